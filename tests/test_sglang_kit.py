"""SGLang 0.5.23's own verify tests, which nobody here wrote, with the patch on.

The kit builds the batch, the surroundings and the reference, and compares: a whole small attention module, projections
and all, against a plain one. What is ours is only the assertion that our kernel, and not the stock one, computed it.
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
    dict(name="tree", prefixes=[2, 4], q_len=3, topk=2),
    dict(name="tree_of_8_heads_and_no_prefix", prefixes=[0, 13], q_len=3, topk=2, heads=8),
    dict(name="ngram_tree", prefixes=[17], q_len=3, topk=2, kind="ngram"),
    dict(name="frozen_kv_mtp_tree", prefixes=[5, 6, 7], q_len=3, topk=2, kind="frozen_kv_mtp"),
    dict(name="chain", prefixes=[4, 9], q_len=4),
    dict(name="dflash_chain", prefixes=[21], q_len=9, kind="dflash"),
    dict(name="chain_on_pages_of_16", prefixes=[14, 16, 3], q_len=4, page_size=16),
]

# Only with KDTREE_FORWARD_MODES.
EXTENDS: list[dict[str, Any]] = [
    dict(name="extend", mode="EXTEND", prefixes=[21], new=[5]),
    dict(name="ragged_extend", mode="EXTEND", prefixes=[40, 3, 17], new=[2, 7, 1]),
    dict(name="extend_without_prefix", mode="EXTEND", prefixes=[0, 33], new=[6, 3]),
    dict(name="long_extend_on_pages_of_16", mode="EXTEND", prefixes=[16, 20], new=[45, 4], page_size=16),
    dict(name="draft_extend", mode="DRAFT_EXTEND_V2", prefixes=[12, 30], new=[4, 4]),
    dict(name="ragged_draft_extend", mode="DRAFT_EXTEND_V2", prefixes=[12, 30, 1], new=[4, 1, 3]),
]


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What the router did with each case; all run in one child."""
    return run_cases(CASES, tmp_path_factory.mktemp("kit"), {})


def run_cases(cases: list[dict[str, Any]], empty: Path, variables: dict[str, str]) -> dict[str, dict[str, int]]:
    child = subprocess.run(
        [sys.executable, "-m", "support.kit_child", json.dumps(cases)],
        env=child_env("0.5.23", variables),
        cwd=empty,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    result: dict[str, dict[str, int]] = json.loads(child.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("case", [case["name"] for case in CASES])
def test_kit_case_is_right_and_ours(routed: dict[str, dict[str, int]], case: str) -> None:
    assert routed[case] == {"kernel verify": 1}


@pytest.mark.parametrize("asked", ["verify", "draft_extend", "verify,draft_extend,extend"])
def test_extends_of_the_kit_are_right_and_ours_where_they_are_asked_for(asked: str, tmp_path: Path) -> None:
    """The kit compares each with its own reference, whoever computes it."""
    routed = run_cases(EXTENDS, tmp_path, {"KDTREE_FORWARD_MODES": asked})
    modes = {"EXTEND": "extend", "DRAFT_EXTEND_V2": "draft_extend"}
    for case in EXTENDS:
        mode = modes[case["mode"]]
        # Those of a service without speculation: its backend has no router unless extends are asked for.
        stock = {} if mode == "extend" else {"stock forward_mode": 1}
        expected = {f"kernel {mode}": 1} if mode in asked.split(",") else stock
        assert routed[case["name"]] == expected, case["name"]
