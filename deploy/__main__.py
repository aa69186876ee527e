"""`python -m deploy ACTION`: what the make targets of the same names run. The operator's words are in DEPLOY_*."""

from __future__ import annotations

import sys

from kdtree_patch import exits

# pyinfra looks at them when it is imported.
if not exits.standard_files("deploy"):
    sys.exit(exits.NOT_DONE)
try:
    # pyinfra's connections are greenlets: the standard library has to be patched before anything else is imported.
    from gevent import monkey
except ImportError:
    exits.complain(
        "deploy",
        f"{sys.executable} has no pyinfra; nothing has been done: `make deploy` makes .venv/deploy, which has it",
    )
    sys.exit(exits.NOT_DONE)
monkey.patch_all()

import logging  # noqa: E402
import os  # noqa: E402

from gevent import get_hub  # noqa: E402

from deploy import steps  # noqa: E402
from deploy.options import Options, UsageError  # noqa: E402

USAGE = f"""usage: python -m deploy {"|".join(steps.ACTIONS)}
What `make deploy` and its sisters run. The words behind make are environment
variables here: DEPLOY_HOST, DEPLOY_UNIT and so on, as README.md lists them.
The exit status:
{exits.table(exits.STATUSES | exits.DEPLOY_STATUSES)}"""


def main() -> int:
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    if action in ("-h", "--help"):
        print(USAGE)
        return exits.GOOD
    if action not in steps.ACTIONS:
        words = " ".join(sys.argv[1:])
        what = f"{words!r} is no action" if words else "there is no action"
        raise exits.NotDone(what, f"name one of {', '.join(steps.ACTIONS)}, or --help")
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    # What goes wrong below arrives here as an exception too, and is one line of ours: not their tracebacks beside it.
    get_hub().NOT_ERROR += (KeyboardInterrupt,)
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    try:
        options = Options.from_environ(os.environ)
    except UsageError as error:
        raise exits.NotDone(str(error), f"README.md lists the words of `make {action}`") from error
    try:
        return steps.ACTIONS[action](options)
    except KeyboardInterrupt:
        steps.say()
        steps.say("interrupted here. A change that is under way on the host goes on there: see `make status`")
        return exits.INTERRUPTED


if __name__ == "__main__":
    sys.exit(exits.run("deploy", main))
