"""python -m tests.support.notice_child FOLDER RANK: one worker of a service, with a router of its own on the CPU.

Each line of standard input is a step of one call, and says what the kernel adds to its results. Each is answered by a
line of JSON: whether the call was right, and what has been counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kdtree_patch import notice
from kdtree_patch.ledger import Ledger
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support.cases import reference
from tests.support.reference import rel


def main() -> None:
    notice.FOLDER = Path(sys.argv[1])
    kernel, ledger = FakeKernel(), Ledger()
    router = VerifyRouter(Stock().function, kernel, Settings(guard_rel=0.05), ledger, rank=int(sys.argv[2]))
    for line in sys.stdin:
        kernel.mark = float(line)
        case = a_case()
        case.out.fill_(torch.nan)
        router.before_step()
        router.context = (a_layer(3), a_batch())
        router(**arguments(case))
        counts = {"/".join(key): calls for key, calls in ledger.counts.items()}
        print(json.dumps({"right": rel(case.out, reference(case)) < 1e-3, "counts": counts}), flush=True)


if __name__ == "__main__":
    main()
