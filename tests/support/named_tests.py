"""Tables of the tests that show something, held to the tests that there are."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from .env import REPO


def functions(file: Path) -> set[str]:
    """The functions at the top of a Python file."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def missing(named: Iterable[str]) -> list[str]:
    """Those of `file below tests/::test` that do not exist."""
    found = []
    for name in named:
        file, _, test = name.partition("::")
        path = REPO / "tests" / file
        if not path.is_file() or test not in functions(path) or not test.startswith("test_"):
            found.append(name)
    return found
