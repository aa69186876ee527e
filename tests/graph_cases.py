"""What must hold of verify calls in CUDA graphs, wherever they run: tests/test_graphs.py runs these functions on
`FakeGraph`, tests/gpu/test_graphs.py on a GPU. `make` builds a `GraphBench`; its keyword `wrong` adds a number to what
our kernel writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kdtree_patch.notice import Notice
from kdtree_patch.settings import Settings
from tests.graph_bench import GraphBench
from tests.support.cases import Case, reference
from tests.support.reference import rel

Make = Callable[..., GraphBench]
LIMIT = {torch.float16: 4e-4, torch.bfloat16: 2.5e-3}

BATCHES = [[5, 37, 300, 99], [500], [0, 31, 40], [2, 70]]
VALIDATE = Settings(validate=True)
GUARD = Settings(guard_rel=0.05)
SHADOW = Settings(mode="shadow", validate=True)


def bucket(prefixes: list[int]) -> int:
    return next(bs for bs in (1, 2, 4) if bs >= len(prefixes))


def layer_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    found = []
    for line in capsys.readouterr().err.splitlines():
        if match := re.match(r"\[kdtree\] L(\d+) ", line):
            found.append({"layer": match[1], **dict(word.split("=") for word in line.split()[2:])})
    return found


def replays_are_right_and_have_the_bits_of_the_eager_call(make: Make, settings: Settings) -> None:
    """Batches that grow and shrink, are padded or not, and are captured anew in between."""
    bench = make(settings)
    bench.capture(4, 2, 1)
    for batches in (BATCHES, BATCHES[1:3]):
        for seed, prefixes in enumerate(batches):
            cases = bench.cases(prefixes, seed)
            eager = bench.eager(cases)
            for layer, out in enumerate(bench.replay(bucket(prefixes), cases)):
                assert torch.equal(out, eager[layer]), (prefixes, layer)
                assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
        bench.capture(4, 2, 1)
    assert bench.ledger.disabled is None


def draft_extends_are_recorded_by_themselves(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Right, with the bits of the eager call, counted as what they are, compared, and not taken for the verify graph of
    the same batch size.
    """
    settings = Settings(validate=True, guard_rel=0.05, forward_modes=frozenset({"verify", "draft_extend"}))
    bench = make(settings, mode="draft_extend")
    bench.capture(4, 2)
    layers = len(bench.layers)
    for seed, prefixes in enumerate([[5, 37, 300], [70, 9, 31, 64], [500]]):
        cases = bench.cases(prefixes, seed)
        eager = bench.eager(cases)
        for layer, out in enumerate(bench.replay(max(2, bucket(prefixes)), cases)):
            assert torch.equal(out, eager[layer]), (prefixes, layer)
            assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
    bench.settle()
    assert bench.ledger.disabled is None
    # Two eager calls before each of the two captures, then an eager call and a replay of each batch.
    assert bench.ledger.counts == {("kernel", "draft_extend"): (2 * 2 + 2 * 3) * layers}
    lines = layer_lines(capsys)
    assert {line["mode"] for line in lines} == {"draft_extend"}
    replays = [line for line in lines if "calls" in line]
    assert sum(int(line["calls"]) for line in replays) == 3 * layers
    assert all(float(line["rel"]) < 2 * LIMIT[bench.layers[0].q.dtype] for line in replays)
    bench.router.replay_begins(4)  # a verify batch, of which nothing was captured
    assert bench.ledger.counts.total() == 10 * layers


def a_replay_is_a_call(make: Make) -> None:
    """Captures and their replays: what is counted are the eager calls, two of them before each capture, and replays."""
    bench = make(Settings())
    bench.capture(4, 1)
    layers = len(bench.layers)
    assert bench.ledger.counts == {("kernel", "verify"): 4 * layers}
    for _ in range(3):
        bench.replay(4, bench.cases([5, 6, 7]))
    bench.replay(1, bench.cases([5]))
    assert bench.ledger.counts == {("kernel", "verify"): 8 * layers}
    bench.capture(4)
    bench.replay(4, bench.cases([5, 6, 7]))
    assert bench.ledger.counts == {("kernel", "verify"): 11 * layers}


def validation_says_what_replays_have_done(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    bench = make(VALIDATE)
    bench.capture(4, 2)
    bench.settle()
    assert layer_lines(capsys) == []  # neither for the warm-up, nor for the capture
    cases = bench.cases([5, 37, 700], seed=3)
    bench.replay(4, cases)
    bench.settle()
    lines = layer_lines(capsys)
    assert [line["layer"] for line in lines] == [str(layer) for layer in range(len(bench.layers))]
    for line in lines:
        assert (line["calls"], line["tp_rank"]) == ("1", "2")
        assert float(line["rel"]) < LIMIT[bench.layers[0].q.dtype] * 2
        assert "nan" not in line and "stock_nan" not in line
    # Without a step in between, the figures of several replays come together.
    for _ in range(3):
        bench.router.replay_begins(2)
        bench.graphs[2].replay()
    bench.settle()
    assert {line["calls"] for line in layer_lines(capsys)} == {"3"}


def validation_figures_are_those_of_the_eager_call(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that is wrong by 1 everywhere, with padding that is as wrong: the same figures in a graph as without."""
    bench = make(VALIDATE, wrong=1.0)
    cases = bench.cases([5, 37, 200], seed=3)
    bench.eager(cases)
    eager = layer_lines(capsys)
    bench.capture(4)
    bench.replay(4, cases)
    bench.settle()
    replayed = layer_lines(capsys)
    assert len(eager) == len(replayed) == len(bench.layers)
    for one, other in zip(eager, replayed, strict=True):
        assert other.pop("calls") == "1"
        assert one == other
        assert 0.99 < float(one["mean"]) < 1.01


def every_nth_replay(make: Make, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Between them the stock kernel of the graph has nothing to do, and the result is right nevertheless."""
    bench = make(settings)
    bench.capture(2)
    layer_lines(capsys)
    found = []
    for step in range(7):
        cases = bench.cases([5 + step, 40], seed=step)
        for layer, out in enumerate(bench.replay(2, cases)):
            assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
        bench.settle()
        lines = layer_lines(capsys)
        assert {line["calls"] for line in lines} <= {"1"}
        found.append(len(lines))
    layers = len(bench.layers)
    assert found == [layers, 0, 0, layers, 0, 0, layers]


def the_guard_trips_in_a_replay(make: Make, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """From the call that trips it on the stock result is served, by the graph itself; one line says so, later."""
    bench = make(settings, wrong=1.0, wrong_from=2)
    bench.capture(2)
    layer_lines(capsys)
    for step in range(5):
        cases = bench.cases([50 + step, 20], seed=step)
        for layer, out in enumerate(bench.replay(2, cases)):
            assert rel(out, reference(cases[layer])) < LIMIT[out.dtype], (step, layer)
    bench.settle()
    assert bench.ledger.disabled == "guard"
    errors = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]
    assert len(errors) == 1
    for words in (
        "disabled reason=guard layer=0 max_abs_diff=",
        " calls=1 limit=0.05 ",
        " replay=1 ",
        "version=0",
        "tp_rank=2",
    ):
        assert words in errors[0], errors[0]
    # Whatever comes now is stock: graphs that are captured already, eager calls, and graphs captured from here on.
    before = bench.ledger.counts["kernel", "verify"]
    for run in (lambda cases: bench.replay(2, cases), bench.eager):
        cases = bench.cases([70, 20], seed=9)
        for layer, out in enumerate(run(cases)):
            assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
    bench.capture(2)
    cases = bench.cases([70, 20], seed=9)
    for layer, out in enumerate(bench.replay(2, cases)):
        assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
    assert bench.ledger.counts["kernel", "verify"] == before
    bench.settle()
    assert "ERROR" not in capsys.readouterr().err


def another_ranks_notice_between_replays(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The very next replay serves the stock result, and so does whatever else this rank computes from there on."""
    bench = make(Settings(guard_rel=0.05, validate_every=1000), wrong=1.0, wrong_from=1)
    bench.capture(4, 2)

    def is_right(run: Callable[[list[Case]], list[torch.Tensor]], step: int) -> bool:
        cases = bench.cases([50 + step, 20], seed=step)
        outs = zip(run(cases), cases, strict=True)
        return all(rel(out, reference(case)) < LIMIT[out.dtype] for out, case in outs)

    def replay(cases: list[Case]) -> list[torch.Tensor]:
        return bench.replay(2, cases)

    # The second one is wrong, and none that is compared.
    assert [is_right(replay, step) for step in (0, 1)] == [True, False]
    before = bench.ledger.counts["kernel", "verify"]
    Notice().post("of=0 of_layer=0")
    for run in (replay, replay, lambda cases: bench.replay(4, cases), bench.eager):
        assert is_right(run, 2)
    assert bench.ledger.counts["kernel", "verify"] == before
    assert bench.ledger.counts["stock", "guard_elsewhere"] == 4 * len(bench.layers)
    bench.settle()
    errors = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]
    assert len(errors) == 1 and "disabled reason=guard_elsewhere tp_rank=2 of=0 " in errors[0]


def a_notice_between_a_replay_and_its_preparation(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The stock kernel of a prepared replay had been told to do nothing: its result is not what the graph may take."""
    bench = make(Settings(guard_rel=0.05, validate_every=1000))
    bench.capture(2)
    bench.replay(2, bench.cases([50, 20]))
    cases = bench.cases([60, 30], seed=1)
    bench.router.before_step()
    bench.write_metadata(cases, 2)
    bench.router.replay_begins(2)
    Notice().post("of=0 of_layer=0")
    bench.router.before_step()
    bench.graphs[2].replay()
    assert bench.ledger.disabled == "guard_elsewhere"
    live = cases[0].q.shape[0]
    for layer, case in zip(bench.layers, cases, strict=True):
        assert rel(layer.out[:live], reference(case)) < LIMIT[case.out.dtype]


def ranks_that_trip_in_one_replay_all_say_so(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The notice of the other one is there before the figures of this one are."""
    bench = make(GUARD, wrong=1.0)
    bench.capture(2)
    bench.replay(2, bench.cases([50, 20]))
    Notice().post("of=0 of_layer=0")
    bench.router.before_step()
    assert bench.ledger.disabled == "guard_elsewhere"
    bench.settle()
    assert bench.ledger.disabled == "guard"
    errors = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]
    assert len(errors) == 2 and "disabled reason=guard layer=0 " in errors[1]


def the_dump_of_a_replay_has_the_inputs_of_that_call(make: Make, folder: Path) -> None:
    bench = make(Settings(guard_rel=0.05, guard_dump=folder), wrong=1.0, wrong_from=1)
    bench.capture(4, 2)
    bench.replay(2, bench.cases([50, 20], seed=0))
    tripping = bench.cases([60, 7, 33], seed=1)
    bench.replay(4, tripping)
    # The copy takes its time, and more replays are wrong before the host learns of the first.
    comparison = bench.router._both._comparison
    fetched, waits = comparison.fetched, iter([True, True])
    comparison.fetched = lambda: ([], None) if comparison._under_way and next(waits, False) else fetched()
    for step in range(5):
        bench.replay(4, bench.cases([10, 11, 12 + step], seed=2 + step))
    assert bench.ledger.disabled == "guard"
    (file,) = folder.iterdir()
    saved = torch.load(file)
    inputs, results, live = saved["inputs"], saved["results"], tripping[0]
    tokens = live.q.shape[0]
    assert saved["left_out"] == [] and saved["facts"]["layer"] == 0 and saved["facts"]["replay"]
    assert torch.equal(inputs["q"][:tokens], live.q.cpu()) and inputs["q"].shape[0] == 4 * bench.q_len
    assert torch.equal(inputs["k_extend"][:tokens], live.k_extend.cpu())
    assert inputs["kv_indptr"].tolist() == [0, 60, 67, 100, 101]
    assert inputs["custom_mask"][: len(live.custom_mask)].bool().tolist() == live.custom_mask.tolist()
    expected = reference(live).cpu()
    assert rel(results["stock"][:tokens], expected) < LIMIT[live.q.dtype]
    assert rel(results["ours"][:tokens] - 1, expected) < 0.1  # what was added has cost it some digits


def a_replay_that_nobody_prepared(make: Make, every: int) -> None:
    """Nobody told the router of it: the graph itself reads what batch it has. A right kernel does not trip it, and
    after a trip the stock result is that of the batch at hand.
    """
    bench = make(Settings(guard_rel=0.05, validate_every=every), wrong=1.0, wrong_from=2)
    bench.capture(4, 2)
    for seed, prefixes in enumerate([[5, 20], [200, 90]]):
        cases = bench.cases(prefixes, seed)
        if seed == 0:
            bench.replay(2, cases)
        else:
            assert _is_right_as_it_is(bench, cases)
    bench.settle()
    assert bench.ledger.disabled is None
    bench.replays = 2
    bench.replay(4, bench.cases([7, 8, 9]))
    while bench.ledger.disabled is None:
        bench.replay(4, bench.cases([7, 8, 9]))
    assert _is_right_as_it_is(bench, bench.cases([300, 40], seed=3))


def _is_right_as_it_is(bench: GraphBench, cases: list[Case]) -> bool:
    bench.write_metadata(cases, 2)
    bench.graphs[2].replay()
    live = cases[0].q.shape[0]
    pairs = zip(bench.layers, cases, strict=True)
    return all(rel(layer.out[:live], reference(case)) < LIMIT[case.out.dtype] for layer, case in pairs)


def padding_does_not_trip(make: Make) -> None:
    """A padded request whose result differs, and is not even a number, is nobody's."""
    bench = make(GUARD, wrong=torch.nan, wrong_request=3)
    bench.capture(4)
    for step in range(3):
        bench.replay(4, bench.cases([50 + step, 20, 7], seed=step))
        bench.settle()
    assert bench.ledger.disabled is None


def a_nan_of_ours_alone_trips(make: Make) -> None:
    bench = make(GUARD, wrong=torch.nan, wrong_request=1, wrong_from=1)
    bench.capture(2)
    for step in range(4):
        cases = bench.cases([50 + step, 20], seed=step)
        for layer, out in enumerate(bench.replay(2, cases)):
            assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
    assert bench.ledger.disabled == "guard"


def two_backends(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Target and draft in one process: each has its graphs and its figures; a guard of one turns both off, also where
    the other one's graphs do not compare."""
    target = make(Settings(guard_rel=0.05, validate_every=1000), wrong=1.0, wrong_from=6)
    draft = make(GUARD, ledger=target.ledger, wrong=1.0, wrong_from=2, layers=1)
    for bench in (target, draft):
        bench.capture(2)
    for step in range(8):
        for bench in (target, draft):
            cases = bench.cases([50 + step, 20], seed=step)
            for layer, out in enumerate(bench.replay(2, cases)):
                assert rel(out, reference(cases[layer])) < LIMIT[out.dtype], (step, layer)
    assert target.ledger.disabled == "guard"
    assert capsys.readouterr().err.count("ERROR") == 1


def an_eager_batch_above_the_largest_graph(make: Make) -> None:
    """Scratch memory grows; the graphs go on with what they were captured with."""
    bench = make(VALIDATE, max_bs=16)
    bench.capture(2)
    large = bench.cases([10] * 16, seed=1)
    for _ in range(2):
        for layer, out in enumerate(bench.eager(large)):
            assert rel(out, reference(large[layer])) < LIMIT[out.dtype]
        cases = bench.cases([50, 20], seed=3)
        for layer, out in enumerate(bench.replay(2, cases)):
            assert rel(out, reference(cases[layer])) < LIMIT[out.dtype]
    assert bench.ledger.disabled is None


def a_capture_between_replays_is_no_step(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither what SGLang makes up for it, nor our rehearsal, nor the capture itself is compared."""
    bench = make(VALIDATE)
    bench.capture(2)
    bench.replay(2, bench.cases([5, 40]))
    bench.settle()
    layer_lines(capsys)
    bench.capture(4, 2)
    bench.settle()
    bench.replay(2, bench.cases([5, 40]))
    bench.settle()
    assert [line["calls"] for line in layer_lines(capsys)] == ["1"] * len(bench.layers)
