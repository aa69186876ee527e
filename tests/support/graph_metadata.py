"""What SGLang's graph runners have the backend do before a capture and before a replay, for either way that releases
have of it. `bed` and `call` are those of `backend.py`.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from kdtree_patch import demo_backend
from kdtree_patch.demo_backend import Bed, Call

FILL = 1  # the sequence length of a request that pads the batch


def prepare_capture(bed: Bed, bs: int) -> Call:
    """A made-up batch: each request has one token, in slot 0, and every draft sees every other."""
    call = demo_backend.verify_batch(bed, [FILL] * bs)
    batch, device = call.forward_batch, bed.device
    mask = torch.ones(bed.q_len * (FILL + bed.q_len) * bs, dtype=torch.bool, device=device)
    batch.spec_info.custom_mask = mask
    batch.out_cache_loc = torch.zeros_like(batch.out_cache_loc)
    batch.req_pool_indices = torch.zeros_like(batch.req_pool_indices)
    with demo_backend._forward_context(bed):
        if hasattr(bed.backend, "init_forward_metadata_out_graph"):
            bed.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        else:
            bed.backend.init_forward_metadata_capture_cuda_graph(
                bs,
                bs * bed.q_len,
                batch.req_pool_indices,
                batch.seq_lens,
                None,
                batch.forward_mode,
                SimpleNamespace(custom_mask=mask, draft_token_num=bed.q_len, topk=4),
            )
    return call


def prepare_replay(bed: Bed, captured: Call, live: Call) -> None:
    """Writes the inputs and the metadata of a live batch, padded, where the graph of `captured` reads them."""
    batch, graph = live.forward_batch, captured.forward_batch
    bs, raw_bs = len(captured.prefixes), len(live.prefixes)
    tokens = raw_bs * bed.q_len
    for name in ("q", "k", "v"):
        getattr(captured, name)[:tokens].copy_(getattr(live, name))
    graph.out_cache_loc.zero_()
    graph.out_cache_loc[:tokens].copy_(batch.out_cache_loc)

    def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, bs - raw_bs), value=fill)

    requests, lengths = padded(batch.req_pool_indices, 0), padded(batch.seq_lens, FILL)
    with demo_backend._forward_context(bed):
        if hasattr(bed.backend, "init_forward_metadata_out_graph"):
            view: Any = copy.copy(batch)
            view.batch_size, view.req_pool_indices, view.seq_lens = bs, requests, lengths
            bed.backend.init_forward_metadata_out_graph(view)
        else:
            bed.backend.init_forward_metadata_replay_cuda_graph(
                bs,
                requests,
                lengths,
                int(lengths.sum()),
                None,
                batch.forward_mode,
                batch.spec_info,
                seq_lens_cpu=lengths.cpu(),
            )
