"""The kernel with an fp8 KV pool, compiled for the CPU, against float64 on the dequantised pool: both types, both
configurations, queries of both types, scales.

The CPU build converts e4m3 as sm_80 and sm_86 do; the instruction of later GPUs is the GPU suite's to test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kdtree_patch import tiles
from kdtree_patch.compile import cached_binary, with_pool
from kdtree_patch.kernel import FP8_POOLS, VerifyKernel
from tests.support.cases import LIMIT, Case, host_kernel, in_high_slots, make_case, padded, reference, with_drafts
from tests.support.reference import rel

BF16, FP16 = torch.bfloat16, torch.float16
# One that is a power of two changes no bit of the rounding; the others do.
SCALES = [(1.0, 1.0), (0.5, 0.25), (0.3, 0.7), (3.0, 5.0)]


@pytest.fixture(scope="module", params=FP8_POOLS, ids=FP8_POOLS.values())
def pool(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=tiles.CONFIGS)
def new_kernel(pool: torch.dtype, request: pytest.FixtureRequest) -> Callable[..., VerifyKernel]:
    """Makes a kernel of each configuration: `new_kernel(seed, workers)`."""
    library = cached_binary(with_pool("host", FP8_POOLS[pool]))
    return partial(host_kernel, library, config=request.param, pool=pool)


def limit(new_kernel: Callable[..., VerifyKernel], dtype: torch.dtype) -> float:
    """The hopper configuration makes two e4m3 numbers of each query, which is as exact as bf16, whatever its type."""
    return LIMIT[BF16 if new_kernel.keywords["config"] == "hopper" else dtype]  # type: ignore[attr-defined]


def fuzz(count: int) -> list[tuple[int, list[int], int, int, str, torch.dtype, tuple[float, float], int]]:
    rnd = random.Random(2)
    cases = []
    for seed in range(count):
        lengths = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 130]
        prefixes = [rnd.choice(lengths) for _ in range(rnd.randint(1, 4))]
        q_len, heads = rnd.choice([(1, 1), (9, 8), (2, 8), (17, 3), (65, 1), (4, 16), (3, 8), (8, 8)])
        mask, dtype = rnd.choice(["tree", "none", "zero_row"]), (FP16, BF16)[seed % 2]
        cases.append((seed, prefixes, q_len, heads, mask, dtype, SCALES[seed // 2 % len(SCALES)], rnd.randint(1, 9)))
    return cases


@pytest.mark.parametrize("seed, prefixes, q_len, heads, mask, dtype, scales, workers", fuzz(16))
def test_fuzz_against_float64(new_kernel, pool, seed, prefixes, q_len, heads, mask, dtype, scales, workers) -> None:
    names = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    case = make_case(prefixes, q_len, heads, dtype=dtype, mask=mask, seed=seed, slack=40, pool=pool, **names)
    case.launch(new_kernel(seed, workers))
    assert rel(case.out, reference(case)) < limit(new_kernel, dtype)


def alone(pool: torch.dtype, key: torch.Tensor, positions: list[int], prefix: int, dtype: torch.dtype) -> Case:
    """A request for each position, where the prefix has `key` (512 bytes) as its latent. Its rope part scores so much
    more than that of all others that the output is its value.
    """
    case = make_case([prefix] * len(positions), 1, 8, dtype=dtype, pool=pool, scale=1.0)
    case.q[..., :512], case.q[..., 512:] = 0.0, 1.0
    case.k_extend[...] = 0.0
    for request, position in enumerate(positions):
        slots = case.kv_indices[request * prefix : (request + 1) * prefix]
        case.kv_pool[slots, :, 512:] = torch.tensor(-448.0).to(pool)
        case.kv_pool[slots[position], :, 512:] = torch.tensor(448.0).to(pool)
        case.kv_pool.view(torch.uint8)[slots[position], 0, :512] = key
    return case


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("turn", [0, 3, 7, 77])
def test_every_byte_that_is_a_number_is_that_number(new_kernel, pool, dtype, turn) -> None:
    """At the beginning of a tile and at its end, in every column of the latent: each byte to the bit, not nearly."""
    key = torch.arange(512).roll(turn).to(torch.uint8)
    key = torch.where(key.view(pool).float().isfinite(), key, 0)
    positions = [0, 1, 7, 8, 30, 31, 32, 63, 64, 69]
    case = alone(pool, key, positions, 70, dtype)
    case.launch(new_kernel())
    expected = key.view(pool).to(dtype).expand(len(positions), 8, 512)
    assert torch.equal(expected.double(), key.view(pool).double().expand_as(expected)), "both types hold all of fp8"
    assert torch.equal(case.out, expected)


@pytest.mark.parametrize("column", [0, 17, 511, 512, 575])
@pytest.mark.parametrize("sign", [0, 128])
def test_a_nan_stays_one_and_spreads_no_further_than_its_request(new_kernel, pool, column, sign) -> None:
    """Of e5m2 each of its three, and infinity as well: infinity times 0 is a NaN."""
    for byte in (0x7F,) if pool == torch.float8_e4m3fn else (0x7C, 0x7D, 0x7E, 0x7F):
        case = make_case([70, 70], 2, 8, pool=pool)
        case.q[..., column] = 0.0
        case.kv_pool.view(torch.uint8)[case.kv_indices[3], 0, column] = byte | sign
        out = case.launch(new_kernel())
        assert out[:2].isnan().all()
        assert rel(out[2:], reference(case)[2:]) < limit(new_kernel, FP16)


def test_scales_are_those_of_the_prefix_alone(new_kernel, pool) -> None:
    """Drafts alone: scales change nothing but the last bit. A prefix alone: its values times v_scale, to the bit."""
    for prefixes in ([0, 0], [40, 70]):
        plain = make_case(prefixes, 4, 8, dtype=BF16, pool=pool)
        scaled = make_case(prefixes, 4, 8, dtype=BF16, pool=pool)
        scaled.v_scale = 0.25
        if prefixes[0]:
            assert plain.custom_mask is not None and scaled.custom_mask is not None
            for case in (plain, scaled):
                case.custom_mask[...] = False
        else:
            scaled.k_scale = 0.3
        kernel = new_kernel()
        plain.launch(kernel), scaled.launch(kernel)
        assert torch.equal(scaled.out, plain.out * 0.25 if prefixes[0] else plain.out)


@pytest.mark.parametrize("v_scale", [2.0**-14, 2.0**-7, 1.0, 2.0**14])
def test_a_large_and_a_small_scale(new_kernel, pool, v_scale) -> None:
    """Neither overflows, and what is dominant keeps its precision."""
    case = make_case([70, 20], 9, 8, dtype=BF16, pool=pool, v_scale=v_scale)
    assert rel(case.launch(new_kernel()), reference(case)) < limit(new_kernel, BF16)


def test_a_pool_with_gaps_between_slots(new_kernel, pool) -> None:
    plain, case = make_case([37, 2], 4, 3, pool=pool), make_case([37, 2], 4, 3, pool=pool)
    wide = torch.full((case.kv_pool.shape[0], 1, 640), 0x7F, dtype=torch.uint8)
    wide[..., 16:592] = case.kv_pool.view(torch.uint8)
    case.kv_pool = wide.view(pool)[..., 16:592]
    kernel = new_kernel()
    assert torch.equal(case.launch(kernel), plain.launch(kernel))


def test_slots_beyond_32_bits_of_elements(new_kernel, pool) -> None:
    case = in_high_slots(make_case([64], 9, 8, pool=pool))
    assert rel(case.launch(new_kernel()), reference(case)) < limit(new_kernel, FP16)


def test_a_row_that_sees_nothing_is_zero(new_kernel, pool) -> None:
    case = make_case([0, 40], 9, 8, mask="zero_row", pool=pool, k_scale=0.5, v_scale=0.25)
    case.launch(new_kernel())
    assert torch.count_nonzero(case.out[1]) == 0
    assert torch.isfinite(case.out).all()


@pytest.mark.parametrize("workers", [3, 132])
@pytest.mark.parametrize("prefixes", [[64], [100, 30, 64], [1500, 5, 900]], ids=str)
def test_graph_padding_rows_change_no_bit(new_kernel, pool, prefixes, workers) -> None:
    kernel = new_kernel(workers=workers)
    case = make_case(prefixes, 9, 8, pool=pool, k_scale=0.3, v_scale=0.7)
    expected = case.launch(kernel)
    for requests in (1, 40):
        out = padded(case, requests).launch(kernel)
        assert torch.equal(out[: len(expected)], expected), f"{requests} requests of padding"
        assert torch.isfinite(out).all()


def test_the_order_of_execution_does_not_change_a_bit(new_kernel, pool) -> None:
    first = make_case([200, 0, 64], 9, 8, pool=pool)
    first.launch(new_kernel(seed=0))
    for seed in range(1, 6):
        again = make_case([200, 0, 64], 9, 8, pool=pool)
        again.launch(new_kernel(seed=seed))
        assert torch.equal(first.out, again.out), f"order {seed}"


def test_requests_with_different_numbers_of_draft_tokens(new_kernel, pool) -> None:
    case = with_drafts(make_case([70, 40, 3, 90], 9, 8, mask="none", pool=pool, k_scale=0.5), [9, 1, 0, 4])
    for workers in (2, 30):
        case.out.fill_(float("nan"))
        case.launch(new_kernel(workers=workers))
        assert rel(case.out, reference(case)) < limit(new_kernel, FP16), f"{workers} workers"
