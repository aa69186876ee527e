"""Calls of changing shapes, one after the other for as long as a minute: each has the bits of the first pass, and no
memory grows. A short run is part of the GPU suite; the whole is `make soak`.

The host waits for nothing while it calls: results are compared on the device, and what was found is fetched at the end.
"""

from __future__ import annotations

import random
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kdtree_patch.kernel import VerifyKernel
from kdtree_patch.ledger import Ledger
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from tests.fakes import Stock, a_batch, a_layer, arguments
from tests.support.cases import LIMIT, Case, make_case, poisoned, reference
from tests.support.reference import rel

SHAPES = 64


def cases() -> list[Case]:
    rnd = random.Random(11)
    found = []
    for seed in range(SHAPES):
        prefixes = [rnd.choice([0, 1, 15, 33, 64, 300, 700]) for _ in range(rnd.choice([1, 1, 2, 3, 8, 20]))]
        found.append(
            make_case(
                prefixes,
                rnd.choice([1, 2, 5, 9, 17]),
                rnd.choice([1, 3, 8, 16]),
                dtype=rnd.choice([torch.bfloat16, torch.float16]),
                mask=rnd.choice(["tree", "none"]),
                device="cuda",
                seed=seed,
            )
        )
    return found


@dataclass
class Memory:
    """Bytes: what torch's tensors take, what it has of the device, and the most that the process has had resident."""

    allocated: int
    reserved: int
    resident: int

    @classmethod
    def now(cls) -> Memory:
        torch.cuda.synchronize()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pages * resource.getpagesize())


def soak(kernel: VerifyKernel, calls: int) -> None:
    poisoned(kernel)
    ledger = Ledger()
    router = VerifyRouter(Stock().function, kernel, Settings(), ledger)
    router.context = (a_layer(), a_batch())
    batches = cases()
    split: list[tuple[list[Any], dict[str, Any]]] = []
    for case in batches:
        call = arguments(case)
        split.append(([call.pop(name) for name in list(call)[:16]], call))
    # The first pass, which must be right.
    expected = []
    for case, (args, kwargs) in zip(batches, split, strict=True):
        router(*args, **kwargs)
        right = reference(case)
        assert rel(case.out, right) < 1.3 * LIMIT[case.out.dtype]
        expected.append(case.out.clone())
    different = torch.zeros(SHAPES, dtype=torch.int64, device="cuda")
    rnd = random.Random(12)

    def once(number: int) -> None:
        out = batches[number].out
        out.fill_(torch.nan)
        args, kwargs = split[number]
        router(*args, **kwargs)
        different[number] += (out.view(torch.int16) != expected[number].view(torch.int16)).any()

    for number in [*range(SHAPES)] * 2:  # until torch has met every size that it will be asked for
        once(number)
    before, started = Memory.now(), time.monotonic()
    for _ in range(calls):
        once(rnd.randrange(SHAPES))
    torch.cuda.synchronize()
    seconds, after = time.monotonic() - started, Memory.now()
    print(f"{kernel.config.name}: {calls:,} calls, {seconds:.0f} s, {before} {after}")
    assert different.tolist() == [0] * SHAPES
    assert ledger.counts == {("kernel", "verify"): calls + 3 * SHAPES}
    assert (after.allocated, after.reserved) == (before.allocated, before.reserved)
    # A hundred bytes a call would be 20 MB.
    assert after.resident - before.resident < 8 << 20


def test_a_short_soak(kernel: VerifyKernel) -> None:
    soak(kernel, 4_000)


@pytest.mark.soak
def test_soak(kernel: VerifyKernel) -> None:
    soak(kernel, 200_000)
