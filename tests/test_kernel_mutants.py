"""Proof that the kernel tests can fail: the kernel's source with one fault each, and the test inputs that must turn red
on it.

Each mutant replaces one piece of text in a copy of kernels/verify_attn_flash.cu, is compiled for the CPU and run in
several orders of execution. It is caught if a run reports a fault (a shared-memory address out of bounds, a race, a
deadlock) or a result is wrong. A piece of text that is no longer in the source fails the test too, so that no mutant
quietly stops being one.
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

from kdtree_patch.compile import KERNELS, SOURCE_NAME, cached_binary, sanitizer_runtime

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    old: str
    new: str


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
        "(long long)token * columns + column",
        "(long long)token * request.prefix + column",
    ),
    Mutant(
        "mask_start",
        "every request reads the first request's mask",
        "load_index(p.mask_indptr, item.request,",
        "load_index(p.mask_indptr, 0,",
    ),
    Mutant(
        "column_base",
        "draft columns are counted from 0, not from the prefix",
        "max(column - request.prefix, 0)",
        "column",
    ),
    Mutant(
        "rope_first_value",
        "the value is columns 64..575 of the row",
        "key * kRowBytes + warp * 128;",
        "key * kRowBytes + warp * 128 + 128;",
    ),
    Mutant(
        "query_start",
        "every request reads the first request's queries",
        "p.q + (request.q_start + token)",
        "p.q + (0 + token)",
    ),
    Mutant(
        "missing_tile_barrier",
        "a tile is read before all threads' copies have landed",
        "__syncthreads();  // the tile is complete",
        "// the tile is complete",
    ),
    Mutant(
        "missing_item_barrier",
        "an item is read before the first warp has found it",
        "__syncthreads();  // the item is known",
        "// the item is known",
    ),
    Mutant(
        "missing_exchange_barrier",
        "partial scores are summed before they are all there",
        "r_part[n][3]);\n    __syncthreads();",
        "r_part[n][3]);",
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
        "        *(float2*)&s_sum[warp * 8 + quad * 2] = r_sum;\n      }\n    }\n    __syncthreads();",
        "        *(float2*)&s_sum[warp * 8 + quad * 2] = r_sum;\n      }\n    }",
    ),
    Mutant(
        "out_of_bounds_state",
        "sums are written beyond the end of shared memory",
        "s_sum[warp * 8 + quad * 2] = r_sum",
        "s_sum[warp * 8 + quad * 2 + 48] = r_sum",
    ),
    Mutant("missing_wait", "the copy of a tile is not waited for", "cp_async_wait<0>();", "cp_async_wait<1>();"),
    Mutant(
        "out_of_bounds_stage",
        "a third stage is used where there are two",
        "shared_address(shared + (tile & 1) * kTileBytes) + tile_offset",
        "shared_address(shared + (tile & 3) * kTileBytes) + tile_offset",
    ),
    Mutant(
        "swizzle",
        "keys are stored with another swizzle than they are read",
        "(((unit ^ key) & 7) << 4)",
        "((unit & 7) << 4)",
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
    Mutant("empty_stretch", "more workers than tiles", "(int)max(1ll, min((long long)p.workers, total))", "p.workers"),
    Mutant(
        "zero_row",
        "a row that sees nothing divides by zero",
        "factor = sum == 0.f ? 0.f : 1.f / sum;",
        "factor = 1.f / sum;",
    ),
    Mutant(
        "padding_moves_the_cuts",
        "requests of padding take part in the line",
        "size.is_short = r.prefix < kTileKeys;",
        "size.is_short = false;",
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
        "before += __shfl_sync(~0u, sum, 31);",
        "before += 0;",
    ),
    Mutant(
        "stale_cut",
        "a worker that starts no item leaves what it said at the last call",
        "if (rows_by_worker && threadIdx.x == 0) p.cut_items[worker] = make_int4(0, 0, -1, 0);",
        "",
    ),
    Mutant(
        "slot_offset_width",
        "slot times stride in 32 bits",
        "p.kv_pool + r_slot * p.kv_slot_stride;",
        "p.kv_pool + (int)((int)r_slot * (int)p.kv_slot_stride);",
    ),
    Mutant("index_width", "kv_indices are read as 32-bit", "p.wide_indices & kWideKvIdx", "false"),
    Mutant(
        "causal_chain",
        "without a mask a draft does not see itself",
        "column - request.prefix <= token",
        "column - request.prefix < token",
    ),
]


def check(library: Path, **variables: str) -> list[str]:
    """What is wrong with a build, over a few small batches in several orders; empty if nothing is.

    In a process of its own: a mutant may well crash it.
    """
    command = [sys.executable, "-m", "tests.support.check_build", str(library)]
    child = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    if child.returncode < 0:
        return [f"killed by signal {-child.returncode}"]
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_the_kernel_itself_passes() -> None:
    assert check(cached_binary("host")) == []


def test_no_two_accesses_race() -> None:
    """The build that also sees every plain load and store of shared memory."""
    assert check(cached_binary("host-races")) == []


def test_no_access_is_out_of_bounds_or_undefined() -> None:
    """Under AddressSanitizer and UBSan: shared memory, and every tensor, since torch allocates with its malloc too."""
    assert check(cached_binary("host-asan"), LD_PRELOAD=sanitizer_runtime(), ASAN_OPTIONS="detect_leaks=0") == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    source = (kernels / SOURCE_NAME).read_text()
    assert source.count(mutant.old) >= 1, f"the source no longer has: {mutant.old}"
    # The batches are float16: without the other kernels the build takes half the time.
    source = re.sub(r"  DO\(bf16,.*\\\n", "", source)
    (kernels / SOURCE_NAME).write_text(source.replace(mutant.old, mutant.new))
    problems = check(cached_binary("host", tmp_path / "cache", kernels))
    assert problems, f"not caught: {mutant.fault}"
    print(f"{mutant.name}: {problems[0]}")
