"""SGLang's own Triton verify kernel on a `Case`, from whichever SGLang release can be imported."""

from __future__ import annotations

import torch

from kdtree_patch.bench_measure import bind_stock, stock_kernel
from tests.support.cases import Case


def run_stock(case: Case) -> torch.Tensor:
    """The stock result of a case, in a new tensor."""
    stock = stock_kernel()
    assert stock is not None, "the GPU suite compares with SGLang's kernel: put a release on PYTHONPATH"
    out = torch.empty_like(case.out)
    bind_stock(stock, vars(case), out, case.q_len, case.scale)()
    return out
