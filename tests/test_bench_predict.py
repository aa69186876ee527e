"""The paper model of `bench --predict`: its counts against numbers worked out by hand and against the kernel itself,
its constants against a run made up from known ones.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdtree_patch import bench, bench_predict, bench_report
from kdtree_patch.bench_predict import GPUS, PORTABLE, REFERENCES, Counts, Gpu, Model, count, deal
from kdtree_patch.bench_shapes import SHAPES, Shape, moved_bytes
from kdtree_patch.compile import cached_binary
from kdtree_patch.exits import NotDone
from tests.support.bench import RUN, Command, bench_command, stored
from tests.support.cases import host_kernel, make_case

PAPER = Gpu("Paper", 4, 1.0, 4.0, 2, "made up")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return bench_command(monkeypatch, capsys)


@pytest.fixture
def forty_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 keys, 72 rows cut into two blocks of 40: what the numbers below were worked out with."""
    cut = SimpleNamespace(row_blocks=2, rows_per_block=40, variant=SimpleNamespace(rows=40))
    monkeypatch.setattr(bench_predict, "PORTABLE", SimpleNamespace(tile_keys=32, cut_rows=lambda q_len, heads: cut))


# -------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    "bs, row_blocks, item_tiles, workers, short, dealt",
    [
        (1, 2, 33, 4, False, (17, 4)),  # a line each, of 33 tiles for two workers
        (1, 2, 33, 5, False, (14, 6)),  # a line each would leave one of five idle: 66 tiles, cut where they may
        (3, 1, 4, 2, False, (6, 2)),  # 12 tiles: the item in the middle is cut in half, the others are whole
        (2, 2, 5, 16, False, (2, 16)),  # four lines of four workers, for five tiles
        (3, 2, 5, 4, False, (8, 4)),  # two lines of 15 tiles for two workers: the second request of each is cut
        (4, 1, 3, 4, False, (3, 0)),  # one item each
        (1, 1, 2, 8, False, (1, 2)),  # never more workers than tiles
        (5, 1, 2, 2, True, (6, 0)),  # short ones are dealt out whole: three for one worker, two for the other
    ],
)
def test_tiles_are_dealt_out(
    bs: int, row_blocks: int, item_tiles: int, workers: int, short: bool, dealt: tuple[int, int]
) -> None:
    assert deal(bs, row_blocks, item_tiles, workers, short) == dealt


def test_tiles_are_dealt_out_as_the_kernel_does() -> None:
    """The kernel's own table of cut items, from the CPU build: which workers share which item."""
    library, rnd = cached_binary("host"), random.Random(3)
    for _ in range(40):
        bs, workers = rnd.randint(1, 4), rnd.randint(1, 17)
        q_len, heads = rnd.choice([(2, 8), (9, 8), (3, 16), (5, 9)])
        prefix = rnd.choice([1, 31, 31, 32, 65, 130])
        kernel = host_kernel(library, workers=workers)
        make_case([prefix] * bs, q_len, heads).launch(kernel)
        cut = PORTABLE.cut_rows(q_len, heads)
        item_tiles = -(-(prefix + q_len) // PORTABLE.tile_keys)
        items = bs * cut.row_blocks
        rows = kernel.cut_items.view(workers, 4)[: min(items, workers)].tolist()
        partials = sum(last - first + 1 for _, first, last, _ in rows if last > first)
        assert deal(bs, cut.row_blocks, item_tiles, workers, prefix < PORTABLE.tile_keys)[1] == partials, (
            bs,
            q_len,
            heads,
            prefix,
            workers,
        )


def test_counts_of_a_call(forty_rows: None) -> None:
    """By hand: 1,033 keys are 33 tiles, two row blocks of them on four multiprocessors."""
    shape = Shape(1, 9, 8, 1024)
    assert count(shape, PAPER) == Counts(
        tiles=17,
        tile_operations=32 * 40 * 2176,
        cut=True,
        memory_bytes=1033 * 1152 + 72 * 2176,
        # Each key for both row blocks; four partial results of 40 rows, 512 numbers and two more each, out and in.
        l2_bytes=2 * 1033 * 1152 + 2 * 4 * 40 * (512 * 4 + 8),
    )


def test_keys_that_do_not_fit_into_l2_are_read_again(forty_rows: None) -> None:
    """One multiprocessor goes through both row blocks of 4,105 keys, 4.7 MB: from L2 if it holds them, else twice."""
    shape, keys = Shape(1, 9, 8, 4096), 4105 * 1152
    large, small = (Gpu("Paper", 1, 1.0, 1.0, mib, "made up") for mib in (5, 4))
    assert count(shape, large).memory_bytes == moved_bytes(shape)
    assert count(shape, small).memory_bytes == moved_bytes(shape) + keys


def test_row_blocks_at_the_same_time_read_memory_once(forty_rows: None) -> None:
    """Each on a multiprocessor of its own, the two row blocks keep step, and the second finds the keys in L2."""
    shape = Shape(1, 9, 8, 4096)
    assert count(shape, Gpu("Paper", 2, 1.0, 1.0, 1, "made up")).memory_bytes == moved_bytes(shape)


# ---------------------------------------------------------------------------------------------------------------- time

MODEL = Model(start_us=10.0, combine_us=2.0, tensor_fraction=0.5, memory_fraction=0.8)


def test_time_bound_by_tensor_cores(forty_rows: None) -> None:
    """17 tiles of 2,785,280 operations at half of 1 TFLOP/s: 94.70 us. 1,346,688 bytes at 0.8 TB/s: 1.68 us."""
    us, bound = MODEL.us(count(Shape(1, 9, 8, 1024), PAPER), PAPER)
    assert (us, bound) == (pytest.approx(10 + 2 + 94.69952), "tensor")


def test_time_bound_by_memory() -> None:
    counts = Counts(tiles=1, tile_operations=10**6, cut=False, memory_bytes=80_000_000, l2_bytes=0)
    # 80 MB at 0.8 TB/s are 100 us; a tile is 2 us, and nothing has to be combined.
    assert MODEL.us(counts, PAPER) == (pytest.approx(110.0), "memory")


def test_measured_rate_takes_the_place_of_the_public_one() -> None:
    counts = Counts(tiles=4, tile_operations=10**6, cut=False, memory_bytes=0, l2_bytes=0)
    # 4 million operations at half of 8 / 4 TFLOP/s.
    assert MODEL.us(counts, PAPER, tflops=8.0)[0] == pytest.approx(14.0)


# ----------------------------------------------------------------------------------------------------------------- fit


def a_run(model: Model, rate: float = 600.0) -> dict[str, Any]:
    """A run whose rows took exactly as long as the model says."""
    gpu = REFERENCES["NVIDIA H200"]
    rows = [
        dict(
            **dict(shape._asdict(), kv_dtype="bfloat16", config="portable", kernel_us=1.0, floor_us=1.0),
            **dict(stock_us=None, rel=0.0017, peers={}, kernel_cold_us=model.us(count(shape, gpu), gpu, rate)[0]),
        )
        for shape in SHAPES
    ]
    ceilings = dict(copy_tb_s=4.8 * model.memory_fraction, product_tflops=700, mma_sync_tflops=rate)
    return dict(meta=RUN["meta"] | dict(ceilings=ceilings), rows=rows)


def test_constants_are_found_again() -> None:
    made = Model(start_us=15.0, combine_us=4.0, tensor_fraction=0.4, memory_fraction=0.9)
    found, gpu, rate = bench_predict.fit(a_run(made))
    assert vars(found) == {name: pytest.approx(value, rel=1e-6) for name, value in vars(made).items()}
    assert (gpu.name, rate) == ("H200", 600.0)


def test_only_portable_rows_count() -> None:
    run = a_run(MODEL)
    other = [row | {"config": "hopper", "kernel_cold_us": 1.0} for row in run["rows"]]
    fp8 = [row | {"kv_dtype": "float8_e4m3fn", "kernel_cold_us": 1.0} for row in run["rows"]]
    found, _, _ = bench_predict.fit(run | {"rows": [*other, *run["rows"], *fp8]})
    assert vars(found) == {name: pytest.approx(value, rel=1e-6) for name, value in vars(MODEL).items()}


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_too_few_rows_are_no_model(rows: int) -> None:
    run = a_run(MODEL)
    run["rows"] = run["rows"][:rows]
    with pytest.raises(NotDone, match=rf"the run's {rows} rows of the configuration portable do not determine"):
        bench_predict.fit(run)


def test_run_of_an_unknown_gpu_is_no_reference() -> None:
    run = a_run(MODEL)
    run["meta"]["gpu"] = "NVIDIA Paper"
    with pytest.raises(
        NotDone,
        match="the run is of a NVIDIA Paper; nothing has been done: predictions can start from one of NVIDIA H200",
    ):
        bench_predict.fit(run)


def test_run_without_the_mma_sync_rate_is_no_reference() -> None:
    run = a_run(MODEL)
    del run["meta"]["ceilings"]["mma_sync_tflops"]
    with pytest.raises(NotDone, match="no mma_sync_tflops among its ceilings"):
        bench_predict.fit(run)


# ------------------------------------------------------------------------------------------------------------- command


def test_prediction_is_labelled_and_complete(command: Command, tmp_path: Path) -> None:
    run = a_run(MODEL)
    run["rows"][4]["kernel_cold_us"] *= 1.2  # a row that the model does not fit
    path = tmp_path / "f.json"
    status, output, error = command("--predict", "--from", stored(tmp_path, run), "--json", path)
    assert (status, error) == (0, "")
    document = json.loads(path.read_text())
    assert document["meta"]["kind"] == "prediction"
    assert document["meta"]["reference"]["gpu"] == "NVIDIA H200"
    assert [(row["gpu"], bench_report.shape_of(row)) for row in document["rows"]] == [
        (gpu.name, shape) for gpu in GPUS for shape in SHAPES
    ]
    assert all(0 < row["floor_us"] < row["predicted_us"] for row in document["rows"])
    assert not any(name in row for row in document["rows"] for name in ("kernel_us", "kernel_cold_us"))
    assert "PREDICTION, not a measurement" in output
    off = [abs(row["off_percent"]) for row in document["check"]]
    assert len(off) == 12 and max(off) == off[4] > 10
    assert f"off by {sorted(off)[6]:.1f} % in the median and {off[4]:.1f} % at worst" in output
    for gpu in GPUS:
        assert gpu.name in output and gpu.source.split()[0] in output


def test_prediction_of_other_shapes(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    source = stored(tmp_path, a_run(MODEL))
    assert command("--predict", "--from", source, "--shapes", "4,17,8,30000", "--json", path)[0] == 0
    assert {bench_report.shape_of(row) for row in json.loads(path.read_text())["rows"]} == {Shape(4, 17, 8, 30000)}


def test_prediction_is_no_run(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    assert command("--predict", "--from", stored(tmp_path, a_run(MODEL)), "--json", path)[0] == 0
    for words in (["--from", path], ["--predict", "--from", path]):
        status, _, error = command(*words)
        assert status == 2 and "is not a run of the benchmark: it is a prediction" in error


def test_committed_run_predicts_or_says_what_it_lacks(command: Command) -> None:
    run = bench_report.read_run(bench.REFERENCE_RUN)
    status, output, error = command("--predict")
    if "mma_sync_tflops" in run["meta"]["ceilings"]:
        assert (status, error) == (0, "") and "PREDICTION" in output
    else:
        assert status == 2 and "h200.json: the run has no mma_sync_tflops" in error and "make it again" in error


def test_model_is_close_to_the_committed_run() -> None:
    """The H200's own rows, with a rate put in where the run has none: it scales a constant and moves no time there."""
    run = bench_report.read_run(bench.REFERENCE_RUN)
    run["meta"]["ceilings"].setdefault("mma_sync_tflops", 600)
    off = sorted(abs(row["off_percent"]) for row in bench_predict.predict(run, SHAPES)["check"])
    assert off[len(off) // 2] < 5 and off[-1] < 15
