"""The kernel itself, compiled for every target with NVRTC: it compiles, nothing spills, every variant fits."""

from __future__ import annotations

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from kdtree_patch import tiles
from kdtree_patch.compile import KERNELS, NVRTC_TARGETS, SOURCE_NAME, CompileError, CompileResult, compile_cubin
from kdtree_patch.compile_command import MAX_REGISTERS

# What sm_86, sm_89 and sm_120 give to one block; written out, so that a change of the table is noticed here.
SHARED_LIMIT = 101_376

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
        outcomes = pool.map(outcome, NVRTC_TARGETS, [tmp_path_factory.mktemp("cache")] * len(NVRTC_TARGETS))
        return dict(zip(NVRTC_TARGETS, outcomes, strict=True))


@pytest.fixture
def result(compiled: Outcomes, target: str) -> CompileResult:
    found = compiled[target]
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    return found


def test_the_targets_are_the_eight():
    assert set(NVRTC_TARGETS) == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "sm_120a"}


@pytest.mark.parametrize("target", NVRTC_TARGETS)
def test_every_variant_is_in_the_cubin(result: CompileResult):
    assert result.cubin.startswith(b"\x7fELF")
    expected = {
        name(element) for v in tiles.VARIANTS for name in (v.kernel_name, v.combine_name) for element in tiles.ELEMENTS
    }
    assert {kernel.name for kernel in result.kernels if kernel.registers} == expected


@pytest.mark.parametrize("target", NVRTC_TARGETS)
def test_nothing_spills(result: CompileResult):
    spilling = {kernel.name: (kernel.spill_stores, kernel.spill_loads) for kernel in result.kernels}
    assert {name: spills for name, spills in spilling.items() if spills != (0, 0)} == {}
    assert {kernel.name: kernel.stack for kernel in result.kernels if kernel.stack} == {}


@pytest.mark.parametrize("target", NVRTC_TARGETS)
def test_registers(result: CompileResult):
    assert all(0 < kernel.registers <= MAX_REGISTERS for kernel in result.kernels)


@pytest.mark.parametrize("target", NVRTC_TARGETS)
def test_shared_memory_fits_the_smallest_parts(result: CompileResult):
    assert tiles.SHARED_LIMIT == SHARED_LIMIT
    static = {kernel.name: kernel.static_shared for kernel in result.kernels}
    for variant in tiles.VARIANTS:
        for element in tiles.ELEMENTS:
            assert static[variant.kernel_name(element)] + variant.shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize("target", NVRTC_TARGETS)
def test_nvrtc_has_no_warnings(result: CompileResult):
    assert re.findall(r".*\bwarning\b.*", result.log) == []


def test_source_includes_nothing_that_nvrtc_would_have_to_find():
    """Headers are missing on offline hosts or come from another toolkit; the one include is for the CPU build."""
    source = (KERNELS / SOURCE_NAME).read_text()
    includes = re.findall(r"^\s*#\s*include\s+(\S+)", source, re.MULTILINE)
    guarded = re.findall(r"^#ifdef KDTREE_HOST\n((?:#include \S+\n)+)", source, re.MULTILINE)
    assert len(includes) == sum(block.count("#include") for block in guarded), includes
