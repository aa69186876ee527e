"""Verify calls as plain tensors, and what the right answer is. Used by the kernel tests on the CPU and on a GPU; knows
nothing of SGLang.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kdtree_patch import tiles
from kdtree_patch.demo_backend import tree
from kdtree_patch.kernel import FP8_POOLS, VerifyKernel, host_launcher

from .reference import attention

SCALE = 0.14468
HEAD_DIM = 576
# rel to float64. The rounding of the output alone costs 0.0016 in bf16 and 0.0002 in fp16, the rounding of P the rest.
LIMIT = {torch.bfloat16: 0.0020, torch.float16: 0.00026}


@dataclass
class Case:
    """The arguments of `VerifyKernel.launch`."""

    q: torch.Tensor
    k_extend: torch.Tensor
    out: torch.Tensor
    kv_pool: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    custom_mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    q_len: int
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0

    def launch(self, kernel: VerifyKernel) -> torch.Tensor:
        kernel.launch(
            self.q,
            self.k_extend,
            self.out,
            self.kv_pool,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.custom_mask,
            self.mask_indptr,
            self.q_len,
            self.scale,
            self.k_scale,
            self.v_scale,
        )
        return self.out


def poisoned(kernel: VerifyKernel) -> VerifyKernel:
    """The kernel with a workspace full of NaN and of cuts that are not there, so that what nobody wrote shows."""
    kernel.partial_out.fill_(0xFF)
    kernel.partial_stats.fill_(float("nan"))
    kernel.cut_items.copy_(torch.tensor([0, 0, 1, 0], dtype=torch.int32).repeat(kernel.workers))
    return kernel


def host_kernel(
    library: Path, seed: int = 0, workers: int = 5, config: str = "portable", pool: torch.dtype | None = None
) -> VerifyKernel:
    """The CPU build with blocks, warps and lanes run in the order that `seed` gives, and a grid of `workers` blocks."""
    launcher = host_launcher(library, seed)
    return poisoned(VerifyKernel(torch.device("cpu"), launcher, workers, "host", tiles.CONFIGS[config], pool))


def make_case(
    prefixes: list[int],
    q_len: int,
    heads: int,
    *,
    dtype: torch.dtype = torch.float16,
    mask: str = "tree",
    device: str = "cpu",
    seed: int = 0,
    scale: float = SCALE,
    mask_dtype: torch.dtype = torch.bool,
    qo_dtype: torch.dtype = torch.int32,
    kv_indptr_dtype: torch.dtype = torch.int32,
    kv_indices_dtype: torch.dtype = torch.int64,
    mask_indptr_dtype: torch.dtype = torch.int64,
    slack: int = 0,
    extra_slots: int = 7,
    pool: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Case:
    """A batch with one prefix length a request: N(0, 1) inputs, scattered slots, NaN in every slot that no request owns
    and in the output.

    mask is "tree", "none" (a causal chain) or "zero_row" (a tree whose draft 1 sees nothing). `slack` appends that many
    stale entries to the mask and to kv_indices, as the persistent buffers under CUDA graphs have. Strides are as SGLang
    passes them: contiguous. An fp8 `pool` holds keys that are N(0, 1) once they are multiplied by k_scale.
    """
    assert pool is None or pool in FP8_POOLS
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    bs = len(prefixes)
    total = sum(prefixes)
    tokens = bs * q_len
    pool_slots = total + extra_slots
    kv_pool = torch.full((pool_slots, 1, HEAD_DIM), float("nan"))
    order = torch.randperm(pool_slots - 1, generator=generator)[:total] + 1
    kv_pool[order] = torch.randn(total, 1, HEAD_DIM, generator=generator)
    q = torch.randn(tokens, heads, HEAD_DIM, generator=generator)
    k_extend = torch.randn(tokens, 1, HEAD_DIM, generator=generator)
    ends = torch.tensor([0, *prefixes]).cumsum(0)

    rows = []
    for b in range(bs):
        seen = tree(q_len, rng)
        if mask == "zero_row" and q_len > 1:
            seen[1] = False
        rows.append(torch.cat([torch.ones(q_len, prefixes[b], dtype=torch.bool), seen], 1).flatten())
    custom_mask = None
    mask_indptr = None
    if mask != "none":
        stale = torch.randint(0, 2, (slack,), generator=generator).bool()
        flat = torch.cat([*rows, stale])
        custom_mask = flat.to(mask_dtype)
        if mask_dtype == torch.uint8:
            # Any byte that is not zero means visible.
            custom_mask = custom_mask * torch.randint(1, 256, flat.shape, generator=generator).to(torch.uint8)
        lengths = torch.tensor([0, *(q_len * (p + q_len) for p in prefixes)])
        mask_indptr = lengths.cumsum(0).to(mask_indptr_dtype).to(device)
        custom_mask = custom_mask.to(device)
    indices = torch.cat([order, torch.randint(0, pool_slots, (slack,), generator=generator)]).to(kv_indices_dtype)
    return Case(
        q=q.to(dtype).to(device),
        k_extend=k_extend.to(dtype).to(device),
        out=torch.full((tokens, heads, 512), float("nan"), dtype=dtype, device=device),
        kv_pool=(kv_pool / k_scale).to(pool or dtype).to(device),
        qo_indptr=(torch.arange(bs + 1) * q_len).to(qo_dtype).to(device),
        kv_indptr=ends.to(kv_indptr_dtype).to(device),
        kv_indices=indices.to(device),
        custom_mask=custom_mask,
        mask_indptr=mask_indptr,
        q_len=q_len,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def padded(case: Case, requests: int) -> Case:
    """The case as a graph runner pads it: more requests, of prefix 1 in slot 0, with a mask that is all ones."""
    q_len, device = case.q_len, case.q.device
    extra = requests * q_len
    steps = torch.arange(1, requests + 1, device=device)

    def longer(tensor: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, more.to(tensor.dtype).to(device)])

    def continued(offsets: torch.Tensor, step: int) -> torch.Tensor:
        return longer(offsets, offsets[-1] + steps * step)

    tokens = case.out.shape[0] + extra
    pool = case.kv_pool.clone()
    as_bytes(pool)[0] = 0.5 if pool.itemsize > 1 else 0x30  # 0.5 of e4m3, 0.125 of e5m2
    # The stale ends of kv_indices and of the mask come after the live part, and so does the padding.
    live_indices = case.kv_indices[: int(case.kv_indptr[-1])]
    mask, mask_indptr = case.custom_mask, case.mask_indptr
    if mask is not None and mask_indptr is not None:
        mask = longer(mask[: int(mask_indptr[-1])], torch.ones(extra * (1 + q_len)))
        mask_indptr = continued(mask_indptr, q_len * (1 + q_len))
    return replace(
        case,
        q=longer(case.q, torch.ones(extra, *case.q.shape[1:])),
        k_extend=longer(case.k_extend, torch.ones(extra, 1, HEAD_DIM)),
        out=torch.full((tokens, *case.out.shape[1:]), float("nan"), dtype=case.out.dtype, device=device),
        kv_pool=pool,
        qo_indptr=continued(case.qo_indptr, q_len),
        kv_indptr=continued(case.kv_indptr, 1),
        kv_indices=longer(live_indices, torch.zeros(requests)),
        custom_mask=mask,
        mask_indptr=mask_indptr,
    )


def with_drafts(case: Case, lengths: list[int]) -> Case:
    """The same prefixes, each with as many draft tokens as `lengths` says, at most q_len. For a case without a mask."""
    tokens = sum(lengths)
    return replace(
        case,
        qo_indptr=torch.tensor([0, *lengths]).cumsum(0).to(case.qo_indptr),
        # Memory of their own: a sanitizer then sees what is read or written beyond their end.
        q=case.q[:tokens].clone(),
        k_extend=case.k_extend[:tokens].clone(),
        out=case.out[:tokens].clone(),
    )


def on_pages(case: Case, page_size: int) -> Case:
    """The same prefixes on pages of `page_size` slots, whole ones for each request; NaN in every other slot."""
    lengths = case.kv_indptr.diff().tolist()
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(7)) + 1
    slots = torch.cat(
        [
            (own[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            for own, length in zip(order.split(pages), lengths, strict=True)
        ]
    ).to(case.kv_indices.device)
    pool = torch.full_like(case.kv_pool[:1], float("nan")).repeat((sum(pages) + 1) * page_size, 1, 1)
    pool[slots] = case.kv_pool[case.kv_indices]
    return replace(
        case, kv_pool=pool, kv_indices=slots.to(case.kv_indices.dtype), out=torch.full_like(case.out, float("nan"))
    )


def with_pool(case: Case, pool: torch.dtype | None, k_scale: float = 0.5, v_scale: float = 0.25) -> Case:
    """The case with an fp8 pool that holds the same keys; None changes nothing."""
    if pool is None:
        return case
    return replace(case, kv_pool=(case.kv_pool / k_scale).to(pool), k_scale=k_scale, v_scale=v_scale)


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """A pool of fp8 as bytes, whose rows every torch can read and write; another one as it is."""
    return pool.view(torch.uint8) if pool.itemsize == 1 else pool


def in_high_slots(case: Case) -> Case:
    """The same prefixes in slots whose element offsets do not fit 31 bits, the first of which is 3,728,271.

    The pool is 4.3 GB of address space, of which only those rows are ever touched.
    """
    slots = 3_728_280 + torch.arange(len(case.kv_indices), device=case.q.device)
    pool = torch.empty(int(slots[-1]) + 1, 1, HEAD_DIM, dtype=case.kv_pool.dtype, device=case.q.device)
    as_bytes(pool)[slots] = as_bytes(case.kv_pool)[case.kv_indices]
    return replace(case, kv_pool=pool, kv_indices=slots.to(case.kv_indices.dtype))


def with_far_rows(case: Case, what: str) -> Case:
    """The case with one of q, k_extend, out and custom_mask where offsets do not fit 31 bits: of a mask the beginning,
    of the others all rows but the first four, of which each is 2^29 bytes behind the one before.

    The memory is address space but for those rows.
    """
    tensor: torch.Tensor = getattr(case, what)
    if what == "custom_mask":
        assert case.mask_indptr is not None
        offset = 2**31 + 8
        far = torch.empty(offset + len(tensor), dtype=tensor.dtype, device=tensor.device)
        far[offset:] = tensor
        return replace(case, custom_mask=far, mask_indptr=case.mask_indptr + offset)
    step = 2**29 // tensor.element_size()
    far = torch.empty(step * (len(tensor) - 1) + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
    return replace(case, **{what: far.as_strided(tensor.shape, (step, *tensor.stride()[1:])).copy_(tensor)})


def with_garbage_padding(case: Case, sees: bool) -> Case:
    """The case with one request of padding, whose mask is left over from something else, or is all zero."""
    more = padded(case, 1)
    if more.custom_mask is not None and more.mask_indptr is not None:
        stale = more.custom_mask[int(more.mask_indptr[-2]) :]
        stale.copy_(torch.randint(0, 2, stale.shape, generator=torch.Generator().manual_seed(1)).bool() & sees)
    return more


def with_extreme_scores(case: Case, magnitude: float) -> Case:
    """Scores of about `magnitude`, with small differences between them. A softmax that flat has more rounding of P."""
    case.q[...] = 1.0
    for keys in (case.kv_pool[case.kv_indices], case.k_extend):
        keys[..., :512] *= 0.01
        keys[..., 512:] = magnitude / (64 * case.scale)
        if keys is not case.k_extend:
            case.kv_pool[case.kv_indices] = keys
    return case


def reference(case: Case) -> torch.Tensor:
    """What the case's output has to be, (tokens, heads, 512) in float64."""
    return attention(
        q=case.q,
        k=case.k_extend,
        v=case.k_extend[..., :512],
        kv_pool=case.kv_pool,
        qo_indptr=case.qo_indptr,
        kv_indptr=case.kv_indptr,
        kv_indices=case.kv_indices,
        custom_mask=case.custom_mask,
        mask_indptr=case.mask_indptr,
        scale=case.scale,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
