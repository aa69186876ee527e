"""Double-compute: compares what the kernel wrote with what the stock kernel wrote, and says so in one line a layer.

The figures answer two questions. `max_abs_diff` and `mean` (of the absolute difference) show whether the outputs look
alike; `rel`, the L2 norm of the difference over that of the stock result, is the one to judge by: about 2e-3 is the
rounding of bf16, about 2e-4 that of fp16, near 1 is a wrong answer. Knows torch and the log, and nothing of SGLang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kdtree_patch import log

# Rows are compared this many elements at a time: in double precision a big batch would otherwise need gigabytes.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Difference:
    """How far two outputs are apart. Elements that are not finite in either are counted, and are in no other figure."""

    max_abs_diff: float
    mean: float
    rel: float
    nan: int  # not finite in the kernel's output: a fault
    stock_nan: int  # not finite in the stock output: 0 / 0 for a draft token that sees nothing, where ours is 0

    def line(self, layer: object, rank: int | None) -> str:
        """The layer line, which operators grep for: fields may follow, none may go."""
        words = f"L{layer} max_abs_diff={self.max_abs_diff:.4e} mean={self.mean:.4e} rel={self.rel:.4e}"
        more = log.fields({"nan": self.nan or None, "stock_nan": self.stock_nan or None, "tp_rank": rank})
        return f"{words} {more}" if more else words


def difference(ours: torch.Tensor, stock: torch.Tensor) -> Difference:
    """Reads both outputs, in double precision, and waits for the device once."""
    ours, stock = ours.reshape(-1), stock.reshape(-1)
    sums = torch.zeros(6, dtype=torch.float64, device=ours.device)
    largest = torch.zeros(1, dtype=torch.float64, device=ours.device)
    for start in range(0, ours.numel(), CHUNK):
        a, b = ours[start : start + CHUNK].double(), stock[start : start + CHUNK].double()
        bad_a, bad_b = ~a.isfinite(), ~b.isfinite()
        bad = bad_a | bad_b
        gap, reference = (a - b).abs().masked_fill_(bad, 0.0), b.masked_fill(bad, 0.0)
        largest = torch.maximum(largest, gap.max())
        squares = gap.square().sum(), reference.square().sum()
        sums += torch.stack([gap.sum(), *squares, bad_a.sum(), bad_b.sum(), bad.sum()])
    top, total, gap_square, stock_square, nan, stock_nan, left_out = torch.cat([largest, sums]).tolist()
    counted = ours.numel() - int(left_out)
    # A stock result of zeros makes the ratio 0 / 0: equal outputs are 0 apart, anything else is infinitely far.
    rel = math.sqrt(gap_square / stock_square) if stock_square else (math.inf if gap_square else 0.0)
    return Difference(top, total / counted if counted else 0.0, rel, int(nan), int(stock_nan))


class Steps:
    """Tells which calls to validate: all layers of every Nth verify step.

    A step begins with the lowest layer that this backend has routed, since layers run in order. Nothing else tells: the
    router sees calls, not steps.
    """

    def __init__(self, every: int):
        self._every = every
        self._step = -1
        self._lowest: int | None = None

    def due(self, layer: int) -> bool:
        """Called once for each call, in order."""
        if self._lowest is None or layer <= self._lowest:
            self._lowest = layer
            self._step += 1
        return self._step % self._every == 0
