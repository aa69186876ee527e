"""How a command ends: the exit statuses, and the one line of a command that cannot do what it was asked.

For all commands of the repository alike: `python -m kdtree_patch`, `python -m tests.e2e` and `python -m deploy`. An
error says three things, in this order: what happened, what happens now, what to do. Standard library only; nothing that
a worker imports imports it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

GOOD = 0
FINDING = 1
NOT_DONE = 2
RESTORED = 3
BROKEN = 4
UNKNOWN = 5
FAULT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 128 + signal.SIGINT  # as a shell says it of other programs
READER_GONE = 128 + signal.SIGPIPE

# The table. README.md has it in the same words, which tests/test_exits.py sees to.
STATUSES = {
    GOOD: "good",
    FINDING: "a finding: what was looked at is not as it should be, and the output says what",
    NOT_DONE: "not done: wrong usage, a file that cannot be read or written, or something needed that is not there",
    FAULT: "a fault of the command itself: please report what it prints",
    INTERRUPTED: "interrupted",
    READER_GONE: "whoever read the output has gone, as `head` does",
}
# What a change of a service adds, and what 1 and 130 are to it.
DEPLOY_STATUSES = {
    FINDING: "refused, or `status` has something to report: no service has been touched",
    RESTORED: "it failed, and the service is as it was before",
    BROKEN: "it failed, and the service is not as it was: somebody has to look at it",
    UNKNOWN: "the connection was lost while the host was at work: `make status` tells",
    INTERRUPTED: "interrupted here; a host that is at work goes on",
}


def table(statuses: dict[int, str]) -> str:
    """For a help text, 80 columns wide."""
    lines = []
    for status, words in sorted(statuses.items()):
        first, *rest = textwrap.wrap(words, 66)
        lines += [f"  {status:<4} {first}", *(f"       {line}" for line in rest)]
    return "\n".join(lines)


class NotDone(Exception):
    """The command cannot do what it was asked; its status is NOT_DONE.

    `what` has happened, `now` is what that means, `do` is what somebody who reads it does next.
    """

    def __init__(self, what: str, do: str, now: str = "nothing has been done"):
        super().__init__(f"{what}; {now}: {do}")


class OutputLost(Exception):
    """Standard output cannot be written. Not an OSError, which others would take for one of their own files'."""


class Parser(argparse.ArgumentParser):
    """With one line about a wrong word, like any other error's, instead of the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        complain(name_of(self.prog), f"{message}; nothing has been done: see {self.prog} --help")
        self.exit(NOT_DONE)


def name_of(prog: str) -> str:
    """`bench` of "python -m kdtree_patch bench", `e2e` of "python -m tests.e2e"."""
    return prog.split()[-1].rpartition(".")[2]


def printable(text: str) -> str:
    """On one line, and nothing that a terminal would obey: names and words of others may have anything in them."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def complain(name: str, text: object) -> None:
    """A line on standard error, which may be as full or as closed as anything."""
    try:
        print(printable(f"{name}: {text}"), file=sys.stderr, flush=True)
    except OSError:
        _drop(2)


def write(path: Path, save: Callable[[Path], object], option: str) -> None:
    """Has `save` write a file that the command was given with `option`: whole, or else what was there before stays.
    Raises NotDone where that does not go.
    """
    real = Path(os.path.realpath(path))
    # Not beside a device or a pipe, and not where only the file itself is ours.
    beside = (real.is_file() or not real.exists()) and os.access(real.parent, os.W_OK)
    # The ending stays: it says in which format a picture is written.
    # Short, where the name itself is as long as a name may be.
    part = real.with_name(f".{real.stem[:32]}-{os.getpid()}.part{path.suffix}") if beside else path
    try:
        save(part)
        if beside:
            os.replace(part, real)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise NotDone(
            f"{path} cannot be written: {why}",
            f"name a file with {option} where there is room",
            "the file is as it was before" if beside else "what it has got of it is not whole",
        ) from error
    finally:
        if beside:
            with contextlib.suppress(OSError):  # what has failed is said above
                part.unlink()


def run(name: str, command: Callable[[], int]) -> int:
    """A command from its first line to its exit status, whatever ends it. `name` begins each line about an error."""
    if not standard_files(name):
        return NOT_DONE
    try:
        try:
            return command()
        finally:
            # Here, because what fails when the interpreter flushes at its end can no longer be caught.
            print(end="", flush=True)
    except NotDone as error:
        complain(name, error)
        return NOT_DONE
    except OutputLost as lost:
        drop_output()
        if isinstance(lost.__cause__, BrokenPipeError):
            return READER_GONE  # it has seen enough, and is no error
        why = getattr(lost.__cause__, "strerror", lost.__cause__)
        complain(
            name, f"standard output cannot be written: {why}; the output is not whole: make room, or send it elsewhere"
        )
        return NOT_DONE
    except KeyboardInterrupt:
        complain(name, "interrupted; what it was at is not finished: run it again")
        return INTERRUPTED
    except Exception:
        with contextlib.suppress(OSError):  # the line below sees to it
            traceback.print_exc()
        complain(
            name,
            "this is a fault of the command itself; do not rely on what it printed: please report it with these lines",
        )
        return FAULT


def drop_output() -> None:
    """What is still to be printed goes nowhere."""
    _drop(1)


def _drop(number: int) -> None:
    """The interpreter is going to flush once more when it ends, and would have an exit status of its own for it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


class _Output(io.FileIO):
    """Standard output, which says so when it is the one that cannot be written."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost from error


def standard_files(name: str) -> bool:
    """Whether there is a standard output; from now on its errors are OutputLost. One that is closed has to be told
    before a file is opened: the first one would be given its number, and get what is printed.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        # print() takes None for standard output.
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for good
    if sys.stdout is None:
        complain(name, "standard output is closed; nothing has been done: send it to a file, or to /dev/null")
        return False
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        raw = _Output(sys.stdout.fileno(), "w", closefd=False)
        terminal = sys.stdout.isatty()
        sys.stdout = io.TextIOWrapper(
            raw if sys.stdout.write_through else io.BufferedWriter(raw),
            encoding=sys.stdout.encoding,
            # A name that a locale cannot encode is no reason to say nothing.
            errors="backslashreplace" if sys.stdout.errors == "strict" else sys.stdout.errors,
            line_buffering=terminal or sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )
    return True
