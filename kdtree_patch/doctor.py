"""`python -m kdtree_patch doctor`: if the service is restarted now, what will happen, and why.

The command and its words; what is asked of whom is in doctor_questions.py. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from kdtree_patch import contract
from kdtree_patch.doctor_questions import OK, PART, STOCK, UNKNOWN, Findings, ask

# What is printed of a verdict, and the exit status.
VERDICTS = {
    "serve": ("will serve", 0),
    "shadow": ("will compare, and serve stock", 0),
    "part": ("will serve part", 1),
    "stock": ("stock", 1),
    "unknown": ("unknown", 1),
}
COLOURS = {OK: "32", "serve": "32", "shadow": "32", PART: "33", UNKNOWN: "33", STOCK: "31", "kernel": "32"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        usage="python -m kdtree_patch doctor [-h] [--json] [--compile]\n"
        "                                     [-- SERVICE COMMAND LINE]",
        help="what the service will do with the patch when it is restarted, and why",
        description="Looks at what a restart of the service would meet, and says what will come of it. Run it with the "
        "service's own interpreter, as its user, in its environment. It changes nothing and is safe beside a running "
        "service. Exit status: 0 verify calls will be served, or compared in shadow mode; 1 they will not, or not all, "
        "or it cannot be told; 2 not done: wrong usage.",
    )
    parser.add_argument(
        "service",
        nargs="*",
        metavar="SERVICE COMMAND LINE",
        help="after --: how the service is started, or its options alone, to learn which calls will be served",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document with the same content")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also compile what is not in the cache, and run the self-test on a GPU that has 2 GiB free",
    )
    parser.set_defaults(run=run, hint="those of the service go behind --")


def run(arguments: argparse.Namespace) -> int:
    found = ask(arguments.service, os.environ, arguments.compile)
    verdict, because = judge(found)
    words, status = VERDICTS[verdict]
    summary = f"{words}{', because ' if verdict != 'serve' else ': '}{because[0]}"
    if arguments.json:
        groups = {group: [asdict(fact) for fact in facts] for group, facts in found.groups.items()}
        modes = [asdict(mode) for mode in found.modes]
        document = {"verdict": verdict, "summary": summary, "because": because, "groups": groups}
        print(json.dumps({**document, "forward_modes": modes, "contract": found.contract}, indent=1))
    else:
        colourful = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print("\n".join(details(found, verdict, summary, because, colourful)))
    return status


def judge(found: Findings) -> tuple[str, list[str]]:
    """The verdict, and the reasons for it, the first one in time first."""
    for effect in (STOCK, UNKNOWN, PART):
        facts = found.with_effect(effect)
        if facts:
            return effect, [f"{fact.name}: {fact.value}" for fact in facts]
    holds = f", if {' and '.join(found.conditions)}" if found.conditions else ""
    if any(fact.name == "KDTREE_MODE" and fact.value.startswith("shadow") for fact in found.groups["settings"]):
        return "shadow", [f"KDTREE_MODE=shadow{holds}"]
    return "serve", [f"verify calls go to the kernel, all others stay stock{holds}"]


def details(found: Findings, verdict: str, summary: str, because: list[str], colourful: bool) -> list[str]:
    lines = [_paint(summary, COLOURS[verdict], colourful)]
    lines += [f"  also {reason}" for reason in because[1:]]
    for group, facts in found.groups.items():
        lines += ["", group]
        width = max(len(fact.name) for fact in facts)
        for fact in facts:
            effect = _paint(f"{fact.effect:<7}", COLOURS.get(fact.effect, "0"), colourful)
            lines.append(f"  {effect} {fact.name:<{width}}  {fact.value}")
        if group == "SGLang":
            lines += _contract(found)
    if found.modes:
        lines += ["", "forward modes, if nothing but the options stands in the way"]
        names, backends = (max(len(column) for column in columns) for columns in zip(*_names(found), strict=True))
        for mode in found.modes:
            route = _paint(f"{mode.route:<7}", COLOURS.get(mode.route, "0"), colourful and mode.name == "TARGET_VERIFY")
            lines.append(f"  {route} {mode.name:<{names}}  {mode.backend:<{backends}}  {mode.why}")
    return lines


def _names(found: Findings) -> list[tuple[str, str]]:
    return [(mode.name, mode.backend) for mode in found.modes]


def _contract(found: Findings) -> list[str]:
    """Each row by its name, those with one outcome together."""
    wheres = dict.fromkeys(row["where"] for row in found.contract)
    lines = []
    for where in wheres:
        rows = [row for row in found.contract if row["where"] == where]
        said = []
        for kind in (contract.VIOLATED, contract.THERE, contract.ABSENT, contract.LATER):
            names = [row["name"] for row in rows if row["outcome"] == kind]
            said += [f"{kind}: {', '.join(names)}"] if names else []
        lines.append(f"          {where}: {'; '.join(said)}")
    return lines


def _paint(text: str, colour: str, colourful: bool) -> str:
    return f"\033[{colour}m{text}\033[0m" if colourful and text.strip() else text
