"""Proof that the kernel tests can fail: the kernel's source with one fault each, and the test inputs that must turn red
on it.

Each mutant replaces one piece of text in a copy of kernels/verify_attn_flash.cu, or of kernels/hopper.cuh, is compiled
for the CPU and run in several orders of execution. It is caught if a run reports a fault (a shared-memory address out
of bounds, a race, a deadlock) or a result is wrong. A piece of text that is no longer in the source fails the test too,
so that no mutant quietly stops being one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdtree_patch import tiles
from kdtree_patch.compile import KERNELS, SOURCE_NAME, cached_binary, sanitizer_runtime

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    old: str
    new: str
    target: str = "host"  # host-races: only there is it seen


MUTANTS = [
    Mutant(
        "prefix_only",
        "the draft tokens are not attended",
        "columns = request.columns();",
        "columns = request.prefix;",
    ),
    Mutant(
        "mask_stride",
        "row stride of the mask is the prefix, not prefix + q_len",
        "(long long)token[i] * columns",
        "(long long)token[i] * request.prefix",
    ),
    Mutant(
        "mask_start",
        "every request reads the first request's mask",
        "load_index(p.mask_indptr, item.number,",
        "load_index(p.mask_indptr, 0,",
    ),
    Mutant(
        "masked_prefix",
        "prefix columns are judged by the mask of the first draft column",
        "(draft < 0 | sees_draft[i])",
        "sees_draft[i]",
    ),
    Mutant(
        "column_base",
        "draft columns are counted from 0, not from the prefix",
        "column < columns ? column - request.prefix : 0",
        "column < columns ? column : 0",
    ),
    Mutant(
        "rope_first_value",
        "the value is columns 64..575 of the row",
        "tile_offset(key, warp * 8 + (lane >> 3 & 1))",
        "tile_offset(key, warp * 8 + 8 + (lane >> 3 & 1))",
    ),
    Mutant(
        "query_start",
        "every request reads the first request's queries",
        "p.q + (long long)(request.q_start + token)",
        "p.q + (long long)(0 + token)",
    ),
    Mutant(
        "missing_tile_barrier",
        "a tile is read before all threads' copies have landed",
        "neither tiles nor the queries.\n    __syncthreads();",
        "",
    ),
    Mutant(
        "missing_item_barrier",
        "an item begins before the last one has been written",
        "__syncthreads();  // the queries are complete",
        "// the queries are complete",
    ),
    Mutant(
        "missing_exchange_barrier",
        "partial scores are summed before they are all there",
        "r_part[n][3]);\n    __syncthreads();",
        "r_part[n][3]);",
    ),
    Mutant(
        "exchange_rows",
        "the second key group does not exchange its pairs of rows",
        "(lane & 7) ^ key_group",
        "lane & 7",
    ),
    Mutant(
        "missing_probability_barrier",
        "P is read before it is complete",
        "if (__syncthreads_or(risen)) rescale_output();",
        "if (risen) rescale_output();",
    ),
    Mutant(
        "missing_sum_barrier",
        "the output is divided by sums that are not there yet",
        "s_sum[finished_row(i)] = r_sum[i];\n    }\n    __syncthreads();",
        "s_sum[finished_row(i)] = r_sum[i];\n    }",
    ),
    Mutant(
        "out_of_bounds_state",
        "sums are written beyond the end of shared memory",
        "s_sum[finished_row(i)] = r_sum[i]",
        "s_sum[finished_row(i) + 96] = r_sum[i]",
    ),
    Mutant(
        "missing_wait",
        "the copy of a tile is not waited for",
        "    cp_async_wait<0>();\n    // The tile is complete",
        "    cp_async_wait<1>();\n    // The tile is complete",
    ),
    Mutant(
        "out_of_bounds_stage",
        "a third stage is used where there are two",
        "attend_tile(tile, last, (tile - first) & 1)",
        "attend_tile(tile, last, (tile - first) & 3)",
    ),
    Mutant(
        "swizzle",
        "keys are stored with another swizzle than they are read",
        "shared_address(shared + stage * kTileBytes) + tile_offset(key, unit);",
        "shared_address(shared + stage * kTileBytes) + key * kRowBytes + unit * 16;",
    ),
    Mutant(
        "stale_rescale",
        "accumulators are not rescaled with the sums",
        "r_out[i][n][0] *= factor.x, r_out[i][n][1] *= factor.y;",
        "",
    ),
    Mutant(
        "combine_order",
        "the first partial result of a cut item is taken from the wrong slot",
        "partial_slot(first_worker + split, split == 0)",
        "partial_slot(first_worker + split, false)",
    ),
    Mutant(
        "combine_group",
        "with eight warps a fragment, the groups after the first are left out",
        "add(total, s_reduce[group * 32 + lane])",
        "add(total, s_reduce[lane])",
    ),
    Mutant(
        "combine_tail",
        "splits beyond the first eight are left out",
        "for (int first = kCombineGroups; first < splits; first += kCombineGroups) {",
        "for (int first = kCombineGroups; first < 0; first += kCombineGroups) {",
    ),
    Mutant(
        "zero_row",
        "a row that sees nothing divides by zero",
        "factor = sum == 0.f ? 0.f : 1.f / sum;",
        "factor = 1.f / sum;",
    ),
    Mutant(
        "padding_moves_the_cuts",
        "requests of padding take part in the line",
        "sized.is_short = rows > 0 && sized.request.prefix < TILE_KEYS;",
        "sized.is_short = false;",
    ),
    Mutant(
        "maximum_starts_at_zero",
        "a running maximum begins above the scores",
        "constexpr float kNothingSeen = -3e38f;",
        "constexpr float kNothingSeen = 0.f;",
    ),
    Mutant(
        "first_32_requests",
        "requests beyond the first 32 are looked up among them",
        "unit -= __shfl_sync(~0u, end, 31);",
        "",
    ),
    Mutant(
        "end_of_line",
        "every item that has a line of its own ends with the first line's workers",
        "alike ? (line + 1) * line_workers - 1",
        "alike ? line_workers - 1",
    ),
    Mutant(
        "stale_cut",
        "a worker that starts no item leaves what it said at the last call",
        "if (piece.first != 0) return announce_nothing(p, worker);",
        "if (piece.first != 0) return;",
    ),
    Mutant(
        "stale_cut_of_nobody",
        "a worker without a piece leaves what it said at the last call",
        "if (threadIdx.x == 0) announce_nothing(p, worker);",
        "",
    ),
    Mutant(
        "slot_offset_width",
        "slot times stride in 32 bits",
        "p.kv_pool + (long long)(unsigned)r_slot * p.kv_slot_stride;",
        "p.kv_pool + (int)(r_slot * (int)p.kv_slot_stride);",
    ),
    Mutant("index_width", "kv_indices are read as 32-bit", "p.wide_indices & kWideKvIdx", "false"),
    Mutant(
        "causal_chain",
        "without a mask a draft does not see itself",
        "draft <= token[i]",
        "draft < token[i]",
    ),
]


HOPPER_MUTANTS = [
    Mutant(
        "stale_cut_of_nobody",
        "a worker without a piece leaves what it said at the last call",
        "if (!more && thread == 0) announce_nothing(p, blockIdx.x);",
        "",
    ),
    Mutant(
        "missing_tile_wait",
        "scores are made of a tile that has not landed",
        "mbarrier_wait(Base::full(stage), parity);",
        "",
    ),
    Mutant("tile_parity", "a tile is waited for in the wrong phase", "parity = tiles >> 1 & 1;", "parity = tiles & 1;"),
    Mutant(
        "missing_tile_fence",
        "wgmma may not see what cp.async has written",
        "parity);\n    fence_proxy_async();",
        "parity);",
    ),
    Mutant(
        "missing_query_barrier",
        "queries are used before all threads' copies have landed",
        "    fence_proxy_async();\n    barrier_sync(barrier, kWarpgroup);\n",
        "    fence_proxy_async();\n",
    ),
    Mutant(
        "missing_vote",
        "each warp decides for itself whether maxima have risen",
        "barrier_sync_or(barrier, kWarpgroup, risen)",
        "__any_sync(~0u, risen)",
    ),
    Mutant(
        "missing_taken_wait",
        "P is written over while a value warpgroup reads it",
        "    Base::wait_until_taken();\n    unsigned char* const s_prob",
        "    unsigned char* const s_prob",
    ),
    Mutant(
        "one_factor_buffer",
        "factors are written over while a value warpgroup reads them",
        "(hand_overs - before & 1) * G::kRows",
        "(before & 1) * G::kRows",
        target="host-races",
    ),
    Mutant(
        "missing_value_barrier",
        "values are copied over while another warp of the warpgroup reads them",
        "    barrier_sync(barrier, kWarpgroup);\n    if (thread == 0) mbarrier_arrive(Base::taken());",
        "    if (thread == 0) mbarrier_arrive(Base::taken());",
    ),
    Mutant(
        "missing_rope_wait",
        "keys are copied over P while the other value warpgroup reads it",
        "Base::wait_until_taken();  // by the other, too: P is in the rope chunk",
        "",
    ),
    Mutant("swizzle", "keys are stored in plain order", "((unit ^ (row & 7)) << 4)", "(unit << 4)"),
    Mutant("prob_layout", "the strides of P are exchanged", "128, 1024, false", "1024, 128, false"),
    Mutant("value_step", "the second 16 keys are the second 8", "step * 2048", "step * 1024"),
    Mutant(
        "spare_bytes",
        "the second stage's P begins in its rope chunk, and ends in the values",
        "return number ? kOffsetSpare :",
        "return number ? kOffsetStage1 - kChunkBytes :",
    ),
    Mutant("stale_rescale", "outputs are not rescaled", "if (Base::s_rescale()) rescale_output();", ""),
    Mutant("lost_sums", "a lane's share of the sums is lost", "(lane & 4 ? kEighth : 0)", "0"),
    Mutant("lost_warp", "the sums of the last warp are lost", " + exchange(3)[thread]", ""),
    Mutant("second_key", "the second key is judged as the first", "column + k * 8 < columns", "column < columns"),
    Mutant(
        "slots_ahead",
        "slots are loaded for another tile",
        "load_slots(tile + 3, r_slot);",
        "load_slots(tile + 2, r_slot);",
    ),
    Mutant(
        "fragment_order",
        "partial results are not where combine looks",
        "((half * kValueChunks + i) * 4 + warp) * ROW_TILES + n",
        "((half * 4 + warp) * kValueChunks + i) * ROW_TILES + n",
    ),
    Mutant(
        "too_many_registers",
        "the warpgroups want more registers than there are",
        "kScoreRegisters = 3 * 168 - 2 * kValueRegisters;",
        "kScoreRegisters = 3 * 168 - 2 * kValueRegisters + 8;",
    ),
]


def check(library: Path, config: str, **variables: str) -> list[str]:
    """What is wrong with a configuration of a build, over a few small batches in several orders; empty if nothing is.

    In a process of its own: a mutant may well crash it.
    """
    command = [sys.executable, "-m", "tests.support.check_build", str(library), config]
    child = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    if child.returncode < 0:
        return [f"killed by signal {-child.returncode}"]
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_the_kernel_itself_passes(config: str) -> None:
    assert check(cached_binary("host"), config) == []


@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_no_two_accesses_race(config: str) -> None:
    """The build that also sees every plain load and store of shared memory."""
    assert check(cached_binary("host-races"), config) == []


@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_no_access_is_out_of_bounds_or_undefined(config: str) -> None:
    """Under AddressSanitizer and UBSan: shared memory, and every tensor, since torch allocates with its malloc too."""
    variables = {"LD_PRELOAD": sanitizer_runtime(), "ASAN_OPTIONS": "detect_leaks=0"}
    assert check(cached_binary("host-asan"), config, **variables) == []


def only(source: str, config: str) -> str:
    """The source without the other configuration and without bfloat16: the batches are float16, and this builds
    sooner.
    """

    def shorter(match: re.Match[str]) -> str:
        kept = match["hopper"] is not None if config == "hopper" else match["hopper"] is None
        return match["head"] + "".join(re.findall(r"  DO\(fp16,.*\n", match["variants"]) if kept else "\n")

    variants = r"(?P<head>#define KDTREE_FOR_EACH_(?P<hopper>HOPPER_)?VARIANT.*\n)(?P<variants>(?:  DO\(.*\n)+)"
    shortened, found = re.subn(variants, shorter, source)
    assert found == len(tiles.CONFIGS)
    return shortened


@pytest.mark.parametrize(
    "config, mutant",
    [
        *(pytest.param("portable", mutant, id=mutant.name) for mutant in MUTANTS),
        *(pytest.param("hopper", mutant, id=f"hopper-{mutant.name}") for mutant in HOPPER_MUTANTS),
    ],
)
def test_mutant_is_caught(config: str, mutant: Mutant, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    (kernels / SOURCE_NAME).write_text(only((kernels / SOURCE_NAME).read_text(), config))
    mutated = kernels / (SOURCE_NAME if config == "portable" else "hopper.cuh")
    source = mutated.read_text()
    assert source.count(mutant.old) >= 1, f"the source no longer has: {mutant.old}"
    mutated.write_text(source.replace(mutant.old, mutant.new))
    problems = check(cached_binary(mutant.target, tmp_path / "cache", kernels), config)
    assert problems, f"not caught: {mutant.fault}"
    print(f"{mutant.name}: {problems[0]}")
