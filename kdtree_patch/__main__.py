"""The command line: `python -m kdtree_patch COMMAND`. Exit status 0 is good, 1 a finding, 2 wrong usage."""

from __future__ import annotations

import argparse
import sys

from kdtree_patch import __version__, bench, compile_command, demo


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kdtree_patch",
        description="Verify attention for MLA models in SGLang on a CUDA kernel of its own.",
    )
    parser.add_argument("--version", action="version", version=f"kdtree_patch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, compile_command, bench):
        command.add_parser(commands)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
