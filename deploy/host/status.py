"""What runs now, told without changing anything."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from deploy.host import look, release, service
from deploy.host.command import Refused
from deploy.host.look import Look
from deploy.host.service import Journal
from deploy.host.systemd import SystemdError, Unit, transactions

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
    facts += [["under way", text] for text in transactions()]
    unit = Unit(order["unit"])
    if not unit.exists:
        raise Refused(f"there is no unit {unit.name} here")
    seen = Look(unit, Path(order["prefix"]))
    state = unit.state()
    facts.append(["unit", f"{unit.name}, {state.active} ({state.sub})"])
    name = look.release_of(seen.drop_in, seen.place)
    record = seen.state or {}
    if name is None:
        facts.append(["release", "none: the unit runs stock"])
    else:
        about = f"{name}, mode {record.get('mode', 'unknown')}, since {record.get('since', 'unknown')}"
        facts.append(["release", f"{about}, by {record.get('by', 'unknown')}"])
        previous = (record.get("previous") or {}).get("release")
        facts.append(["previous", previous or "none"])
    if seen.pending:
        findings.append("a change was cut off before it was confirmed: run `make deploy`, rollback or undeploy again")
    elif name != record.get("release"):
        findings.append(f"the drop-in names {name}, but {record.get('release')} was confirmed: run `make deploy` again")
    if name and release.current(seen.place) != name:
        facts.append(["current", f"{release.current(seen.place)}, of another unit"])
    if name and not (seen.place.releases / name).is_dir():
        findings.append(f"{seen.place.releases / name} is gone: at its next start the service runs stock")
    command = seen.command()
    url = look.health_url(command)
    facts.append(["health", f"{url}/health " + ("answers" if service.healthy(url) else "does not answer")])
    if not state.is_up or not state.invocation:
        return
    journal = journal_of(unit, state.invocation, state.main_pid)
    installed = {line.pid for line in journal.ours("installed ")}
    facts.append(["workers", f"{len(installed)} of {look.workers_of(command)} installed"])
    facts.append(["calls", counters(journal) or "no counts yet"])
    for line in [*journal.ours("declined "), *journal.ours("disabled "), *journal.ours("ERROR ")][:10]:
        facts.append(["says", line.text])


def journal_of(unit: Unit, invocation: str, pid: int) -> Journal:
    journal = Journal(invocation, look.secrets_of(unit, pid))
    journal.read()
    return journal


def counters(journal: Journal) -> str:
    """The last `calls` line of each worker, added up."""
    last = {line.pid: line.text for line in journal.ours("calls ")}
    total: Counter[str] = Counter()
    for text in last.values():
        for name, number in re.findall(r"(\w+)=(\d+)\b", text):
            if name != "tp_rank":
                total[name] += int(number)
    return " ".join(f"{name}={number}" for name, number in total.items())


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
