"""Our figures on the service's own /metrics, if it runs with `--enable-metrics`.

SGLang's processes write theirs into files of one directory (prometheus_client's multiprocess mode), which the HTTP
process reads: whatever a worker registers appears there, with no port of its own. prometheus_client decides at its
import whether it writes such files, so it is imported here, when the first backend is constructed, long after SGLang
has named the directory; and not at all in a service without metrics.

It writes through a map of a sparse file. Where the disk has no block for a page of it, there is no exception: the
process is ended by SIGBUS. So before anything is added to such a file, it is given the blocks. Knows prometheus_client,
its files, and the log.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kdtree_patch import log

DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
# What a file is to have beyond what is in it: as much as prometheus_client makes a new one. An entry of ours has less
# than 500 bytes; the rest is for what SGLang adds in the same moment.
ROOM: Final = 1 << 16


def of_service(server_args: Any) -> Metrics | None:
    """None if the service has no metrics, or if they cannot be had, which is one line and no more."""
    if getattr(server_args, "enable_metrics", False) is not True:
        return None
    if not os.environ.get(DIRECTORY):
        log.get_logger().warning(
            "metrics are on, but %s is not set; ours are not exported: set it to a folder", DIRECTORY
        )
        return None
    try:
        from prometheus_client import values

        if not values.ValueClass._multiprocess:
            words = (
                "metrics are on, but prometheus_client was imported before %s was set; ours are not exported: set it "
                "to a folder in the service's environment"
            )
            log.get_logger().warning(words, DIRECTORY)
            return None
        return Metrics()
    except Exception as error:
        log.get_logger().warning(
            "metrics failed: %s: %s; ours are not exported, calls are served as before: restart when it is mended",
            type(error).__name__,
            error,
        )
        return None


def safely(method: Callable[..., None]) -> Callable[..., None]:
    """A full disk under the files of metrics must not cost a verify call: they stop, with one line."""

    @functools.wraps(method)
    def call(self: Metrics, *args: Any) -> None:
        if self.off:
            return
        try:
            method(self, *args)
        except Exception as error:
            self.off = True
            log.get_logger().warning(
                "metrics failed: %s: %s; ours stop here, calls are served as before: restart when it is mended",
                type(error).__name__,
                error,
            )

    return call


def make_room(kind: str) -> None:
    """In the file that this process has for metrics of a kind, which need not be there yet. Raises OSError."""
    path = Path(os.environ[DIRECTORY], f"{kind}_{os.getpid()}.db")
    with path.open("a+b") as file:
        file.seek(0)
        used = int.from_bytes(file.read(4), sys.byteorder)
        try:
            os.posix_fallocate(file.fileno(), 0, used + ROOM)
        except OSError as error:
            if not used:  # nobody has it yet, and an empty one is an error to whoever reads them all
                path.unlink()
            raise OSError(error.errno, f"{error.strerror} for {ROOM >> 10} KB more", str(path)) from error


class Metrics:
    """The sum over all workers of calls, and the largest of each gauge."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.off = False
        self._calls = Counter(
            "kdtree:verify_calls_total",
            "Attention calls of verify layers, by who served them and why; a replay of a CUDA graph counts its layers.",
            ["route", "reason"],
        )
        self._rel = Gauge(
            "kdtree:validation_rel",
            "L2 norm of the difference to the stock result over that of the stock result, when last compared.",
            ["mode", "layer"],
            multiprocess_mode="max",
        )
        make_room("gauge_max")
        self._tripped = Gauge(
            "kdtree:guard_tripped",
            "1 if the guard of a worker has tripped; not in those that are stock because of it.",
            multiprocess_mode="max",
        )
        self._tripped.set(0)
        # Once for each, because labels() costs more than counting does, and adds an entry.
        self._calls_of = functools.cache(functools.partial(self._entry, "counter", self._calls))
        self._rel_of = functools.cache(functools.partial(self._entry, "gauge_max", self._rel))

    def _entry(self, kind: str, metric: Any, *labels: object) -> Any:
        make_room(kind)
        return metric.labels(*labels)

    @safely
    def count(self, route: str, reason: str, calls: int) -> None:
        """`route` is kernel or stock."""
        self._calls_of(route, reason).inc(calls)

    @safely
    def compared(self, mode: str, layer: int, rel: float) -> None:
        self._rel_of(mode, layer).set(rel)

    @safely
    def tripped(self) -> None:
        self._tripped.set(1)
