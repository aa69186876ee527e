"""Verify calls recorded in a real SGLang 0.5.12 server on an H200, run again through our kernel (tests/data/README.md).

In bfloat16, as they were recorded: what a server really passes, its strides of 1,152 bytes, its trees of 16 drafts and
its scores, which are larger than those of N(0, 1) inputs because the rope part of the queries is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kdtree_patch.kernel import VerifyKernel
from tests.support.reference import LATENT, attention, rel

DATA = Path(__file__).with_name("data")
WHOLE = ("verify_bs1_noisy", "verify_bs1_same")
CUT_DOWN = ("verify_bs4_noisy",)  # of a larger call, so there is no stock output of it


@pytest.fixture(scope="module")
def kernel() -> VerifyKernel:
    return VerifyKernel.load(torch.device("cpu"))


def recorded(name: str) -> dict[str, Any]:
    call: dict[str, Any] = torch.load(DATA / f"{name}.pt", weights_only=True)
    return call


def right_output(call: dict[str, Any]) -> torch.Tensor:
    return attention(
        q=call["q"],
        k=call["k"],
        v=call["k"][..., :LATENT],
        kv_pool=call["kv"],
        qo_indptr=call["qo_indptr"],
        kv_indptr=call["kv_indptr"],
        kv_indices=torch.arange(len(call["kv"])),
        custom_mask=call["mask"],
        mask_indptr=call["mask_indptr"],
        scale=call["scale"],
    )


def our_output(kernel: VerifyKernel, call: dict[str, Any]) -> torch.Tensor:
    """Through a pool in which the recorded rows are scattered and every other row is NaN."""
    slots = torch.randperm(2 * len(call["kv"]), generator=torch.Generator().manual_seed(0))[: len(call["kv"])]
    pool = torch.full((2 * len(call["kv"]), *call["kv"].shape[1:]), torch.nan, dtype=call["kv"].dtype)
    pool[slots] = call["kv"]
    tokens, heads, _ = call["q"].shape
    out = torch.full((tokens, heads, LATENT), torch.nan, dtype=call["q"].dtype)
    kernel.launch(
        call["q"],
        call["k"],
        out,
        pool,
        call["qo_indptr"],
        call["kv_indptr"],
        slots,
        call["mask"],
        call["mask_indptr"],
        int(call["qo_indptr"][1]),
        call["scale"],
    )
    return out


@pytest.mark.parametrize("name", WHOLE + CUT_DOWN)
def test_no_further_from_the_truth_than_stock_was(kernel: VerifyKernel, name: str) -> None:
    """`stock_rel` is how far the server's own output was, over the whole of the call as it was recorded."""
    call = recorded(name)
    assert rel(our_output(kernel, call), right_output(call)) <= 1.1 * call["stock_rel"]


@pytest.mark.parametrize("name", WHOLE)
def test_agrees_with_what_the_server_computed(kernel: VerifyKernel, name: str) -> None:
    call = recorded(name)
    assert rel(our_output(kernel, call), call["stock_out"]) < 4e-3
