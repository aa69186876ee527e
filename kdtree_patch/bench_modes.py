"""`bench --modes`: what lies beside the table of trees, ours and SGLang's kernel in one run.

* chains: the same call with a tree mask and without one, on pages of 1 and of 64 tokens. The kernel knows neither pages
  nor trees apart, so all three should take as long.
* trees: the largest, up to q_len 257 with 128 heads.
* extends: q_len 1 to 512 without a mask, to find from which length on SGLang's kernel is the faster one. That number
  belongs to `MOST_NEW_TOKENS` in route.py.

Times are cold, as in `bench_measure`. Results are checked against float64 at three tokens of the first and of the last
request, all heads: more of 128 heads over 65,536 keys would not fit beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from kdtree_patch import bench_measure as measuring
from kdtree_patch.bench_shapes import Shape, Trial
from kdtree_patch.tiles import LATENT

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kdtree_patch.kernel import VerifyKernel


Say = Callable[[str], None]


def measure(
    trials: Iterable[Trial], kernel: VerifyKernel, stock: measuring.Stock | None, step: Say, say: Say
) -> list[dict[str, Any]]:
    """A row for each trial, which `step` is told of before. One that does not fit into the GPU's memory is left out."""
    rows = []
    for trial in trials:
        step(f"{trial.kind}: {trial.shape}")
        try:
            rows.append(measure_trial(trial, kernel, stock))
        except torch.cuda.OutOfMemoryError:
            say(f"{trial.kind}: {trial.shape} is left out: it does not fit into this GPU's memory")
        if kernel.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def measure_trial(trial: Trial, kernel: VerifyKernel, stock: measuring.Stock | None) -> dict[str, Any]:
    shape = trial.shape
    call = inputs(trial, kernel.device.type)

    def ours() -> None:
        kernel.launch(**call, q_len=shape.q_len, scale=measuring.SCALE)

    ours()
    rel = error_of_some(call, shape)
    ours_us = measuring.cold_us(ours)
    stock_us = None
    if stock is not None:
        out = torch.empty_like(call["out"])
        stock_us = measuring.cold_us(measuring.bind_stock(stock, call, out, shape.q_len, measuring.SCALE))
    return dict(
        **dict(kind=trial.kind, mask="tree" if trial.tree else "none", page_size=trial.page_size),
        **dict(shape._asdict(), kv_dtype="bfloat16", config=kernel.config.name, kernel_cold_us=round(ours_us, 1)),
        stock_us=None if stock_us is None else round(stock_us, 1),
        rel=None if math.isnan(rel) else round(rel, 6),
    )


def inputs(trial: Trial, device: str) -> dict[str, Any]:
    """Those of `bench_measure.inputs`, without their mask and on larger pages where the trial says so."""
    call: dict[str, Any] = measuring.inputs(trial.shape, device)
    if not trial.tree:
        call.update(custom_mask=None, mask_indptr=None)
    if trial.page_size > 1:
        bs, prefix, size = trial.shape.bs, trial.shape.prefix, trial.page_size
        pages = -(-prefix // size)
        generator = torch.Generator(device).manual_seed(1)
        own = torch.randperm(bs * pages, device=device, generator=generator).view(bs, pages, 1)
        slots = (own * size + torch.arange(size, device=device)).view(bs, -1)[:, :prefix]
        missing = bs * pages * size - call["kv_pool"].shape[0]
        if missing > 0:  # the last page of each request is not full
            call["kv_pool"] = torch.cat([call["kv_pool"], call["kv_pool"][:1].expand(missing, -1, -1)])
        call["kv_indices"] = slots.flatten().contiguous()
    return call


def error_of_some(call: Mapping[str, Any], shape: Shape) -> float:
    """rel to float64 of a few tokens, the larger of the first and the last request's; NaN if either is."""
    _, q_len, _, prefix = shape
    found = []
    for request in {0, shape.bs - 1}:
        tokens = torch.tensor(sorted({0, q_len // 2, q_len - 1}), device=call["q"].device)
        slots = call["kv_indices"][request * prefix : (request + 1) * prefix]
        drafts = call["k_extend"][request * q_len : (request + 1) * q_len]
        keys = torch.cat([call["kv_pool"][slots], drafts]).squeeze(1).double()
        if call["custom_mask"] is None:
            visible = torch.arange(prefix + q_len, device=tokens.device) <= tokens[:, None] + prefix
        else:
            visible = call["custom_mask"].view(shape.bs, q_len, prefix + q_len)[request, tokens]
        rows = request * q_len + tokens
        scores = torch.einsum("qhd,kd->qhk", call["q"][rows].double(), keys) * measuring.SCALE
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        right = torch.einsum("qhk,kd->qhd", weights, keys[:, :LATENT])
        found.append(float((call["out"][rows].double() - right).norm() / right.norm()))
    return math.nan if any(map(math.isnan, found)) else max(found)


# -------------------------------------------------------------------------------------------------------------- showing


def ahead_up_to(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The largest q_len up to which ours has been the faster one at every q_len measured; 0 if at none, None if stock
    was not timed. The rows are of one batch size, number of heads and prefix.
    """
    largest = 0
    for row in sorted(rows, key=lambda row: row["q_len"]):
        if row["stock_us"] is None:
            return None
        if row["kernel_cold_us"] > row["stock_us"]:
            break
        largest = row["q_len"]
    return largest


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Up to how many new tokens the kernel is ahead, and what follows of it."""
    extends = [row for row in rows if row["kind"] == "extends"]
    said, least = [], None
    for (bs, heads, prefix), same in groupby(extends, key=lambda row: (row["bs"], row["heads"], row["prefix"])):
        largest = ahead_up_to(list(same))
        if largest is None:
            return ["extends: SGLang's kernel was not timed, so nothing can be said of them"]
        said.append(f"extends: bs {bs}, {heads} heads, prefix {prefix:,}: ahead up to q_len {largest}")
        least = largest if least is None else min(least, largest)
    if least is not None:
        said.append(f"extends: ahead everywhere up to q_len {least}: MOST_NEW_TOKENS in route.py")
    return said


def tables(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    from rich.table import Table

    made: list[RenderableType] = []
    for kind, same in groupby(rows, key=lambda row: row["kind"]):
        names = ("bs", "q_len", "heads", "prefix", "mask", "page_size", "config")
        table = Table(title=f"{kind}: us a layer, cold", title_justify="left")
        for heading in (*names, "stock", "ours", "times", "rel"):
            table.add_column(heading, justify="right")
        for row in same:
            stock, ours = row["stock_us"], row["kernel_cold_us"]
            times = ("-", "-") if stock is None else (f"{stock:.1f}", f"{stock / ours:.1f}")
            rel = "not finite" if row["rel"] is None else f"{row['rel']:.5f}"
            table.add_row(*(str(row[name]) for name in names), times[0], f"{ours:.1f}", times[1], rel)
        made.append(table)
    return made
