"""The kernel with an fp8 KV pool on a GPU, against float64 on the dequantised pool and against SGLang's own kernel on
the same input.

The stock kernel multiplies in fp8: it rounds queries and weights to the pool's type first, which alone is a rel of 0.03
to 0.2 to float64. Ours multiplies in the queries' type, and is held to what it has with a pool of that type.
"""

from __future__ import annotations

import random

import pytest
import torch
import triton.testing

from kdtree_patch.kernel import VerifyKernel
from tests.gpu.stock import run_stock
from tests.gpu.test_kernel import SHAPES
from tests.support.cases import LIMIT, as_bytes, in_high_slots, make_case, padded, reference
from tests.support.reference import rel

BF16, FP16 = torch.bfloat16, torch.float16


def stock_can(pool: torch.dtype) -> bool:
    """Triton has e4m3 from compute capability 8.9 on."""
    return pool == torch.float8_e5m2 or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("prefixes, q_len, heads", SHAPES, ids=lambda v: str(v)[:24])
def test_against_float64_and_stock(fp8_kernel: VerifyKernel, prefixes, q_len, heads, dtype, scales) -> None:
    pool = dict(pool=fp8_kernel.pool, k_scale=scales[0], v_scale=scales[1])
    case = make_case(prefixes, q_len, heads, dtype=dtype, device="cuda", seed=len(prefixes), slack=100, **pool)
    expected = reference(case)
    ours = rel(case.launch(fp8_kernel), expected)
    # The limit is for many rows; a single one's rounding may be half as large again.
    assert ours < LIMIT[dtype] * (1 if q_len * heads >= 8 else 1.5)
    if stock_can(pool["pool"]) and len(prefixes) * q_len * heads >= 64:
        stock = rel(run_stock(case), expected)
        assert ours <= stock * 1.02, (ours, stock)


def test_error_over_a_fuzz_of_shapes_is_no_larger_than_stock(fp8_kernel: VerifyKernel) -> None:
    rnd = random.Random(0)
    ours, stock = [], []
    for seed in range(40):
        prefixes = [rnd.choice([0, 1, 15, 17, 31, 33, 64, 700, 2000, 8736]) for _ in range(rnd.randint(1, 6))]
        q_len, heads = rnd.randint(1, 33), rnd.choice([1, 3, 8, 9, 16, 63, 64, 128])
        scales = dict(k_scale=rnd.choice([1.0, 0.5, 0.03]), v_scale=rnd.choice([1.0, 0.25, 0.7]))
        kind = dict(dtype=BF16, device="cuda", seed=seed, mask=rnd.choice(["tree", "none"]), pool=fp8_kernel.pool)
        case = make_case(prefixes, q_len, heads, **kind, **scales)
        expected = reference(case)
        ours.append(rel(case.launch(fp8_kernel), expected))
        if stock_can(kind["pool"]):
            stock.append(rel(run_stock(case), expected))
    for name, errors in (("ours", ours), ("stock", stock)):
        if errors:
            print(f"rel of {name}: mean {sum(errors) / len(errors):.6f}, max {max(errors):.6f}")
    assert max(ours) < LIMIT[BF16] and (not stock or sum(ours) <= sum(stock))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_byte_that_is_a_number_is_that_number(fp8_kernel: VerifyKernel, dtype) -> None:
    """This GPU's conversion, of all bytes in all columns of the latent: one key alone in the prefix, whose rope part
    outscores the draft.
    """
    pool = fp8_kernel.pool
    for turn in (0, 3, 64, 77):
        key = torch.arange(512, device="cuda").roll(turn).to(torch.uint8)
        key = torch.where(key.view(pool).float().isfinite(), key, 0)
        case = make_case([1], 1, 8, dtype=dtype, device="cuda", pool=pool, scale=1.0)
        case.q[..., :512], case.q[..., 512:] = 0.0, 1.0
        case.k_extend[...] = 0.0
        row = as_bytes(case.kv_pool)[case.kv_indices[0], 0]
        row[:512], row[512:] = key, torch.full((64,), 448.0, device="cuda").to(pool).view(torch.uint8)
        assert torch.equal(case.launch(fp8_kernel), key.view(pool).to(dtype).expand(1, 8, 512))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_stays_one_and_spreads_no_further_than_its_request(fp8_kernel: VerifyKernel, byte) -> None:
    case = make_case([70, 70], 9, 8, dtype=BF16, device="cuda", pool=fp8_kernel.pool)
    as_bytes(case.kv_pool)[case.kv_indices[3], 0, 17] = byte
    out = case.launch(fp8_kernel)
    assert out[:9].isnan().all()
    assert rel(out[9:], reference(case)[9:]) < LIMIT[BF16]


def test_same_input_same_bits(fp8_kernel: VerifyKernel) -> None:
    case = make_case([5000, 17, 1200], 9, 8, dtype=BF16, device="cuda", pool=fp8_kernel.pool, k_scale=0.3)
    first = case.launch(fp8_kernel).clone()
    for _ in range(50):
        case.out.fill_(float("nan"))
        assert torch.equal(case.launch(fp8_kernel), first)


def test_slots_beyond_32_bits_of_elements(fp8_kernel: VerifyKernel) -> None:
    case = in_high_slots(make_case([64], 9, 8, dtype=BF16, device="cuda", pool=fp8_kernel.pool))
    assert rel(case.launch(fp8_kernel), reference(case)) < LIMIT[BF16]


@pytest.mark.parametrize("prefixes", [[1500] * 3, [4000, 5, 9], [21]], ids=str)
def test_graph_padding_rows_change_no_bit(fp8_kernel: VerifyKernel, prefixes) -> None:
    case = make_case(prefixes, 9, 8, dtype=BF16, device="cuda", pool=fp8_kernel.pool, k_scale=0.5, v_scale=0.25)
    expected = case.launch(fp8_kernel)
    for requests in (1, 40):
        assert torch.equal(padded(case, requests).launch(fp8_kernel)[: len(expected)], expected)


@pytest.mark.xfail(
    raises=AssertionError, strict=True, reason="unpacking does not hide behind the products: docs/limits.md"
)
def test_no_slower_than_with_a_pool_of_the_queries_type(fp8_kernel: VerifyKernel) -> None:
    """Cold, bs 16, q_len 9, 8 heads, prefix 16,384, in the Hopper configuration, where the conversion is to hide behind
    the products. Two per cent for the clock.
    """
    if fp8_kernel.config.name != "hopper":
        pytest.skip("the portable configuration converts in the warps that multiply")
    plain = VerifyKernel.load(fp8_kernel.device, config="hopper")
    times = {}
    for name, kernel in (("fp8", fp8_kernel), ("bf16", plain)):
        case = make_case([16384] * 16, 9, 8, dtype=BF16, device="cuda", pool=kernel.pool)
        times[name] = triton.testing.do_bench(
            lambda case=case, kernel=kernel: case.launch(kernel), warmup=30, rep=200, return_mode="median"
        )
    print(f"{torch.cuda.get_device_name()}: fp8 {times['fp8'] * 1e3:.1f} us, bf16 {times['bf16'] * 1e3:.1f} us")
    assert times["fp8"] <= times["bf16"] * 1.02
