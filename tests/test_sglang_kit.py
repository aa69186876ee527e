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


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What the router did with each case; all run in one child."""
    empty: Path = tmp_path_factory.mktemp("kit")
    child = subprocess.run(
        [sys.executable, "-m", "support.kit_child", json.dumps(CASES)],
        env=child_env("0.5.23"),
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
