"""Proof that the kernel tests can fail: the kernel's source with one fault each, and the test inputs that must turn red
on it.

Each mutant replaces one piece of text in a copy of kernels/verify_attn_flash.cu, or of kernels/hopper.cuh, is compiled
for the CPU and run in several orders of execution. It is caught if a run reports a fault (a shared-memory address out
of bounds, a race, a deadlock) or a result is wrong. A piece of text that is no longer in the source fails the test too,
so that no mutant quietly stops being one.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdtree_patch import tiles
from kdtree_patch.compile import KERNELS, SOURCE_NAME, cached_binary, parts_of, sanitizer_runtime, with_pool
from tests.support import check_build

REPOSITORY = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.check_build"])
SANITIZER_FOUND = 99  # the exit status of a process in which a sanitizer has found something
SANITIZER = {
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={SANITIZER_FOUND}",
    "UBSAN_OPTIONS": f"exitcode={SANITIZER_FOUND}",
}


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    old: str
    new: str
    target: str = "host"  # host-races or host-asan: only there is it seen; or for an fp8 pool, as the fault is there
    also: tuple[str, str] | None = None  # a second replacement, where either alone does no harm


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
        "__syncthreads();  // P is complete",
        "",
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
        "    cp_async_wait<0>();\n    if constexpr (Pool::is_fp8) unpack_tile",
        "    cp_async_wait<1>();\n    if constexpr (Pool::is_fp8) unpack_tile",
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
        "packed_offset() : tile_offset(key, unit));",
        "packed_offset() : key * kRowBytes + unit * 16);",
    ),
    Mutant(
        "stale_rescale",
        "accumulators are not rescaled with the sums",
        "r_out[i][n][0] *= factor.x, r_out[i][n][1] *= factor.y;",
        "",
    ),
    Mutant(
        "risen_row_tile",
        "a row tile is rescaled if a maximum of the first one has risen",
        "if (!(risen >> n & 1)) continue;",
        "if (!(risen & 1)) continue;",
    ),
    Mutant(
        "risen_warps",
        "the last four warps' word of what has risen is not heard",
        "shared[G::kOffsetRisen + (lane & 7)]",
        "shared[G::kOffsetRisen + (lane & 3)]",
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
        "return sum == 0.f ? 0.f : (Pool",
        "return (Pool",
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
        "another_row_block",
        "every row block's line is of the first one",
        "line_each ? schedule.row_block() : row_block",
        "line_each ? 0 : row_block",
    ),
    Mutant(
        "unequal_requests",
        "each request is a line although they are not equally long",
        "requests <= workers_each && tiles == requests * longest",
        "requests <= workers_each",
    ),
    Mutant(
        "more_requests_than_workers",
        "each request is a line although there are too few workers",
        "requests <= workers_each && tiles",
        "tiles",
    ),
    Mutant(
        "longer_stretches",
        "stretches begin as if none had a tile more",
        "within * s.share + min(within, s.longer)",
        "within * s.share",
    ),
    Mutant(
        "last_worker",
        "the last worker of a cut item is left out",
        "return owner(last_tile - before) - owner(stretch_end - 1 - before);",
        "return owner(last_tile - before) - owner(stretch_end - 1 - before) - 1;",
    ),
    Mutant(
        "first_worker",
        "a worker whose stretch ends with the item is taken to share it",
        "owner(stretch_end - 1 - before)",
        "owner(stretch_end - before)",
    ),
    Mutant(
        "tiles_of_a_request",
        "the workers of every request's line are counted on the first one's",
        "kind & kLineOfRequest ? start : 0",
        "0",
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
    # An fp8 pool.
    Mutant(
        "unpacked_too_soon",
        "keys are unpacked before they have landed",
        "    cp_async_wait<0>();\n    if constexpr (Pool::is_fp8) unpack_tile(tile, stage);",
        "    if constexpr (Pool::is_fp8) unpack_tile(tile, stage);\n    cp_async_wait<0>();",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_place",
        "packed keys lie where another thread unpacks",
        "return (unit & 3) * 2 + packed_line(unit);",
        "return (unit & 3) + packed_line(unit) * 4;",
        target="host-races-fp8_e4m3",
    ),
    Mutant(
        "packed_halves",
        "the two halves of 16 numbers are exchanged",
        "second ? packed.z : packed.x, second ? packed.w : packed.y",
        "second ? packed.x : packed.z, second ? packed.y : packed.w",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_rope",
        "all threads have a part of the rope line, which is alone",
        "return line + 1 < kLines || packed_line(threadIdx.x & 7) == 0;",
        "return true;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_source",
        "lines are taken for as long in the pool as in shared memory",
        "source + line * 64, 16",
        "source + line * 128, 16",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_drafts",
        "draft tokens are taken for fp8",
        "(int)(threadIdx.x >> 3) < request.prefix;",
        "(int)(threadIdx.x >> 3) < columns;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "scaled_drafts",
        "the scores of draft tokens are scaled as those of the prefix",
        "is_draft ? score * p.scale_log2e + p.draft_lift",
        "is_draft ? score * p.prefix_scale_log2e + p.draft_lift",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "unscaled_prefix",
        "the scores of the prefix are not scaled",
        ": score * p.prefix_scale_log2e;",
        ": score * p.scale_log2e;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "scaled_draft_values",
        "the values of draft tokens are scaled as well",
        "score * p.scale_log2e + p.draft_lift",
        "score * p.scale_log2e",
        target="host-fp8_e4m3",
        also=("return weight * (is_draft ? p.v_scale : 1.f);", "return weight;"),
    ),
    Mutant(
        "lifted_sums",
        "sums count the weights of draft tokens as they are lifted",
        "return weight * (is_draft ? p.v_scale : 1.f);",
        "return weight;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "unscaled_values",
        "nothing is multiplied by v_scale in the end",
        "(Pool::is_fp8 ? p.v_scale : 1.f) / sum",
        "1.f / sum",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "e4m3_nan",
        "a NaN of e4m3 becomes 480",
        "size = rest | ((rest + 0x01010101u) & 0x80808080u);",
        "size = rest;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "e4m3_sign",
        "the sign of every fourth number is lost",
        "| (sign & 0x80000000u) |",
        "|",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "e4m3_bias",
        "the biases of the exponents are taken for equal",
        "(size & 0xff00u) << 15, 0x5c005c00u)",
        "(size & 0xff00u) << 15, 0x3c003c00u)",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "e5m2_order",
        "the second of two numbers of e5m2 comes first",
        "pair[0] = (packed & 0xffu) << 8 | (packed & 0xff00u) << 16",
        "pair[0] = (packed & 0xffu) << 24 | (packed & 0xff00u)",
        target="host-fp8_e5m2",
    ),
]


HOPPER_MUTANTS = [
    Mutant(
        "stale_cut_of_nobody",
        "a worker without a piece leaves what it said at the last call",
        "if (!more && thread == 0) announce_nothing(p, blockIdx.x);",
        "",
    ),
    # The copies.
    Mutant(
        "missing_free_wait",
        "a tile is copied over one that is still read",
        "if (nth % kPartChunks == 0) wait_until_free(stage, nth / kPartChunks);",
        "",
    ),
    Mutant(
        "free_parity",
        "a stage is waited for in the wrong phase",
        "(tiles >> 1) - 1 & 1",
        "tiles >> 1 & 1",
    ),
    Mutant(
        "early_free",
        "a stage is free before it was read",
        "        value_product(stage);\n        taken_over();\n        if (lane == 0)"
        " mbarrier_arrive(Base::free(stage, kParts - 1));",
        "        if (lane == 0) mbarrier_arrive(Base::free(stage, kParts - 1));\n"
        "        value_product(stage);\n        taken_over();",
    ),
    Mutant(
        "early_free_part", "a part of a stage is free before all of it was read", "wgmma_wait<2>();", "wgmma_wait<3>();"
    ),
    Mutant(
        "free_part_too_much",
        "a part of a stage is taken to be free as soon as another one is",
        "wait_until_free(stage, nth / kPartChunks)",
        "wait_until_free(stage, 0)",
    ),
    Mutant("slots_ahead", "slots are loaded for another tile", "load_slots(tile + 1);", "load_slots(tile);"),
    Mutant(
        "slot_offset_width",
        "slot times stride in 32 bits",
        "(long long)(unsigned)r_slot[i] * p.kv_slot_stride",
        "(int)(r_slot[i] * (int)p.kv_slot_stride)",
    ),
    Mutant(
        "column_base",
        "draft columns are counted from 0, not from the prefix",
        "column < columns ? column - request.prefix : 0",
        "column < columns ? column : 0",
    ),
    Mutant("swizzle", "keys are stored in plain order", "((unit ^ (row & 7)) << 4)", "(unit << 4)"),
    Mutant(
        "first_tile",
        "the first piece is copied from its item's first tile on",
        "any ? piece.first : 0",
        "0",
    ),
    Mutant(
        "next_position",
        "the second piece that is copied is the first one again",
        "any ? piece.last : 0, pieces.position}",
        "any ? piece.last : 0, schedule.stretch_start}",
    ),
    Mutant(
        "registers",
        "the copy warpgroup keeps the registers that the value warpgroups need",
        "set_max_registers_down<kCopyRegisters>();",
        "",
    ),
    # The scores.
    Mutant(
        "missing_tile_wait",
        "scores are made of a tile that has not landed",
        "mbarrier_wait(Base::full(stage, PART), tiles() >> 1 & 1);",
        "",
    ),
    Mutant(
        "missing_part_wait",
        "only the first part of a tile is waited for",
        "mbarrier_wait(Base::full(stage, PART),",
        "mbarrier_wait(Base::full(stage, 0),",
    ),
    Mutant(
        "early_part",
        "a part of a tile is said to have landed before its last chunk was even started",
        "if (nth % kPartChunks == kPartChunks - 1) cp_async_mbarrier_arrive(",
        "if (nth % kPartChunks == 0) cp_async_mbarrier_arrive(",
    ),
    Mutant("tile_parity", "a tile is waited for in the wrong phase", "tiles() >> 1 & 1);", "tiles() & 1);"),
    Mutant(
        "missing_tile_fence",
        "wgmma may not see what cp.async has written",
        "tiles() >> 1 & 1);\n    fence_proxy_async();",
        "tiles() >> 1 & 1);",
    ),
    Mutant(
        "missing_query_wait",
        "only the first part of the queries is waited for",
        "cp_async_wait<kParts - 1 - PART>();",
        "cp_async_wait<kParts - 1>();",
    ),
    Mutant(
        "missing_query_barrier",
        "queries are used before all threads' copies have landed",
        "    fence_proxy_async();\n    barrier_sync(barrier, kWarpgroup);\n",
        "    fence_proxy_async();\n",
    ),
    Mutant(
        "missing_target_barrier",
        "the mask of an item is looked up in what the last one left",
        "      barrier_sync(barrier, kWarpgroup);\n      for (int tile",
        "      for (int tile",
    ),
    Mutant(
        "missing_target_wait",
        "where outputs go is written over while a value warpgroup reads it",
        "      Base::wait_until_taken();\n      if (thread == 0)\n",
        "      if (thread == 0)\n",
        target="host-races",
    ),
    Mutant(
        "stale_maximum",
        "the maxima of an item begin with those of the last one",
        "if (thread < G::kRows) Base::s_highest()[thread] = kNothingSeen;",
        "if (thread < G::kRows && Base::hand_overs() == 0) Base::s_highest()[thread] = kNothingSeen;",
    ),
    Mutant(
        "missing_vote",
        "each warp decides for itself whether maxima have risen",
        "barrier_sync_or(barrier, kWarpgroup, risen != 0)",
        "__ballot_sync(~0u, risen != 0) != 0",
    ),
    Mutant(
        "last_sum",
        "the last tile of a piece is not in the sums",
        "    add_probabilities(last_tile);\n    Base::wait_until_taken();",
        "    Base::wait_until_taken();",
    ),
    Mutant(
        "sum_of_the_piece_before",
        "the last tile of a piece counts for the next one, too",
        "r_sum[i] = 0.f, r_prob[i / 2][i % 2] = 0;",
        "r_sum[i] = 0.f;",
    ),
    Mutant(
        "missing_vote_barrier",
        "the rope chunk is written over while another warp's product reads it",
        "if (barrier_sync_or(barrier, kWarpgroup, risen != 0)) note",
        "if (true) note",
    ),
    Mutant(
        "missing_exchange_barrier",
        "the warps' maxima are compared before they are all there",
        "barrier_sync(barrier, kWarpgroup);\n    if (thread < G::kRows) {\n      const float before",
        "if (thread < G::kRows) {\n      const float before",
    ),
    Mutant(
        "missing_maximum_barrier",
        "maxima are read before they are raised",
        "barrier_sync(barrier, kWarpgroup);\n    unsigned risen = 0;",
        "unsigned risen = 0;",
    ),
    Mutant(
        "note_of_a_lane",
        "the note knows of the first lane's rows only",
        "(int)__reduce_or_sync(~0u, risen)",
        "(int)risen",
    ),
    Mutant("note_bit", "the note names the next row tile", "risen |= 1u << n;", "risen |= 1u << (n + 1);"),
    Mutant("note_of_nothing", "the note names a row tile that has not risen", "int note = 0;", "int note = 1;"),
    Mutant(
        "one_factor_buffer",
        "factors are written over while a value warpgroup reads them",
        "(hand_overs() - before & 1) * G::kRows",
        "(before & 1) * G::kRows",
        target="host-races",
    ),
    Mutant(
        "missing_taken_wait",
        "P is written over while a value warpgroup reads it",
        "    Base::wait_until_taken();\n    unsigned char* const s_prob",
        "    unsigned char* const s_prob",
    ),
    Mutant(
        "missing_taken_wait_of_sums",
        "sums are written over P while a value warpgroup reads it",
        "    Base::wait_until_taken();\n    barrier_sync(barrier, kWarpgroup);  // all",
        "    barrier_sync(barrier, kWarpgroup);  // all",
    ),
    Mutant(
        "missing_sum_barrier",
        "the warps' sums are added before they are all there",
        "barrier_sync(barrier, kWarpgroup);\n    if (thread < G::kRows) {\n      const float sum",
        "if (thread < G::kRows) {\n      const float sum",
    ),
    Mutant(
        "sums_in_a_tile",
        "the last warp's sums are written into the rope chunk of a tile that may be arriving",
        "w == 3 ? Base::s_factor(1) : s_spare",
        "s_spare",
        target="host-races",
    ),
    Mutant("lost_sums", "a lane's share of the sums is lost", "(lane & 4 ? kEighth : 0)", "0"),
    Mutant("lost_warp", "the sums of the last warp are lost", " + exchange(3)[thread]", ""),
    Mutant(
        "missing_prob_fence",
        "wgmma may not see the P that threads have written",
        "    fence_proxy_async();\n    __syncwarp();\n    if (lane == 0) mbarrier_arrive(Base::handed());",
        "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(Base::handed());",
        target="host-races",
        also=("    fence_proxy_async();\n    const int note", "    const int note"),
    ),
    # The mask.
    Mutant(
        "mask_stride", "row stride of the mask is the prefix", "(long long)token * columns", "token * request.prefix"
    ),
    Mutant("mask_start", "every request reads the first one's mask", "p.mask_indptr, t.request,", "p.mask_indptr, 0,"),
    Mutant("masked_prefix", "prefix columns are judged by the mask", "draft < 0 || (draft", "(draft"),
    Mutant(
        "beyond_the_drafts",
        "columns beyond the last draft token are seen",
        "(draft < request.q_len && (",
        "((",
    ),
    Mutant("causal_chain", "without a mask a draft does not see itself", "draft <= token", "draft < token"),
    Mutant(
        "first_token",
        "every row block reads the mask of the first one's tokens",
        "min(first_token + (pair + i) * 2",
        "min((pair + i) * 2",
    ),
    Mutant("every_other_token", "odd tokens see what even ones do", "(token & 1) * 16 + group", "group"),
    Mutant("second_key", "the second key is judged as the first", "(word >> 8 & 1)", "(word & 1)"),
    Mutant("far_tokens", "tokens from the 65th on see what the first ones do", "if (token >= 64) word = far;", ""),
    Mutant(
        "mask_column",
        "the mask is read beyond its end",
        "max(min(column, columns - 1), request.prefix)",
        "max(column, request.prefix)",
        target="host-asan",
    ),
    Mutant(
        "mask_row",
        "the mask is read for tokens that there are not",
        "min(first_token + (pair + i) * 2 + (lane >> 4), last_token)",
        "first_token + (pair + i) * 2 + (lane >> 4)",
        target="host-asan",
    ),
    # The values.
    Mutant(
        "stale_outputs",
        "what a request of NaN leaves in the accumulators is multiplied by zero for the next one",
        "        write_partial(target.partial_slot);\n      }\n      clear();",
        "        write_partial(target.partial_slot);\n      }",
    ),
    Mutant(
        "early_taken",
        "P is free before it was read",
        "        value_product(stage);\n        taken_over();",
        "        taken_over();\n        value_product(stage);",
    ),
    Mutant(
        "early_target",
        "where outputs go is read after it may be written over",
        "      const Target target = Base::s_target();\n      taken_over();",
        "      taken_over();\n      const Target target = Base::s_target();",
        target="host-races",
    ),
    Mutant(
        "missing_warp_barrier",
        "a warp is done with what was handed over while a lane of it still reads",
        "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(Base::taken());",
        "    if (lane == 0) mbarrier_arrive(Base::taken());",
        target="host-races",
    ),
    Mutant("stale_rescale", "outputs are not multiplied", "multiply_output(note == kFinish ? ~0 : note)", ""),
    Mutant("undivided", "outputs are not divided by the sums", "note <= kFinish) multiply", "note < kFinish) multiply"),
    Mutant(
        "multiplied_twice",
        "outputs are multiplied twice",
        "multiply_output(note == kFinish ? ~0 : note);",
        "multiply_output(note == kFinish ? ~0 : note), multiply_output(note == kFinish ? 0 : note);",
    ),
    Mutant(
        "risen_row_tile",
        "a row tile is multiplied if the first one has risen",
        "if (!(which >> n & 1)) continue;",
        "if (!(which & 1)) continue;",
    ),
    Mutant("prob_layout", "the strides of P are exchanged", "128, 1024, false", "1024, 128, false"),
    Mutant("value_step", "the second 16 keys are the second 8", "step * 2048", "step * 1024"),
    Mutant(
        "spare_bytes",
        "the second stage's P begins in its rope chunk, and ends in the values",
        "return number ? kOffsetSpare :",
        "return number ? kOffsetStage1 - kChunkBytes :",
    ),
    Mutant(
        "not_transposed",
        "of the second eight columns, rows are taken for columns",
        "const unsigned hi = movmatrix_trans(pack2<Element>(r_out[i][n][2], r_out[i][n][3]));",
        "const unsigned hi = pack2<Element>(r_out[i][n][2], r_out[i][n][3]);",
    ),
    Mutant(
        "wrong_half_sent",
        "pairs of lanes exchange the halves that they need themselves",
        "odd ? lo : hi, 1",
        "odd ? hi : lo, 1",
    ),
    Mutant(
        "halves_in_order",
        "what came from the other lane is written after a lane's own columns",
        "odd ? make_uint2(other, hi)",
        "odd ? make_uint2(hi, other)",
    ),
    Mutant(
        "rows_beyond",
        "rows that there are not are written over the last one",
        "if (row < t.rows) *(uint2*)",
        "*(uint2*)",
    ),
    Mutant(
        "fragment_order",
        "partial results are not where combine looks",
        "((half * kValueChunks + i) * 4 + warp) * ROW_TILES + n",
        "((half * 4 + warp) * kValueChunks + i) * ROW_TILES + n",
    ),
    # An fp8 pool.
    Mutant(
        "unpacked_too_soon",
        "keys are unpacked before they have landed",
        "cp_async_wait<kPackedRounds - 1 - ROUND>();",
        "cp_async_wait<kPackedRounds - ROUND>();",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "full_too_soon",
        "a part is said to be complete before all of it is unpacked",
        "constexpr int kPartsBefore = ROUND * 2 / kPartChunks;",
        "constexpr int kPartsBefore = (ROUND * 2 + 1) / kPartChunks;",
        target="host-fp8_e4m3",
        also=(
            "ROUND == kPackedRounds - 1 ? kParts : (ROUND + 1) * 2 / kPartChunks;",
            "ROUND == kPackedRounds - 1 ? kParts : (ROUND * 2 + 3) / kPartChunks;",
        ),
    ),
    Mutant(
        "packed_rope",
        "all threads have a part of the rope chunk, which is alone",
        "return round < kPackedRounds - 1 || packed_line(thread & 7) == 0;",
        "return true;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_chunk",
        "threads put their part of the second chunk into the first",
        "nth_chunk(round * 2) + packed_line(unit) * kValueChunks;",
        "nth_chunk(round * 2);",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_source",
        "a round copies 128 fp8 that lie one after the other, not those of its two chunks",
        "packed_line(fresh(thread) & 7) * (kValueChunks - 1) * 64",
        "0",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_drafts",
        "draft tokens are taken for fp8",
        "return tile * kTileKeys + copied_key(i) < request.prefix;",
        "return tile * kTileKeys + copied_key(i) < request.columns();",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "second_draft",
        "a thread's second key is taken for a draft token where its first one is",
        "group + k * 8 >= request.prefix",
        "group >= request.prefix",
        target="host-fp8_e4m3",
    ),
]


def check(target: str, config: str, *place: Path) -> list[str]:
    """What is wrong with a configuration of a build, over a few small batches in several orders; empty if nothing is.

    `place`: cache and sources, if not the usual ones. In a process of its own: a mutant may well crash it.
    """
    build, pool = parts_of(target)
    library = cached_binary(target, *place)
    if build == "host-asan":
        return check_sanitized(library, config, pool)
    # Forked from a process that has torch already, which takes longer to import than most faults to be found.
    receiver, sender = FORKS.Pipe(duplex=False)
    child = FORKS.Process(
        target=check_build.send_first_problem, args=(library, config, pool, build == "host", sender), daemon=True
    )
    child.start()
    sender.close()
    try:
        found: list[str] = receiver.recv()
    except EOFError:
        child.join(60)
        assert child.exitcode is not None and child.exitcode < 0, f"exit status {child.exitcode}, see stderr"
        return [f"killed by signal {-child.exitcode}"]
    child.join(60)
    return found


def check_sanitized(library: Path, config: str, pool: str | None) -> list[str]:
    """An interpreter of its own, as the sanitizer's library has to be the first."""
    command = [sys.executable, "-m", "tests.support.check_build", str(library), config, *([pool] if pool else [])]
    variables = SANITIZER | {"LD_PRELOAD": sanitizer_runtime()}
    child = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, text=True, timeout=900
    )
    if child.returncode < 0:
        return [f"killed by signal {-child.returncode}"]
    if child.returncode == SANITIZER_FOUND:
        return [
            line for line in child.stderr.splitlines() if "ERROR: AddressSanitizer" in line or "runtime error" in line
        ]
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


POOLS = pytest.mark.parametrize("pool", [None, *tiles.FP8_POOLS])


@POOLS
@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_the_kernel_itself_passes(config: str, pool: str | None) -> None:
    assert check(with_pool("host", pool), config) == []


# Of the types of fp8 pools, which differ in arithmetic alone, one.
@pytest.mark.parametrize("pool", [None, "fp8_e4m3"])
@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_no_two_accesses_race(config: str, pool: str | None) -> None:
    """The build that also sees every plain load and store of shared memory."""
    assert check(with_pool("host-races", pool), config) == []


@pytest.mark.parametrize("pool", [None, "fp8_e4m3"])
@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_no_access_is_out_of_bounds_or_undefined(config: str, pool: str | None) -> None:
    """Under AddressSanitizer and UBSan: shared memory, and every tensor, since torch allocates with its malloc too."""
    assert check(with_pool("host-asan", pool), config) == []


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
    for old, new in [(mutant.old, mutant.new), *([mutant.also] if mutant.also else [])]:
        assert source.count(old) >= 1, f"the source no longer has: {old}"
        source = source.replace(old, new)
    mutated.write_text(source)
    problems = check(mutant.target, config, tmp_path / "cache", kernels)
    assert problems, f"not caught: {mutant.fault}"
    print(f"{mutant.name}: {problems[0]}")
