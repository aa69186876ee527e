"""The real Triton backend for tests: the bed of `kdtree_patch.demo_backend` and the right answer beside it.

    bed = build(heads=8, max_bs=4, q_len=9, max_context=64)
    call = verify_batch(bed, prefixes=[21, 0, 5])
    ours = forward(bed, call)
    stock = forward_stock(bed, call)
    right = reference(bed, call)

Only for processes started with the environment of `child_env` in env.py; there this package is called `support`.
"""

from __future__ import annotations

from typing import Any

import torch

from kdtree_patch.demo_backend import (
    LATENT,
    ROPE,
    ROW,
    SCALE,
    Bed,
    Call,
    build,
    forward,
    prepare,
    sglang_release,
    stock_attention,
    tree,
    verify_batch,
)

from .reference import attention, rel

__all__ = [
    "LATENT",
    "ROPE",
    "ROW",
    "SCALE",
    "Bed",
    "Call",
    "build",
    "forward",
    "forward_stock",
    "prepare",
    "reference",
    "reference_arguments",
    "rel",
    "sglang_release",
    "stock_attention",
    "tree",
    "verify_batch",
]


def forward_stock(bed: Bed, call: Call, layer: int = 0, **options: Any) -> torch.Tensor:
    """The same layer through SGLang's own kernel."""
    with stock_attention(bed):
        return forward(bed, call, layer, **options)


def reference(bed: Bed, call: Call, layer: int = 0) -> torch.Tensor:
    """The right output in float64, (tokens, heads, 512)."""
    return attention(**reference_arguments(bed, call, layer))


def reference_arguments(bed: Bed, call: Call, layer: int = 0) -> dict:
    """The arguments of `tests.support.reference.attention` for a call.

    Built from the call itself, not from the metadata of the backend, so that it cannot share a mistake with it.
    """
    lengths = torch.tensor(call.prefixes, dtype=torch.int64)
    return dict(
        q=call.q,
        k=call.k,
        v=call.v,
        kv_pool=bed.rows(layer),
        qo_indptr=torch.arange(len(lengths) + 1) * bed.q_len,
        kv_indptr=_offsets(lengths),
        kv_indices=torch.cat(call.prefix_slots),
        custom_mask=call.custom_mask,
        mask_indptr=_offsets(bed.q_len * (lengths + bed.q_len)),
        scale=bed.layers[layer].scaling,
        k_scale=bed.layers[layer].k_scale_float or 1.0,
        v_scale=bed.layers[layer].v_scale_float or 1.0,
    )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
