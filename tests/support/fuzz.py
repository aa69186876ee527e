"""Verify calls at random, and what must hold of each: for hypothesis, on the CPU build and on a GPU.

`calls(budget)` is the strategy. What it draws is small and says itself when it fails; the tensors are made from it by
`made`. `check` sends one through the router to a kernel and compares the result with float64.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st

from kdtree_patch.demo_backend import tree
from kdtree_patch.kernel import VerifyKernel
from kdtree_patch.ledger import Ledger
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from tests.fakes import Stock, a_batch, a_layer, arguments

from .cases import HEAD_DIM, LIMIT, SCALE, Case, poisoned, reference
from .reference import rel

HEADS = (1, 3, 8, 9, 16, 63, 64, 128)
PREFIXES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 8736)
# A cosine-like difference, 1 - 2 <x, y> / (<x, x> + <y, y>): for a result that is off by rounding alone, half of rel
# squared. It is blind to nothing that rel sees, and sees a scale that is wrong in one request of many.
COSINE = {torch.bfloat16: 3e-6, torch.float16: 1e-7}
# Of one request, which may be a single row: its rounding is not that of the mean.
ROUGHER = 1.3


@dataclass(frozen=True)
class Drawn:
    """What a call is made from."""

    prefixes: tuple[int, ...]
    q_len: int
    heads: int
    dtype: torch.dtype
    mask: str  # none; chain, tree, scattered (some rows see nothing)
    mask_dtype: torch.dtype
    index_dtypes: tuple[torch.dtype, ...]  # of qo_indptr, kv_indptr, kv_indices, mask_indptr
    q_layout: str  # contiguous; wide: a slice of longer rows; heads_first: a transposed one
    pool_layout: str  # contiguous; wide; later: a slice of a longer pool
    shared: bool  # requests have slots in common
    slack: int  # stale entries behind the live part of mask and indices
    special: str  # "", or a value that is no number: "nan in pool", "inf in q", ...
    seed: int

    def __repr__(self) -> str:
        return "Drawn(" + ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)) + ")"


# An idle batch, which must not be left to chance.
IDLE = Drawn(
    *((), 3, 8, torch.bfloat16, "tree", torch.bool, (torch.int32,) * 4),
    *("contiguous", "contiguous", False, 0, "", 0),
)


def tiles_of(prefix: int, q_len: int, heads: int) -> int:
    """Tiles of 32 keys by row blocks of 40 rows."""
    return math.ceil((prefix + q_len) / 32) * math.ceil(q_len * heads / 40)


@st.composite
def calls(draw: st.DrawFn, budget: int) -> Drawn:
    """Calls of `budget` tiles at most, which bounds the time that one takes."""
    heads = draw(st.sampled_from(HEADS))
    q_len = draw(st.one_of(st.sampled_from((1, 4, 9)), st.integers(1, 65)))
    while tiles_of(0, q_len, heads) > budget:
        q_len //= 2
    edges = [32 * n - q_len + d for n in (1, 2, 3, 6) for d in (-1, 0, 1)]
    lengths = st.sampled_from(sorted({*PREFIXES, *(edge for edge in edges if edge >= 0)}))
    prefixes: list[int] = []
    bs = draw(st.sampled_from((1, 2, 3, 4, 7, 16, 33, 64, 0)))
    # A long one first, now and then: it would not fit behind others.
    first = draw(st.one_of(lengths, lengths, st.just(max(PREFIXES))))
    for prefix in [first, *draw(st.lists(lengths, min_size=bs, max_size=bs))][:bs]:
        if tiles_of(prefix, q_len, heads) <= budget:
            budget -= tiles_of(prefix, q_len, heads)
            prefixes.append(prefix)
    indices = st.sampled_from((torch.int32, torch.int64))
    special = st.sampled_from(
        [f"{value} in {place}" for value in ("nan", "inf", "-inf") for place in ("q", "pool", "k")]
    )
    return Drawn(
        prefixes=tuple(prefixes),
        q_len=q_len,
        heads=heads,
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16))),
        mask=draw(st.sampled_from(("tree", "none", "chain", "scattered"))),
        mask_dtype=draw(st.sampled_from((torch.bool, torch.uint8))),
        index_dtypes=draw(st.tuples(indices, indices, indices, indices)),
        q_layout=draw(st.sampled_from(("contiguous", "wide", "heads_first"))),
        pool_layout=draw(st.sampled_from(("contiguous", "wide", "later"))),
        shared=draw(st.booleans()),
        slack=draw(st.sampled_from((0, 1, 300))),
        special=draw(st.one_of(st.just(""), st.just(""), special)),
        seed=draw(st.integers(0, 2**31)),
    )


def made(drawn: Drawn, device: str = "cpu") -> Case:
    """N(0, 1) inputs; NaN in every slot that no request owns, between rows, and in the output."""
    generator = torch.Generator(device).manual_seed(drawn.seed)
    rng = random.Random(drawn.seed)
    dtype, q_len, heads = drawn.dtype, drawn.q_len, drawn.heads
    bs, total = len(drawn.prefixes), sum(drawn.prefixes)
    tokens = bs * q_len

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    # Slots: of each request all different, in any order; of two requests some the same, as with a prefix cache.
    longest = max(drawn.prefixes, default=0)
    slots_at_all = longest + longest // 3 + 2 if drawn.shared else total + 7
    if drawn.shared:
        owned = [torch.randperm(slots_at_all, generator=generator, device=device)[:p] for p in drawn.prefixes]
        slots = torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *owned])
    else:
        slots = torch.randperm(slots_at_all, generator=generator, device=device)[:total]
    pool = _pool(drawn.pool_layout, slots_at_all, full)
    pool[slots] = normal(total, 1, HEAD_DIM)  # of a slot that is there twice, one of the two
    q = _queries(drawn.q_layout, tokens, heads, full)
    q.copy_(normal(tokens, heads, HEAD_DIM))
    k_extend = normal(tokens, 1, HEAD_DIM)
    _put_special(drawn, rng, q, pool, slots, k_extend)

    stale = torch.randint(0, slots_at_all, (drawn.slack,), generator=generator, device=device)
    qo, kv, indices, mask_offsets = drawn.index_dtypes
    lengths = torch.tensor([0, *drawn.prefixes], device=device)
    custom_mask, mask_indptr = None, None
    if drawn.mask != "none":
        custom_mask = _mask(drawn, rng).to(device)
        areas = torch.tensor([0, *(q_len * (p + q_len) for p in drawn.prefixes)], device=device)
        mask_indptr = areas.cumsum(0).to(mask_offsets)
    return Case(
        q=q,
        k_extend=k_extend,
        out=full(math.nan, tokens, heads, 512),
        kv_pool=pool,
        qo_indptr=(torch.arange(bs + 1, device=device) * q_len).to(qo),
        kv_indptr=lengths.cumsum(0).to(kv),
        kv_indices=torch.cat([slots, stale]).to(indices),
        custom_mask=custom_mask,
        mask_indptr=mask_indptr,
        q_len=q_len,
        scale=SCALE,
    )


def _pool(layout: str, slots: int, full) -> torch.Tensor:  # type: ignore[no-untyped-def]
    if layout == "wide":
        return full(math.nan, slots, 1, HEAD_DIM + 64)[..., :HEAD_DIM]
    if layout == "later":
        return full(math.nan, slots + 5, 1, HEAD_DIM)[5:]
    return full(math.nan, slots, 1, HEAD_DIM)


def _queries(layout: str, tokens: int, heads: int, full) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """As SGLang passes them: one tensor, or what a batched product by head has left."""
    if layout == "wide":
        return full(math.nan, tokens, heads, HEAD_DIM + 8)[..., :HEAD_DIM]
    if layout == "heads_first":
        return full(math.nan, heads, tokens, HEAD_DIM).transpose(0, 1)
    return full(math.nan, tokens, heads, HEAD_DIM)


def _mask(drawn: Drawn, rng: random.Random) -> torch.Tensor:
    """All of the prefix, which the kernel does not look at, and of the drafts what the kind says."""
    q_len, rows = drawn.q_len, []
    for prefix in drawn.prefixes:
        if drawn.mask == "tree":
            seen = tree(q_len, rng)
        elif drawn.mask == "chain":
            seen = torch.ones(q_len, q_len, dtype=torch.bool).tril()
        else:
            seen = torch.tensor([[rng.random() < 0.3 for _ in range(q_len)] for _ in range(q_len)]).tril()
        rows.append(torch.cat([torch.ones(q_len, prefix, dtype=torch.bool), seen], 1).flatten())
    stale = torch.tensor([rng.random() < 0.5 for _ in range(drawn.slack)], dtype=torch.bool)
    flat = torch.cat([*rows, stale])
    if drawn.mask_dtype == torch.bool:
        return flat
    # Any byte that is not zero means visible.
    return flat * torch.randint(1, 256, flat.shape, generator=torch.Generator().manual_seed(drawn.seed)).to(torch.uint8)


def _put_special(
    drawn: Drawn, rng: random.Random, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, k: torch.Tensor
) -> None:
    """One number that is none: in a query, in a row of the pool that is in use, or in a draft row."""
    if not drawn.special or not len(q):
        return
    value, _, place = drawn.special.split()
    column = rng.randrange(HEAD_DIM)
    if place == "q":
        q[rng.randrange(len(q)), rng.randrange(drawn.heads), column] = float(value)
    elif place == "k":
        k[rng.randrange(len(k)), 0, column] = float(value)
    elif len(slots):
        pool[slots[rng.randrange(len(slots))], 0, column] = float(value)


def check(kernel: VerifyKernel, drawn: Drawn) -> None:
    """The call is served if it has anything to serve, and right."""
    poisoned(kernel)
    case = made(drawn, kernel.device.type)
    stock = Stock()
    router = VerifyRouter(stock.function, kernel, Settings(), Ledger())
    router.context = (a_layer(), a_batch())
    call = arguments(case)
    router(*[call.pop(name) for name in list(call)[:16]], **call)
    if not drawn.prefixes:
        assert router.ledger.counts == {("stock", "empty_batch"): 1} and len(stock.calls) == 1
        return
    assert router.ledger.counts == {("kernel", "verify"): 1} and not stock.calls
    right, out = reference(case), case.out.double()
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(what(out), what(right)), f"{what.__name__}: {int(what(out).sum())}, {int(what(right).sum())}"
    finite = torch.isfinite(right)
    ours, expected = out.where(finite, 0.0), right.where(finite, 0.0)
    # A weight's rounding is shared by all columns of a row, so few rows are further off than many.
    difference(ours, expected, drawn.dtype, 1 + (ROUGHER - 1) / (len(out) * drawn.heads) ** 0.5)
    for first in range(0, len(out), drawn.q_len):
        rows = slice(first, first + drawn.q_len)
        difference(ours[rows], expected[rows], drawn.dtype, ROUGHER)


def difference(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, rougher: float) -> None:
    if not bool(expected.any()):
        assert not bool(ours.any())
        return
    off = rel(ours, expected)
    cosine = 1 - 2 * float((ours * expected).sum() / (ours.square().sum() + expected.square().sum()))
    assert off < LIMIT[dtype] * rougher, f"rel {off:.2e}"
    assert cosine < COSINE[dtype] * rougher**2, f"cosine-like difference {cosine:.1e}"
