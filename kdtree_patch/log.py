"""The `[kdtree]` lines. Everything a worker says goes through here, one line at a time, to stderr.

Operators grep for these lines, so their form is fixed: the prefix, then for warnings and errors the level, then the
words. What a process says about itself (`installed`, or `declined` and why) ranks as an error without being called one,
so that it is said at every KDTREE_LOG_LEVEL: a worker that says neither has not loaded the patch. The logger has its
own handler and does not propagate: SGLang reconfigures the root logger, and a line must neither vanish because of that
nor appear twice.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

PREFIX = "[kdtree] "
NAME = "kdtree_patch"


# What somebody who reads the line does next, for the reasons whose own words do not say it already.
TO_DO = {
    "boot_failed": "please report it",
    "hook_failed": "please report it",
    "package_broken": "put the folder of the patch back as it was released",
    "contract": "please report it: a later version may know this one",
    "no_speculation": "nothing is wrong, unless --speculative-algorithm was forgotten",
    "not_mla": "take the patch off this service's PYTHONPATH",
    "draft_only": "nothing is wrong: the target model's backend says its own line",
    "deterministic": "leave out --enable-deterministic-inference",
    "context_parallel": "leave out --decode-context-parallel-size, or take the patch off this service's PYTHONPATH",
    "device": "the patch is for NVIDIA GPUs alone",
    "compute_capability": "use another GPU, or take the patch off this host",
    "load_failed": "python -m kdtree_patch doctor --compile tries it; please report it",
    "compile_failed": "python -m kdtree_patch compile tries it; please report it",
    "cache_unwritable": "set KDTREE_CACHE_DIR to a folder that the service's user can write to",
    "out_of_memory": "leave the GPU some more memory, with a smaller --mem-fraction-static, and restart the service",
    "selftest_failed": "python -m kdtree_patch selftest shows the cases; please report it",
    "guard": "please report it with this line",
    "guard_elsewhere": "the line of that worker has the details",
    "guard_failed": "if a WARNING before this speaks of memory, leave the service some more",
    "launch_failed": "when it is mended, restart the service",
    "v_not_latent": "do not use the patch with this model",
}


class _StderrHandler(logging.StreamHandler):
    """Writes to what sys.stderr is at the time of the line, not at the time of the import (services redirect it)."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """logging's own constructor assigns it; there is nothing to remember."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A stderr that is closed loses the line. logging would report that on the same stderr, and raise."""


class _Formatter(logging.Formatter):
    """`[kdtree] words`, or `[kdtree] WARNING words` from warnings upwards, unless the record says that it is plain."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno < logging.WARNING or getattr(record, "plain", False) else f"{record.levelname} "
        return PREFIX + level + one_line(record.getMessage())


def one_line(text: object) -> str:
    """Messages quote exceptions and compiler output; a line stays one line whatever they contain."""
    return " ".join(str(text).split())


def get_logger() -> logging.Logger:
    """The package's logger, set up on first use. Asking again, also after a reload, adds no second handler."""
    logger = logging.getLogger(NAME)
    if not any(type(handler).__name__ == _StderrHandler.__name__ for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(_Formatter())
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
    return logger


def set_level(name: str) -> None:
    """`info`, `warning` or `error`."""
    get_logger().setLevel(name.upper())


def fields(values: dict[str, object]) -> str:
    """`k=v k=v`, a value with a space in quotes, so that a line can be cut at its spaces. None is left out."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items() if value is not None)


def _quoted(value: object) -> str:
    text = one_line(value).replace('"', "'")
    return f'"{text}"' if " " in text else text


def advised(reason: str, detail: str) -> str:
    """`detail`, and what to do about it."""
    return "; ".join(part for part in (detail, TO_DO.get(reason, "")) if part)


def installed(**values: object) -> None:
    """`[kdtree] installed k=v ...`: this process serves verify calls."""
    _say(logging.ERROR, "installed", fields(values))


def declined(reason: str, detail: str = "", **values: object) -> None:
    """`[kdtree] declined reason=<code> k=v ... detail`: a kind of call stays with the stock kernel."""
    _say(logging.WARNING, f"declined reason={reason}", fields(values), detail)


def stays_stock(reason: str, detail: str, **values: object) -> None:
    """`[kdtree] declined reason=<code> k=v ... detail; what to do; the service runs stock`: it serves nothing."""
    _say(
        logging.ERROR, f"declined reason={reason}", fields(values), f"{advised(reason, detail)}; the service runs stock"
    )


def _say(rank: int, *parts: str) -> None:
    get_logger().log(rank, "%s", " ".join(part for part in parts if part), extra={"plain": True})
