"""Extend and draft-extend batches on the real Triton backend of SGLang 0.5.12, patched through `sitecustomize`.

They have no mask, and requests with different numbers of new tokens. `test_sglang_kit.py` has those of 0.5.23.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.env import child_env

CASES: list[dict[str, Any]] = [
    dict(name="extend", mode="EXTEND", prefixes=[21], new=[5]),
    dict(name="ragged extend", mode="EXTEND", prefixes=[100, 3, 40, 0], new=[2, 17, 1, 6]),
    dict(name="draft extend, ragged", mode="DRAFT_EXTEND", prefixes=[12, 30, 1], new=[4, 1, 3]),
    dict(name="draft extend, v2", mode="DRAFT_EXTEND_V2", prefixes=[12, 30], new=[4, 4]),
]
MODES = {"EXTEND": "extend", "DRAFT_EXTEND": "draft_extend", "DRAFT_EXTEND_V2": "draft_extend"}


@pytest.mark.parametrize("asked", ["verify", "draft_extend", "verify,draft_extend,extend"])
def test_extends_are_ours_where_they_are_asked_for_and_right(asked: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "support.extend_child", json.dumps(CASES)],
        env=child_env("0.5.12", {"KDTREE_FORWARD_MODES": asked}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found = json.loads(child.stdout.splitlines()[-1])
    for case in CASES:
        one, mode = found[case["name"]], MODES[case["mode"]]
        served = mode in asked.split(",")
        assert one["routed"] == {f"kernel {mode}" if served else "stock forward_mode": 1}, case["name"]
        assert one["to_stock"] < (1e-3 if served else 1e-9), case["name"]
        assert one["ours"] <= 1.1 * one["stock"] < 1e-3, case["name"]
