"""Small batches that between them use every part of both kernels, on a GPU: what `make sanitize` runs under each tool
of compute-sanitizer, and quick enough to run with the rest of the suite.

The batches are those with which tests/test_kernel_mutants.py shows that no fault of the kernel goes unseen. Whether the
workers have cuts, nothing to do or many items each depends on how many there are, so besides one a multiprocessor there
are grids of few. Inputs are copied to the device and results back, and right is computed on the CPU: so that under a
tool, which slows kernels down ten- to fifty-fold, little runs but ours.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from kdtree_patch import tiles
from kdtree_patch.kernel import VerifyKernel
from tests.support.cases import LIMIT, Case, reference
from tests.support.check_build import batches
from tests.support.reference import rel

# The one in slots beyond 2^31 elements has a test of its own: here it would be 4.3 GB to copy.
BATCHES = {name: case for name, case in batches(0, None) if name != "high slots"}
PACKED = {name: case for name, case in batches(0, torch.float8_e4m3fn) if name != "high slots"}


def with_workers(kernel: VerifyKernel, workers: int) -> VerifyKernel:
    """The loaded module with another grid, and a workspace in which nothing has been written."""
    return VerifyKernel(kernel.device, kernel._launcher, workers, kernel.target, kernel.config, kernel.pool)


def on(device: torch.device, case: Case, dtype: torch.dtype) -> Case:
    """The case in memory of its own, as long as it is and no longer: a tool then sees what is read beyond its end."""
    moved = {}
    for field in fields(case):
        value = getattr(case, field.name)
        if isinstance(value, torch.Tensor):
            is_ours = value.is_floating_point() and value.itemsize > 1
            moved[field.name] = (value.to(dtype) if is_ours else value).to(device)
    return replace(case, **moved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("workers", [5, 30, None])
@pytest.mark.parametrize("name", BATCHES)
def test_every_part(kernel: VerifyKernel, name: str, workers: int | None, dtype: torch.dtype) -> None:
    check(kernel, BATCHES[name], workers, dtype)


@pytest.mark.parametrize("name", PACKED)
def test_every_part_with_an_fp8_pool(fp8_kernel: VerifyKernel, name: str) -> None:
    if fp8_kernel.pool == torch.float8_e4m3fn:
        check(fp8_kernel, PACKED[name], 5, torch.bfloat16)


def check(kernel: VerifyKernel, case: Case, workers: int | None, dtype: torch.dtype) -> None:
    batch = on(torch.device("cpu"), case, dtype)
    ours = on(kernel.device, batch, dtype).launch(with_workers(kernel, workers or kernel.workers)).cpu()
    right = reference(batch)
    assert torch.equal(ours.isnan(), right.isnan())
    assert rel(ours.nan_to_num(), right.nan_to_num()) < LIMIT[dtype]


def test_the_batches_use_every_variant(kernel: VerifyKernel) -> None:
    cuts = {kernel.config.cut_rows(case.q_len, case.q.shape[1]).variant for case in BATCHES.values()}
    assert cuts == set(tiles.CONFIGS[kernel.config.name].variants)
