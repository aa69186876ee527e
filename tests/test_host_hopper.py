"""Hopper's primitives for the CPU (kernels/host/hopper.h): they compute what PTX says, and are as strict as they claim.

The little kernels of data/host_hopper_kernels.cu run in the four builds of support/host_program.py. Where a kernel is
wrong because somebody does not wait, every order of execution must show it: what is on its way is NaN until somebody
has waited for it, in every build.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.host_program import BUILDS, DATA, Outcome, Program, bits, floats, judge

SOURCE = DATA / "host_hopper_kernels.cu"
SEEDS = 12


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(request.param, SOURCE, tmp_path_factory.mktemp("hopper"))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# -- wgmma


@dataclass
class Layout:
    """Where element (mn, k) of an operand lies, relative to a multiple of 1024 bytes; PTX's canonical layouts."""

    mn_major: bool
    swizzled: bool
    start: int
    leading: int
    stride: int

    def offsets(self, rows: int) -> np.ndarray:
        """(rows, 16), in 16-bit elements."""
        mn, k = np.arange(rows)[:, None], np.arange(16)[None]
        if self.mn_major and self.swizzled:
            at = mn // 64 * self.leading + k // 8 * self.stride + k % 8 * 128 + mn % 64 * 2
        elif self.mn_major:
            at = mn // 8 * self.stride + k // 8 * self.leading + k % 8 * 16 + mn % 8 * 2
        elif self.swizzled:
            at = mn // 8 * self.stride + mn % 8 * 128 + k * 2
        else:
            at = mn // 8 * self.stride + mn % 8 * 16 + k // 8 * self.leading + k % 8 * 2
        at = at + self.start
        return (at ^ (at >> 7 & 7) << 4 if self.swizzled else at) // 2


def layouts(mn_major: bool, swizzled: bool, columns: int) -> tuple[Layout, Layout]:
    """Of a and of b behind it, with gaps, so that no field can stand in for another."""
    if mn_major and swizzled:
        # k advances to the third group of 8 in a; b begins at its 65th column, if it has no more than 64.
        a = Layout(True, True, 2048, 1 << 14, 1024)
        return a, Layout(True, True, 8192, 4096, 2048)
    if mn_major:
        return Layout(True, False, 16, 1280, 144), Layout(True, False, 4096, 128, 272)
    if swizzled:
        # k advances by 32 bytes in a, by 64 in b.
        return Layout(False, True, 32, 16, 2048), Layout(False, True, 16384 + 64, 0, 1024)
    return Layout(False, False, 48, 2048, 160), Layout(False, False, 8192, 144, 320)


@pytest.mark.parametrize("columns", [8, 16, 40, 64, 72])
@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "plain"])
@pytest.mark.parametrize("mn_major", [False, True], ids=["k_major", "mn_major"])
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_wgmma(
    program: Program, rng: np.random.Generator, element: str, mn_major: bool, swizzled: bool, columns: int
) -> None:
    a, b = (bits(rng.standard_normal((size, 16)).astype(np.float32), element) for size in (64, columns))
    layout_a, layout_b = layouts(mn_major, swizzled, columns)
    image = np.full(1 << 14, 0x7FFF, np.uint16)  # NaN
    for layout, matrix in ((layout_a, a), (layout_b, b)):
        at = layout.offsets(len(matrix))
        assert (image[at] == 0x7FFF).all(), "the operands of this test overlap"
        assert len(np.unique(at)) == at.size
        image[at] = matrix
    c = rng.standard_normal((64, columns)).astype(np.float32)
    words = [image.nbytes, layout_a.start, layout_a.leading, layout_a.stride]
    words += [layout_b.start, layout_b.leading, layout_b.stride, int(swizzled)]
    row, column = registers(columns)
    given = [np.array(words, np.int32), c[row, column].ravel(), image]
    name = f"wgmma_{element}_{columns // 8}" + "_transposed" * mn_major
    expected = c.astype(np.float64) + floats(a, element).astype(np.float64) @ floats(b, element).astype(np.float64).T
    everything = np.concatenate([x.view(np.uint8) for x in given])
    for seed in (0, 5):
        out = program.result(name, everything, c.nbytes, block=128, shared=image.nbytes + 1024, seed=seed)
        # 16 exact products summed in float32, and c: a few units in the last place of the largest partial sum.
        np.testing.assert_allclose(out.words(np.float32).reshape(row.shape), expected[row, column], atol=1e-5)


def registers(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of d[n][i] of each thread, as the PTX ISA's figure for wgmma .m64nNk16 has them."""
    thread, n, i = np.arange(128)[:, None, None], np.arange(columns // 8)[:, None], np.arange(4)
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 * 8 + 0 * n
    return row, 8 * n + thread % 4 * 2 + i % 2


def swizzled_tiles(x: np.ndarray) -> np.ndarray:
    """(..., 64, 64) elements as bytes, each tile K-major with the 128-byte swizzle."""
    steps = [Layout(False, True, step * 32, 0, 1024).offsets(64) for step in range(4)]
    at = np.concatenate(steps, axis=1)
    out = np.empty((*x.shape[:-2], 4096), np.uint16)
    out[..., at] = x
    return out.view(np.uint8)


def products(rng: np.random.Generator, tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of tiles as they lie in memory, and the sum of their products as the registers have it."""
    x = bits(rng.integers(-4, 5, (tiles, 2, 64, 64)).astype(np.float32), "bf16")
    values = floats(x, "bf16")
    total = (values[:, 0] @ values[:, 1].transpose(0, 2, 1)).sum(0)  # exact: small integers
    row, column = registers(64)
    return swizzled_tiles(x), total[row, column].ravel()


def test_movmatrix(program: Program, rng: np.random.Generator) -> None:
    matrix = rng.integers(0, 1 << 16, (8, 8), dtype=np.uint16)
    for outcome in program.launch("movmatrix", matrix, 128, seeds=4):
        assert not outcome.error
        np.testing.assert_array_equal(outcome.words(np.uint16).reshape(8, 8), matrix.T)


def test_vote(program: Program, rng: np.random.Generator) -> None:
    """Of a barrier that not the whole block comes to, again and again."""
    given = np.zeros((6, 2, 64), np.int32)
    for at in ((1, 0, 3), (2, 1, 63), (3, 0, 40), (3, 1, 0)):
        given[at] = 8
    for outcome in program.launch("vote", given, given.nbytes, 6, block=128, seeds=SEEDS):
        assert not outcome.error
        np.testing.assert_array_equal(outcome.words().reshape(6, 2, 64), given.any(-1)[..., None].repeat(64, -1))


def check(outcomes: list[Outcome], expected: np.ndarray, right: bool) -> None:
    wrong = [bool(o.error) or not np.array_equal(o.words(np.float32), expected) for o in outcomes]
    assert not any(wrong) if right else all(wrong), [o.error for o in outcomes]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (0, None),
        (1, "wgmma at line .*, after cp.async of line .*no fence_proxy_async between"),
        (2, "race at offset .*cp.async in flight of line .*, against wgmma at line|race .*wgmma at line"),
        (3, None),
        (4, None),
        (5, "race at offset .*cp.async in flight of line .*, against wgmma at line|race .*wgmma at line"),
        (6, "wgmma at line .*, after cp.async of line .*no fence_proxy_async between"),
        (7, "wgmma at line .*, after cp.async of line .*no fence_proxy_async between"),
        (8, None),
        (9, "wgmma at line .*, after cp.async of line .*no fence_proxy_async between"),
    ],
)
def test_wgmma_pipeline(program: Program, rng: np.random.Generator, fault: int, message: str | None) -> None:
    given, expected = products(rng, 6)
    shape = dict(block=384, shared=2 * 16384 + 1024 + 64, seed=1, seeds=SEEDS)
    outcomes = program.launch("wgmma_pipeline", given, 128 * 128, 6, fault, **shape)
    check(outcomes, expected, right=message is None)
    assert message is None or all(re.search(message, o.error) for o in outcomes), [o.error for o in outcomes]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (0, None),
        (1, "wgmma at line .* after store after line .* no fence_proxy_async"),
        (2, None),
        (3, "no fence_proxy_async"),
        (4, "race at offset .*wgmma at line"),
        (5, "race at offset .*store after line .* against wgmma at line"),
    ],
)
def test_wgmma_of_what_threads_stored(
    program: Program, rng: np.random.Generator, fault: int, message: str | None
) -> None:
    given, expected = products(rng, 1)
    shape = dict(block=128, shared=16384 + 1024, seed=1, seeds=SEEDS)
    outcomes = program.launch("wgmma_of_stores", given, 128 * 128, fault, **shape)
    if message is None:
        check(outcomes, expected, right=True)
    elif program.build == "races":
        assert all(re.search(message, o.error) for o in outcomes), [o.error for o in outcomes]
    elif fault in (4, 5):
        judge(program, outcomes, expected, right=False)


def test_accumulators_are_nan_until_they_are_waited_for(program: Program, rng: np.random.Generator) -> None:
    given, _ = products(rng, 1)
    outcome = program.result("wgmma_of_stores", given, 128 * 128, 6, block=128, shared=16384 + 1024)
    assert np.isnan(outcome.words(np.float32)).all()


# -- mbarriers and the copies that they count


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (0, None),
        (1, "cp.async in flight of line"),
        (2, "race at offset .*cp.async in flight|has had all 64 arrivals"),
        (3, "race at offset"),
        (4, "cp.async in flight of line"),
        (5, None),
        (6, None),
        (7, "race at offset"),
        (8, "race at offset"),
        (9, "race at offset .* of the mbarrier|no mbarrier was initialised"),
    ],
)
def test_pipeline_of_cp_async(program: Program, rng: np.random.Generator, fault: int, message: str | None) -> None:
    x = rng.standard_normal((7, 128, 4)).astype(np.float32)
    shape = dict(block=128, shared=128 + 4096, seed=1, seeds=SEEDS)
    outcomes = program.launch("copy_pipeline", x, x.nbytes, 7, fault, **shape)
    expected = np.roll(x, -1, axis=1).ravel()
    if message is None:
        check(outcomes, expected, right=True)
    elif program.build == "races" or fault == 9:
        assert all(re.search(message, o.error) for o in outcomes), [o.error for o in outcomes]
    elif fault not in (7, 8):  # in some orders the result is right
        check(outcomes, expected, right=False)


def test_parities(program: Program) -> None:
    for outcome in program.launch("parities", np.zeros(1), 128, block=32, shared=128, seeds=SEEDS):
        assert not outcome.error and (outcome.words() == 10).all()


# -- clusters


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (0, None),
        (1, "race at offset|has had all 1 arrivals"),
        (2, "race at offset .*cp.async in flight|has had all 1 arrivals"),
        (3, "."),
        (4, "race at offset"),
        (5, "race at offset .* of the mbarrier|no mbarrier was initialised"),
        (6, "deadlock.*1024 bytes missing|race at offset"),
    ],
)
def test_blocks_of_a_cluster(program: Program, rng: np.random.Generator, fault: int, message: str | None) -> None:
    """Four clusters; what is stored in another block is NaN there until somebody has waited for its bytes."""
    x = rng.standard_normal((6, 4, 2, 64, 4)).astype(np.float32)
    shape = dict(grid_x=8, block=64, shared=128 + 1024, seed=1, seeds=SEEDS)
    outcomes = program.launch("trade", x, x.nbytes, 6, fault, **shape)
    expected = np.roll(x[:, :, ::-1], -1, axis=3).ravel()
    if message is None:
        check(outcomes, expected, right=True)
    elif program.build == "races" or fault in (3, 5, 6):
        assert all(re.search(message, o.error) for o in outcomes), [o.error for o in outcomes]
    elif fault != 4:  # in some orders the result is right
        check(outcomes, expected, right=False)


def test_whether_a_phase_is_complete(program: Program) -> None:
    """Asking makes nothing wait, and who asks again and again is told in the end."""
    given = np.full(16, 7, np.int32)
    answers = set()
    for outcome in program.launch("tests_of_a_phase", given, 32, block=32, shared=64, seeds=SEEDS):
        before, too_early, after, landed, more, value = outcome.words()[:6]
        assert not outcome.error and (before, too_early, after, value) == (1, 0, 1, 7)
        assert landed or more >= 0
        answers.add(landed)
    assert answers == {0, 1}


# -- what is refused


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (0, "mbarrier_arrive at line {}: no mbarrier was initialised at offset 16"),
        (1, "mbarrier_init at line {}: offset 20 is not a multiple of 8 bytes"),
        (2, "mbarrier_init at line {}: 0 arrivals: must be 1 to 1048575"),
        (3, "mbarrier_init at line {}: offset 8 is an mbarrier already, initialised at line"),
        (4, "mbarrier_wait at line {}: parity 2: must be 0 or 1"),
        (5, "phase 0: 1 of 2 arrivals; 1 threads wait, thread 0 at line {}"),
        (6, "mbarrier_arrive at line {}: the mbarrier at offset 8 has had all 1 arrivals of phase 0"),
        (7, "mbarrier_arrive at line {}: something was written over the mbarrier at offset 8"),
        (8, "cp_async_mbarrier_arrive at line {}: the mbarrier at offset 8 has had all 1 arrivals of phase 0"),
        (9, "deadlock; barrier 3: 32 of 64 threads (warps 00000001) wait at barrier_sync, line {}"),
        (10, "set_max_registers_up at line {}: the warp has 256 registers a thread, cannot go up to 24"),
        (11, "warp 0 waits at set_max_registers_up, line {}"),
        (12, "set_max_registers_down at line {}: warp 4 is in no whole warpgroup"),
        (13, "wgmma_m64k16 at line {}: wgmma_fence is missing before the first wgmma of the warp"),
        (14, "another warp of the warpgroup has in its place wgmma_m64k16 at line {}"),
        (15, "wgmma_fence at line {}: warp 2 of the warpgroup never came there"),
        (16, "of a: bits that belong to no field are set"),
        (17, "of b: only swizzles of 128 bytes and none are supported"),
        (18, "of a: the pattern of the 128-byte swizzle does not start at a multiple of 1024 bytes"),
        (19, "of b: the operand leaves the 128 bytes of a row of the swizzle"),
        (20, "of a: the stride is not a multiple of the 1024 bytes that the swizzle repeats after"),
        (21, "wgmma_m64k16 at line {}: offset "),
        (22, "wgmma_m64k16 at line {}: the lanes of a warp have different descriptors"),
        (23, "wgmma at line {}: the warp has returned without a wgmma_wait that covers it"),
        (24, "wgmma_wait at line {}: accumulators were written to between wgmma and this wait"),
        (25, "wgmma_m64k16 at line {}: the accumulators have changed since wgmma_wait, with no wgmma_fence after it"),
        (26, "of a: only a base offset of 0 is supported"),
        (27, "wgmma at line {}: the warp has returned without a wgmma_wait that covers it"),
        (28, "mbarrier_wait at line {}: phase 0 was complete, and so was the next one before this thread had seen it"),
        (29, "barrier_sync_or at line {}: barrier 1 for 48 threads: not a multiple of a warp"),
        (30, "movmatrix_trans at line {}"),
        (31, "meet barrier 1 in barrier_sync"),
    ],
)
def test_misuse(program: Program, case: int, expected: str) -> None:
    lines = SOURCE.read_text().splitlines()
    start = lines.index(f"    case {case}:")
    end = lines.index("      break;", start)
    # Four warps that make a warpgroup, and one that is none; where those would be in the way, others.
    block = {10: 128, 11: 384}.get(case, 160)
    seeds = 1 if case == 28 else 4  # in other orders the thread comes when it is too late to wait
    for outcome in program.launch("misuse", np.zeros(64), 4, case, block=block, shared=10240, seeds=seeds):
        at = re.escape(expected).replace(re.escape("{}"), r"(\d+)")
        found = re.search(at, outcome.error)
        assert found, outcome.error
        assert all(start < int(line) <= end for line in found.groups()), (found.groups(), start, end)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (100, "map_address at line {}: there is no block 2 in the cluster"),
        (101, "store_async at line {}: [0-9a-f]+ is no address of another block of the cluster"),
        (102, "store_async at line {}: [0-9a-f]+ is no address of another block of the cluster"),
        (103, "mbarrier_arrive_remote at line {}: [0-9a-f]+ is no address of another block of the cluster"),
        (104, "mbarrier_arrive at line {}: offset .*: outside the block's 10240 bytes"),
        (105, "store_async at line {}: offset 20 is not a multiple of 8 bytes"),
        (106, "mbarrier_arrive_remote at line {}: no mbarrier was initialised at offset 8"),
        (107, "cluster_wait at line {}: the warp has not arrived at the barrier of the cluster"),
        (108, "cluster_arrive at line {}: the warp has arrived at the barrier of the cluster, but not waited for it"),
        (109, r"warp 0 waits at cluster_wait, line {}; warps that have returned: 00000000; block \(1,0\): deadlock"),
        (110, "mbarrier_arrive_expecting at line {}: -1 bytes: must be 0 to 1048575"),
        (111, "phase 0: 1 of 1 arrivals, 4 bytes missing; 1 threads wait, thread 0 at line {}"),
        (112, "mbarrier_test at line {}: parity 2: must be 0 or 1"),
    ],
)
def test_misuse_of_clusters(program: Program, case: int, expected: str) -> None:
    lines = SOURCE.read_text().splitlines()
    start = lines.index(f"    case {case}:")
    end = lines.index("      break;", start)
    shape = dict(grid_x=2, block=32, shared=10240, seeds=4)
    for outcome in program.launch("misuse_of_clusters", np.zeros(64), 4, case, **shape):
        found = re.search(expected.replace("{}", r"(\d+)"), outcome.error)
        assert found, outcome.error
        assert all(start < int(line) <= end for line in found.groups()), (found.groups(), start, end)


def test_a_grid_is_of_whole_clusters(program: Program) -> None:
    assert program.error("trade", 1, 0, grid_x=3) == "3 blocks along x in clusters of 2"


def test_speed(program: Program) -> None:
    """A wgmma of 64 x 72 takes a warpgroup about 0.1 ms. The bound allows for a busy machine and finds a blunder."""
    if program.build != "plain":
        pytest.skip("the other builds are not for speed")
    start = time.perf_counter()
    program.result("busy", np.zeros(1), 512, 400, block=128, shared=8192 + 9216 + 1024)
    assert (time.perf_counter() - start) / 400 < 0.0015
