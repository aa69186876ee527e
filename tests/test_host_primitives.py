"""The device primitives for the CPU (kernels/host): they compute what PTX says, and are as strict as they claim.

The little kernels of data/host_kernels.cu run in four builds: plain; with AddressSanitizer and UBSan; with every load
and store shown to the race detector; and with ucontext in place of the hand-written stack switch.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.env import REPO
from tests.support.host_program import BUILDS, DATA, FLAGS, Program, bits, floats, judge, run, source_flag

SOURCE = DATA / "host_kernels.cu"
SEEDS = 20


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(request.param, SOURCE, tmp_path_factory.mktemp("host"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# -- what they compute


def test_indices_and_sizes(program: Program) -> None:
    outcomes = program.launch("indices", np.zeros(1), 6 * 64 * 32, grid_x=3, grid_y=2, block=64, shared=1, seeds=SEEDS)
    for outcome in outcomes:
        assert not outcome.error
        out = outcome.words().reshape(2, 3, 64, 8)
        for y in range(2):
            for x in range(3):
                for thread in (0, 37, 63):
                    assert out[y, x, thread, :6].tolist() == [thread, x, y, 64, 3, 2]
        assert (out[..., 7] == -4).all()
    # Shared memory starts at a multiple of 128, which is all that a kernel may rely on.
    addresses = [int(outcome.words()[6]) for outcome in outcomes]
    assert addresses[0] == 1024 and len(set(addresses)) > SEEDS / 2
    assert all(address % 256 == 128 for address in addresses[1:])


def test_ldmatrix(program: Program, rng: np.random.Generator) -> None:
    memory = rng.integers(0, 256, 2048, dtype=np.uint8)
    offsets = (rng.permutation(128)[:32] * 16).astype(np.int32)
    given = np.concatenate([offsets.view(np.uint8), memory])
    for seed in (0, 3):
        out = program.result("ldmatrix", given, 32 * 32, 2048, shared=2048, seed=seed).words(np.uint32).reshape(32, 8)
        elements = memory.view(np.uint16)
        matrices = np.stack([elements[o // 2 : o // 2 + 8] for o in offsets]).reshape(4, 8, 8).astype(np.uint32)
        for lane in range(32):
            row, column = lane // 4, lane % 4 * 2
            straight = matrices[:, row, column] | matrices[:, row, column + 1] << 16
            transposed = matrices[:, column, row] | matrices[:, column + 1, row] << 16
            np.testing.assert_array_equal(out[lane], [*straight, *transposed])


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_mma(program: Program, rng: np.random.Generator, element: str) -> None:
    a, b = (bits(rng.standard_normal(shape).astype(np.float32), element) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    given = np.zeros((32, 10), np.uint32)
    positions = []
    for lane in range(32):  # the PTX ISA's figures for mma.m16n8k16 with 16-bit elements
        group, quad = lane // 4, lane % 4 * 2
        for i in range(4):
            row, column = group + i % 2 * 8, quad + i // 2 * 8
            given[lane, i] = int(a[row, column]) | int(a[row, column + 1]) << 16
        for i in range(2):
            given[lane, 4 + i] = int(b[quad + i * 8, group]) | int(b[quad + i * 8 + 1, group]) << 16
        where = [(group + i // 2 * 8, quad + i % 2) for i in range(4)]
        given[lane, 6:] = np.array([c[at] for at in where]).view(np.uint32)
        positions += where
    out = program.result(f"mma_{element}", given, 32 * 16).words(np.float32)
    expected = c.astype(np.float64) + floats(a, element).astype(np.float64) @ floats(b, element).astype(np.float64)
    # 16 exact products summed in float32: a few units in the last place of the largest partial sum.
    np.testing.assert_allclose(out, [expected[at] for at in positions], atol=1e-5)


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_conversions(program: Program, rng: np.random.Generator, element: str) -> None:
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        65504,
        65519.99,
        65520,
        65536,
        1e38,
        3.4e38,
        2**-14,
        2**-24,
        2**-25,
        2**-25 * 1.01,
        1e-45,
        1 + 2**-11,
    ]
    edges += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, 0.1, -126.0, -126.5, -127.0, -1e30, 127.9, 128.0]
    scattered = rng.standard_normal(20000) * 2.0 ** rng.integers(-30, 20, 20000)
    x = np.concatenate([edges, scattered]).astype(np.float32)
    out = program.result(f"convert_{element}", x, x.size * 24, x.size, block=64).words(np.uint32).reshape(-1, 6)
    expected = bits(x, element)
    np.testing.assert_array_equal(out[:, 0], expected)
    np.testing.assert_array_equal(out[:, 1], expected | (expected ^ 0x8000).astype(np.uint32) << 16)
    np.testing.assert_array_equal(out[:, 2].view(np.float32), floats(expected, element))
    np.testing.assert_array_equal(out[:, 3].view(np.float32), -floats(expected, element))
    with np.errstate(over="ignore"):
        power = np.exp2(x.astype(np.float64)).astype(np.float32)
    power[power < np.finfo(np.float32).tiny] = 0
    np.testing.assert_allclose(out[:, 4].view(np.float32), power, rtol=2e-7)
    # Never the exact one: who needs more than the hardware promises is found out.
    with np.errstate(divide="ignore"):
        exact = np.float32(1) / x
    normal = np.isfinite(exact) & (np.abs(exact) > np.finfo(np.float32).tiny * 2)
    reciprocal, exact = out[normal, 5].view(np.float32), exact[normal]
    np.testing.assert_array_max_ulp(reciprocal, exact, maxulp=1)
    assert (reciprocal != exact).all()


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_a_nan_stays_one(program: Program, element: str) -> None:
    x = np.array([0x7FC00000, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    out = program.result(f"convert_{element}", x, 72, 3).words(np.uint32).reshape(3, 6)
    assert (out[:, 0] == 0x7FFF).all()
    assert np.isnan(out[:, 2:].view(np.float32)).all()


def test_collectives(program: Program, rng: np.random.Generator) -> None:
    x = rng.integers(100, 1000, 96).astype(np.int32)
    for outcome in program.launch("collectives", x, 96 * 44, block=96, seeds=5):
        assert not outcome.error
        out = outcome.words().reshape(3, 32, 11)
        for warp, own in enumerate(x.reshape(3, 32)):
            lane = np.arange(32)
            odd = own & 1
            votes = int((odd.astype(np.uint64) << lane.astype(np.uint64)).sum())
            lowest = int(np.argmax(odd)) + 1 if odd.any() else 0
            expected = [
                own[lane * 7 % 32],
                own[lane ^ 5],
                np.where(lane < 3, own, own[lane - 3]),
                own[lane ^ 16],
                own[31],
                np.uint32(votes).astype(np.int32),
            ]
            expected += [lowest, odd.sum(), (own - 500).sum(), (own - 1000).max()]
            expected.append(np.bitwise_or.reduce(own << 22))
            for i, column in enumerate(expected):
                np.testing.assert_array_equal(out[warp, :, i], column, err_msg=f"result {i} of warp {warp}")


# -- who must wait for whom


def test_shared_memory_is_nan_when_a_block_starts(program: Program) -> None:
    assert (program.result("fresh_memory", np.zeros(1), 256, grid_x=2, shared=128).words() == -1).all()


@pytest.mark.parametrize("missing", [0, 1])
def test_barrier(program: Program, rng: np.random.Generator, missing: int) -> None:
    x = rng.standard_normal(256).astype(np.float32)
    outcomes = program.launch("reverse_block", x, 1024, missing, grid_x=2, block=256, shared=1024, seed=1, seeds=SEEDS)
    judge(program, outcomes, x[::-1], right=not missing)


@pytest.mark.parametrize("missing", [0, 1])
def test_syncwarp(program: Program, rng: np.random.Generator, missing: int) -> None:
    x = rng.standard_normal(64).astype(np.float32)
    outcomes = program.launch("reverse_warp", x, 256, missing, block=64, shared=256, seed=1, seeds=SEEDS)
    judge(program, outcomes, x.reshape(2, 32)[:, ::-1].ravel(), right=not missing)


@pytest.mark.parametrize("missing", [(0, 0), (1, 0), (0, 1)], ids=["none", "before the reads", "after the reads"])
def test_named_barriers(program: Program, missing: tuple[int, int]) -> None:
    x = np.arange(4 * 256, dtype=np.float32).reshape(4, 2, 128)
    outcomes = program.launch("two_groups", x, 1024, *missing, block=256, shared=1024, seed=1, seeds=SEEDS)
    judge(program, outcomes, x.sum((0, 2)).repeat(128), right=missing == (0, 0))


@pytest.mark.parametrize("missing", [(0, 0), (1, 0), (0, 1)], ids=["none", "wait", "barrier"])
def test_pipeline_of_copies(program: Program, rng: np.random.Generator, missing: tuple[int, int]) -> None:
    x = rng.standard_normal((6, 256, 4)).astype(np.float32)
    outcomes = program.launch("pipeline", x, x.nbytes, *missing, 6, block=256, shared=8192, seed=1, seeds=SEEDS)
    judge(program, outcomes, np.roll(x, -1, axis=1).ravel(), right=missing == (0, 0))


def test_a_copy_is_poison_until_its_group_was_waited_for(program: Program) -> None:
    x = np.arange(10, 58, dtype=np.uint8)
    poison, zeros, late = np.full(16, 255), np.zeros(16), np.concatenate([[200], x[33:]])
    look = program.build != "races"  # it would not let us look
    out = program.result("copy_groups", x, 4 * 48, int(look), shared=48).out.reshape(4, 48)
    if look:
        np.testing.assert_array_equal(out[0], np.concatenate([poison, poison, poison]))
        np.testing.assert_array_equal(out[1], np.concatenate([x[:16], poison, poison]))
        np.testing.assert_array_equal(out[2], np.concatenate([x[:16], zeros, poison]))
    else:
        assert "cp.async in flight" in program.error("copy_groups", 1, shared=48)
    np.testing.assert_array_equal(out[3], np.concatenate([x[:16], zeros, late]))


def test_ldmatrix_of_a_copy_in_flight(program: Program) -> None:
    assert not program.error("copy_then_ldmatrix", 0, shared=512)
    assert "ldmatrix at line" in program.error("copy_then_ldmatrix", 1, shared=512)


def test_a_copy_over_rows_that_are_being_read(program: Program) -> None:
    # In the plain order the read comes first and the result is right; it is a race all the same.
    assert not program.error("ldmatrix_then_copy", 0, block=64, shared=512)
    error = program.error("ldmatrix_then_copy", 1, block=64, shared=512)
    assert "race at offset 0 of shared memory: cp.async in flight" in error and "against ldmatrix" in error


def test_copies_that_nobody_waited_for_end_with_their_block(program: Program) -> None:
    outcome = program.result("abandoned_copies", np.zeros(16, np.uint8), 512, grid_x=2, shared=512)
    assert (outcome.words() == 5).all()


def test_a_store_over_what_several_lanes_have_read(program: Program) -> None:
    assert not program.error("read_then_write", 0, shared=4)
    error = program.error("read_then_write", 1, shared=4)
    if (
        program.build == "races"
    ):  # no order of execution makes it wrong for sure; the lane that stores was the last to read
        assert "store after line" in error and "in several lanes of a warp" in error


def test_a_barrier_orders_only_those_who_met_there(program: Program) -> None:
    error = program.error("barrier_used_again", block=128, shared=4)
    if program.build == "races":  # in the plain order the result is right
        assert "load after line" in error and "in thread 64, against store after line" in error


def test_neighbouring_halves_of_a_word_are_no_race(program: Program) -> None:
    for outcome in program.launch("own_halves", np.zeros(1), 128, shared=64, seeds=5):
        assert not outcome.error and (outcome.words(np.float32) == 1).all()


# -- what is refused


OUTSIDE = "outside the block's 1024 bytes of shared memory"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 1025), f"shared_address at line {{}}: offset 1025, size 0: {OUTSIDE}"),
        ((0, -1), f"offset -1, size 0: {OUTSIDE}"),
        ((1, 1024), f"ldmatrix_x4 at line {{}}: offset 1024, size 16: {OUTSIDE}"),
        ((2, 1009), f"ldmatrix_x4_trans at line {{}}: offset 1009, size 16: {OUTSIDE}"),
        ((4, 1024, 16), f"cp_async_16 at line {{}}: offset 1024, size 16: {OUTSIDE}"),
        ((1, 8), "ldmatrix_x4 at line {}: offset 8 is not a multiple of 16 bytes"),
        ((4, 24, 0), "offset 24 is not a multiple of 16 bytes"),
        ((4, 16, 8), "8 bytes: must be 0 or 16"),
        ((5, 4), "is not a multiple of 16"),
        ((6, 0, 0xFFFF), "__shfl_sync at line {}: mask 0000ffff, width 32: only the whole warp"),
        ((7, 0, 1), "__ballot_sync at line {}: mask 00000001: only the whole warp"),
        ((8, 0, 3), "__syncwarp at line {}: mask 00000003: only the whole warp"),
        ((3, 0, 7), "__reduce_or_sync at line {}: mask 00000007: only the whole warp"),
        ((13, 0, 7), "__reduce_add_sync at line {}: mask 00000007: only the whole warp"),
        ((14, 0, 7), "__reduce_max_sync at line {}: mask 00000007: only the whole warp"),
        ((9, 16, 64), "there is no barrier 16"),
        ((9, 1, 48), "barrier 1 for 48 threads: not a multiple of a warp"),
        ((9, 1, 96), "barrier 1 for 96 threads: the block has 64"),
        ((10,), "the lanes of a warp name different barriers"),
    ],
)
def test_bad_arguments(program: Program, arguments: tuple[int, ...], expected: str) -> None:
    source = SOURCE.read_text().splitlines()
    line = source.index(f"    case {arguments[0]}:") + 2
    for seed in (0, 9):
        error = program.error("bad_argument", *arguments, block=64, shared=1024, seed=seed)
        assert expected.format(line) in error
        assert error.startswith("block (0,0) thread ") and error.endswith(f"(seed {seed})")
        if arguments[0] in (0, 1, 2, 4) and arguments[1] != 16:
            assert "thread 5:" in error


@pytest.mark.parametrize("offset", [-1, -128, 1024, 1500])
def test_a_store_beside_shared_memory(program: Program, offset: int) -> None:
    done = program.start("bad_argument", np.zeros(16), 16, 11, offset, shared=1024)
    if program.build == "sanitized":
        assert done.returncode != 0 and "use-after-poison" in done.stderr
    else:
        assert f"block (0,0): a store hit offset {offset}, {OUTSIDE}" in done.stdout


def test_a_misaligned_vector(program: Program) -> None:
    done = program.start("bad_argument", np.zeros(16), 16, 12, 8, shared=1024)
    assert ("misaligned address" in done.stderr) == (program.build == "sanitized")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0,), "deadlock; barrier 0: 64 of 96 threads (warps 00000005) wait at __syncthreads, line"),
        ((1,), "deadlock; barrier 2: 64 of 96 threads (warps 00000005) wait at barrier_sync"),
        ((2,), "deadlock; barrier 1: 32 of 64 threads (warps 00000001)"),
        ((3,), "barrier 1 for"),
        ((4,), "the warp diverged"),
        ((5,), "the warp diverged"),
        ((6, 7), "but lanes 00000080 have returned"),
        ((6, 31), "but lanes 80000000 have returned"),  # the last to run, in the plain order
        ((7,), "other warps"),
    ],
)
def test_threads_that_never_meet(program: Program, arguments: tuple[int, ...], expected: str) -> None:
    for outcome in program.launch("never_meet", np.zeros(1), 1, *arguments, block=96, seeds=5):
        assert expected in outcome.error


def test_abandoned_stacks_are_used_again(program: Program) -> None:
    """The launches of one process share stacks, also those that a failed one left in the middle of a kernel."""
    outcomes = program.launch("never_meet", np.zeros(1), 1, 6, 7, block=96, seeds=50)
    assert len({outcome.error.split("(seed")[1] for outcome in outcomes}) == 50


@pytest.mark.parametrize(
    "shape", [{"block": 48}, {"block": 0}, {"block": 2048}, {"grid_x": 0}, {"grid_y": 70000}, {"shared": -1}]
)
def test_impossible_shapes(program: Program, shape: dict[str, int]) -> None:
    assert program.error("busy", **shape)


def test_an_unknown_kernel(program: Program) -> None:
    assert program.error("nothing") == "there is no kernel nothing"


# -- the order


def test_the_order_is_the_seeds(program: Program) -> None:
    steps, blocks, warps = 12, 4, 4
    length = steps * blocks * warps * 32

    def orders(seed: int, seeds: int) -> np.ndarray:
        """(seeds, blocks, steps * warps, 32): which threads ran, in this order, as block * 1000 + thread."""
        outcomes = program.launch(
            "order", np.zeros(1), 4 + 4 * length, grid_x=blocks, block=128, seed=seed, seeds=seeds
        )
        words = np.stack([outcome.words() for outcome in outcomes])
        assert (words[:, 0] == length).all()
        return words[:, 1:].reshape(seeds, blocks, steps * warps, 32)

    everything = orders(0, 1 + SEEDS)
    np.testing.assert_array_equal(everything[1:], orders(1, SEEDS))
    block, warp, lane = everything // 1000, everything % 1000 // 32, everything % 1000 % 32
    # Whatever the seed: one block after the other, and a warp's lanes one after the other.
    assert (
        (block == block[:, :, :1, :1]).all()
        and (warp == warp[..., :1]).all()
        and (np.sort(lane) == np.arange(32)).all()
    )
    # Seed 0: in order, each warp until something stops it.
    assert block[0, :, 0, 0].tolist() == [0, 1, 2, 3]
    assert (warp[0, ..., 0] == np.arange(warps).repeat(steps)).all() and (lane[0] == np.arange(32)).all()
    # Other seeds: other orders of blocks and lanes; of warps, now a fine interleaving, now one that runs far ahead.
    assert len({tuple(order) for order in block[1:, :, 0, 0]}) > SEEDS / 3
    assert len({tuple(order) for order in lane[1:].reshape(-1, 32)}) > 500
    changes = (np.diff(warp[1:, ..., 0]) != 0).sum(-1)
    assert changes.max() > 25 and changes.min() < 8


# -- as a library


def test_the_library(tmp_path: Path) -> None:
    flags = [*FLAGS, source_flag(SOURCE), "-O1", "-shared"]
    run(["g++", *flags, REPO / "kernels/host/launch.cpp", "-o", tmp_path / "host.so"])
    host = ctypes.CDLL(str(tmp_path / "host.so"))
    assert host.kdtree_host_params_size() == 32
    out = np.full((32, 8), -1, np.int32)
    params = np.zeros(4, np.uint64)
    params[1] = out.ctypes.data

    def launch(kernel: bytes, error_bytes: int = 1024) -> tuple[int, bytes]:
        message = ctypes.create_string_buffer(error_bytes)
        seed = ctypes.c_ulonglong(2**63)
        pointer = ctypes.c_void_p(params.ctypes.data)
        return host.kdtree_host_launch(kernel, 1, 1, 32, 1, pointer, seed, message, error_bytes), message.value

    assert launch(b"nothing") == (1, b"there is no kernel nothing")
    assert launch(b"nothing", 12) == (1, b"there is no")
    params[2] = 6 | 7 << 32  # never_meet, the case of a lane that has returned
    failed, message = launch(b"never_meet")
    assert failed == 1 and message.endswith(b"have returned (seed 9223372036854775808)")
    assert launch(b"indices") == (0, b"")
    assert out[:, 0].tolist() == list(range(32))
    # A "unique" symbol is shared by all libraries of a process, whichever was loaded first.
    symbols = subprocess.run(["nm", "-C", tmp_path / "host.so"], capture_output=True, text=True).stdout.splitlines()
    assert not [line for line in symbols if " u host::" in line]


def test_speed(program: Program) -> None:
    """Eight warps at 109 collectives a round: about 1 ms. The bound allows for a busy machine and finds a blunder."""
    if program.build != "plain":
        pytest.skip("the other builds are not for speed")
    start = time.perf_counter()
    program.result("busy", np.zeros(1), 1024, 50, block=256, shared=512)
    assert (time.perf_counter() - start) / 50 < 0.02
