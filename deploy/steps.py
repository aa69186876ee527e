"""The operator's side of each action: what is asked of which host, in which order, and what is printed.

Up to `launch` nothing has happened to the service. From there on the host does it alone (deploy/host/transaction.py)
and this side only reads along, over a new connection if need be.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyinfra.operations import files

from deploy import bundle
from deploy.bundle import BundleError, Source
from deploy.host import systemd, wire
from deploy.options import Host, Options, operator
from deploy.remote import ConnectionLost, Remote, RemoteError, Unreachable
from kdtree_patch import exits
from kdtree_patch.exits import BROKEN, DEPLOY_STATUSES, FINDING, GOOD, NOT_DONE, RESTORED, STATUSES, UNKNOWN, OutputLost

_POLL_SECONDS = 1.0
_POLL_LIMIT = 60
# After the transaction's end, for its last lines.
_QUIET_POLLS = 3
# How long a lost connection is tried again while a transaction goes on without it.
_RECONNECT_SECONDS = 300.0


# The exit statuses are those of kdtree_patch/exits.py. Make itself makes 2 of each that is not 0.
_STATUS = {"untouched": FINDING, "restored": RESTORED, "broken": BROKEN}
# What to do, after an error and what it means for the service.
_NEXT = {
    FINDING: "put that right, and run the same again",
    NOT_DONE: "write it as README.md has it, and run it again",
    RESTORED: "the reason is above, and in `make logs`; put that right, and run the same again",
    BROKEN: "see `make status` and `make logs`; then the same again, `make rollback` or `make undeploy`",
    UNKNOWN: "see `make status`; the same again finishes the job, or says that nothing is to be done",
}


class Stop(Exception):
    """This action ends here; the message is the reason."""

    def __init__(self, reason: str, status: int = FINDING):
        super().__init__(reason)
        self.status = status


@dataclass
class Target:
    """One host on the way."""

    host: Host
    remote: Remote
    report: dict[str, Any]


FAILURES = (Stop, BundleError, RemoteError, ConnectionLost)


def say(text: str = "") -> None:
    """Nobody has to listen: a change that is under way is followed to its end, for its status."""
    try:
        print(wire.printable(text), flush=True)
    except OutputLost as lost:
        exits.drop_output()
        exits.complain("deploy", f"standard output cannot be written any more ({lost.__cause__}); this goes on without")


def step(name: str, host: Host) -> None:
    say(f"==> {name} {host}")


def _run(action: Callable[[Options], None]) -> Callable[[Options], int]:
    """An action as a command: what goes wrong is one line, and a status that says how far it had come."""

    def command(options: Options) -> int:
        try:
            action(options)
        except FAILURES as error:
            status = error.status if isinstance(error, Stop) else FINDING
            say(f"FAILED: {error}")
            say(f"exit status {status}: {(STATUSES | DEPLOY_STATUSES)[status]}: {_NEXT[status]}")
            return status
        return GOOD

    return command


# --------------------------------------------------------------------------------------------------------------- deploy


def deploy(options: Options) -> None:
    source = bundle.source()
    if source.dirty and not options.force and not options.dry_run:
        names = ", ".join(source.dirty[:5]) + (" ..." if len(source.dirty) > 5 else "")
        raise Stop(f"the checkout has changes that are in no commit ({names}): commit them, or say FORCE=1")
    say(f"release {source.release}, {len(source.files)} files")
    if source.dirty and not options.force:
        say("warning: the checkout has changes in no commit: without DRY_RUN=1 this is refused, unless FORCE=1")
    targets = [preflight(host, options, source) for host in options.hosts]
    bad = [target for target in targets if target.report["findings"]]
    if bad:
        raise Stop(f"preflight of {', '.join(str(target.host) for target in bad)}; nothing has been changed anywhere")
    if options.dry_run:
        say("dry run: nothing has been changed")
        return
    one_after_the_other(options, lambda index: deploy_one(targets[index], options, source))


def one_after_the_other(options: Options, change: Callable[[int], None]) -> None:
    """Changes each host, by its number, and stops at the first that fails."""
    for index in range(len(options.hosts)):
        try:
            change(index)
        except FAILURES as error:
            rest = ", ".join(str(later) for later in options.hosts[index + 1 :])
            status = error.status if isinstance(error, Stop) else FINDING
            raise Stop(f"{error}" + (f"; not begun: {rest}" if rest else ""), status) from error


def preflight(host: Host, options: Options, source: Source) -> Target:
    """Looks at a host and prints what it saw. Findings are in the report; a host that does not answer is one, too."""
    step("preflight", host)
    remote = Remote(host)
    order = {"unit": options.unit, "prefix": options.prefix, "mode": options.mode, "release": source.release}
    try:
        report = remote.ask("preflight", order)
    except (ConnectionLost, RemoteError) as error:
        report = {"facts": [], "findings": [str(error)], "warnings": [], "plan": [], "data": {}}
    show(report["facts"])
    for text in report["warnings"]:
        say(f"    warning: {text}")
    for text in report["findings"]:
        say(f"    FINDING: {text}")
    if not report["findings"]:
        say("    what is to be done:" if report["plan"] else "    nothing is to be done")
        for line in report["plan"]:
            say(f"      {line}")
    return Target(host, remote, report)


def show(facts: list[list[str]]) -> None:
    for name, value in facts:
        say(f"    {name:<14}{value}")


def deploy_one(target: Target, options: Options, source: Source) -> None:
    step("bundle", target.host)
    data = target.report["data"]
    key = bundle.wheel_key(data["probe"])
    there: dict[str, Any] = data["releases"]
    existing = there.get(source.release)
    archive = ""
    if existing is not None:
        if existing.get("digest") != source.digest or existing["wheel_key"] != key:
            raise Stop(
                f"{target.host} has a release {source.release} already, with other files or other wheels: units that "
                "need different ones need a PREFIX each"
            )
        say(f"    {source.release} is on the host already: nothing to send")
    else:
        archive = send(target, options, source, key, there)
    order = {"mode": options.mode, "release": source.release, "archive": archive}
    transact("deploy", target.remote, options, order)


def send(target: Target, options: Options, source: Source, key: dict[str, Any], there: dict[str, Any]) -> str:
    """Puts the archive onto the host, under a name that nobody else uses. Returns it."""
    donors = (name for name, manifest in there.items() if manifest["wheel_key"] == key and manifest.get("has_vendor"))
    donor = next(donors, None)
    wheels = () if donor else bundle.wheels(key)
    for wheel in wheels:
        say(f"    {wheel.name}, {wheel.stat().st_size / (1 << 20):.1f} MiB")
    if donor:
        say(f"    wrapt and cupy are those of {donor}")
    incoming = f"{options.prefix}/incoming"
    name = f"{incoming}/{source.release}-{os.urandom(4).hex()}.tar"
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "release.tar"
        bundle.pack(source, key, wheels, donor, archive)
        say(f"    sending {archive.stat().st_size / (1 << 20):.1f} MiB to {name}")
        owner = {"user": "root", "group": "root"}
        try:
            target.remote.apply(
                (files.directory, dict(path=options.prefix, mode="755", **owner)),
                (files.directory, dict(path=incoming, mode="700", **owner)),
                (files.put, dict(src=str(archive), dest=name, mode="600", **owner)),
            )
        except RemoteError as error:
            _, left, _ = target.remote.run(f"df -h {options.prefix}; rm -f {name}")
            free = " ".join(left.splitlines()[-1:])
            raise Stop(
                f"{error}: the release could not be written to {options.prefix}, where df says: {free}. The service "
                "has not been touched; `make undeploy` removes the empty folders"
            ) from error
    return name


# --------------------------------------------------------------------------------------------------------- transactions


def transact(action: str, remote: Remote, options: Options, order: dict[str, Any]) -> None:
    """Has the host do it, and reads along until it is done. Raises Stop with the host's reason, ConnectionLost if the
    host cannot have begun.
    """
    order = {
        **order,
        "action": action,
        "unit": options.unit,
        "prefix": options.prefix,
        "timeout": options.timeout,
        "by": operator(),
    }
    try:
        token = remote.ask("launch", order)["token"]
    except Unreachable:
        raise
    except ConnectionLost as error:
        raise Stop(f"{error}; the host may have begun: see `make status`, or run the same again", UNKNOWN) from error
    result = follow(remote, token)
    if not result["ok"]:
        for line in result.get("lines", []):
            say(f"    | {line}")
        status = _STATUS[result["outcome"]]
        rest = "; the service is as it was before" if status == RESTORED else ""
        raise Stop(f"{remote.host}: {result['reason']}{rest}", status)


def follow(remote: Remote, token: str) -> dict[str, Any]:
    """Prints the lines of a transaction as they come, until its result, however often the connection breaks."""
    shown = quiet = 0
    lost_since: float | None = None
    # Anybody on the host may log under this name: only lines of root are the transaction's.
    command = f"journalctl --quiet --no-pager --output=cat --identifier={token} _UID=0; systemctl is-active {token}"
    while True:
        try:
            _, output, _ = remote.run(command, timeout=_POLL_LIMIT)
            lost_since = None
        except ConnectionLost as error:
            if lost_since is None:
                say(f"    (connection lost; the host goes on by itself; trying again: {error})")
                lost_since = time.monotonic()
            if time.monotonic() - lost_since > _RECONNECT_SECONDS:
                raise Stop(f"{error}; the host goes on by itself, see `make status`", UNKNOWN) from error
            time.sleep(2 * _POLL_SECONDS)
            continue
        *lines, state = output.splitlines() or [""]
        result = wire.answer_in("\n".join(lines))
        fresh = lines[shown:]
        shown = len(lines)
        for line in fresh:
            if not wire.is_answer(line):
                say(line if not line.startswith("==>") else f"{line} {remote.host}")
        if result is not None:
            return result
        quiet = 0 if fresh or state in systemd.UNDER_WAY else quiet + 1
        if quiet > _QUIET_POLLS:
            reason = "the transaction ended without a result; run the same command again"
            return {"ok": False, "reason": reason, "outcome": "broken"}
        time.sleep(_POLL_SECONDS)


def rollback(options: Options) -> None:
    _simple("rollback", options)


def undeploy(options: Options) -> None:
    _simple("undeploy", options)


def _simple(action: str, options: Options) -> None:
    # Not to be passed over: who writes DRY_RUN=1 expects no restart.
    for word, given in (("DRY_RUN", options.dry_run), ("MODE", options.mode), ("FORCE", options.force)):
        if given:
            raise Stop(
                f"{word} is for `make deploy` alone, and nothing has been done: `make status` shows what "
                f"`make {action}` would take back",
                NOT_DONE,
            )

    def change(index: int) -> None:
        host = options.hosts[index]
        step(action, host)
        transact(action, Remote(host), options, {})

    one_after_the_other(options, change)


# --------------------------------------------------------------------------------------------------------------- status


def status(options: Options) -> None:
    def tell(host: Host) -> list[str]:
        step("status", host)
        answer = Remote(host).ask("status", {"unit": options.unit, "prefix": options.prefix})
        show(answer["facts"])
        return list(answer["findings"])

    every_host(options, tell)


def logs(options: Options) -> None:
    def tell(host: Host) -> list[str]:
        if len(options.hosts) > 1:
            step("logs", host)
        answer = Remote(host).ask("logs", {"unit": options.unit})
        for line in answer["lines"]:
            say(line)
        if not answer["lines"] and not answer["findings"]:
            say(f"    {options.unit} has logged no [kdtree] line since it was started: see `make status`")
        return list(answer["findings"])

    every_host(options, tell)


def every_host(options: Options, tell: Callable[[Host], list[str]]) -> None:
    """Asks each host, whatever the others say. Raises Stop where anything was found."""
    bad: list[Host] = []
    for host in options.hosts:
        try:
            found = tell(host)
        except FAILURES as error:
            found = [str(error)]
        for text in found:
            say(f"    FINDING: {text}")
        bad += [host] if found else []
    if bad:
        raise Stop(f"see what was found on {', '.join(map(str, bad))}")


ACTIONS: dict[str, Callable[[Options], int]] = {
    name: _run(action)
    for name, action in (
        ("deploy", deploy),
        ("status", status),
        ("logs", logs),
        ("rollback", rollback),
        ("undeploy", undeploy),
    )
}
