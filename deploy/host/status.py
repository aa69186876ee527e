"""What runs now, told without changing anything."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from deploy.host import look, release, service
from deploy.host.look import Look, Place
from deploy.host.service import Journal
from deploy.host.systemd import SystemdError, Unit, transactions
from kdtree_patch.service_command import Refused

_LOG_LINES = 200


def status(order: dict[str, Any]) -> dict[str, Any]:
    """`order`: unit, prefix."""
    facts: list[list[str]] = []
    findings: list[str] = []
    try:
        _status(order, facts, findings)
    except (Refused, SystemdError, KeyError, ValueError) as error:
        findings.append(str(error))
    return {"facts": facts, "findings": findings}


def _status(order: dict[str, Any], facts: list[list[str]], findings: list[str]) -> None:
    under_way = transactions()
    for transaction in under_way:
        facts += [["under way", str(transaction)], ["says", transaction.line]]
    if not under_way:  # whose own archive it may be
        for path in release.being_sent(Place(Path(order["prefix"]), order["unit"])):
            facts.append(["under way", f"{path} is being sent, or was until a minute ago"])
    unit = Unit(order["unit"])
    if not unit.exists:
        left = Look(unit, Path(order["prefix"]))
        rest = "; what it had of ours still is: `make undeploy` removes it" if left.drop_in or left.state else ""
        raise Refused(f"there is no unit {unit.name} here{rest}")
    seen = Look(unit, Path(order["prefix"]))
    # One that has begun since the first look is as good as one that has ended since.
    pending = seen.pending
    at_work = {Unit(transaction.unit).name for transaction in (*under_way, *transactions())} if pending else set()
    is_changing = unit.name in at_work
    state = unit.state()
    facts.append(["unit", f"{unit.name}, {state.active} ({state.sub})"])
    problem = look.drop_in_problem(seen.drop_in, seen.place)
    if problem:  # what runs has its release elsewhere, and is no stock service
        raise Refused(problem)
    name = look.release_of(seen.drop_in, seen.place)
    record = seen.state or {}
    if pending and is_changing:
        before = look.release_of(pending["drop_in"], seen.place)
        facts.append(["release", f"{_about(name, seen.drop_in)}, not confirmed yet"])
        facts.append(["before", _about(before, pending["drop_in"])])
    elif name is None:
        facts.append(["release", _about(None, None)])
        facts += _left_over(seen) if not under_way else []
    else:
        since = f"since {record.get('since', 'unknown')}, by {record.get('by', 'unknown')}"
        facts.append(["release", f"{_about(name, seen.drop_in)}, {since}"])
        previous = record.get("previous")
        facts.append(["previous", f"{previous['release']}, mode {previous['mode']}" if previous else "none"])
    if pending and not is_changing:
        findings.append("a change was cut off before it was confirmed: run `make deploy`, rollback or undeploy again")
    elif not pending and name != record.get("release"):
        has = f"names {name}" if name else "is gone"
        findings.append(f"the drop-in {has}, but {record.get('release')} was confirmed: run `make deploy` again")
    if name and release.current(seen.place) != name:
        facts.append(["current", f"{release.current(seen.place)}, of another unit"])
    if name and not (seen.place.releases / name).is_dir():
        findings.append(f"{seen.place.releases / name} is gone: at its next start the service runs stock")
    try:
        command = seen.command()
    except Refused as refused:
        if not is_changing:
            raise
        facts.append(["health", f"cannot be told: {refused}"])
        return
    url = look.health_url(command)
    facts.append(["health", f"{url}/health " + ("answers" if service.healthy(url) else "does not answer")])
    if not state.is_up or not state.invocation:
        return
    journal = journal_of(unit, state.invocation, state.main_pid)
    installed = service.installed(journal, state.main_pid)
    if name or installed:  # which is all there is to say of a stock service
        facts.append(["workers", f"{len(installed)} of {look.workers_of(command)} installed"])
        facts.append(["calls", counters(journal)])
    findings += turned_off(journal, look.workers_of(command))
    facts += [["says", text] for text in alarms(journal)]


def turned_off(journal: Journal, workers: int) -> list[str]:
    """That the kernel is off in some workers, and by which codes; nothing if it is in none."""
    lines = journal.ours("ERROR disabled ")
    codes = sorted({code for line in lines for code in re.findall(r"reason=(\w+)", line.text)[:1]})
    off = len({line.pid for line in lines})
    return [f"{off} of {workers} workers have turned the kernel off: {', '.join(codes)}"] if off else []


def alarms(journal: Journal, most: int = 10) -> list[str]:
    """Errors, then workers that stay stock. What kinds of call run stock is in the counters."""
    stock = [line for line in journal.ours("declined ") if "scope=call" not in line.text]
    return [line.text for line in [*journal.ours("ERROR "), *stock][:most]]


def _about(name: str | None, drop_in: str | None) -> str:
    return f"{name}, mode {look.mode_of(drop_in)}" if name else "none: the unit runs stock"


def _left_over(seen: Look) -> list[list[str]]:
    """What lies under PREFIX although no unit runs it: of a deployment that was cut off while it was sent."""
    sent = release.being_sent(seen.place)
    what = ", ".join(path for path in release.left_over(seen.place) if path not in sent)
    return [["left over", f"{what}, which no unit uses: `make undeploy` removes it"]] if what else []


def journal_of(unit: Unit, invocation: str, pid: int) -> Journal:
    journal = Journal(invocation, look.secrets_of(unit, pid))
    journal.read()
    return journal


def counters(journal: Journal) -> str:
    """The last `calls` line of each worker, added up. What has been called since then is not in it, and said so."""
    last = {line.pid: line.text for line in journal.ours("calls ")}
    total: Counter[str] = Counter()
    for text in last.values():
        for name, number in re.findall(r"(\w+)=(\d+)\b", text):
            if name != "tp_rank":
                total[name] += int(number)
    said = " ".join(f"{name}={number}" for name, number in total.items())
    return f"{said}, when each worker last logged them" if said else "no counts yet: the first come after 10 calls"


def logs(order: dict[str, Any]) -> dict[str, Any]:
    """The lines of ours of the current start, or of the last one."""
    unit = Unit(order["unit"])
    if not unit.exists:
        return {"lines": [], "findings": [f"there is no unit {unit.name} here"]}
    state = unit.state()
    if not state.invocation:
        return {"lines": [], "findings": [f"{unit.name} has not been started since the host was"]}
    journal = journal_of(unit, state.invocation, state.main_pid)
    return {"lines": [f"{line.pid} {line.text}" for line in journal.ours()][-_LOG_LINES:], "findings": []}


__all__ = ["logs", "status"]
