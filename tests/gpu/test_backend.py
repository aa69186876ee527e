"""SGLang's real Triton backend on a GPU, patched through sitecustomize, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.support.cases import LIMIT
from tests.support.env import REPO, sglang_dir

MODES = {
    "plain": {},
    "guarded": {"KDTREE_VALIDATE": "1", "KDTREE_GUARD_REL": "0.05"},
    "shadow": {"KDTREE_MODE": "shadow", "KDTREE_GUARD_REL": "0.05"},
}


@pytest.fixture(scope="module", params=MODES)
def child(request: pytest.FixtureRequest) -> dict:
    """What the child found. SGLang is the one of this interpreter, else the one in .venv that fits its torch."""
    path = [str(REPO), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if importlib.util.find_spec("sglang") is None:
        path.append(str(sglang_dir("0.5.23")))
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join(path), **MODES[request.param])
    command = [sys.executable, "-m", "tests.gpu.backend_child"]
    done = subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | dict(log=done.stderr, mode=request.param)


def limit(child: dict) -> float:
    """In shadow mode it is the stock result, which is a little further from float64."""
    return LIMIT[torch.bfloat16] * (1.25 if child["mode"] == "shadow" else 1)


def test_eager(child: dict) -> None:
    assert max(child["eager"]) < limit(child)


def test_replay_has_the_bits_of_the_eager_call(child: dict) -> None:
    assert max(child["graphs"]["errors"]) < limit(child)
    assert all(child["graphs"]["same"])


def test_every_verify_call_was_served_and_logged(child: dict) -> None:
    assert set(child["routed"]) == {"stock/shadow" if child["mode"] == "shadow" else "kernel/verify"}
    assert child["log"].count("[kdtree] installed ") == 1
    assert "[kdtree] shapes q=" in child["log"]
    assert "[kdtree] ERROR" not in child["log"] and "[kdtree] WARNING" not in child["log"]


def test_each_replay_is_counted_and_compared(child: dict) -> None:
    """Of 4 captures of 2 layers: 2 eager calls before each, then 4 eager ones and 4 replays."""
    assert child["graph_calls"] == 4 * 2 * (2 + 4 + 4)
    compared = [line for line in child["log"].splitlines() if line.startswith("[kdtree] L") and " calls=" in line]
    replays = sum(int(re.search(r" calls=(\d+)", line)[1]) for line in compared)
    assert replays == (0 if child["mode"] == "plain" else 4 * 2 * 4)
    assert all(float(re.search(r" rel=(\S+)", line)[1]) < 0.005 for line in compared)
