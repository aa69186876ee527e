"""SGLang's own Triton verify kernel on a `Case`, from whichever SGLang release can be imported."""

from __future__ import annotations

import inspect

import torch

from tests.support.cases import Case


def stock_kernel():
    """`extend_attention_fwd` of the SGLang on the path."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError:
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
    return extend_attention_fwd


def run_stock(case: Case) -> torch.Tensor:
    """The stock result of a case, in a new tensor. Arguments go by name: their order changed between releases."""
    function = stock_kernel()
    out = torch.empty_like(case.out)
    arguments = dict(
        q_extend=case.q,
        k_extend=case.k_extend,
        v_extend=case.k_extend[..., :512].contiguous(),
        o_extend=out,
        k_buffer=case.kv_pool,
        v_buffer=case.kv_pool[..., :512],
        qo_indptr=case.qo_indptr,
        kv_indptr=case.kv_indptr,
        kv_indices=case.kv_indices,
        custom_mask=case.custom_mask,
        is_causal=True,
        mask_indptr=case.mask_indptr,
        max_len_extend=case.q_len,
        sm_scale=case.scale,
    )
    if "k_scale" in inspect.signature(function).parameters:
        arguments |= dict(k_scale=1.0, v_scale=1.0)
    function(**arguments)
    return out
