"""The kernel's own source, compiled for the CPU, against float64: every shape and dtype that a GPU would be given, in
small.

A GPU's arithmetic is not that of the CPU build in one respect: exp2 is exact here. The limits are those of the GPU
suite.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kdtree_patch import compile as compiling
from kdtree_patch import kernel as kernel_module
from kdtree_patch import tiles
from kdtree_patch.compile import cached_binary, cubin_target
from kdtree_patch.kernel import PARAMS, KernelUnavailable, VerifyKernel, host_launcher
from tests.support.cases import (
    LIMIT,
    host_kernel,
    in_high_slots,
    make_case,
    on_pages,
    padded,
    reference,
    with_drafts,
    with_extreme_scores,
)
from tests.support.reference import rel


@pytest.fixture(scope="module")
def library() -> Path:
    return cached_binary("host")


@pytest.fixture(params=tiles.CONFIGS)
def new_kernel(library: Path, request: pytest.FixtureRequest) -> Callable[..., VerifyKernel]:
    """Makes a kernel of each configuration: `new_kernel(seed, workers)`."""
    return partial(host_kernel, library, config=request.param)


def fuzz(count: int) -> list[tuple[int, list[int], int, int, str, torch.dtype, int]]:
    rnd = random.Random(1)
    cases = []
    for seed in range(count):
        lengths = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 130]
        prefixes = [rnd.choice(lengths) for _ in range(rnd.randint(1, 4))]
        q_len, heads = rnd.choice([(1, 1), (9, 8), (2, 8), (17, 3), (5, 9), (65, 1), (4, 16), (1, 63), (3, 8), (8, 8)])
        mask, dtype = rnd.choice(["tree", "none", "zero_row"]), rnd.choice([torch.float16, torch.bfloat16])
        cases.append((seed, prefixes, q_len, heads, mask, dtype, rnd.randint(1, 9)))
    return cases


@pytest.mark.parametrize("seed, prefixes, q_len, heads, mask, dtype, workers", fuzz(24))
def test_fuzz_against_float64(new_kernel, seed, prefixes, q_len, heads, mask, dtype, workers) -> None:
    case = make_case(prefixes, q_len, heads, dtype=dtype, mask=mask, seed=seed, slack=40)
    case.launch(new_kernel(seed, workers))
    assert rel(case.out, reference(case)) < LIMIT[dtype]


@pytest.mark.parametrize("config, bytes_a_worker", [("portable", 164_496), ("hopper", 296_080)])
def test_the_workspace_is_stated_and_bounded(library, config, bytes_a_worker) -> None:
    """Two partial results and their statistics a worker, and a note of its cut: what the README says. No call changes
    it.
    """
    kernel = host_kernel(library, workers=7, config=config)
    rows = tiles.CONFIGS[config].variants[-1].rows
    assert bytes_a_worker == 2 * rows * (512 + 2) * 4 + 16
    held = [tensor.data_ptr() for tensor in (kernel.partial_out, kernel.partial_stats, kernel.cut_items)]
    for prefixes, q_len, heads in (([300], 9, 8), ([40] * 12, 1, 1), ([5], 40, 8)):
        make_case(prefixes, q_len, heads).launch(kernel)
        assert kernel.workspace_bytes == 7 * bytes_a_worker
    assert held == [tensor.data_ptr() for tensor in (kernel.partial_out, kernel.partial_stats, kernel.cut_items)]


def test_most_heads_and_a_long_draft(new_kernel) -> None:
    """128 heads and q_len 512, the largest of each, on the smallest other side."""
    for q_len, heads in ((1, tiles.MAX_HEADS), (tiles.MAX_Q_LEN, 1)):
        case = make_case([40], q_len, heads)
        assert rel(case.launch(new_kernel()), reference(case)) < LIMIT[torch.float16]


def test_a_tree_of_257_drafts_and_128_heads(new_kernel) -> None:
    """32,896 rows a request: more row blocks than workers, each of them with more drafts than prefix."""
    case = make_case([3], 257, 128)
    assert rel(case.launch(new_kernel(workers=7)), reference(case)) < LIMIT[torch.float16]


def test_the_workspace_does_not_grow_with_the_tree(new_kernel) -> None:
    """Two partial results a worker, whatever the call: what was laid ready for one draft does for 512 as well."""
    kernel = new_kernel()
    before = [kernel.partial_out.data_ptr(), kernel.partial_stats.data_ptr(), kernel.cut_items.data_ptr()]
    largest = kernel.config.variants[-1]
    assert kernel.workspace_bytes == kernel.workers * (2 * (largest.partial_bytes + largest.rows * 8) + 16)
    for q_len in (1, tiles.MAX_Q_LEN):
        case = make_case([70], q_len, 2)
        assert rel(case.launch(kernel), reference(case)) < LIMIT[torch.float16]
    assert before == [kernel.partial_out.data_ptr(), kernel.partial_stats.data_ptr(), kernel.cut_items.data_ptr()]


@pytest.mark.parametrize("config", tiles.CONFIGS.values(), ids=tiles.CONFIGS)
def test_the_largest_calls_stay_within_the_kernels_integers(config) -> None:
    """`quotient` takes rows below 2^21 (see the source), and an item's number is a 32-bit integer: a call with so many
    requests that it would not be has more tiles than are served.
    """
    most_rows = tiles.MAX_Q_LEN * tiles.MAX_HEADS + config.variants[-1].rows
    assert most_rows < 2**21
    row_blocks = config.cut_rows(tiles.MAX_Q_LEN, tiles.MAX_HEADS).row_blocks
    requests = 2**31 // row_blocks
    assert config.most_tiles(requests, tiles.MAX_Q_LEN, tiles.MAX_HEADS, 0) >= tiles.MAX_TILES


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_chains_on_pages_of_every_size(new_kernel, page_size) -> None:
    """Slots of a page follow one another: kv_indices have one entry a token all the same."""
    prefixes = [200, 0, 31, 129]
    case = on_pages(make_case(prefixes, 5, 8, mask="none"), page_size)
    assert rel(case.launch(new_kernel()), reference(case)) < LIMIT[torch.float16]
    # The same keys in other slots, and nothing but the slots is different: not a bit of the result is.
    scattered = make_case(prefixes, 5, 8, mask="none")
    assert torch.equal(scattered.launch(new_kernel()), case.out)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("wide", ["qo_dtype", "kv_indptr_dtype", "kv_indices_dtype", "mask_indptr_dtype", None])
def test_each_index_dtype(new_kernel, wide, mask_dtype) -> None:
    """One tensor is int64 and the others int32, so that a flag mixed up with another one shows."""
    names = ("qo_dtype", "kv_indptr_dtype", "kv_indices_dtype", "mask_indptr_dtype")
    dtypes = {name: torch.int64 if name == wide else torch.int32 for name in names}
    case = make_case([33, 0, 5], 3, 8, mask_dtype=mask_dtype, **dtypes)
    assert rel(case.launch(new_kernel()), reference(case)) < LIMIT[torch.float16]


def test_strided_queries_pool_and_output(new_kernel) -> None:
    """q as a slice of a wider row, a pool with gaps between slots, an output that is part of a larger one."""
    plain = make_case([37, 2], 4, 3)
    case = make_case([37, 2], 4, 3)
    wide_q = torch.full((8, 3, 1000), float("nan"), dtype=torch.float16)
    case.q = wide_q[..., 8:584].copy_(case.q)
    wide_pool = torch.full((case.kv_pool.shape[0], 1, 640), float("nan"), dtype=torch.float16)
    case.kv_pool = wide_pool[..., :576].copy_(case.kv_pool)
    wide_out = torch.full((8, 5, 512), 7.0, dtype=torch.float16)
    case.out = wide_out[:, 1:4]
    kernel = new_kernel()
    assert torch.equal(case.launch(kernel), plain.launch(kernel))
    assert bool((wide_out[:, 0] == 7).all()) and bool((wide_out[:, 4] == 7).all()), (
        "heads that are not ours were written"
    )


def test_a_row_that_sees_nothing_is_zero(new_kernel) -> None:
    case = make_case([0, 40], 9, 8, mask="zero_row")
    case.launch(new_kernel())
    assert torch.count_nonzero(case.out[1]) == 0
    assert torch.isfinite(case.out).all()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_request_of_nan_is_alone_with_it(new_kernel, workers) -> None:
    """Though the same workers go on to the others, with the same accumulators."""
    case = make_case([70, 70, 150], 9, 8)
    case.kv_pool[case.kv_indices[3]] = torch.nan
    out = case.launch(new_kernel(0, workers))
    assert out[:9].isnan().all()
    assert rel(out[9:], reference(case)[9:]) < LIMIT[torch.float16]


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_extreme_scores(new_kernel, magnitude) -> None:
    """A softmax that flat has more rounding of P: 0.0025."""
    case = with_extreme_scores(make_case([70], 2, 8, dtype=torch.bfloat16), magnitude)
    assert rel(case.launch(new_kernel()), reference(case)) < 0.0025


def test_scores_that_overflow_give_zero_whole_or_cut(new_kernel) -> None:
    """All scores -inf in float32: there is nothing to weigh, with one worker (no cut) as with six (cut and merged)."""
    for workers in (1, 6):
        case = make_case([200], 2, 8, dtype=torch.bfloat16)
        case.q[...] = 1e19
        case.kv_pool[case.kv_indices] = -1e19
        case.k_extend[...] = -1e19
        assert torch.count_nonzero(case.launch(new_kernel(workers=workers))) == 0


@pytest.mark.parametrize("workers", [3, 5, 132])
@pytest.mark.parametrize(
    "prefixes, q_len, heads", [([64], 1, 1), ([100, 30, 64], 9, 8), ([64, 64, 64], 3, 8), ([1500, 5, 900], 9, 8)]
)
def test_graph_padding_rows_change_no_bit(new_kernel, prefixes, q_len, heads, workers) -> None:
    """A graph for a larger batch is padded with requests of prefix 1; the live rows must not notice."""
    kernel = new_kernel(workers=workers)
    case = make_case(prefixes, q_len, heads)
    expected = case.launch(kernel)
    for requests in (1, 5, 40):
        out = padded(case, requests).launch(kernel)
        assert torch.equal(out[: len(expected)], expected), f"{requests} requests of padding"
        assert torch.isfinite(out).all()


def test_slots_beyond_32_bits_of_elements(new_kernel) -> None:
    case = in_high_slots(make_case([64], 9, 8))
    assert rel(case.launch(new_kernel()), reference(case)) < LIMIT[torch.float16]


def test_one_kernel_for_calls_of_all_shapes(new_kernel) -> None:
    """The workspace that a call finds is what other calls left in it."""
    kernel, rnd = new_kernel(), random.Random(3)
    for seed in range(40):
        prefixes = [rnd.choice([0, 10, 33, 200, 400]) for _ in range(rnd.randint(1, 9))]
        case = make_case(prefixes, rnd.choice([1, 2, 5]), rnd.choice([1, 3, 8, 16]), seed=seed)
        assert rel(case.launch(kernel), reference(case)) < LIMIT[torch.float16], (seed, prefixes)


@pytest.mark.parametrize("lengths", [[9, 1, 0, 4], [20, 1, 0, 12]], ids=["one row block", "up to four row blocks"])
def test_requests_with_different_numbers_of_draft_tokens(new_kernel, lengths) -> None:
    """As extends have them: a short request has fewer row blocks than q_len gives."""
    case = with_drafts(make_case([70, 40, 3, 90], max(lengths), 8, mask="none"), lengths)
    for workers in (2, 5, 30):
        case.out.fill_(float("nan"))
        case.launch(new_kernel(workers=workers))
        assert rel(case.out, reference(case)) < LIMIT[torch.float16], f"{workers} workers"


def test_siblings_see_their_parent_and_not_each_other(new_kernel) -> None:
    """Drafts 1 and 2 have the parent 0. Letting 2 see 1 must change draft 2's rows and no others."""
    case = make_case([21], 3, 8)
    assert case.custom_mask is not None
    apart = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    together = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    kernel, results = new_kernel(), []
    for tree in (apart, together):
        case.custom_mask = torch.cat([torch.ones(3, 21, dtype=torch.bool), tree], 1).flatten()
        results.append(case.launch(kernel).clone())
        assert rel(case.out, reference(case)) < LIMIT[torch.float16]
    assert torch.equal(results[0][:2], results[1][:2])
    assert rel(results[0][2], results[1][2].double()) > 0.01


def test_the_order_of_execution_does_not_change_a_bit(new_kernel) -> None:
    """Same input, same bits, however blocks, warps and lanes are interleaved."""
    first = make_case([200, 0, 64], 9, 8)
    first.launch(new_kernel(seed=0))
    for seed in range(1, 6):
        again = make_case([200, 0, 64], 9, 8)
        again.launch(new_kernel(seed=seed))
        assert torch.equal(first.out, again.out), f"order {seed}"


def test_the_split_moves_no_result_beyond_rounding(new_kernel) -> None:
    """From one worker, which cuts nothing, to more workers than tiles, where every tile is alone."""
    case = make_case([150, 7], 9, 8)
    expected = reference(case)
    for workers in (1, 2, 3, 7, 13, 40):
        case.out.fill_(float("nan"))
        case.launch(new_kernel(workers=workers))
        assert rel(case.out, expected) < LIMIT[torch.float16], f"{workers} workers"


def test_stale_mask_and_indices_beyond_the_batch_are_not_read(new_kernel) -> None:
    """Under CUDA graphs the mask and the indices live in long buffers whose ends are old."""
    short, long = make_case([31, 4], 9, 8, slack=0), make_case([31, 4], 9, 8, slack=0)
    long.custom_mask = torch.cat([long.custom_mask, torch.ones(500, dtype=torch.bool)])
    long.kv_indices = torch.cat([long.kv_indices, torch.full((500,), 2**40)])
    kernel = new_kernel()
    assert torch.equal(short.launch(kernel), long.launch(kernel))


def test_params_are_packed_as_the_kernel_reads_them(library) -> None:
    """The scale is a float32 and the record is as long as the CUDA struct; a Python float would have been passed as a
    double.
    """
    assert PARAMS.fields is not None
    assert PARAMS.fields["scale_log2e"][0].itemsize == 4
    host_launcher(library)  # compares the length with sizeof(VerifyParams)


def test_every_variant_fits_the_shared_memory() -> None:
    """The portable ones that of sm_86, sm_89 and sm_120, the others that of sm_90."""
    limits = {"portable": 101_376, "hopper": 232_448}
    assert {name: configuration.shared_limit for name, configuration in tiles.CONFIGS.items()} == limits
    for configuration in tiles.CONFIGS.values():
        assert all(variant.shared_bytes <= configuration.shared_limit for variant in configuration.variants)


@pytest.mark.parametrize("config", tiles.CONFIGS.values(), ids=tiles.CONFIGS)
@pytest.mark.parametrize("q_len, heads", [(q, h) for q in (1, 2, 5, 9, 64, 257, 512) for h in (1, 3, 8, 16, 63, 128)])
def test_cut_covers_all_rows_once(config, q_len, heads) -> None:
    cut = config.cut_rows(q_len, heads)
    rows = q_len * heads
    assert cut.variant in config.variants
    assert cut.rows_per_block % 8 == 0 and cut.rows_per_block <= cut.variant.rows
    assert (cut.row_blocks - 1) * cut.rows_per_block < rows <= cut.row_blocks * cut.rows_per_block


@pytest.mark.parametrize("config", tiles.CONFIGS.values(), ids=tiles.CONFIGS)
def test_no_lengths_have_more_tiles_than_the_bound(config) -> None:
    rnd = random.Random(4)
    for _ in range(200):
        bs, q_len, heads = rnd.randint(1, 40), rnd.randint(1, 512), rnd.randint(1, 128)
        prefixes = [rnd.choice([0, 1, rnd.randint(0, 5000)]) for _ in range(bs)]
        row_blocks = config.cut_rows(q_len, heads).row_blocks
        exact = sum(-(-(prefix + q_len) // config.tile_keys) for prefix in prefixes) * row_blocks
        bound = config.most_tiles(bs, q_len, heads, sum(prefixes))
        assert exact <= bound < exact + bs * row_blocks


@pytest.mark.parametrize(
    "capability, config, target",
    [((12, 0), "portable", "sm_120"), ((9, 0), "portable", "sm_90"), ((9, 0), "hopper", "sm_90a")],
)
def test_a_configuration_has_its_own_cubin(capability, config, target) -> None:
    assert cubin_target(capability, config) == target


@pytest.mark.parametrize("capability, own", [((9, 0), "hopper"), ((10, 0), "portable"), ((12, 0), "portable")])
def test_a_device_has_its_own_configuration(monkeypatch, capability, own) -> None:
    found = SimpleNamespace(name="Some GPU", major=capability[0], minor=capability[1], multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(compiling, "cached_binary", lambda target, cache_dir: target)
    monkeypatch.setattr(kernel_module, "gpu_launcher", lambda *arguments: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: SimpleNamespace(data_ptr=lambda: 0))
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: SimpleNamespace(data_ptr=lambda: 0))
    loaded = VerifyKernel.load(torch.device("cuda", 0))
    assert (loaded.config.name, loaded.target) == (own, cubin_target(capability, own))


@pytest.mark.parametrize(
    "capability, driver, overlap",
    [((9, 0), 12030, True), ((12, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False)],
)
def test_where_kernels_may_overlap(capability, driver, overlap) -> None:
    assert kernel_module.may_overlap(capability, driver) is overlap


@pytest.mark.parametrize(
    "capability, reason, words",
    [
        ((12, 0), "configuration", "needs compute capability 9.0, Some GPU has 12.0: unset KDTREE_CONFIG"),
        ((7, 5), "compute_capability", "Some GPU: compute capability 7.5 is too old"),
    ],
)
def test_a_configuration_is_refused_where_it_cannot_run(monkeypatch, capability, reason, words) -> None:
    found = SimpleNamespace(name="Some GPU", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    with pytest.raises(KernelUnavailable, match=words) as raised:
        VerifyKernel.load(torch.device("cuda", 0), config="hopper")
    assert raised.value.reason == reason
