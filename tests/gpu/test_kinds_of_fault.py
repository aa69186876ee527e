"""Kinds of fault that others have met, where only a GPU shows them; tests/test_kinds_of_fault.py lists all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kdtree_patch.kernel import VerifyKernel
from tests import stand_in
from tests.support.cases import LIMIT, make_case, reference, with_extreme_scores, with_far_rows, with_garbage_padding
from tests.support.env import REPO
from tests.support.reference import rel

BF16 = torch.bfloat16


@pytest.mark.parametrize("what", ["q", "k_extend", "out", "custom_mask"])
def test_no_offset_overflows_32_bits(kernel: VerifyKernel, what: str) -> None:
    case = make_case([400], 5, 8, dtype=BF16, device="cuda")
    assert rel(with_far_rows(case, what).launch(kernel), reference(case)) < LIMIT[BF16]


@pytest.mark.parametrize("sees", ["anything", "nothing"])
@pytest.mark.parametrize("prefixes", [[700, 0, 33], [4000, 5, 9]], ids=str)
def test_graph_padding_rows_with_a_garbage_mask(kernel: VerifyKernel, prefixes: list[int], sees: str) -> None:
    """In a graph for four, captured on four requests of other lengths."""
    case = make_case(prefixes, 9, 8, dtype=BF16, device="cuda")
    expected = case.launch(kernel).clone()
    more = with_garbage_padding(case, sees == "anything")
    more.launch(kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        more.launch(kernel)
    more.out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(more.out[: len(expected)], expected)
    assert bool(torch.isfinite(more.out).all())


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_extreme_scores(kernel: VerifyKernel, magnitude: float) -> None:
    """As in tests/test_kernel.py, which says why the limit is a wider one; over a prefix that is cut as well."""
    for prefix in (70, 5000):
        case = with_extreme_scores(make_case([prefix], 2, 8, dtype=BF16, device="cuda"), magnitude)
        out = case.launch(kernel)
        assert bool(torch.isfinite(out).all())
        assert rel(out, reference(case)) < 0.0025


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_no_context_on_gpu_0_from_rank_1(tmp_path: Path) -> None:
    """Nor from the HTTP server, which imports the backend too when the model is a multimodal one."""
    standing_in = stand_in.write(tmp_path, "0.5.9")  # the release whose signatures are in the repository
    env = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPO), env.get("PYTHONPATH"))))
    # Our sitecustomize takes the repository off the path; -m puts the current directory on it.
    command = [sys.executable, "-m", "tests.gpu.context_child", str(standing_in)]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"HTTP server": [], "rank 1 after the import": [], "rank 1 at work": [1]}
