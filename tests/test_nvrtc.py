"""The kernel itself, compiled for every target with NVRTC: it compiles, nothing spills, every variant fits."""

from __future__ import annotations

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from kdtree_patch import tiles
from kdtree_patch.compile import (
    KERNELS,
    NVRTC_TARGETS,
    SOURCE_NAME,
    CompileError,
    CompileResult,
    compile_cubin,
    parts_of,
    with_pool,
)
from kdtree_patch.compile_command import MAX_REGISTERS

# What one block is given: in the portable configuration by sm_86, sm_89 and sm_120, in the Hopper one by sm_90. Written
# out, so that a change of the table is noticed here.
SHARED_LIMITS = {"portable": 101_376, "hopper": 232_448}
# What the launch bounds of a Hopper kernel leave to a thread; setmaxnreg, which -v does not show, shares it out anew.
HOPPER_REGISTERS = 128

# Each architecture with each type of the KV pool.
TARGETS = tuple(with_pool(target, pool) for pool in (None, *tiles.FP8_POOLS) for target in NVRTC_TARGETS)

Outcomes = dict[str, CompileResult | str]


def outcome(target: str, cache_dir: Path) -> CompileResult | str:
    """An error as text: exceptions with more than one argument do not come back from another process."""
    try:
        return compile_cubin(target, cache_dir=cache_dir)
    except CompileError as error:
        return f"{error.reason}: {error}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """All targets. NVRTC uses one core, so there are as many processes as cores, up to four."""
    if not (KERNELS / SOURCE_NAME).is_file():
        pytest.fail(f"kernels/{SOURCE_NAME} is missing: there is nothing to compile", pytrace=False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=context) as pool:
        outcomes = pool.map(outcome, TARGETS, [tmp_path_factory.mktemp("cache")] * len(TARGETS))
        return dict(zip(TARGETS, outcomes, strict=True))


def variants(target: str) -> list[tuple[tiles.Configuration, tiles.Variant]]:
    """What the cubin for a target holds."""
    configuration = tiles.CONFIGS["hopper" if parts_of(target)[0] == "sm_90a" else "portable"]
    return [(configuration, variant) for variant in configuration.variants]


@pytest.fixture
def result(compiled: Outcomes, target: str) -> CompileResult:
    found = compiled[target]
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    return found


def test_the_targets_are_the_eight():
    assert set(NVRTC_TARGETS) == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_120a"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_in_the_cubin(result: CompileResult, target: str):
    assert result.cubin.startswith(b"\x7fELF")
    expected = {
        name(element)
        for _, variant in variants(target)
        for name in (variant.kernel_name, variant.combine_name)
        for element in tiles.ELEMENTS
    }
    assert {kernel.name for kernel in result.kernels if kernel.registers} == expected


@pytest.mark.parametrize("target", TARGETS)
def test_a_cubin_is_no_larger_than_stated(result: CompileResult):
    """What a worker loads onto its device beside the workspace: up to 4 MB, as the README says."""
    print(f"{len(result.cubin):,} bytes")
    assert len(result.cubin) < 4_000_000


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills(result: CompileResult):
    spilling = {kernel.name: (kernel.spill_stores, kernel.spill_loads) for kernel in result.kernels}
    assert {name: spills for name, spills in spilling.items() if spills != (0, 0)} == {}
    assert {kernel.name: kernel.stack for kernel in result.kernels if kernel.stack} == {}


@pytest.mark.parametrize("target", TARGETS)
def test_registers(result: CompileResult):
    kernels = [kernel for kernel in result.kernels if not kernel.name.startswith("_Z")]  # nor what they call
    assert all(0 < kernel.registers <= MAX_REGISTERS for kernel in kernels)


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_fits_the_smallest_parts(result: CompileResult, target: str):
    static = {kernel.name: kernel.static_shared for kernel in result.kernels}
    for configuration, variant in variants(target):
        for element in tiles.ELEMENTS:
            asked = static[variant.kernel_name(element)] + variant.shared_bytes
            assert asked <= configuration.shared_limit == SHARED_LIMITS[configuration.name]


@pytest.mark.parametrize("target", [target for target in TARGETS if parts_of(target)[0] == "sm_90a"])
def test_registers_are_there_to_be_shared_out(result: CompileResult):
    """setmaxnreg takes the launch bounds' registers for granted; were there fewer, a block would wait for ever."""
    used = {kernel.name: kernel.registers for kernel in result.kernels}
    for variant in tiles.CONFIGS["hopper"].variants:
        assert {used[variant.kernel_name(element)] for element in tiles.ELEMENTS} == {HOPPER_REGISTERS}


@pytest.mark.parametrize("target", TARGETS)
def test_nvrtc_has_no_warnings(result: CompileResult):
    """Such as that setmaxnreg was ignored; or that each wgmma waits for the one before (seen to take the kernel 20 % of
    its speed), which ptxas does not even call a warning.
    """
    assert re.findall(r".*(?:\bwarning\b|Potential Performance Loss).*", result.log) == []


def test_source_includes_nothing_that_nvrtc_would_have_to_find():
    """Headers are missing on offline hosts or come from another toolkit: beside those for the CPU build, the source
    includes what NVRTC is given with it.
    """
    source = (KERNELS / SOURCE_NAME).read_text()
    guarded = re.compile(r"^#ifdef KDTREE_HOST\n(?:#include \S+\n)+", re.MULTILINE)
    headers = sorted(KERNELS.glob("*.cuh"))
    includes = re.findall(r"^\s*#\s*include\s+(\S+)", guarded.sub("", source), re.MULTILINE)
    assert includes == [f'"{header.name}"' for header in headers]
    for header in headers:
        assert "#include" not in header.read_text()
