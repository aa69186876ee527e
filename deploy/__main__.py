"""`python -m deploy ACTION`: what the make targets of the same names run. The operator's words are in DEPLOY_*."""

from __future__ import annotations

# pyinfra's connections are greenlets: the standard library has to be patched before anything else is imported.
from gevent import monkey

monkey.patch_all()

import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from gevent import get_hub  # noqa: E402

from deploy import steps  # noqa: E402
from deploy.options import Options, UsageError  # noqa: E402

USAGE = f"""usage: python -m deploy {"|".join(steps.ACTIONS)}
What `make deploy` and its sisters run. The words behind make are environment variables here: DEPLOY_HOST, DEPLOY_UNIT
and so on, as README.md lists them. The exit status:
  {steps.GOOD}    good
  {steps.FINDING}    refused, or something to look at: no service has been touched
  {steps.USAGE}    wrong usage
  {steps.RESTORED}    failed, and the service is as it was before
  {steps.BROKEN}    failed, and the service is not: somebody has to look at it
  {steps.UNKNOWN}    the connection was lost while the host was at work: `make status` tells
  {steps.INTERRUPTED}  interrupted here; a host that is at work goes on"""


def main() -> int:
    """Returns one of the statuses of steps.py."""
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    if action in ("-h", "--help"):
        print(USAGE)
        return steps.GOOD
    if action not in steps.ACTIONS:
        print(USAGE, file=sys.stderr)
        return steps.USAGE
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    # What goes wrong below arrives here as an exception too, and is one line of ours: not their tracebacks beside it.
    get_hub().NOT_ERROR += (KeyboardInterrupt,)
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    try:
        options = Options.from_environ(os.environ)
    except UsageError as error:
        print(f"{action}: {error}", file=sys.stderr)
        return steps.USAGE
    try:
        return steps.ACTIONS[action](options)
    except KeyboardInterrupt:
        print("\ninterrupted here. A change that is under way on the host goes on there: see `make status`")
        return steps.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
