"""`python -c LOADER COMMAND [ORDER]` on the host; see wire.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deploy.host import wire


def main() -> None:
    command = sys.argv[1]
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # LANG may be any
    order = wire.unpacked(sys.argv[2]) if len(sys.argv) > 2 else {}
    if command == "transaction":
        from deploy.host import transaction

        sys.exit(transaction.run_order(order))
    kept = wire.quiet_stdout()
    try:
        answer = _answer(command, order)
    except Exception as error:
        sys.exit(wire.reason(error))
    os.dup2(kept, 1)
    wire.say(answer)
    # The backend may have been imported, and what it leaves running is none of our business.
    os._exit(0)


def _answer(command: str, order: dict) -> dict:
    if command == "probe":
        from deploy.host import probe

        return probe.probe(order["hide_gpus"])
    if command == "doctor":
        from deploy.host import probe

        return probe.doctor(Path(order["release"]), order["gpus"], order["variables"], order["contract"], order["pool"])
    if command == "preflight":
        from deploy.host import preflight

        return preflight.inspect(order)
    if command == "status":
        from deploy.host import status

        return status.status(order)
    if command == "logs":
        from deploy.host import status

        return status.logs(order)
    if command == "launch":
        from deploy.host import transaction

        return transaction.launch(order)
    raise ValueError(command)
