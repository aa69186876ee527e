"""`python -m kdtree_patch bench` without a GPU: its arguments, its arithmetic, its files and tables, and the way a run
takes through them with the measurements stood in for.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from kdtree_patch import arguments, bench, bench_host, bench_measure, bench_peers, bench_report, bench_shapes, console
from kdtree_patch.bench_shapes import (
    PORTABLE_SHAPES,
    SHAPES,
    SWEEP,
    Shape,
    floor_us,
    moved_bytes,
    operations,
)
from kdtree_patch.compile import GPU_TARGETS, compile_cubin
from tests.fakes import FakeKernel
from tests.support.bench import RUN, Command, bench_command, run_once, stored
from tests.support.env import REPO
from tests.support.small_sources import kernels_folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return bench_command(monkeypatch, capsys)


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "words, says",
    [
        (["--shapes", "1,9,8"], "'1,9,8' is not bs,q_len,heads,prefix"),
        (["--shapes", "1,9,8,x"], "'1,9,8,x' is not bs,q_len,heads,prefix"),
        (["--shapes", "1,513,8,4096"], "q_len is 513, and must be from 1 to 512"),
        (["--shapes", "1,9,129,4096"], "heads is 129, and must be from 1 to 128"),
        (["--shapes", "0,9,8,4096"], "bs is 0, and must be 1 or more"),
        (["--shapes", "1,9,8,-1"], "prefix is -1, and must be 0 or more"),
        (["--shapes", "1,9,8,21", "--sweep"], "not allowed with argument"),
        (["--config", "fast"], "invalid choice: 'fast'"),
        (["--predict", "--host"], "not allowed with argument"),
        (["--plot", "picture.gif"], "picture.gif must end in one of .png, .svg, .pdf"),
        (["--json", "/nonexistent/f.json"], "there is no folder /nonexistent"),
        (["--predict", "--plot", "f.png"], "bench: --predict and --plot do not go together"),
        (["--predict", "--config", "hopper"], "--predict knows the portable configuration alone, not hopper"),
        (["--host", "--sweep"], "bench: --host and --sweep do not go together"),
        (["--host", "--from", "f"], "bench: --host and --from do not go together"),
        (["--from", "f", "--config", "portable"], "bench: --from without --predict and --config do not go together"),
        (["--from", "/nonexistent/f"], "bench: /nonexistent/f cannot be read: No such file or directory"),
        ([], "bench: torch sees no NVIDIA GPU here"),
    ],
    ids=str,
)
def test_wrong_usage_is_said_before_anything_runs(
    words: list[str], says: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, output, error = command(*words)
    assert (status, output) == (2, "")
    assert says in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "package, words", [("rich", ["--predict"]), ("matplotlib", ["--plot", "f.png", "--from", "f"])]
)
def test_missing_package_is_named(
    package: str, words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None if name == package else object())
    status, _, error = command(*words)
    assert status == 2
    assert f"the package {package} is needed" in error and f"pip install {package}" in error


def test_command_is_what_makes_the_figures_again() -> None:
    """The files that it writes are left out: their paths are of the machine alone."""
    parser = bench.argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    words = [
        "bench",
        "--json",
        "f.json",
        "--config",
        "portable",
        "--shapes",
        "1,9,8,21",
        "16,9,8,4096",
        "--plot",
        "f.png",
    ]
    said = bench.command_of(parser.parse_args(words))
    assert said == "python -m kdtree_patch bench --config portable --shapes 1,9,8,21 16,9,8,4096"
    assert bench.command_of(parser.parse_args(["bench", "--sweep"])) == "python -m kdtree_patch bench --sweep"


# --------------------------------------------------------------------------------------------------- bytes, operations


def test_bytes_and_operations_of_a_shape() -> None:
    """By hand: 2 requests, 3 drafts, 4 heads, prefix 10. 26 keys, 24 rows; a row is 576 numbers in and 512 out."""
    shape = Shape(2, 3, 4, 10)
    assert moved_bytes(shape) == 26 * 1152 + 24 * 2176 == 82_176
    assert operations(shape) == 2 * 3 * 4 * 13 * 2176 == 678_912


def test_fp8_pool_halves_the_cached_keys_alone() -> None:
    """The drafts' own keys stay at two bytes: 20 cached keys of 576 bytes, 6 draft keys of 1152."""
    assert moved_bytes(Shape(2, 3, 4, 10), "float8_e4m3fn") == 20 * 576 + 6 * 1152 + 24 * 2176


@pytest.mark.parametrize(
    "shape, floor",
    [
        ((1, 9, 8, 16384), 4.5),
        ((1, 9, 8, 131072), 35.4),
        ((16, 9, 8, 16384), 71.3),
        ((64, 9, 8, 4096), 73.2),
        ((1, 64, 8, 16384), 28.9),
        ((16, 9, 16, 8192), 64.7),
        ((16, 9, 128, 4096), 259.3),
        ((32, 4, 16, 8192), 71.8),
    ],
)
def test_floor_is_the_larger_of_memory_and_mma_sync(shape: tuple[int, ...], floor: float) -> None:
    """Floors worked out beforehand for a GPU of 4.27 TB/s and 635 TFLOP/s, some bound by one and some by the other."""
    assert floor_us(Shape(*shape), 4.27, 635) == pytest.approx(floor, abs=0.06)


def test_shapes_are_all_there() -> None:
    assert len(SHAPES) == 12 and len(PORTABLE_SHAPES) == 10 and set(PORTABLE_SHAPES) < set(SHAPES)
    assert {shape.bs for shape in SWEEP} == {1, 4, 16, 64}
    assert all(shape.bs * shape.prefix <= 2**20 for shape in SWEEP)


# --------------------------------------------------------------------------------------------------- the ceilings' loop


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_mma_loop_compiles_and_stays_in_registers(target: str, tmp_path: Path) -> None:
    source = (REPO / "kernels" / "ceilings.cu").read_text()
    (loop,) = compile_cubin(target, kernels_folder(tmp_path, source), tmp_path / "cache").kernels
    assert loop.name == "mma_sync_loop"
    assert (loop.spill_stores, loop.spill_loads, loop.stack) == (0, 0, 0)
    # Two blocks of 256 threads share the 65,536 registers of a multiprocessor.
    assert loop.registers <= 128


def test_mma_loop_is_counted_as_it_is_written() -> None:
    source = (REPO / "kernels" / "ceilings.cu").read_text()
    accumulators = re.search(r"kAccumulators = (\d+);", source)
    assert accumulators and int(accumulators[1]) == bench_measure.MMA_ACCUMULATORS
    assert f"__launch_bounds__({bench_measure.MMA_THREADS})" in source
    # 8 warps, 10 rounds, 8 products of 16 x 8 x 16.
    assert bench_measure.mma_operations_of_block(10) == 8 * 10 * 8 * 4096


# --------------------------------------------------------------------------------------------------------- stored runs


def test_committed_run_is_a_run_and_is_right() -> None:
    run = bench_report.read_run(bench.REFERENCE_RUN)
    assert run["rows"] and not any(map(bench_report.wrong, run["rows"]))


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    change(run)
    return run


@pytest.mark.parametrize(
    "run, says",
    [
        ([], "it has no meta and rows"),
        ({"meta": {}}, "it has no meta and rows"),
        (broken(lambda run: run["meta"].pop("ceilings")), "meta has no ceilings"),
        (broken(lambda run: run["meta"].update(kind="prediction")), "it is a prediction"),
        (broken(lambda run: run["rows"][1].pop("floor_us")), "rows[1] has no floor_us"),
        (broken(lambda run: run["rows"][2].update(kernel_cold_us="fast")), "rows[2] has 'fast' for kernel_cold_us"),
        (broken(lambda run: run["rows"][0].update(bs=True)), "rows[0] has True for bs"),
        (broken(lambda run: run["rows"].append(3)), "rows[3] is no object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_files_are_not_taken_for_runs(run: Any, says: str, command: Command, tmp_path: Path) -> None:
    path = stored(tmp_path, run)
    status, _, error = command("--from", path)
    assert status == 2 and error.startswith(f"bench: {path} is not a run of the benchmark: {says}; nothing has been ")


def test_file_that_is_not_json(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text("{")
    status, _, error = command("--from", path)
    assert status == 2 and error.startswith(f"bench: {path} is not JSON (") and "Traceback" not in error


def test_table_of_a_stored_run(command: Command, tmp_path: Path) -> None:
    status, output, error = command("--from", stored(tmp_path))
    assert (status, error) == (0, "")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0] == "NVIDIA H200: us a layer, cold (warm: graph replays)"
    assert lines[1] == "bs q_len heads prefix config stock fa2 ours warm floor % of floor times rel"
    # bs, q_len, heads, prefix, config, stock, fa2, ours, warm, floor, percent, times, rel
    assert lines[2] == "1 9 8 4096 portable 664.0 - 25.0 20.0 1.25 5 26.6 0.00170"
    assert lines[3] == "1 9 8 16384 portable 2,602.0 45.6 35.0 30.0 4.50 13 74.3 0.00170"
    assert lines[5] == "fa2: plain causal attention; they take no tree mask"
    assert lines[6] == "ceilings: copy 4.0 TB/s, bf16 product 700 TFLOP/s, mma.sync 600 TFLOP/s"


def test_peers_that_are_absent_are_no_columns(command: Command, tmp_path: Path) -> None:
    run = broken(lambda run: [row.update(peers={}) for row in run["rows"]])
    assert "fa2" not in command("--from", stored(tmp_path, run))[1]


@pytest.mark.parametrize("rel", [0.002, 1.07, None])
def test_wrong_result_is_a_finding(rel: float | None, command: Command, tmp_path: Path) -> None:
    run = broken(lambda run: run["rows"][1].update(rel=rel))
    status, output, error = command("--from", stored(tmp_path, run))
    assert status == 1
    assert error == f"bench: WRONG: 1,9,8,16384 portable: rel {rel} is not below 0.002\n"
    assert ("not finite" if rel is None else f"{rel:.5f}") in output


def test_stock_that_was_not_timed(command: Command, tmp_path: Path) -> None:
    run = broken(lambda run: [row.update(stock_us=None) for row in run["rows"]])
    status, output, _ = command("--from", stored(tmp_path, run), "--plot", tmp_path / "f.svg")
    assert status == 0
    assert " ".join(output.splitlines()[2].split()) == "1 9 8 4096 portable - - 25.0 20.0 1.25 5 - 0.00170"
    assert "not measured" in (tmp_path / "f.svg").read_text()


# ----------------------------------------------------------------------------------------------------------------- plot


@pytest.mark.parametrize("ending, starts", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_from_a_stored_run(ending: str, starts: bytes, command: Command, tmp_path: Path) -> None:
    path = tmp_path / f"f.{ending}"
    status, _, error = command("--from", stored(tmp_path), "--plot", path)
    assert status == 0 and error == f"bench: {path} is drawn\n"
    assert path.read_bytes().startswith(starts)


def test_lines_of_the_plot() -> None:
    """One line a batch size, over the prefix, in the order of the prefix whatever the order of the rows."""
    from matplotlib.figure import Figure

    rows = RUN["rows"][::-1] + [{**row, "config": "hopper", "kernel_cold_us": 10.0} for row in RUN["rows"][:1]]
    axes = Figure().subplots()
    bench_report.lines(axes, rows, "percent of floor", bench_report.percent_of_floor)
    drawn = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert drawn == {
        "bs 1, hopper": [(4096, 12.5)],
        "bs 1, portable": [(4096, 5.0), (16384, pytest.approx(100 * 4.5 / 35))],
        "bs 16, portable": [(4096, 25.0)],
    }


def test_empty_prefix_has_no_place_on_a_logarithmic_axis(command: Command, tmp_path: Path) -> None:
    run = broken(lambda run: [row.update(prefix=0) for row in run["rows"]])
    status, _, error = command("--from", stored(tmp_path, run), "--plot", tmp_path / "f.png")
    assert status == 2 and error.startswith("bench: there is no row with a prefix; nothing has been drawn: ")


# -------------------------------------------------------------------------------------------- a run, without its GPU


class Machine:
    """Stands in for what needs a GPU. `own` is the configuration that the GPU would take by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own: str = "hopper"):
        self.own = own
        self.measured: list[tuple[str, Shape]] = []
        self.rel: float | None = 0.0017
        self.too_large: Shape | None = None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Paper")
        monkeypatch.setattr(bench_measure, "load_kernel", self.load)
        monkeypatch.setattr(bench_measure, "stock_kernel", lambda: None)
        monkeypatch.setattr(bench_measure, "measure_ceilings", lambda: dict(RUN["meta"]["ceilings"]))
        monkeypatch.setattr(bench_measure, "measure_shape", self.measure)
        host = bench_host.measure_host(bench_host.kernel_without_gpu(), None, steps=1)
        monkeypatch.setattr(bench_host, "measure_host", lambda kernel, stock: host)

    def load(self, config: str = "auto", pool: str | None = None) -> Any:
        return SimpleNamespace(config=SimpleNamespace(name=self.own if config == "auto" else config))

    def measure(
        self, shape: Shape, kernels: list[Any], rivals: Any, ceilings: dict[str, float]
    ) -> list[dict[str, Any]]:
        if shape == self.too_large:
            raise torch.cuda.OutOfMemoryError("too large")
        self.measured += [(kernel.config.name, shape) for kernel in kernels]
        figures = dict(kernel_us=1.0, kernel_cold_us=2.0, stock_us=None, floor_us=1.0, rel=self.rel, peers={})
        fixed = dict(kv_dtype="bfloat16", **figures)
        return [dict(shape._asdict(), config=kernel.config.name, **fixed) for kernel in kernels]


def test_run_measures_both_tables(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The GPU's own configuration on every shape, portable on those of its table; each shape set up once."""
    machine, path = Machine(monkeypatch), tmp_path / "f.json"
    status, output, error = command("--json", path)
    assert status == 0
    run = bench_report.read_run(path)
    done = [(row["config"], bench_shapes.shape_of(row)) for row in run["rows"]]
    assert done == [("hopper", shape) for shape in SHAPES] + [("portable", shape) for shape in PORTABLE_SHAPES]
    assert machine.measured[1:3] == [("hopper", SHAPES[1]), ("portable", SHAPES[1])]
    assert set(run["meta"]) == {"command", "gpu", "date", "versions", "ceilings", "host"}
    assert run["meta"]["gpu"] == "NVIDIA Paper" and run["meta"]["command"] == "python -m kdtree_patch bench"
    assert run["meta"]["host"]["routed_us"] > 0
    # A log shows how far it has come.
    assert [line for line in error.splitlines() if line.startswith("bench: [")] == [
        "bench: [1/14] ceilings",
        "bench: [2/14] host time",
        *(
            f"bench: [{n}/14] bs {s.bs}, q_len {s.q_len}, {s.heads} heads, prefix {s.prefix:,}"
            for n, s in enumerate(SHAPES, 3)
        ),
    ]
    assert "host time of one call" in output


@pytest.mark.parametrize(
    "words, own, done",
    [
        ([], "portable", [("portable", SHAPES)]),
        (["--config", "portable"], "hopper", [("portable", SHAPES)]),
        (["--shapes", "2,3,4,5"], "hopper", [("hopper", [Shape(2, 3, 4, 5)])]),
        (["--shapes", "2,3,4,5", "2,3,4,5", "--config", "portable"], "hopper", [("portable", [Shape(2, 3, 4, 5)])]),
        (["--sweep", "--config", "hopper"], "hopper", [("hopper", dict.fromkeys((*SHAPES, *SWEEP)))]),
    ],
    ids=str,
)
def test_what_is_measured(
    words: list[str], own: str, done: list[tuple[str, Any]], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, own)
    assert command(*words)[0] == 0
    assert machine.measured == [(config, shape) for config, shapes in done for shape in shapes]


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that says what is being measured now and how much is done."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(console, "open_console", lambda stderr=False: terminal)
    with bench.progress(2) as step:
        step("ceilings")
        step("bs 1, prefix 21")
        assert "0/2" in screen.getvalue() or "1/2" in screen.getvalue()
    assert "2/2" in screen.getvalue() and "done" in screen.getvalue()


def test_wrong_result_of_a_run_is_kept_and_found(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine, path = Machine(monkeypatch), tmp_path / "f.json"
    machine.rel = None
    status, _, error = command("--shapes", "1,9,8,21", "--json", path)
    assert status == 1 and "WRONG: 1,9,8,21 hopper: rel None" in error
    assert bench_report.read_run(path)["rows"][0]["rel"] is None


def test_full_disk_costs_no_figure_of_a_run(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    Machine(monkeypatch)
    monkeypatch.setattr(Path, "write_text", full)
    status, output, error = command("--shapes", "1,9,8,21", "--json", tmp_path / "f.json")
    assert status == 2 and "NVIDIA Paper: us a layer" in output and "ceilings: " in output
    assert f"bench: {tmp_path}/f.json cannot be written: No space left on device; the file is as it was before" in error


def test_shape_that_does_not_fit_costs_no_other(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "portable")
    machine.too_large = SHAPES[5]
    status, _, error = command()
    assert status == 0
    assert "bench: 1,9,8,131072 is left out: it does not fit into this GPU's memory" in error
    assert len(machine.measured) == len(SHAPES) - 1


# ------------------------------------------------------------------------------------------------------------ one shape


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    run_once(monkeypatch)


def silent_rivals(monkeypatch: pytest.MonkeyPatch, stock: Any = None, **peers: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    monkeypatch.setattr(bench_measure, "PEERS", peers)
    monkeypatch.setattr(bench_measure, "installed_peers", lambda: list(peers))
    return bench_measure.Rivals(stock, said.append), said


def test_row_of_a_shape(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rivals, said = silent_rivals(monkeypatch, fa2=lambda call, shape, scale: lambda: None)
    shape, ceilings = Shape(2, 3, 4, 10), dict(copy_tb_s=1.0, product_tflops=9, mma_sync_tflops=0.01)
    (row,) = bench_measure.measure_shape(shape, [FakeKernel()], rivals, ceilings)
    assert said == []
    # 678,912 operations at 0.01 TFLOP/s are 67.9 us, 82,176 bytes at 1 TB/s 0.08.
    assert 0.001 < row.pop("rel") < 0.002
    assert row == {
        **{"bs": 2, "q_len": 3, "heads": 4, "prefix": 10, "kv_dtype": "bfloat16", "config": "portable"},
        **{"kernel_us": 12.3, "kernel_cold_us": 12.3, "stock_us": None, "floor_us": 67.89, "peers": {"fa2": 12.3}},
    }


class WrongRequest(FakeKernel):
    """Right but for one request."""

    def __init__(self, request: int, value: float):
        super().__init__()
        self.request, self.value = request, value

    def launch(self, *args: Any, **kwargs: Any) -> None:
        super().launch(*args, **kwargs)
        q_len = kwargs["q_len"]
        kwargs["out"][self.request * q_len : (self.request + 1) * q_len] *= self.value


@pytest.mark.parametrize("request_", [0, 2])
@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_first_and_last_request_are_checked(
    request_: int, value: float, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals, _ = silent_rivals(monkeypatch)
    (row,) = bench_measure.measure_shape(
        Shape(3, 2, 2, 5), [WrongRequest(request_, value)], rivals, RUN["meta"]["ceilings"]
    )
    assert bench_report.wrong(row)
    assert row["rel"] is None if value != value else row["rel"] == pytest.approx(0.1, rel=0.05)


def test_peer_that_fails_is_said_once_and_left_out(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Any, shape: Shape, scale: float) -> Any:
        raise RuntimeError("no kernel\nfor this GPU")

    rivals, said = silent_rivals(monkeypatch, fa3=fails, fa2=lambda call, shape, scale: lambda: None)
    call = bench_measure.inputs(Shape(1, 2, 2, 5), "cpu")
    for _ in range(2):
        assert rivals.times(call, Shape(1, 2, 2, 5)) == (None, {"fa2": 12.345})
    assert said == ["fa3 is left out where it fails: RuntimeError: no kernel for this GPU"]


def test_peer_that_destroys_the_context_ends_the_run(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("an illegal memory access was encountered")
    error.error_code = 700  # type: ignore[attr-defined]

    def fails(call: Any, shape: Shape, scale: float) -> Any:
        raise error

    rivals, _ = silent_rivals(monkeypatch, fa2=fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rivals.times(bench_measure.inputs(Shape(1, 2, 2, 5), "cpu"), Shape(1, 2, 2, 5))


def test_peers_are_looked_for_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: object() if name == "flash_mla" else None)
    assert bench_peers.installed_peers() == ["flashmla"]
    assert bench_peers.PEERS.keys() == bench_peers.MODULES.keys()


def test_flashinfer_gets_prefix_and_drafts_at_page_size_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlashInfer is told must be the very call that the others get: the same keys at the same slots."""
    planned: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, backend: str):
            planned["backend"] = backend

        def plan(self, **arguments: Any) -> None:
            planned.update(arguments)

        def run(self, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> Any:
            return q_latent, q_rope, latent, rope

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper))
    shape = Shape(2, 3, 4, 10)
    call = bench_measure.inputs(shape, "cpu")
    q_latent, q_rope, latent, rope = bench_peers.PEERS["fa3"](call, shape, 0.1)()
    assert torch.equal(torch.cat([q_latent, q_rope], -1), call["q"])
    rows = torch.cat([latent, rope], -1)[planned["kv_indices"].long()].view(2, 13, 1, 576)
    prefix = call["kv_pool"][call["kv_indices"]].view(2, 10, 1, 576)
    assert torch.equal(rows, torch.cat([prefix, call["k_extend"].view(2, 3, 1, 576)], 1))
    assert (planned["backend"], planned["page_size"], planned["causal"], planned["sm_scale"]) == ("fa3", 1, True, 0.1)
    assert planned["kv_indptr"].tolist() == [0, 13, 26] and planned["kv_len_arr"].tolist() == [13, 13]
    assert (planned["num_heads"], planned["head_dim_ckv"], planned["head_dim_kpe"]) == (4, 512, 64)


def test_configuration_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench_measure.VerifyKernel, "load", lambda device, config, pool: (config, pool))
    assert bench_measure.load_kernel("hopper", "fp8_e5m2") == ("hopper", torch.float8_e5m2)
    assert bench_measure.load_kernel() == ("auto", None)


# ------------------------------------------------------------------------------------------------------------ host time


def test_host_time_without_a_gpu(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "f.json"
    status, output, error = command("--host", "--json", path)
    assert (status, error) == (0, "")
    document = json.loads(path.read_text())
    host = document["meta"]["host"]
    assert document["rows"] == [] and host["device"] == "cpu" and host["stock_us"] is None
    assert host["routed_us"] == pytest.approx(host["hook_us"] + host["router_us"] + host["launch_us"], abs=0.05)
    assert 0 < host["launch_us"] < host["routed_us"] < 1000
    assert "no GPU: nothing is launched, stock unknown" in output


def with_any(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same parameters, but it takes anything."""

    @functools.wraps(function)
    def takes_anything(*args: Any, **kwargs: Any) -> None:
        pass

    return takes_anything


@pytest.mark.parametrize("decision", ["dtype", None], ids=["declined", "not bound"])
def test_host_time_is_that_of_the_served_call(decision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that leaves the call to the stock function would be timed as well, and look quick."""
    monkeypatch.setattr("kdtree_patch.route.decide", lambda call, device: decision)
    if decision is None:
        monkeypatch.setitem(bench_host.BY_NAME, "unknown", 0)
        monkeypatch.setattr(bench_host, "extend_attention_fwd", with_any(bench_host.extend_attention_fwd))
    with pytest.raises(RuntimeError, match="the router did not serve all"):
        bench_host.measure_host(bench_host.kernel_without_gpu(), None, steps=1)


def test_host_time_goes_through_hook_and_kernel() -> None:
    """Every call reaches the launcher: routed, by the router alone, by the kernel alone; a first step and one that
    counts, of 61 calls each.
    """
    launched: list[Any] = []
    kernel = bench_host.kernel_without_gpu()
    kernel._launcher = lambda steps, params: launched.append(steps)
    bench_host.measure_host(kernel, None, steps=1)
    assert len(launched) == 3 * 2 * bench_host.LAYERS


@pytest.mark.parametrize("pool", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_pool_is_measured_against_what_it_holds(monkeypatch: pytest.MonkeyPatch, pool: torch.dtype) -> None:
    """Right, the bytes that are its own, and no peer, which were given bf16."""
    monkeypatch.setattr(bench_measure, "warm_us", lambda run: 1.0)
    monkeypatch.setattr(bench_measure, "cold_us", lambda run: 1.0)
    shape, ceilings = Shape(2, 3, 4, 400), {"copy_tb_s": 1e-6, "mma_sync_tflops": 1e3}
    rivals = bench_measure.Rivals(None, print)
    rivals._peers = {"peer": lambda *arguments: pytest.fail("a peer was asked")}  # type: ignore[dict-item]
    (row,) = bench_measure.measure_shape(shape, [FakeKernel(pool=pool)], rivals, ceilings)
    assert row["rel"] < 0.002 and row["peers"] == {}
    assert row["kv_dtype"] == str(pool).removeprefix("torch.")
    assert row["floor_us"] == moved_bytes(shape, row["kv_dtype"]) < 0.6 * moved_bytes(shape)


def test_a_prediction_for_an_fp8_pool(command: Command, tmp_path: Path) -> None:
    """Where the bytes bind it is quicker, and nowhere slower."""
    rows = {}
    for pool in ((), ("--kv-cache-dtype", "fp8_e4m3")):
        words = ("--predict", *pool, "--shapes", "64,1,8,8192", "16,9,8,16384", "--json", tmp_path / "p.json")
        assert command(*words)[0] == 0
        rows[pool] = json.loads((tmp_path / "p.json").read_text())["rows"]
    plain, fp8 = rows.values()
    assert {row["kv_dtype"] for row in fp8} == {"float8_e4m3fn"}
    gains = [one["predicted_us"] / other["predicted_us"] for one, other in zip(plain, fp8, strict=True)]
    assert min(gains) >= 1.0 and max(gains) > 1.7


@pytest.mark.parametrize("mode", ["--host", "--from"])
def test_an_fp8_pool_is_refused_where_it_means_nothing(command: Command, mode: str) -> None:
    words = [mode] if mode == "--host" else [mode, str(bench.REFERENCE_RUN)]
    status, _, error = command(*words, "--kv-cache-dtype", "fp8_e4m3")
    assert status == 2 and "--kv-cache-dtype do not go together" in error
