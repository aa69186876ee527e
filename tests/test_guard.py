"""The guard in eager mode: when it trips, what it says, serves and saves. For graphs see test_graphs.py."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdtree_patch import guard, hook, validate
from kdtree_patch.kernel import VerifyKernel
from kdtree_patch.ledger import Ledger
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support.cases import Case, reference
from tests.support.reference import rel

pytestmark = pytest.mark.usefixtures("all_lines")

FACTS = {"version": "0.1.0", "sglang": "0.5.23", "torch": "2.11.0", "gpu": "NVIDIA H200", "cc": "9.0"}


class Bench:
    def __init__(self, kernel: FakeKernel, **settings: Any):
        self.kernel, self.stock = kernel, Stock(answer="stock's answer")
        self.settings = Settings(guard_rel=0.05, **settings)
        self.ledger = Ledger()
        self.router = VerifyRouter(self.stock.function, kernel, self.settings, self.ledger, rank=2, facts=FACTS)

    def run(self, case: Case, layer: int = 3) -> Any:
        case.out.fill_(torch.nan)
        self.router.context = (a_layer(layer), a_batch())
        return self.router(**arguments(case))


def is_right(case: Case) -> bool:
    return rel(case.out, reference(case)) < 1e-3


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("[kdtree] ERROR")]


def test_a_right_kernel_is_served_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bench, case = Bench(FakeKernel()), a_case()
    for layer in range(3):
        assert bench.run(case, layer) is None
    assert bench.ledger.counts == {("kernel", "verify"): 3} and is_right(case)
    assert len(bench.stock.calls) == 3  # each is compared
    assert " L0 " not in capsys.readouterr().err  # what is only guarded is not logged


@pytest.mark.parametrize("wrong", [1.0, math.nan, math.inf])
def test_the_call_that_trips_it_is_served_by_stock_and_so_are_all_after_it(
    wrong: float, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, case = Bench(FakeKernel(mark=wrong)), a_case()
    for layer in (3, 4, 5):
        bench.run(case, layer)
        assert is_right(case)
    assert (len(bench.kernel.calls), len(bench.stock.calls)) == (1, 3)
    assert bench.ledger.counts == {("stock", "guard"): 3}
    (line,) = errors(capsys)
    assert line.startswith("[kdtree] ERROR disabled reason=guard layer=3 max_abs_diff=")
    assert line.endswith("; verify calls run stock from here on")
    for words in (" limit=0.05 ", " replay=0 ", " q_len=3 ", " scale=0.14468 ", " tp_rank=2", 'gpu="NVIDIA H200"'):
        assert words in line, line
    for name in ("q_extend", "k_buffer", "kv_indices", "custom_mask", *FACTS):
        assert f" {name}=" in line, line
    assert (" nan=" in line) == (wrong != 1.0)


def test_in_shadow_mode_too(capsys: pytest.CaptureFixture[str]) -> None:
    bench, case = Bench(FakeKernel(mark=1.0), mode="shadow", validate=True), a_case()
    for layer in (3, 4):
        assert bench.run(case, layer) == "stock's answer" and is_right(case)
    assert (len(bench.kernel.calls), len(errors(capsys))) == (1, 1)


def test_just_below_and_just_above() -> None:
    case = a_case()
    norm = float(reference(case).norm())
    for factor, trips in ((0.9, False), (1.1, True)):
        bench = Bench(FakeKernel(mark=0.05 * factor * norm / case.out.numel() ** 0.5))
        bench.run(case)
        assert (bench.ledger.disabled == "guard") is trips


def test_a_nan_that_stock_has_as_well_is_none_of_ours() -> None:
    case = a_case()
    case.k_extend[0] = torch.nan
    bench = Bench(FakeKernel())
    bench.run(case)
    assert bench.ledger.disabled is None


def test_only_the_steps_that_are_compared_can_trip_it() -> None:
    kernel, case = FakeKernel(), a_case()
    bench = Bench(kernel, validate_every=3)
    bench.run(case)
    kernel.mark = 1.0
    for _ in range(2):
        bench.run(case)
        assert bench.ledger.disabled is None and not is_right(case)
    bench.run(case)
    assert bench.ledger.disabled == "guard" and is_right(case)


def test_a_guard_that_cannot_look_turns_the_kernel_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(validate.Buffers, "get", none_left)
    bench, case = Bench(FakeKernel(mark=1.0)), a_case()
    bench.run(case)
    assert is_right(case) and bench.ledger.counts == {("stock", "guard_failed"): 1}
    assert "reason=guard_failed a call of layer 3 could not be compared" in errors(capsys)[0]


# What it saves.


def saved(folder: Path) -> Any:
    (file,) = folder.glob("*.pt")
    assert [path for path in folder.iterdir() if path != file] == []
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return torch.load(file)


@pytest.mark.parametrize(
    ("mask", "pool"), [("tree", None), ("none", None), ("tree", torch.float8_e4m3fn), ("none", torch.float8_e5m2)]
)
def test_the_file_has_the_call_and_can_be_run_again(
    mask: str, pool: torch.dtype | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = dict(k_scale=0.5, v_scale=0.25) if pool else {}
    case = a_case(prefixes=[40, 0, 7], mask=mask, slack=50, pool=pool, **scales)
    bench = Bench(FakeKernel(mark=1.0, pool=pool), guard_dump=tmp_path)
    bench.run(case)
    found = saved(tmp_path)
    assert f" dump={next(tmp_path.iterdir())}" in errors(capsys)[0]
    assert found["left_out"] == [] and found["facts"]["layer"] == 3 and found["facts"]["sglang"] == "0.5.23"
    assert found["slots"].tolist() == case.kv_indices[:47].tolist()
    assert found["inputs"]["kv_pool"].shape == (47, 1, 576)
    right = reference(case)
    assert rel(found["results"]["stock"], right) < 1e-3
    assert rel(found["results"]["ours"] - 1, right) < 0.02
    inputs = found["inputs"]
    out = torch.full_like(found["results"]["ours"], torch.nan)
    kernel = VerifyKernel.load(torch.device("cpu"), pool=pool)
    kernel.launch(out=out, **{name: inputs[name] for name in inputs})
    assert rel(out, right) < 1e-3


def test_no_more_files_than_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those included that a worker which was killed has begun."""
    for number in range(guard.MAX_FILES):
        (tmp_path / f"kdtree-guard-{number}.{'tmp' if number % 2 else 'pt'}").touch()
    Bench(FakeKernel(mark=1.0), guard_dump=tmp_path).run(a_case())
    assert len(list(tmp_path.iterdir())) == guard.MAX_FILES
    assert f'dump=none dump_error="{tmp_path} has {guard.MAX_FILES} of them already"' in errors(capsys)[0]


def test_a_large_prefix_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_BYTES", 47 * 576 * 2)
    Bench(FakeKernel(mark=1.0), guard_dump=tmp_path).run(a_case(prefixes=[40, 7]))
    found = saved(tmp_path)
    assert found["left_out"] == ["kv_pool"] and found["inputs"]["kv_pool"] is None
    assert len(found["inputs"]["kv_indices"]) >= 47


def test_a_call_that_is_too_large_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "MAX_BYTES", 1000)
    Bench(FakeKernel(mark=1.0), guard_dump=tmp_path).run(a_case())
    assert list(tmp_path.iterdir()) == []
    assert "bytes are more than the 1000 that a file may have" in errors(capsys)[0]


def test_a_folder_that_has_gone_costs_no_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, bench = a_case(), Bench(FakeKernel(mark=1.0), guard_dump=tmp_path / "gone")
    bench.run(case)
    assert is_right(case) and bench.ledger.disabled == "guard"
    assert 'dump=none dump_error="FileNotFoundError: ' in errors(capsys)[0]


def test_a_disk_that_is_full_leaves_no_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        assert [path.name for path in tmp_path.iterdir()] == ["kdtree-guard-0.tmp"]  # it counts if this is the end
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", full)
    Bench(FakeKernel(mark=1.0), guard_dump=tmp_path).run(a_case())
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in errors(capsys)[0]


def test_a_file_with_the_facts_of_a_service_is_loaded(tmp_path: Path) -> None:
    """torch.__version__ is a str of a kind that torch.load refuses to make."""
    bench = Bench(FakeKernel(mark=1.0), guard_dump=tmp_path)
    facts = hook.about(bench.settings, bench.kernel, 0)
    bench.router = VerifyRouter(bench.stock.function, bench.kernel, bench.settings, bench.ledger, rank=0, facts=facts)
    bench.run(a_case())
    found = saved(tmp_path)["facts"]
    assert found["torch"] == str(torch.__version__) and found["guard_rel"] == 0.05
    assert found.keys() >= facts.keys() and {type(value) for value in found.values()} <= set(guard.PLAIN)


@pytest.mark.parametrize("short", ["custom_mask", "kv_indices"])
def test_what_a_graph_has_not_kept_whole_is_left_out(short: str, tmp_path: Path) -> None:
    """Half of it would be read beyond its end by whoever runs the call again."""
    case = a_case(prefixes=[40, 7])
    call = guard.Call.of(arguments(case), 3, case.scale)
    call = replace(call, step={**call.step, short: call.step[short][:-1]})
    tensors = {"q": case.q, "k_extend": case.k_extend, "ours": case.out, "stock": case.out}
    guard.save(tmp_path, call, tensors, FACTS)
    found = saved(tmp_path)
    assert found["left_out"] == ([short, "kv_pool"] if short == "kv_indices" else [short])
    assert {name for name, value in found["inputs"].items() if value is None} == set(found["left_out"])


def test_ranks_that_trip_at_once_share_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(guard.MAX_FILES - 1):
        (tmp_path / f"kdtree-guard-{number}.pt").touch()
    save = torch.save

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        save(*args)

    monkeypatch.setattr(torch, "save", slowly)
    threads = [
        threading.Thread(target=Bench(FakeKernel(mark=1.0), guard_dump=tmp_path).run, args=(a_case(),))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == guard.MAX_FILES


def test_all_that_is_stored_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indices are there twice: where the prefixes came from, and where they are in the file."""
    case = a_case(prefixes=[100_000], mask="none")
    monkeypatch.setattr(guard, "MAX_BYTES", 12 * case.kv_indices.numel())
    Bench(FakeKernel(mark=1.0), guard_dump=tmp_path).run(case)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= guard.MAX_BYTES
