"""What the code of a worker can say in the log: the forms of its lines and its reason codes, from the source.

Found by name, as they are written: a call of one of log.py's functions, an exception that carries a code, a format of
the logger. What is neither a literal nor on one of the lists here fails the test, so that a new way to say something
cannot be missed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kdtree_patch import contract, ledger
from tests.support.env import REPO

LEVELS = {"info": "", "warning": "WARNING ", "error": "ERROR "}
# Calls whose first argument is a reason code.
CARRIERS = ("declined", "stays_stock", "decline", "disable", "Declined", "CompileError", "KernelUnavailable")
# A code that is handed on: found where it begins.
HANDED_ON = frozenset(
    {
        "reason",
        "error.reason",
        "declined.reason",
        "answer['reason']",
        "*compiling.refusal(properties.name, capability, config)",
    }
)
# Formats that say what others have made: a layer line, and the failure of something beside a call.
HARMLESS = " failed: …: …; the call's own result is whole: report it, unless it is memory"
MADE_ELSEWHERE = {"…": "L… max_abs_diff=… mean=… rel=…", f"WARNING …{HARMLESS}": None}


def sources() -> list[Path]:
    return [REPO / "sitecustomize.py", *sorted((REPO / "kdtree_patch").glob("*.py"))]


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            yield name, node


def _is_of_the_logger(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("log.get_logger()", "get_logger()")


def _is_torch(call: ast.Call) -> bool:
    """torch.compiler.disable has the name of one of ours."""
    return ast.unparse(call.func).startswith("torch.")


def _strings(node: ast.expr, all_of_it: bool = False) -> list[str]:
    """What an expression can be, if it is a literal or a choice between some. With `all_of_it`, nothing if it can be
    something else as well.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Name) and node.id in ("GUARD", "GUARD_ELSEWHERE"):
        return [getattr(ledger, node.id)]
    parts: list[ast.expr] = []
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp):
        parts = node.values
    found = [_strings(part, all_of_it) for part in parts]
    return [] if all_of_it and not all(found) else [text for texts in found for text in texts]


def form(text: str) -> str:
    """A format as the documents write it: `…` for each value, and for each code."""
    return re.sub(r"reason=\w+", "reason=…", re.sub(r"%[-0-9.]*[a-zA-Z]|\{[^{}]*\}", "…", text))


def lines() -> dict[str, str]:
    """The form of each line, and the file that writes it."""
    found: dict[str, str] = {}
    for path in sources():
        tree = ast.parse(path.read_text())
        # `words = "..."` in front of a call that says them.
        named: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named.setdefault(node.targets[0].id, []).extend(_strings(node.value, all_of_it=True))
        for name, call in _calls(tree):
            if name in LEVELS and _is_of_the_logger(call):
                given = call.args[0]
                literal = named.get(given.id, []) if isinstance(given, ast.Name) else _strings(given, all_of_it=True)
                assert literal, f"{path.name}:{call.lineno}: what {ast.unparse(call)} says is not found"
                for text in literal:
                    said = LEVELS[name] + form(text)
                    other = MADE_ELSEWHERE.get(said, said)
                    if other is not None:
                        found[other] = path.name
            elif name == "harmlessly":
                (what,) = _strings(call.args[0])
                found[f"WARNING {what}{HARMLESS}"] = path.name
            elif name == "print" and path.name == "sitecustomize.py":
                found[form(ast.unparse(call.args[0]).removeprefix("f'[kdtree] ").rstrip("'"))] = path.name
    log = (REPO / "kdtree_patch" / "log.py").read_text()
    for word in ("installed", "declined reason="):
        assert f'"{word}' in log, word
    return found | {"installed …": "log.py", "declined reason=… … …": "log.py"}


def codes() -> dict[str, str]:
    """Each reason code, and the file that it begins in."""
    found = {row.reason: "contract.py" for row in contract.switches()}
    for path in sources():
        tree = ast.parse(path.read_text())
        for name, call in _calls(tree):
            if name in CARRIERS and call.args and path.name != "log.py" and not _is_torch(call):
                literal = _strings(call.args[0])
                handed_on = ast.unparse(call.args[0]) in HANDED_ON
                assert literal or handed_on, f"{path.name}:{call.lineno}: {ast.unparse(call)} has an unknown code"
                found |= dict.fromkeys(literal, path.name)
            elif name == "_count_declined":
                found |= dict.fromkeys(_strings(call.args[0]), path.name)
            found |= dict.fromkeys(
                (text for word in call.keywords if word.arg == "reason" for text in _strings(word.value)), path.name
            )
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "reason" for target in node.targets):
                found |= dict.fromkeys(_strings(node.value), path.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= dict.fromkeys(re.findall(r"declined reason=(\w+)", node.value), path.name)
            elif isinstance(node, ast.FunctionDef) and node.name in ("decide", "refusal"):
                found |= dict.fromkeys(_returned(node), path.name)
            elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and _strings(node.elts[0]) == ["stock"]:
                found |= dict.fromkeys(_strings(node.elts[1]), path.name)  # route and reason that a call counts for
    return found


def _returned(function: ast.FunctionDef) -> list[str]:
    """Codes that a function returns, alone or in front of a message."""
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return [text for value in values for text in _strings(value.elts[0] if isinstance(value, ast.Tuple) else value)]


def judgements() -> set[str]:
    """The codes under which `doctor` says what becomes of a service's options."""
    tree = ast.parse((REPO / "kdtree_patch" / "service_options.py").read_text())
    return {text for name, call in _calls(tree) if name == "Judgement" for text in _strings(call.args[1])}
