"""`python -m deploy ACTION`: what the make targets of the same names run. The operator's words are in DEPLOY_*."""

from __future__ import annotations

# pyinfra's connections are greenlets: the standard library has to be patched before anything else is imported.
from gevent import monkey

monkey.patch_all()

import os  # noqa: E402
import sys  # noqa: E402

from deploy import steps  # noqa: E402
from deploy.options import Options, UsageError  # noqa: E402


def main() -> int:
    """0 good, 1 a finding or a failure, 2 wrong usage."""
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    if action not in steps.ACTIONS:
        print(f"usage: python -m deploy {'|'.join(steps.ACTIONS)}, with DEPLOY_HOST and the like", file=sys.stderr)
        return 2
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        options = Options.from_environ(os.environ)
    except UsageError as error:
        print(f"{action}: {error}", file=sys.stderr)
        return 2
    try:
        return steps.ACTIONS[action](options)
    except KeyboardInterrupt:
        print("\ninterrupted here. A change that is under way on the host goes on there: see `make status`")
        return 130


if __name__ == "__main__":
    sys.exit(main())
