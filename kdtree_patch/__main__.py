"""The command line: `python -m kdtree_patch COMMAND`. Exit status 0 is good, 1 a finding, 2 wrong usage.

Every command is imported for its help, so their modules import at the top only what Python brings along.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from kdtree_patch import __version__, bench, compile_command, demo, doctor, report, selftest_command


def main() -> int:
    try:
        try:
            return run_command()
        finally:
            # Here, because what fails when the interpreter flushes at its end can no longer be caught.
            print(end="", flush=True)
    except BrokenPipeError:
        # Whoever read the output, `head` for one, has seen enough. The interpreter is going to flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as a shell says it of other programs


def run_command() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kdtree_patch",
        description="Verify attention for MLA models in SGLang on a CUDA kernel of its own.",
    )
    parser.add_argument("--version", action="version", version=f"kdtree_patch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (doctor, demo, compile_command, selftest_command, bench, report):
        command.add_parser(commands)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
