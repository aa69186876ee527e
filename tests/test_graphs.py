"""CUDA graphs without a GPU: captures and replays by `FakeGraph`, both kernels in torch.

The stand-in raises on everything that a capture must not do: an operation that computes while capturing, waits for the
device, or takes memory. tests/gpu/test_graphs.py runs the same cases on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdtree_patch import log
from kdtree_patch.notice import Notice
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from kdtree_patch.validate import CHUNK, FIGURES, LAYERS, Buffers, Comparison, NotPrepared, scratch_elements
from tests import graph_cases as cases
from tests.fakes import FakeKernel, Stock, a_batch, a_layer
from tests.graph_bench import GraphBench
from tests.support.cases import reference
from tests.support.graphs import BreaksCapture, FakeGraph, opaque
from tests.support.reference import rel


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(VerifyRouter, "_capturing", lambda self: FakeGraph.current is not None)
    before = log.get_logger().level
    log.set_level("info")
    yield
    log.get_logger().setLevel(before)


def make(settings: Settings, **how: Any) -> GraphBench:
    stock, kernel = Stock(), FakeKernel()
    kernel.launch = opaque(kernel.launch)  # type: ignore[method-assign]
    stock._run = opaque(stock._run)  # type: ignore[method-assign]
    stock.function.__globals__["run"] = stock._run
    return GraphBench(stock.function, kernel, FakeGraph, settings, **how)


SETTINGS = {"plain": Settings(), "validate": cases.VALIDATE, "guard": cases.GUARD, "shadow": cases.SHADOW}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_replays_are_right_and_have_the_bits_of_the_eager_call(settings: Settings) -> None:
    cases.replays_are_right_and_have_the_bits_of_the_eager_call(make, settings)


def test_draft_extends_are_recorded_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    cases.draft_extends_are_recorded_by_themselves(make, capsys)


def test_a_replay_is_a_call() -> None:
    cases.a_replay_is_a_call(make)


def test_validation_says_what_replays_have_done(capsys: pytest.CaptureFixture[str]) -> None:
    cases.validation_says_what_replays_have_done(make, capsys)


def test_validation_figures_are_those_of_the_eager_call(capsys: pytest.CaptureFixture[str]) -> None:
    cases.validation_figures_are_those_of_the_eager_call(make, capsys)


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_every_nth_replay(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    cases.every_nth_replay(make, Settings(mode=mode, validate=True, validate_every=3), capsys)


@pytest.mark.parametrize("settings", [cases.GUARD, Settings(guard_rel=0.05, validate=True)], ids=["guard", "both"])
def test_the_guard_trips_in_a_replay(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    cases.the_guard_trips_in_a_replay(make, settings, capsys)


def test_another_ranks_notice_between_replays(capsys: pytest.CaptureFixture[str]) -> None:
    cases.another_ranks_notice_between_replays(make, capsys)


def test_ranks_that_trip_in_one_replay_all_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    cases.ranks_that_trip_in_one_replay_all_say_so(make, capsys)


def test_a_notice_between_a_replay_and_its_preparation(capsys: pytest.CaptureFixture[str]) -> None:
    cases.a_notice_between_a_replay_and_its_preparation(make, capsys)


def test_another_ranks_notice_where_metadata_is_replayed_from_a_graph() -> None:
    """The host comes by at the next eager step alone, and tells the graphs then."""
    bench = make(Settings(guard_rel=0.05, validate_every=1000), wrong=1.0)
    bench.capture(2)
    metadata = FakeGraph()
    metadata.capture(lambda: bench.router.replay_begins(2))
    Notice().post("of=0")
    bench.router.before_step()
    batch = bench.cases([5, 40])
    bench.write_metadata(batch, 2)
    metadata.replay()
    bench.graphs[2].replay()
    for layer, case in zip(bench.layers, batch, strict=True):
        assert rel(layer.out[: case.q.shape[0]], reference(case)) < cases.LIMIT[case.q.dtype]


def test_the_dump_of_a_replay_has_the_inputs_of_that_call(tmp_path: Path) -> None:
    cases.the_dump_of_a_replay_has_the_inputs_of_that_call(make, tmp_path)


@pytest.mark.parametrize("every", [1, 3])
def test_a_replay_that_nobody_prepared(every: int) -> None:
    cases.a_replay_that_nobody_prepared(make, every)


def test_padding_does_not_trip() -> None:
    cases.padding_does_not_trip(make)


def test_a_nan_of_ours_alone_trips() -> None:
    cases.a_nan_of_ours_alone_trips(make)


def test_two_backends(capsys: pytest.CaptureFixture[str]) -> None:
    cases.two_backends(make, capsys)


def test_an_eager_batch_above_the_largest_graph() -> None:
    cases.an_eager_batch_above_the_largest_graph(make)


@pytest.mark.parametrize("inside", ["construction", "capture"])
def test_in_and_out_of_inference_mode(inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang's event loop runs in inference mode; its start, and with it a capture, may be outside."""
    bench = make(Settings())
    with torch.inference_mode(inside == "construction"):
        settings = Settings(guard_rel=0.05, guard_dump=tmp_path)
        bench.router = VerifyRouter(bench.router.stock, bench.router.kernel, settings, bench.ledger)
    with torch.inference_mode(inside == "capture"):
        bench.capture(2)
    batch = bench.cases([5, 40])
    for layer, out in enumerate(bench.replay(2, batch)):
        assert rel(out, reference(batch[layer])) < cases.LIMIT[out.dtype]
    bench.settle()
    assert bench.ledger.counts["kernel", "verify"] == 6
    assert "WARNING" not in capsys.readouterr().err


# What is no matter of the device.


def test_the_stand_in_is_strict() -> None:
    value = torch.ones(3)
    for breaks in (
        lambda: value + 1,
        lambda: value.sum().item(),
        lambda: torch.empty(4),
        lambda: torch.equal(value, value),
    ):
        with pytest.raises(BreaksCapture):
            FakeGraph().capture(breaks)
    graph = FakeGraph()
    graph.capture(lambda: value[:2].add_(1))
    assert value.tolist() == [1, 1, 1] and graph.operations == 1
    graph.replay()
    assert value.tolist() == [2, 2, 1]


def test_a_capture_without_validation_records_the_kernel_alone() -> None:
    bench = make(Settings())
    bench.capture(2)
    assert bench.graphs[2].operations == len(bench.layers)


def test_a_capture_that_nothing_was_laid_ready_for_runs_stock(capsys: pytest.CaptureFixture[str]) -> None:
    bench = make(cases.GUARD)
    bench.capture(2, warm_up=False)
    batch = bench.cases([5, 40])
    for layer, out in enumerate(bench.replay(2, batch)):
        assert rel(out, reference(batch[layer])) < cases.LIMIT[out.dtype]
    assert bench.ledger.counts == {("stock", "validation_failed"): 2}
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and "NotPrepared: no eager call has laid ready second output of " in warnings[0]


def test_a_layer_beyond_those_that_are_told_apart() -> None:
    bench = make(cases.GUARD)
    bench.capture(2)
    call = bench.arguments(2, bench.layers[0])
    bench.router.context = (a_layer(LAYERS), a_batch())
    FakeGraph().capture(lambda: bench.router(**call))
    assert bench.router._recordings["verify", 2].counts["stock", "validation_failed"] == 1


def test_a_graph_of_another_mode_or_size_is_none_of_ours() -> None:
    bench = make(cases.VALIDATE)
    bench.capture(2)
    before = dict(bench.ledger.counts)
    bench.router.replay_begins(3)
    assert bench.ledger.counts == before


def test_a_second_capture_that_nobody_announced() -> None:
    """It has a beginning of its own."""
    bench = make(cases.GUARD)
    bench.capture(2)
    assert rights(bench, 1) == [True]
    bench.graphs[2] = FakeGraph()
    bench.graphs[2].capture(lambda: bench.forward(2))
    assert rights(bench, 3) == [True] * 3
    bench.settle()
    assert bench.ledger.disabled is None


# What fails beside a replay.


def fails(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *calls: int) -> None:
    """The calls of these numbers have no memory; without numbers, all of them."""
    real, numbers = getattr(where, name), itertools.count()

    def call(*args: Any) -> Any:
        if not calls or next(numbers) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    monkeypatch.setattr(where, name, call)


class Flag:
    """In place of a flag on the device: cannot be written at first."""

    def __init__(self, comparison: Comparison, name: str, failures: int):
        self._failures = itertools.count(1)
        self._where, self._name, self._last = comparison, name, failures
        self._real = getattr(comparison, name)
        setattr(comparison, name, self)

    def fill_(self, value: bool) -> None:
        if next(self._failures) == self._last:
            setattr(self._where, self._name, self._real)
        raise torch.OutOfMemoryError("CUDA out of memory")


def comparison_of(bench: GraphBench) -> Comparison:
    return bench.router._both._comparison


def rights(bench: GraphBench, steps: int, bs: int = 2) -> list[bool]:
    """Of each replay, whether all of its live rows are right."""
    found = []
    for step in range(steps):
        batch = bench.cases([50 + 30 * step, 20], step)
        pairs = zip(bench.replay(bs, batch), batch, strict=True)
        found.append(all(rel(out, reference(case)) < cases.LIMIT[out.dtype] for out, case in pairs))
    return found


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]


@pytest.mark.parametrize("settings", [cases.VALIDATE, cases.GUARD, cases.SHADOW], ids=["validate", "guard", "shadow"])
@pytest.mark.parametrize("failures", [1, 99], ids=["once", "for good"])
def test_a_flag_that_cannot_be_written_costs_no_result(
    settings: Settings, failures: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation goes on without a step, or until it can; a guard is none any more, from that replay on."""
    bench = make(settings)
    bench.capture(2)
    Flag(comparison_of(bench), "due", failures)
    assert rights(bench, 5) == [True] * 5
    bench.settle()
    guards = settings.guard_rel is not None
    assert bench.ledger.disabled == ("guard_failed" if guards else None)
    if guards:
        assert bench.ledger.counts == {("kernel", "verify"): 4, ("stock", "guard_failed"): 10}
        assert bool(comparison_of(bench).tripped)
    elif failures == 1:
        assert sum(int(line["calls"]) for line in cases.layer_lines(capsys)) == 4 * len(bench.layers)


@pytest.mark.parametrize("name", ["fetch", "fetched", "set_due"])
def test_a_guard_whose_host_learns_nothing_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make(cases.GUARD, wrong=1.0, wrong_from=1)
    bench.capture(2)
    fails(monkeypatch, comparison_of(bench), name)
    assert rights(bench, 5) == [True] * 5
    (line,) = errors(capsys)
    assert "disabled reason=guard_failed " in line and "could not be" in line
    assert rights(bench, 1) == [True] and bench.ledger.counts["stock", "guard_failed"] > 0


def test_a_guard_that_cannot_see_the_notice_of_others_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(cases.GUARD)
    bench.capture(2)
    fails(monkeypatch, bench.router._both._notice, "look")
    assert rights(bench, 2) == [True] * 2 and bench.ledger.disabled == "guard_failed"


@pytest.mark.parametrize("failures", [1, 5])
def test_graphs_that_cannot_be_told_are_told_later(failures: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And until then the calls are counted for the kernel that they are served by."""
    bench = make(Settings(guard_rel=0.05, validate_every=1000), wrong=1.0, wrong_from=1)
    bench.capture(2)
    assert rights(bench, 1) == [True]
    Flag(comparison_of(bench), "tripped", failures)
    before = bench.ledger.counts["kernel", "verify"]
    Notice().post("of=0 of_layer=0")
    # Each step tries twice: when it begins, and when its replay has been prepared.
    wrong = failures // 2
    assert rights(bench, 4) == [False] * wrong + [True] * (4 - wrong)
    layers = len(bench.layers)
    assert bench.ledger.counts["kernel", "verify"] - before == wrong * layers
    assert bench.ledger.counts["stock", "guard_elsewhere"] == (4 - wrong) * layers
    lines = errors(capsys)
    assert len(lines) == 2 and "disabled reason=guard_elsewhere" in lines[0]
    assert "CUDA graphs could not be told that the kernel is off: OutOfMemoryError: CUDA out of memory; " in lines[1]


def test_a_rehearsal_has_everything_that_a_replay_needs() -> None:
    """What is loaded at its first use, or has no memory, is so before the capture: it would be too late at a replay."""
    bench = make(Settings(guard_rel=0.05, validate=True))
    with Operations() as rehearsed:
        bench.capture(2)
    with Operations() as needed:
        bench.router.before_step()
        bench.router.replay_begins(2)
    assert needed.seen and needed.seen <= rehearsed.seen, needed.seen - rehearsed.seen


class Operations(TorchDispatchMode):
    """Which ones are carried out, on which types."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in [*args, *(kwargs or {}).values()] if isinstance(value, torch.Tensor)]
        self.seen.add((str(function), *(str(tensor.dtype) for tensor in tensors)))
        return function(*args, **(kwargs or {}))


# A trip that the host learns of late.


def tripped_on_the_device() -> GraphBench:
    """The figures are still there."""
    bench = make(cases.GUARD, wrong=1.0, wrong_from=1)
    bench.capture(4, 2)
    assert rights(bench, 2) == [True] * 2
    assert bench.ledger.disabled is None and bool(comparison_of(bench).tripped)
    return bench


def says_so(bench: GraphBench, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of the trip, which is the last one, and of the file that tells the others."""
    bench.settle()
    assert bench.ledger.disabled == "guard"
    assert str(Notice().look()).startswith("of=2 of_layer=0 ")
    *_, line = errors(capsys)
    assert "disabled reason=guard layer=0 " in line and " replay=1 " in line
    return line


@pytest.mark.parametrize("reason", ["launch_failed", "v_not_latent", "guard_failed", "guard_elsewhere"])
def test_a_trip_is_said_whatever_else_has_turned_the_kernel_off(
    reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tripped_on_the_device()
    bench.ledger.disable(reason, "first")
    says_so(bench, capsys)
    assert rights(bench, 1) == [True]
    bench.settle()
    assert errors(capsys) == []  # once


def test_a_trip_is_said_after_a_launch_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    bench = tripped_on_the_device()
    bench.router.kernel.launch = fail
    bench.eager(bench.cases([9, 10, 11, 12], 3))
    assert bench.ledger.disabled == "launch_failed"
    says_so(bench, capsys)


def fail(*args: Any) -> None:
    raise RuntimeError("too many resources")


def test_a_trip_is_said_if_a_copy_was_under_way_when_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the step before it are, when another rank's notice turns off all that would ask for new ones."""
    bench = make(cases.GUARD, wrong=1.0, wrong_from=1)
    bench.capture(2)
    done = True
    comparison_of(bench)._event = SimpleNamespace(record=lambda: None, query=lambda: done)
    rights(bench, 1)
    bench.router.before_step()
    done = False
    rights(bench, 1)
    Notice().post("of=0 of_layer=0")
    bench.router.before_step()
    assert bench.ledger.disabled == "guard_elsewhere"
    done = True
    bench.settle()
    bench.settle()
    assert "disabled reason=guard layer=0 " in errors(capsys)[-1]


@pytest.mark.parametrize("what", ["metrics", "file"])
def test_a_trip_is_said_whatever_else_fails_with_it(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make(Settings(guard_rel=0.05, guard_dump=tmp_path), wrong=1.0)
    bench.capture(2)
    if what == "metrics":
        bench.ledger.meters = SimpleNamespace(count=lambda *args: None, compared=fail, tripped=lambda: None)
    else:
        bench.router._both._snapshot.taken = fail
    assert rights(bench, 1) == [True]
    line = says_so(bench, capsys)
    assert ('dump=none dump_error="RuntimeError: too many resources"' in line) == (what == "file")


def test_a_capture_after_a_trip_that_the_host_does_not_know_of(capsys: pytest.CaptureFixture[str]) -> None:
    """The rehearsal does not take the offsets that the last replay has left for those of its own batch."""
    bench = tripped_on_the_device()
    bench.capture(4, 2)
    assert rights(bench, 2, bs=4) == [True] * 2
    assert "WARNING" not in capsys.readouterr().err


# A launch that fails without validation: graphs have no switch.


@pytest.mark.parametrize("where", ["eager", "capture"])
def test_graphs_that_do_not_compare_keep_the_kernel_and_the_line_says_so(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make(Settings(), wrong=1.0)
    real, kept = bench.router.kernel.launch, 2
    if where == "eager":
        bench.capture(2)
        bench.router.kernel.launch = fail
        bench.eager(bench.cases([9, 10, 11, 12], 3))
    else:  # the second layer, with the first one recorded

        def sometimes(*args: Any) -> None:
            if FakeGraph.current is not None and args[2].data_ptr() == bench.layers[1].out.data_ptr():
                fail()
            real(*args)

        bench.router.kernel.launch, kept = sometimes, 1
        bench.capture(2)
    assert bench.ledger.disabled == "launch_failed"
    before = bench.ledger.counts.copy()
    bench.replay(2, bench.cases([50, 20]))
    assert bench.ledger.counts["kernel", "verify"] - before["kernel", "verify"] == kept
    assert bench.ledger.counts["stock", "launch_failed"] - before["stock", "launch_failed"] == 2 - kept
    (line,) = errors(capsys)
    assert "eager verify calls run stock from here on, CUDA graphs go on with what they have captured until a " in line


def test_graphs_that_compare_go_stock_after_a_launch_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    bench = make(cases.VALIDATE, wrong=1.0)
    bench.capture(2)
    bench.router.kernel.launch = fail
    bench.eager(bench.cases([9, 10, 11, 12], 3))
    assert rights(bench, 2) == [True] * 2
    assert bench.ledger.counts["stock", "launch_failed"] == 2 + 2 * 2
    (line,) = errors(capsys)
    assert line.endswith("; verify calls run stock from here on")


def test_metadata_that_is_replayed_from_a_graph_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """SGLANG_ENABLE_METADATA_GLUE_GRAPH: the host no longer comes by before a replay."""
    bench = make(cases.VALIDATE)
    bench.capture(2)
    before = dict(bench.ledger.counts)
    FakeGraph().capture(lambda: bench.router.replay_begins(2))
    assert bench.ledger.counts == before and bench.ledger.disabled is None
    assert capsys.readouterr().err.count("replays are neither counted nor logged") == 1


def test_a_guard_that_could_not_look_at_replays_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """The same with a guard: the kernel is off, and the graphs are told before the next step."""
    bench = make(cases.GUARD)
    bench.capture(2)
    FakeGraph().capture(lambda: bench.router.replay_begins(2))
    assert bench.ledger.disabled == "guard_failed"
    err = capsys.readouterr().err
    assert err.count("ERROR disabled reason=guard_failed") == 1 and "unset SGLANG_ENABLE_METADATA_GLUE_GRAPH" in err
    both = bench.router._both
    assert both is not None and not bool(both._comparison.tripped)
    bench.router.before_step()
    assert bool(both._comparison.tripped)


def test_buffers_grow_and_keep_what_a_graph_may_write_to() -> None:
    buffers = Buffers(torch.device("cpu"))
    with pytest.raises(NotPrepared, match="no eager call has laid ready x of 40 bytes"):
        buffers.get("x", 10, torch.float32, capturing=True)
    first = buffers.get("x", 10, torch.float32, capturing=False)
    assert buffers.get("x", 16, torch.float32, capturing=False).data_ptr() == first.data_ptr()
    assert buffers.get("x", 3, torch.int64, capturing=True).data_ptr() == first.data_ptr()
    assert buffers.get("x", 17, torch.float32, capturing=False).data_ptr() != first.data_ptr()
    assert buffers.nbytes == 64 + 128
    buffers.get("x", 100, torch.float32, capturing=False)  # no graph knows the one of 128
    assert buffers.nbytes == 64 + 512


def test_scratch_memory_has_a_bound() -> None:
    out = torch.empty(4000, 128, 512, device="meta")
    assert scratch_elements(out) * 8 <= 32 * CHUNK + 8 * FIGURES


def test_a_stock_kernel_that_cannot_be_compared_with_leaves_a_graph_that_runs_stock(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A capture that raises would be a service that does not start."""
    bench = make(cases.VALIDATE)
    stock_with = bench.router._both._stock

    def only_as_it_is(*args: Any, **other: Any) -> Any:
        if other:
            raise RuntimeError("not with these")
        return stock_with(*args)

    bench.router._both._stock = only_as_it_is
    bench.capture(2)
    batch = bench.cases([5, 40])
    for layer, out in enumerate(bench.replay(2, batch)):
        assert rel(out, reference(batch[layer])) < cases.LIMIT[out.dtype]
    assert bench.ledger.counts["stock", "validation_failed"] == 2
    assert "WARNING validation of a CUDA graph failed: RuntimeError: not with these" in capsys.readouterr().err


def test_a_capture_between_replays_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    cases.a_capture_between_replays_is_no_step(make, capsys)


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_both_kernels_have_run_before_they_are_captured(mode: str) -> None:
    """What is compiled or loaded at a first call would otherwise be so under the capture."""
    bench = make(Settings(mode=mode, validate=True))
    stock, launched = bench.router.stock.__globals__["run"], []
    bench.router.kernel.launch = lambda *args: launched.append(args[2].data_ptr())
    asked: list[tuple[int, int]] = []
    bench.router.stock.__globals__["run"] = lambda call: asked.append(
        (call["o_extend"].data_ptr(), int(call["qo_indptr"].data_ptr()))
    )
    bench.router.before_step()
    bench.write_metadata(None, 2)
    bench.router.capture_begins(2)
    bench.forward(2)
    eager = (set(asked), set(launched))
    FakeGraph().capture(lambda: bench.forward(2))
    assert stock and asked and launched
    assert (set(asked), set(launched)) == eager


def test_v_is_checked_before_a_capture() -> None:
    bench = make(cases.VALIDATE)
    for v in bench.v.values():
        v.add_(0.5)
    bench.capture(2)
    assert bench.ledger.disabled == "v_not_latent"
    batch = bench.cases([5, 40])
    bench.replay(2, batch)
    assert ("kernel", "verify") not in bench.ledger.counts
