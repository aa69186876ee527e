"""The kernel's own source, compiled for the CPU, on calls at random: fifty of each configuration.

The same every time, so that a change is to blame for a failure. A thousand others a night run on a GPU: `make fuzz`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from kdtree_patch import tiles
from kdtree_patch.compile import cached_binary
from tests.support.cases import host_kernel
from tests.support.fuzz import IDLE, Drawn, calls, check

# The emulator needs 4 ms for a tile, ten times as long in the Hopper configuration for a larger one.
TILES = 300


@pytest.fixture(scope="module")
def library() -> Path:
    return cached_binary("host")


@pytest.mark.parametrize("config", tiles.CONFIGS)
@settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # to shrink what fails would take the emulator many minutes
    suppress_health_check=list(HealthCheck),
)
@given(drawn=calls(TILES))
@example(drawn=IDLE)
def test_fuzz(config: str, library: Path, drawn: Drawn) -> None:
    """In an order of blocks, warps and lanes, and cut over a number of workers, that are drawn too."""
    rng = random.Random(drawn.seed)
    check(host_kernel(library, rng.randrange(100), rng.randint(1, 9), config), drawn)
