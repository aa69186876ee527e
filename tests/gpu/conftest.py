"""The GPU suite: `make test-gpu`. Without a GPU it ends at its first test, with one clear line."""

from __future__ import annotations

import pytest
import torch

from kdtree_patch import tiles
from kdtree_patch.kernel import FP8_POOLS, VerifyKernel
from tests.support.cases import poisoned


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix() and item.get_closest_marker("soak") is None:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.exit("the GPU suite needs an NVIDIA GPU that torch can see; `make test` is the suite without one", 1)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session", params=tiles.CONFIGS)
def kernel(gpu: torch.device, request: pytest.FixtureRequest) -> VerifyKernel:
    """Each configuration that this GPU runs."""
    if request.param == "hopper" and torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("the hopper configuration needs compute capability 9.0")
    return poisoned(VerifyKernel.load(gpu, config=request.param))


@pytest.fixture(scope="session", params=[(c, pool) for pool in FP8_POOLS for c in tiles.CONFIGS], ids=str)
def fp8_kernel(gpu: torch.device, request: pytest.FixtureRequest) -> VerifyKernel:
    """The same for each type of an fp8 pool: `fp8_kernel.pool`."""
    config, pool = request.param
    if config == "hopper" and torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("the hopper configuration needs compute capability 9.0")
    return poisoned(VerifyKernel.load(gpu, config=config, pool=pool))
