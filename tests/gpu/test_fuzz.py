"""Calls at random on a GPU, as tests/test_fuzz.py has them for the CPU build, and larger ones: fifty of each
configuration with the rest of the GPU suite, a thousand others each time with `make fuzz`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, example, given, settings

from kdtree_patch.kernel import VerifyKernel
from tests.support.fuzz import IDLE, Drawn, calls, check

# 64 requests of 8,736 with a few rows each, or one with the most rows; float64 takes a tenth of a second for it.
TILES = 120_000
NIGHT = settings().max_examples >= 1000  # --hypothesis-profile=night, which tests/conftest.py has


@settings(
    max_examples=settings().max_examples if NIGHT else 50,
    derandomize=not NIGHT,
    print_blob=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(drawn=calls(TILES))
@example(drawn=IDLE)
def test_fuzz(kernel: VerifyKernel, drawn: Drawn) -> None:
    check(kernel, drawn)
    torch.cuda.synchronize()  # a fault is this call's, not the next one's
