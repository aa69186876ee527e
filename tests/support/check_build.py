"""python -m tests.support.check_build LIBRARY: runs a CPU build of the kernel on a few small batches; one line for each
thing that is wrong.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from kdtree_patch.kernel import KernelFault
from tests.support.cases import LIMIT, host_kernel, make_case, reference
from tests.support.reference import rel

BATCHES: list[dict[str, Any]] = [
    dict(prefixes=[21], q_len=9, heads=8),
    dict(prefixes=[70, 0, 40], q_len=5, heads=8),
    dict(prefixes=[0, 66], q_len=9, heads=2, mask="zero_row"),
    dict(prefixes=[33, 12], q_len=4, heads=8, mask="none"),
]


def problems(library: Path) -> list[str]:
    """Every batch twice, each time in another order of execution and with another number of workers."""
    found = []
    for order, batch in enumerate(BATCHES * 2):
        case = make_case(**batch, seed=order, slack=20)
        # Scores that rise with the column raise the running maxima more than once.
        for start, end in itertools.pairwise(case.kv_indptr.tolist()):
            case.kv_pool[case.kv_indices[start:end]] *= torch.linspace(0.5, 1.5, end - start).half()[:, None, None]
        kernel = host_kernel(library, order, 3 + order)
        try:
            case.launch(kernel)
        except KernelFault as fault:
            found.append(str(fault))
            continue
        error = rel(case.out, reference(case))
        if not error < LIMIT[torch.float16]:
            found.append(f"{batch}: rel {error}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for problem in problems(Path(sys.argv[1])):
        print(problem)
