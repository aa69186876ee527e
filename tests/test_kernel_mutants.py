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
from kdtree_patch.compile import KERNELS, SOURCE_NAME, cached_binary, parts_of, sanitizer_runtime, with_pool

REPOSITORY = Path(__file__).resolve().parent.parent
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
        "if (!more && announces()) announce_nothing(p, this_worker());",
        "",
    ),
    # The copies.
    Mutant(
        "missing_free_wait",
        "a tile is copied over one that is still read",
        "      mbarrier_wait(mbarrier(kFree + stage * kParts + part), (tiles / kStages) - 1 & 1);",
        "",
    ),
    Mutant(
        "free_parity",
        "a stage is waited for in the wrong phase",
        "(tiles / kStages) - 1 & 1",
        "tiles / kStages & 1",
    ),
    Mutant(
        "early_free",
        "a stage is free before it was read",
        "    wgmma_wait<0>();\n    if (lane == 0) mbarrier_arrive(free + 8);",
        "    if (lane == 0) mbarrier_arrive(free + 8);\n    wgmma_wait<0>();",
    ),
    Mutant(
        "early_free_part",
        "a part of a stage is free before all of it was read",
        "wgmma_wait<1>();",
        "wgmma_wait<2>();",
    ),
    Mutant(
        "free_part_too_much",
        "a part of a stage is taken to be free as soon as another one is",
        "mbarrier_wait(mbarrier(kFree + stage * kParts + part)",
        "mbarrier_wait(mbarrier(kFree + stage * kParts)",
    ),
    Mutant(
        "slots_ahead",
        "slots are loaded for another tile",
        "load_slots(tile + 1);",
        "load_slots(tile);",
    ),
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
    Mutant(
        "swizzle",
        "keys are stored in plain order",
        "((unit ^ (row & 7)) << 4)",
        "(unit << 4)",
    ),
    Mutant(
        "rope_of_the_other_stage",
        "two stages have their rope columns in the same place",
        "(stage & 1) * 4 + rope_unit",
        "rope_unit",
    ),
    Mutant(
        "rope_columns",
        "the second block copies the first one's rope columns",
        "(kLatent - rank * (kBlockLatent - kBlockRope)) * 2",
        "(kLatent - rank * kBlockLatent) * 2",
    ),
    Mutant(
        "latent_columns",
        "both blocks copy the first one's columns",
        "source[i] += rank * (kBlockLatent * 2) + unit * 16;",
        "source[i] += unit * 16;",
    ),
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
        "the copy warpgroup keeps the registers that others need",
        "set_max_registers_down<kCopyRegisters>();",
        "",
    ),
    # The two blocks.
    Mutant(
        "missing_cluster_wait",
        "the other block is written to before its mbarriers are there",
        "      if (first) cluster_wait();\n      first = false;",
        "      first = false;",
    ),
    Mutant(
        "block_in_descriptor",
        "the number of the block gets into the descriptors",
        "(address & 0x3ffff) >> 4",
        "address >> 4",
    ),
    Mutant(
        "missing_received_wait",
        "scores are sent over some that the other block still reads",
        "    mbarrier_wait(mbarrier(kReceived + turn), attended - 1 & 1);",
        "    //",
    ),
    Mutant(
        "early_received",
        "the other block may send its next scores before these are read",
        "if (lane == 0) mbarrier_arrive_remote(other + G::mbarrier(kReceived + turn));\n    attended++;",
        "attended++;",
        also=(
            "    const unsigned char* const source = shared + G::partial(turn);\n",
            "    const unsigned char* const source = shared + G::partial(turn);\n"
            "    if (lane == 0) mbarrier_arrive_remote(other + G::mbarrier(kReceived + turn));\n",
        ),
    ),
    Mutant(
        "missing_partial_wait",
        "the other block's scores are added before they are there",
        "    mbarrier_wait(mbarrier(kPartial + turn), attended & 1);\n",
        "",
    ),
    Mutant(
        "own_scores_sent",
        "each block gets the scores that the other one wants itself",
        "r_own[n][0] = copied(r_score[n][0]), r_own[n][1] = copied(r_score[n][2])",
        "r_own[n][0] = copied(r_score[n][1]), r_own[n][1] = copied(r_score[n][3])",
    ),
    Mutant(
        "taken_here_alone",
        "P is written over in the other block while it reads it",
        "      mbarrier_arrive_remote(other + taken);\n",
        "      mbarrier_arrive(shared_address(shared) + taken);\n",
    ),
    Mutant(
        "bytes_of_factors",
        "a hand-over is complete before all of the other block's factors are there",
        "kFactorBytes = kOwnRows * 4 + 4",
        "kFactorBytes = kOwnRows * 4 + 0",
    ),
    Mutant(
        "rows_of_the_other",
        "both blocks finish the first one's rows",
        "return local < 4 * kRun ? block * 4 * kRun + local",
        "return local < 4 * kRun ? local",
    ),
    # The scores.
    Mutant(
        "missing_tile_wait",
        "scores are made of a tile that has not landed",
        "      mbarrier_wait(mbarrier(kFull + stage * kParts + part), tiles / kStages & 1);\n",
        "",
    ),
    Mutant(
        "missing_part_wait",
        "only the first part of a tile is waited for",
        "mbarrier_wait(mbarrier(kFull + stage * kParts + part)",
        "mbarrier_wait(mbarrier(kFull + stage * kParts)",
    ),
    Mutant(
        "tile_parity",
        "a tile is waited for in the wrong phase",
        "part), tiles / kStages & 1);\n      fence",
        "part), tiles & 1);\n      fence",
    ),
    Mutant(
        "missing_tile_fence",
        "wgmma may not see what cp.async has written",
        "tiles / kStages & 1);\n      fence_proxy_async();",
        "tiles / kStages & 1);",
    ),
    Mutant(
        "missing_query_barrier",
        "queries are used before all threads' copies have landed",
        "    fence_proxy_async();\n    synchronise_both();\n",
        "    fence_proxy_async();\n",
    ),
    Mutant(
        "query_layout",
        "the rope queries' strides are exchanged",
        "G::kRows * 16, 128, false)",
        "128, G::kRows * 16, false)",
    ),
    Mutant(
        "missing_exchange_barrier",
        "the warps' maxima are compared before they are all there",
        "    } else {\n      synchronise();\n    }\n    raise_maxima",
        "    }\n    raise_maxima",
    ),
    Mutant(
        "vote_of_a_warp",
        "each warp decides for itself whether the next product goes ahead",
        "!barrier_sync_or(kBarrierOfWarpgroup + turn, kWarpgroup, !has_landed(nth + 2))",
        "(synchronise(), __ballot_sync(~0u, !has_landed(nth + 2)) == 0)",
    ),
    Mutant(
        "one_exchange",
        "the warps' maxima are written over while some warp still reads the last ones",
        "exchange(nth >> 1 & 1,",
        "exchange(0,",
        target="host-races",
    ),
    Mutant(
        "missing_maxima_wait",
        "the running maxima are read before they have come through the tile before",
        "    mbarrier_wait(mbarrier(kRisen + (turn ^ 1)), waited & 1);\n",
        "",
        target="host-races",
    ),
    Mutant(
        "maxima_of_a_warp",
        "a warp says that it has read the maxima while a lane of it has not",
        "    __syncwarp();\n    if (lane == 0) mbarrier_arrive(mbarrier(kRisen + turn));",
        "    if (lane == 0) mbarrier_arrive(mbarrier(kRisen + turn));",
        target="host-races",
    ),
    Mutant(
        "lost_maximum",
        "the last warp's maxima are lost",
        "for (int w = 1; w < 4; w++)",
        "for (int w = 1; w < 3; w++)",
    ),
    Mutant(
        "unscaled_sums",
        "sums are not brought to the maxima of the tile",
        "      r_sum[n] *= exp2_approx(r_highest[n] - r_tile[n]);\n",
        "",
    ),
    Mutant(
        "unscaled_total",
        "sums are not brought to the last maxima of the piece",
        "r_sum[n] *= exp2_approx(r_highest[n] - r_last[n]);",
        "r_sum[n] *= 1.f;",
    ),
    Mutant(
        "note_of_a_lane",
        "the note knows of the first lane's rows only",
        "__reduce_or_sync(~0u, risen << row_tile | last_risen << 8)",
        "risen << row_tile | last_risen << 8",
    ),
    Mutant(
        "note_bit",
        "the note names the next row tile",
        "risen << row_tile |",
        "risen << (row_tile + 1) |",
    ),
    Mutant(
        "one_factor_buffer",
        "factors are written over while a value warpgroup reads them",
        "return kOffsetFactor + number * kRows * 4;",
        "return kOffsetFactor;",
        target="host-races",
    ),
    Mutant(
        "missing_taken_wait",
        "P is written over while a value warpgroup reads it",
        "    wait_until_taken();\n    if (warp == 1)",
        "    if (warp == 1)",
    ),
    Mutant(
        "missing_taken_wait_of_sums",
        "factors are written over while a value warpgroup reads the last but one",
        "    wait_until_taken();\n    if (thread == 0) *",
        "    if (thread == 0) *",
        target="host-races",
    ),
    Mutant(
        "missing_sum_barrier",
        "the warps' sums are added before they are all there",
        "    synchronise_both();\n    if (turn != 0) return;\n",
        "    if (turn != 0) return;\n",
    ),
    Mutant(
        "late_slot",
        "where a partial result goes is read when it may be the next piece's",
        "    synchronise_both();\n    if (turn != 0) return;\n",
        "    synchronise_both();\n    if (turn != 0) return;\n    const int slot = s_target().partial_slot;\n",
        target="host-races",
        also=("    const int slot = s_target().partial_slot;  // not later: it becomes the next piece's\n", ""),
    ),
    Mutant(
        "lost_sums",
        "a lane's share of the sums is lost",
        "(lane & 4 ? kEighth : 0)",
        "0",
    ),
    Mutant(
        "lost_warp",
        "the sums of the last warp are lost",
        " + s_part[3 * G::kOwnRows + thread])",
        ")",
    ),
    Mutant(
        "lost_warpgroup",
        "the sums of the second warpgroup are lost",
        "sum_of(s_sums) + sum_of((const float*)(shared + G::exchange(1, tiles / 2 & 1)))",
        "sum_of(s_sums)",
    ),
    Mutant(
        "missing_prob_fence",
        "wgmma may not see the P that threads have written",
        "hand_overs >> 1 & 1);\n    fence_proxy_async();",
        "hand_overs >> 1 & 1);",
        target="host-races",
    ),
    Mutant(
        "pair_of_keys",
        "of a ninth row tile keys are taken for rows",
        "quad & 1 ? theirs >> 16 | (keys & 0xffff0000u) : (keys & 0xffffu) | theirs << 16",
        "keys",
    ),
    # The mask.
    Mutant(
        "mask_stride",
        "row stride of the mask is the prefix",
        "(long long)token * columns",
        "token * prefix",
    ),
    Mutant(
        "mask_start",
        "every request reads the first one's mask",
        "p.mask_indptr, t.number,",
        "p.mask_indptr, 0,",
    ),
    Mutant(
        "masked_prefix",
        "prefix columns are judged by the mask",
        "draft < 0 || (draft",
        "(draft",
    ),
    Mutant(
        "beyond_the_drafts",
        "columns beyond the last draft token are seen",
        "(draft < q_len && (",
        "((",
    ),
    Mutant(
        "causal_chain",
        "without a mask a draft does not see itself",
        "draft <= token",
        "draft < token",
    ),
    Mutant(
        "first_token",
        "every row block reads the mask of the first one's tokens",
        "min(first_token + (pair + i) * 2",
        "min((pair + i) * 2",
    ),
    Mutant(
        "every_other_token",
        "odd tokens see what even ones do",
        "(token & 1) * 16 + group",
        "group",
    ),
    Mutant(
        "second_key",
        "the second key is judged as the first",
        "(word >> 8 & 1)",
        "(word & 1)",
    ),
    Mutant(
        "far_tokens",
        "tokens from the 65th on see what the first ones do",
        "if (token >= 64) word = far;",
        "",
    ),
    Mutant(
        "mask_column",
        "the mask is read beyond its end",
        "max(min(column, columns - 1), prefix)",
        "max(column, prefix)",
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
        "        value_product();\n        tiles++;\n        taken_over();",
        "        taken_over(), hand_overs--;\n        value_product();\n        tiles++, hand_overs++;",
    ),
    Mutant(
        "early_target",
        "where outputs go is read after it may be written over",
        "(const Target*)(shared + G::kOffsetTarget))[hand_overs & 1];\n      taken_over();",
        "(const Target*)(shared + (taken_over(), G::kOffsetTarget)))[hand_overs - 1 & 1];",
        target="host-races",
    ),
    Mutant(
        "missing_warp_barrier",
        "a warp is done with what was handed over while a lane of it still reads",
        "    __syncwarp();\n    if (lane == 0) {\n      mbarrier_arrive(shared_address(shared) + taken);",
        "    if (lane == 0) {\n      mbarrier_arrive(shared_address(shared) + taken);",
        target="host-races",
    ),
    Mutant(
        "stale_rescale",
        "outputs are not multiplied",
        "multiply_output(note == kFinish ? ~0 : note)",
        "",
    ),
    Mutant(
        "undivided",
        "outputs are not divided by the sums",
        "note <= kFinish) multiply",
        "note < kFinish) multiply",
    ),
    Mutant(
        "note_of_one_block",
        "what has risen in the other block's rows is not known",
        "(int)(notes.x | notes.y)",
        "(int)notes.x",
    ),
    Mutant(
        "risen_row_tile",
        "a row tile is multiplied if the first one has risen",
        "if (!(which >> n & 1)) continue;",
        "if (!(which & 1)) continue;",
    ),
    Mutant(
        "prob_layout",
        "the strides of P are exchanged",
        "128, G::kProbTile, false",
        "G::kProbTile, 128, false",
    ),
    Mutant(
        "value_step",
        "the second 16 keys are the second 8",
        "step * 2048",
        "step * 1024",
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
        "odd ? make_uint2(exchanged, hi)",
        "odd ? make_uint2(hi, exchanged)",
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
        "(((chunk + i) * 4 + warp) * ROW_TILES + n)",
        "((warp * 8 + chunk + i) * ROW_TILES + n)",
    ),
    # An fp8 pool.
    Mutant(
        "unpacked_too_soon",
        "keys are unpacked before they have landed",
        "    unpack_part<1, PENDING>(number % kStages);",
        "    unpack_part<1, PENDING + 1>(number % kStages);",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "full_too_soon",
        "a part is said to be complete before it is unpacked",
        "    cp_async_wait<PENDING>();\n",
        "    cp_async_wait<PENDING>();\n    mbarrier_arrive(mbarrier(kFull + stage * kParts + PART));\n",
        target="host-fp8_e4m3",
        also=(
            "    fence_proxy_async();\n    mbarrier_arrive(mbarrier(kFull + stage * kParts + PART));",
            "    fence_proxy_async();",
        ),
    ),
    Mutant(
        "packed_rope",
        "the second of the two that have a key's rope columns puts them over the first one's",
        "(stage & 1) * 4 + (number & 1) * 2",
        "(stage & 1) * 4",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_chunk",
        "threads put their part of the second chunk into the first",
        "(part * 2 + packed_line(unit)) * kChunkBytes",
        "part * 2 * kChunkBytes",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_source",
        "both blocks copy the first one's fp8",
        "if (Pool::is_fp8) source[i] -= rank * kBlockLatent;",
        "if (Pool::is_fp8) source[i] -= rank * kBlockLatent * 2;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "packed_drafts",
        "draft tokens are taken for fp8",
        "next_packed |= (int)(column < request.prefix) << i;",
        "next_packed |= (int)(column < columns) << i;",
        target="host-fp8_e4m3",
    ),
    Mutant(
        "second_draft",
        "a thread's second key is taken for a draft token where its first one is",
        "group + k * 8 >= prefix",
        "group >= prefix",
        target="host-fp8_e4m3",
    ),
]


def check(target: str, config: str, *place: Path) -> list[str]:
    """What is wrong with a configuration of a build, over a few small batches in several orders; empty if nothing is.

    `place`: cache and sources, if not the usual ones. In a process of its own: a mutant may well crash it.
    """
    build, pool = parts_of(target)
    command = [sys.executable, "-m", "tests.support.check_build", str(cached_binary(target, *place)), config]
    command += [pool] if pool else []
    variables = SANITIZER | {"LD_PRELOAD": sanitizer_runtime()} if build == "host-asan" else {}
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
