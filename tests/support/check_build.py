"""python -m tests.support.check_build LIBRARY CONFIGURATION [POOL]: runs one configuration of a CPU build of the kernel
on small batches without padding, and prints the first thing that is wrong. POOL is the fp8 pool that the build is for.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kdtree_patch.kernel import FP8_POOLS, KernelFault
from tests.support.cases import (
    LIMIT,
    Case,
    host_kernel,
    in_high_slots,
    make_case,
    padded,
    reference,
    with_drafts,
    with_pool,
)
from tests.support.reference import rel

# With an fp8 pool, tiles are copied and scored otherwise; what comes before and behind is the same.
OF_FP8 = ("reference", "mixed", "a row that sees nothing", "cut", "several row blocks", "more items than workers")


def batches(seed: int, pool: torch.dtype | None) -> Iterator[tuple[str, Case]]:
    """Small batches that between them use every part of the kernel, and a name for each."""
    for name, case in (
        # First, while all of the workspace says that there are cuts.
        ("workers without a piece", with_drafts(make_case([130] * 40, 1, 1, mask="none", seed=seed), [1] + [0] * 39)),
        ("reference", make_case([21], 9, 8, seed=seed, slack=20)),
        ("mixed", make_case([70, 0, 40], 5, 8, seed=seed, slack=20)),
        ("a row that sees nothing", make_case([0, 66], 9, 2, mask="zero_row", seed=seed, slack=20)),
        ("chain", make_case([33, 12], 4, 8, mask="none", seed=seed, slack=20)),
        ("cut", make_case([300], 9, 8, seed=seed)),
        ("many tiles a worker", make_case([1000, 700], 9, 8, seed=seed)),
        ("more than 32 requests", make_case([3, 40] * 20, 1, 1, seed=seed)),
        ("more items than workers", make_case([33, 5, 0, 100] * 6, 1, 1, seed=seed)),
        ("workers that start no item", make_case([900, *[40] * 11], 1, 1, seed=seed)),
        ("several row blocks", make_case([150, 70], 20, 8, seed=seed)),
        ("unequally many row blocks", with_drafts(make_case([150, 70], 20, 8, mask="none", seed=seed), [20, 2])),
        ("requests of equal length", make_case([200] * 7, 1, 1, seed=seed)),
        ("more than 64 draft tokens in a row block", make_case([20], 72, 1, seed=seed)),
    ):
        if pool is not None and name not in OF_FP8:
            continue
        # Scores that rise with the column raise the running maxima more than once.
        for start, end in itertools.pairwise(case.kv_indptr.tolist()):
            case.kv_pool[case.kv_indices[start:end]] *= torch.linspace(0.5, 1.5, end - start).half()[:, None, None]
        yield name, with_pool(case, pool)
    yield "high slots", in_high_slots(with_pool(make_case([40], 3, 2, seed=seed), pool))
    negative = make_case([70, 9], 4, 8, seed=seed)
    negative.q.abs_()
    negative.kv_pool.abs_().neg_()
    negative.k_extend.abs_().neg_()
    yield "scores that are all negative", with_pool(negative, pool)
    # A worker goes from its items to those of others.
    strange = make_case([70] * 12, 1, 8, seed=seed)
    strange.kv_pool[strange.kv_indices[0]] = torch.nan
    yield "a request of NaN before others", with_pool(strange, pool)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def problems(library: Path, config: str, pool: torch.dtype | None, padding: bool) -> Iterator[str]:
    """What is wrong: in two orders of execution, one kernel object for all batches, so that old workspace is there.

    `padding`: also with requests of padding behind, which takes as long again.
    """
    for order, workers in (
        (0, 5),
        (5, 30),
    ):  # 30: an item in more splits than combine has groups, and warps that share them
        kernel = host_kernel(library, order, workers, config, pool)
        for name, case in batches(order, pool):
            try:
                out, right = case.launch(kernel), reference(case)
                if not torch.equal(out.isnan(), right.isnan()):
                    yield f"{name}: NaN in other places"
                error = rel(out.nan_to_num(), right.nan_to_num())
                if not error < LIMIT[torch.bfloat16 if pool is not None and config == "hopper" else torch.float16]:
                    yield f"{name}: rel {error}"
                live = case.out.shape[0]
                # The pool of high slots would be 4.3 GB of memory if it were copied.
                if padding and name != "high slots" and not same_bits(padded(case, 2).launch(kernel)[:live], case.out):
                    yield f"{name}: two requests of padding change the result"
            except KernelFault as fault:
                yield f"{name}: {fault}"


def first_problem(library: Path, config: str, pool: str | None, padding: bool) -> list[str]:
    torch.set_num_threads(1)
    of_pool = next((dtype for dtype, name in FP8_POOLS.items() if name == pool), None)
    return list(itertools.islice(problems(library, config, of_pool, padding), 1))


def send_first_problem(library: Path, config: str, pool: str | None, padding: bool, to: Connection) -> None:
    to.send(first_problem(library, config, pool, padding))


if __name__ == "__main__":
    of = sys.argv[3] if len(sys.argv) > 3 else None
    for problem in first_problem(Path(sys.argv[1]), sys.argv[2], of, padding=False):
        print(problem)
