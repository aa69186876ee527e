"""The kernel against float64 on a handful of small cases: at the start of each worker, and by `selftest` on the command
line.

A kernel that computes wrongly on this GPU, with this driver, must be found before it serves anything. The cases are
small but not gentle: scattered slots, NaN in every slot that nobody owns, lengths around the size of a tile, enough
columns that an item is cut among blocks, a tree and a chain, indices of both widths. The reference is computed on the
CPU, so that nothing but the kernel is loaded on the device. Knows torch, and nothing of SGLang.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from kdtree_patch.reference import attention, rel
from kdtree_patch.tiles import HEAD_DIM, LATENT

SCALE: Final = 0.14468
# Of an fp8 pool, and two that are no powers of two.
FP8_SCALES: Final = (0.3, 0.7)
# Of rel to float64, twice what rounding costs. Every mistake that we know of costs fifty times as much.
LIMITS: Final = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Launches(Protocol):
    """What is tested: `kdtree_patch.kernel.VerifyKernel`."""

    device: torch.device
    pool: torch.dtype | None

    def launch(self, *arguments: Any) -> None: ...


@dataclass(frozen=True)
class Case:
    prefixes: tuple[int, ...]
    q_len: int
    heads: int
    mask: bool = True  # a tree; else a chain without a mask
    indices: torch.dtype = torch.int64


@dataclass(frozen=True)
class Result:
    """`rel` is that of the kernel's output to float64; NaN if it is not finite somewhere."""

    name: str
    rel: float
    limit: float

    @property
    def good(self) -> bool:
        return self.rel <= self.limit


CASES: Final = (
    Case((21,), 9, 8),  # the reference case
    Case((0, 1, 31, 33), 5, 3, indices=torch.int32),
    Case((64, 2), 4, 1, mask=False),
    Case((200,), 9, 8),
)


def run(kernel: Launches) -> Iterator[Result]:
    """Launches each case with each element type on the kernel's device, with the KV pool that the kernel is for, and
    waits for it.
    """
    for dtype in LIMITS:
        for number, case in enumerate(CASES):
            arguments = make(case, dtype, seed=number, fp8=kernel.pool)
            on_device = [
                value.to(kernel.device) if isinstance(value, torch.Tensor) else value for value in arguments.values()
            ]
            kernel.launch(*on_device)
            out = on_device[2].cpu()
            inputs = {name: arguments[name] for name in arguments if name not in ("k_extend", "out", "q_len")}
            k = arguments["k_extend"]
            right = attention(k=k, v=k[..., :LATENT], **inputs)
            shape = f"prefixes={','.join(map(str, case.prefixes))} q_len={case.q_len} heads={case.heads}"
            kind = str(dtype).removeprefix("torch.")
            if kernel.pool is not None:
                kind += f" pool={str(kernel.pool).removeprefix('torch.')}"
            yield Result(f"{kind} {shape} {'tree' if case.mask else 'chain'}", rel(out, right), LIMITS[dtype])


def make(case: Case, dtype: torch.dtype, seed: int, fp8: torch.dtype | None = None) -> dict[str, Any]:
    """The arguments of `VerifyKernel.launch` by name and in order, on the CPU; the output is full of NaN."""
    k_scale, v_scale = (1.0, 1.0) if fp8 is None else FP8_SCALES
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    bs, q_len, total = len(case.prefixes), case.q_len, sum(case.prefixes)
    tokens = bs * q_len

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pool = torch.full((total + 8, 1, HEAD_DIM), torch.nan, dtype=dtype)
    slots = torch.randperm(total + 8, generator=generator)[:total]
    pool[slots] = normal(total, 1, HEAD_DIM)
    mask = [
        torch.cat([torch.ones(q_len, prefix, dtype=torch.bool), _tree(q_len, rng)], 1).flatten()
        for prefix in case.prefixes
    ]
    lengths = torch.tensor([0, *(one.numel() for one in mask)])
    return dict(
        q=normal(tokens, case.heads, HEAD_DIM),
        k_extend=normal(tokens, 1, HEAD_DIM),
        out=torch.full((tokens, case.heads, LATENT), torch.nan, dtype=dtype),
        kv_pool=pool if fp8 is None else (pool / k_scale).to(fp8),
        qo_indptr=(torch.arange(bs + 1) * q_len).to(case.indices),
        kv_indptr=torch.tensor([0, *case.prefixes]).cumsum(0).to(case.indices),
        kv_indices=slots.to(case.indices),
        custom_mask=torch.cat(mask) if case.mask else None,
        mask_indptr=lengths.cumsum(0) if case.mask else None,
        q_len=q_len,
        scale=SCALE,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _tree(q_len: int, rng: random.Random) -> torch.Tensor:
    """Which drafts see which: themselves and their ancestors; parents come first."""
    visible = torch.eye(q_len, dtype=torch.bool)
    for draft in range(1, q_len):
        visible[draft] |= visible[rng.randrange(draft)]
    return visible
