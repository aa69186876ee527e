"""SGLang's real backend prepares captures and replays of what stands for CUDA graphs on a CPU (support/graphs.py).

What is tried here and nowhere else: that the methods we wrap are those that SGLang's graph runners call, with what they
call them with, and that the real stock kernel leaves everything as it is when it is given a batch of no tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.env import child_env

# As in test_real_backend.py: float16, and two roundings.
REL_TO_FLOAT64 = 2.6e-4


@pytest.fixture(scope="module", params=["on", "shadow"])
def child(release: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("graph-child")
    variables = dict(KDTREE_MODE=request.param, KDTREE_VALIDATE="1", KDTREE_VALIDATE_EVERY="2")
    done = subprocess.run(
        [sys.executable, "-m", "support.graph_child"],
        cwd=folder,
        env=child_env(release, variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("[kdtree]")]
    return json.loads(done.stdout.splitlines()[-1]) | dict(lines=lines, mode=request.param)


def test_live_rows_are_right_in_padded_replays_of_changing_size(child: dict[str, Any]) -> None:
    """Between the steps that are compared, too, in which the stock kernel has nothing to do."""
    assert len(child["errors"]) == 5
    for of_step in child["errors"]:
        assert max(of_step) < REL_TO_FLOAT64


def test_each_layer_of_each_replay_is_counted(child: dict[str, Any]) -> None:
    assert child["counted"] == {"kernel/verify" if child["mode"] == "on" else "stock/shadow": 10}


def test_every_second_replay_is_compared(child: dict[str, Any]) -> None:
    found = [re.fullmatch(r"\[kdtree\] L(\d) .*rel=(\S+) calls=1", line) for line in child["lines"]]
    layers = [match for match in found if match]
    assert [match[1] for match in layers] == ["0", "1"] * 3
    assert max(float(match[2]) for match in layers) < 1e-3
    if child["mode"] == "on":
        # Tokens that the stock kernel is asked for, layer by layer.
        assert child["stock_calls"] == [15, 15, 0, 0, 15, 15, 0, 0, 15, 15]


def test_nothing_was_amiss(child: dict[str, Any]) -> None:
    assert not [line for line in child["lines"] if "ERROR" in line or "WARNING" in line or "declined" in line]
