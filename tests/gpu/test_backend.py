"""SGLang's real Triton backend on a GPU, patched through sitecustomize, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.cases import LIMIT
from tests.support.env import REPO, sglang_dir


@pytest.fixture(scope="module")
def child() -> dict:
    """What the child found. SGLang is the one of this interpreter, else the one in .venv that fits its torch."""
    path = [str(REPO), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if importlib.util.find_spec("sglang") is None:
        path.append(str(sglang_dir("0.5.23")))
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join(path))
    command = [sys.executable, "-m", "tests.gpu.backend_child"]
    done = subprocess.run(command, cwd=REPO, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | dict(log=done.stderr)


def test_eager(child: dict) -> None:
    assert max(child["eager"]) < LIMIT[torch.bfloat16]


def test_replay_has_the_bits_of_the_eager_call(child: dict) -> None:
    if "graphs" not in child:
        pytest.skip("captures as SGLang 0.5.12's graph runner does; another release is on the path")
    assert max(child["graphs"]["errors"]) < LIMIT[torch.bfloat16]
    assert all(child["graphs"]["same"])


def test_every_verify_call_was_served_and_logged(child: dict) -> None:
    assert set(child["routed"]) == {"kernel/verify"}
    assert child["log"].count("[kdtree] installed ") == 1
    assert "[kdtree] shapes q=" in child["log"]
    assert "[kdtree] ERROR" not in child["log"]
