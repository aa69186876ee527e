"""`python -m kdtree_patch report LOG...`: what the `[kdtree]` lines of a service say, and what is wrong with it.

Reads logs of any length (report_read.py: bytes to records; report_tally.py: records to sums), judges them
(report_judge.py) and shows the result (report_show.py). It needs neither torch nor a GPU, only reads, and is no part of
a service: nothing that a worker imports imports it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import BinaryIO

from kdtree_patch import exits, report_read
from kdtree_patch.arguments import PLOT_FORMATS, need, plot_file
from kdtree_patch.exits import NotDone
from kdtree_patch.report_read import printable
from kdtree_patch.report_show import Report, document, plot, show
from kdtree_patch.report_tally import Log

CHUNK = 1 << 20
# Input that takes long enough to show how far it has come.
LARGE = 16 << 20
# What logrotate leaves, by its first bytes, and the program that shows it.
COMPRESSED = {b"\x1f\x8b": "zcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"BZh": "bzcat"}

_NAME_A_LOG = "name a log that you may read, or pipe it: journalctl -u UNIT | ... report -"

Advance = Callable[[int], None]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="what the [kdtree] lines of a service's log say, and what to check",
        description="Reads the [kdtree] lines of a service's logs, per layer and per rank, picks out what differs from "
        "the rest, and says what to check. Each file is judged by itself and ranks are compared over all of them; of a "
        "file with several starts of the service, the last one. Prefixes of journald, docker and SGLang are tolerated. "
        "Exit status: 0 nothing found, 1 findings (or no [kdtree] line at all), 2 not done.",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a file, or - for standard input (journalctl -u UNIT |)")
    parser.add_argument("--all-starts", action="store_true", help="judge all starts of the service together")
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="F",
        help=f"also draw layers over time, and rel over the prefix length ({', '.join(PLOT_FORMATS)})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        need("matplotlib", "for --plot")
    report = Report.of(read(arguments.logs, arguments.all_starts))
    # What is printed is not lost if there is nothing to draw, nor the picture if nobody reads to the end.
    try:
        if arguments.json:
            print(json.dumps(document(report), indent=1, allow_nan=False))
        else:
            show(report)
        print(end="", flush=True)
    finally:
        if arguments.plot is not None:
            plot(report, arguments.plot)
            exits.complain("report", f"{printable(str(arguments.plot))} is drawn")
    return exits.FINDING if report.findings else exits.GOOD


def read(names: Sequence[str], all_starts: bool) -> list[Log]:
    """All files to their sums. Raises NotDone, before anything is read if a file is not there."""
    if names.count("-") > 1:
        raise NotDone("standard input (-) can be read once, and is named twice", "name it once")
    if "-" in names and sys.stdin is None:
        raise NotDone("standard input is closed", "pipe a log into it: journalctl -u UNIT |")
    sizes = [0 if name == "-" else _size(name) for name in names]
    logs = []
    with _progress(sum(sizes), "-" in names) as advance:
        for name in names:
            log = Log("standard input" if name == "-" else printable(name), all_starts)
            logs.append(log)
            try:
                with open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-") as file:
                    log.read(report_read.lines(_chunks(file, name, log.name, advance)))
            except OSError as error:
                raise NotDone(
                    f"{log.name} cannot be read: {error.strerror}",
                    "copy it to where it can be read",
                    "nothing has been judged",
                ) from error
            except KeyboardInterrupt:
                # Of `journalctl -f` there is no other end; half of a file is not what was asked about.
                if name != "-" and os.path.isfile(name):
                    raise
                log.interrupted = True
                log.unread = [printable(rest) for rest in names[len(logs) :]]
                break
    return logs


def _size(name: str) -> int:
    try:
        found = os.stat(name)
        if stat.S_ISDIR(found.st_mode):
            raise NotDone(f"{printable(name)} is a folder, and not a log", "name the files in it")
        with open(name, "rb"):
            return found.st_size
    except OSError as error:
        raise NotDone(f"{printable(name)} cannot be read: {error.strerror}", _NAME_A_LOG) from error
    except ValueError as error:  # a NUL in the name
        raise NotDone(f"{printable(name)} cannot be read: {error}", _NAME_A_LOG) from error


def _chunks(file: BinaryIO, path: str, name: str, advance: Advance) -> Iterator[bytes]:
    """As they come: a pipe's need not be full."""
    read = getattr(file, "read1", file.read)
    first = True
    while chunk := read(CHUNK):
        if first and (program := next((tool for magic, tool in COMPRESSED.items() if chunk.startswith(magic)), None)):
            report = f"{program} | python -m kdtree_patch report -"
            if path == "-":
                raise NotDone(f"{name} is compressed", f"put {program} before it: ... | {report}")
            raise NotDone(f"{name} is compressed", report.replace(" ", f" {shlex.quote(name)} ", 1))
        first = False
        yield chunk
        advance(len(chunk))


@contextmanager
def _progress(size: int, piped: bool) -> Iterator[Advance]:
    """A bar on a terminal for what takes longer, on standard error. Of a pipe nobody knows the end."""
    if find_spec("rich") is None or not sys.stderr.isatty() or (size < LARGE and not piped):
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from kdtree_patch.console import open_console

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None if piped else size)
        yield lambda count: bar.update(task, advance=count)
