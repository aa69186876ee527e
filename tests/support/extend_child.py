"""Extend and draft-extend batches on SGLang 0.5.12's Triton backend: `python -m support.extend_child CASES`.

CASES is a JSON list; 0.5.23 has a kit of its own for these (`kit_child.py`). Prints one JSON object on its last line:
for each case what the router did, how far ours is from stock and how far each is from float64.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

from kdtree_patch import hook

from . import backend
from .backend import LATENT, ROW
from .reference import attention, rel

HEADS, CONTEXT = 4, 128


def main() -> None:
    bed = backend.build(heads=HEADS, max_bs=4, q_len=9, max_context=CONTEXT)
    print(json.dumps({case.pop("name"): run(bed, **case) for case in json.loads(sys.argv[1])}))


def run(bed: backend.Bed, mode: str, prefixes: list[int], new: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(prefixes))
    slots = (torch.randperm(bed.slots - 1, generator=generator) + 1)[: sum(prefixes) + sum(new)]
    own = slots.split([prefix + more for prefix, more in zip(prefixes, new, strict=True)])
    for request, some in enumerate(own, start=1):
        bed.requests.req_to_token[request, : len(some)] = some.to(bed.requests.req_to_token)
    before, after = torch.tensor(prefixes), torch.tensor(new)
    tokens = sum(new)
    q = torch.randn(tokens, HEADS, ROW, generator=generator).half()
    k = torch.randn(tokens, 1, ROW, generator=generator).half()
    v = k[..., :LATENT].contiguous()
    # Up to 0.5.13 the metadata of a draft extend has the new tokens among the cached ones as well.
    cached = [len(some) if mode == "DRAFT_EXTEND" else prefix for some, prefix in zip(own, prefixes, strict=True)]
    batch = SimpleNamespace(
        forward_mode=ForwardMode[mode],
        batch_size=len(new),
        seq_lens=before + after,
        seq_lens_cpu=before + after,
        seq_lens_sum=len(slots),
        extend_prefix_lens=before,
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens=after,
        extend_seq_lens_cpu=new,
        extend_start_loc=None,
        req_pool_indices=torch.arange(1, len(new) + 1),
        out_cache_loc=torch.cat([some[prefix:] for some, prefix in zip(own, prefixes, strict=True)]),
        spec_info=DraftExtend(after),
        token_to_kv_pool=bed.pool,
        attn_backend=bed.backend,
    )
    call: Any = SimpleNamespace(q=q, k=k, v=v, forward_batch=batch)
    backend.prepare(bed, call)
    counts = hook.counts()
    ours = backend.forward(bed, call)
    routed = hook.counts() - counts
    stock = backend.forward_stock(bed, call)
    right = attention(
        q=q,
        k=k,
        v=v,
        kv_pool=bed.pool.kv_buffer[0],
        qo_indptr=torch.tensor([0, *new]).cumsum(0),
        kv_indptr=torch.tensor([0, *cached]).cumsum(0),
        kv_indices=torch.cat([some[:length] for some, length in zip(own, cached, strict=True)]),
        custom_mask=None,
        mask_indptr=None,
        scale=bed.layers[0].scaling,
    )
    return dict(
        routed={" ".join(reason): count for reason, count in routed.items()},
        to_stock=float(rel(ours, stock)),
        ours=float(rel(ours, right)),
        stock=float(rel(stock, right)),
    )


class DraftExtend:
    """What the backend asks of an EagleDraftExtendInput, whose own method answers."""

    generate_attn_arg_prefill = EagleDraftExtendInput.generate_attn_arg_prefill

    def __init__(self, accepted: torch.Tensor) -> None:
        self.num_accept_tokens = accepted
        self.num_correct_drafts = accepted - 1


if __name__ == "__main__":
    main()
