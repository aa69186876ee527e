"""What verify attention has to compute, in float64 and in the plainest way.

Logical columns of a request are its prefix, read from the KV pool through `kv_indices`, then its drafts, which are not
in the pool as far as attention is concerned. A mask row is therefore prefix + q_len wide, for each request its own
width. K is the whole row of 576 columns, V its first 512. With an fp8 pool, K and V of the prefix are multiplied by a
scale each, those of the drafts are not.
"""

from __future__ import annotations

import torch

LATENT = 512


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The output (tokens, heads, 512) in float64, computed where the tensors are.

    A row that sees nothing is 0; no mask means a causal chain.
    """
    tokens, heads, width = q.shape
    out = torch.zeros(tokens, heads, LATENT, dtype=torch.float64, device=q.device)
    q64, k64, v64 = (x.detach().double() for x in (q, k, v))
    pool = kv_pool.detach().view(-1, width)
    stored = pool.view(torch.uint8) if pool.itemsize == 1 else pool  # not every torch can take rows of fp8
    queries, keys, slots = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices.long()
    for request in range(len(queries) - 1):
        rows = slice(queries[request], queries[request + 1])
        if rows.start == rows.stop:
            continue
        prefix = stored[slots[keys[request] : keys[request + 1]]].view(pool.dtype).double()
        q_len, columns = rows.stop - rows.start, len(prefix) + rows.stop - rows.start
        row_k = torch.cat([prefix * k_scale, k64[rows, 0]])
        row_v = torch.cat([prefix[:, :LATENT] * v_scale, v64[rows, 0]])
        if custom_mask is None:
            visible = torch.ones(q_len, columns, dtype=torch.bool, device=q.device).tril(len(prefix))
        else:
            assert mask_indptr is not None
            start = int(mask_indptr[request])
            visible = custom_mask[start : start + q_len * columns].view(q_len, columns).bool()
        scores = torch.einsum("qhd,kd->qhk", q64[rows], row_k) * scale
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        # A row that sees nothing has no largest score to subtract, and its weights are all 0.
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0))
        total = weights.sum(-1, keepdim=True)
        out[rows] = torch.einsum("qhk,kd->qhd", weights / total.where(total > 0, 1.0), row_v)
    return out


def rel(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the difference over the L2 norm of what was expected; NaN anywhere gives NaN."""
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())
