"""`bench --modes` without a GPU: what it measures, that it finds a wrong result, and what it says of extends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kdtree_patch import bench_measure, bench_modes
from kdtree_patch.bench_shapes import KINDS, TRIALS, Shape, Trial
from kdtree_patch.route import MOST_NEW_TOKENS
from kdtree_patch.tiles import MAX_HEADS, MAX_Q_LEN
from tests.fakes import FakeKernel, Stock
from tests.support.bench import Command, bench_command, run_once

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return bench_command(monkeypatch, capsys)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    run_once(monkeypatch)


TRIES = [
    Trial("chains", Shape(2, 3, 2, 10), tree=True),
    Trial("chains", Shape(2, 3, 2, 10)),
    Trial("chains", Shape(2, 3, 2, 150), page_size=64),
    Trial("chains", Shape(1, 1, 2, 64), page_size=64),
    Trial("trees", Shape(1, 7, 2, 5), tree=True),
    Trial("extends", Shape(3, 6, 2, 9)),
    Trial("extends", Shape(1, 1, 1, 1)),
]


@pytest.mark.parametrize("trial", TRIES, ids=str)
def test_both_kernels_are_given_the_same_call(trial: Trial, clock: None) -> None:
    kernel, stock = FakeKernel(), Stock()
    row = bench_modes.measure_trial(trial, kernel, stock.function)
    (ours, *_), (theirs,) = kernel.calls, stock.calls
    assert (ours["custom_mask"] is None) == (theirs["custom_mask"] is None) == (not trial.tree)
    assert torch.equal(ours["kv_indices"], theirs["kv_indices"]) and ours["out"] is not theirs["o_extend"]
    assert ours["q_len"] == theirs["max_len_extend"] == trial.shape.q_len
    assert row.pop("rel") < 0.002
    assert row == {
        **{"kind": trial.kind, "mask": "tree" if trial.tree else "none", "page_size": trial.page_size},
        **trial.shape._asdict(),
        **{"kv_dtype": "bfloat16", "config": "portable", "kernel_cold_us": 12.3, "stock_us": 12.3},
    }


def test_pages_are_whole_and_no_slot_is_given_twice() -> None:
    call = bench_modes.inputs(Trial("chains", Shape(3, 2, 1, 150), page_size=64), "cpu")
    slots = call["kv_indices"].view(3, 150)
    assert slots.unique().numel() == 450 and int(slots.max()) < call["kv_pool"].shape[0]
    for start in (0, 64, 128):
        page = slots[:, start : start + 64]
        assert (page[:, :1] % 64 == 0).all() and torch.equal(page, page[:, :1] + torch.arange(page.shape[1]))
    assert not torch.equal(slots.flatten().sort().values, slots.flatten())


@pytest.mark.parametrize("trial", TRIES[:5], ids=str)
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_wrong_token_is_found(trial: Trial, where: str, clock: None) -> None:
    kernel = FakeKernel()
    right = kernel.launch

    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        kwargs["out"][0 if where == "first" else -1] *= 1.1

    kernel.launch = wrong  # type: ignore[method-assign]
    assert bench_modes.measure_trial(trial, kernel, None)["rel"] > 0.01


def test_a_chain_that_is_taken_for_all_visible_is_found(clock: None) -> None:
    trial = Trial("extends", Shape(1, 6, 2, 3))
    call = bench_modes.inputs(trial, "cpu")
    FakeKernel().launch(
        **{**call, "custom_mask": torch.ones(54, dtype=torch.bool), "mask_indptr": torch.tensor([0, 54])},
        q_len=6,
        scale=bench_measure.SCALE,
    )
    assert bench_modes.error_of_some(call, trial.shape) > 0.05


def test_every_kind_is_there_and_within_the_kernels_limits() -> None:
    assert tuple(dict.fromkeys(trial.kind for trial in TRIALS)) == KINDS
    assert all(trial.shape.q_len <= MAX_Q_LEN and trial.shape.heads <= MAX_HEADS for trial in TRIALS)
    assert Trial("trees", Shape(1, 257, 128, 4096), tree=True) in TRIALS
    extends = [trial for trial in TRIALS if trial.kind == "extends"]
    assert {trial.shape.q_len for trial in extends} == {2**n for n in range(10)}
    assert {trial.shape.bs for trial in extends} == {1, 4}


def rows(bs: int, stock: list[float | None], ours: float = 10.0) -> list[dict[str, Any]]:
    common = dict(kind="extends", bs=bs, heads=8, prefix=1024, mask="none", page_size=1, config="hopper", rel=0.001)
    return [{**common, "q_len": 2**n, "stock_us": us, "kernel_cold_us": ours} for n, us in enumerate(stock)]


@pytest.mark.parametrize(
    ("stock", "largest"),
    [([20, 20, 20], 4), ([20, 10, 9], 2), ([9, 20, 20], 0), ([20, 9, 20], 1), ([20, None], None)],
    ids=str,
)
def test_up_to_where_the_kernel_is_ahead(stock: list[float | None], largest: int | None) -> None:
    assert bench_modes.ahead_up_to(rows(1, stock)) == largest


def test_the_rule_is_what_holds_everywhere() -> None:
    assert bench_modes.verdicts(rows(1, [20, 20, 20]) + rows(4, [20, 20, 5])) == [
        "extends: bs 1, 8 heads, prefix 1,024: ahead up to q_len 4",
        "extends: bs 4, 8 heads, prefix 1,024: ahead up to q_len 2",
        "extends: ahead everywhere up to q_len 2: MOST_NEW_TOKENS in route.py",
    ]
    assert bench_modes.verdicts(rows(1, [None])) == [
        "extends: SGLang's kernel was not timed, so nothing can be said of them"
    ]
    assert bench_modes.verdicts([{**rows(1, [20])[0], "kind": "chains"}]) == []


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_the_command(
    factor: float, clock: None, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = FakeKernel()
    right = kernel.launch

    def launch(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        kwargs["out"].mul_(factor)

    kernel.launch = launch  # type: ignore[method-assign]
    small = (Trial("chains", Shape(1, 2, 2, 5), tree=True), Trial("extends", Shape(1, 2, 2, 5)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Paper")
    monkeypatch.setattr(bench_measure, "load_kernel", lambda config: kernel)
    monkeypatch.setattr(bench_measure, "stock_kernel", lambda: Stock().function)
    monkeypatch.setattr("kdtree_patch.bench.TRIALS", small)
    path = tmp_path / "f.json"
    status, output, error = command("--modes", "extends", "--json", path)
    assert "bench: [1/1] extends: 1,2,2,5" in error
    assert "extends: ahead everywhere up to q_len 2: MOST_NEW_TOKENS in route.py" in output
    written = json.loads(path.read_text())
    assert written["meta"]["command"] == "python -m kdtree_patch bench --modes extends"
    assert [row["kind"] for row in written["modes"]] == ["extends"]
    assert status == int(factor != 1.0) and ("WRONG: extends 1,2,2,5" in error) == (factor != 1.0)
    again, shown, error = command("--from", path)
    assert (again, shown) == (status, output) and ("WRONG: extends 1,2,2,5" in error) == (factor != 1.0)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: run.pop("meta"), "it has no meta and modes"),
        (lambda run: run.update(modes={}), "it has no meta and modes"),
        (lambda run: run["meta"].pop("gpu"), "meta has no gpu"),
        (lambda run: run["modes"][7].update(q_len="9"), "modes[7] has '9' for q_len"),
        (lambda run: run["modes"].append(None), "modes[140] is no object"),
    ],
    ids=["no meta", "modes of another kind", "meta", "row", "no row"],
)
def test_a_stored_run_that_is_none(damage: Callable[[Any], Any], says: str, command: Command, tmp_path: Path) -> None:
    run = json.loads((REPO / "docs/results/h200-modes.json").read_text())
    damage(run)
    path = tmp_path / "f.json"
    path.write_text(json.dumps(run))
    status, _, error = command("--from", path)
    assert status == 2 and f"{path} is not a run of the benchmark: {says}; nothing has been done" in error


def test_a_stored_run_has_no_plot(command: Command, tmp_path: Path) -> None:
    path = REPO / "docs/results/h200-modes.json"
    status, _, error = command("--from", path, "--plot", tmp_path / "f.png")
    assert status == 2 and f"{path} is of --modes, which has no plot; nothing has been done: leave out --plot" in error


def test_the_rule_of_extends_is_what_was_measured() -> None:
    """Beyond it an extend is left to the stock kernel; up to it ours was ahead wherever it was timed."""
    run = json.loads((REPO / "docs/results/h200-modes.json").read_text())
    ahead = f"extends: ahead everywhere up to q_len {MOST_NEW_TOKENS}: MOST_NEW_TOKENS in route.py"
    assert bench_modes.verdicts(run["modes"])[-1] == ahead


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--modes", "loops"], "invalid choice: 'loops'"),
        (["--modes", "--host"], "not allowed with argument"),
        (["--modes", "--sweep"], "bench: --modes and --sweep do not go together"),
        (["--modes", "--plot", "f.png"], "bench: --modes and --plot do not go together"),
        (["--modes"], "bench: torch sees no NVIDIA GPU here"),
    ],
    ids=str,
)
def test_wrong_usage(words: list[str], says: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, output, error = command(*words)
    assert (status, output) == (2, "") and says in error and "Traceback" not in error
