"""The command line: `python -m kdtree_patch COMMAND`. The exit statuses are those of exits.py.

Every command is imported for its help, so their modules import at the top only what Python brings along.
"""

from __future__ import annotations

import argparse
import sys

from kdtree_patch import __version__, bench, compile_command, demo, doctor, exits, report, selftest_command


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "kdtree_patch"
    return exits.run(name, run_command)


def run_command() -> int:
    parser = exits.Parser(
        prog="python -m kdtree_patch",
        description="Verify attention for MLA models in SGLang on a CUDA kernel of its own.",
        epilog="The exit status of each command:\n" + exits.table(exits.STATUSES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kdtree_patch {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in (doctor, demo, compile_command, selftest_command, bench, report):
        command.add_parser(commands)
    arguments, unknown = parser.parse_known_args()
    if unknown:
        # argparse would send its reader to the help of the whole.
        hint = f" ({arguments.hint})" if "hint" in arguments else ""
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
