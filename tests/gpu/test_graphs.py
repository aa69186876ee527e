"""CUDA graphs on a GPU, with both real kernels: the cases of tests/graph_cases.py, and what only a GPU can tell."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kdtree_patch import contract
from kdtree_patch.kernel import VerifyKernel
from kdtree_patch.settings import Settings
from tests import graph_cases as cases
from tests.graph_bench import GraphBench
from tests.support.env import REPO
from tests.support.graphs import CudaGraph

Q_LEN, HEADS = 9, 8


@pytest.fixture(scope="session")
def make(kernel: VerifyKernel) -> cases.Make:
    stock = stock_function()

    def make(settings: Settings, **how: Any) -> GraphBench:
        how = {"dtype": torch.bfloat16, "q_len": Q_LEN, "heads": HEADS, "layers": 3, **how}
        return GraphBench(stock, kernel, CudaGraph, settings, **how)

    return make


def stock_function() -> Callable[..., Any]:
    """SGLang's own, from whichever release can be imported."""
    for home in contract.INNER_HOMES:
        try:
            return getattr(importlib.import_module(home), contract.INNER)
        except ModuleNotFoundError:
            continue
    pytest.exit("the GPU suite compares with SGLang's kernel: put a release on PYTHONPATH", 1)


SETTINGS = {"plain": Settings(), "validate": cases.VALIDATE, "guard": cases.GUARD, "shadow": cases.SHADOW}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_replays_are_right_and_have_the_bits_of_the_eager_call(make: cases.Make, settings: Settings) -> None:
    cases.replays_are_right_and_have_the_bits_of_the_eager_call(make, settings)


def test_draft_extends_are_recorded_by_themselves(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.draft_extends_are_recorded_by_themselves(make, capsys)


def test_a_replay_is_a_call(make: cases.Make) -> None:
    cases.a_replay_is_a_call(make)


def test_validation_says_what_replays_have_done(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.validation_says_what_replays_have_done(make, capsys)


def test_validation_figures_are_those_of_the_eager_call(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.validation_figures_are_those_of_the_eager_call(make, capsys)


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_every_nth_replay(make: cases.Make, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    cases.every_nth_replay(make, Settings(mode=mode, validate=True, validate_every=3), capsys)


@pytest.mark.parametrize("settings", [cases.GUARD, Settings(guard_rel=0.05, validate=True)], ids=["guard", "both"])
def test_the_guard_trips_in_a_replay(make: cases.Make, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    cases.the_guard_trips_in_a_replay(make, settings, capsys)


def test_another_ranks_notice_between_replays(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.another_ranks_notice_between_replays(make, capsys)


def test_a_notice_between_a_replay_and_its_preparation(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.a_notice_between_a_replay_and_its_preparation(make, capsys)


def test_ranks_that_trip_in_one_replay_all_say_so(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.ranks_that_trip_in_one_replay_all_say_so(make, capsys)


def test_the_dump_of_a_replay_has_the_inputs_of_that_call(make: cases.Make, tmp_path: Path) -> None:
    cases.the_dump_of_a_replay_has_the_inputs_of_that_call(make, tmp_path)


@pytest.mark.parametrize("every", [1, 3])
def test_a_replay_that_nobody_prepared(make: cases.Make, every: int) -> None:
    cases.a_replay_that_nobody_prepared(make, every)


def test_padding_does_not_trip(make: cases.Make) -> None:
    cases.padding_does_not_trip(make)


def test_a_nan_of_ours_alone_trips(make: cases.Make) -> None:
    cases.a_nan_of_ours_alone_trips(make)


def test_two_backends(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.two_backends(make, capsys)


def test_an_eager_batch_above_the_largest_graph(make: cases.Make) -> None:
    cases.an_eager_batch_above_the_largest_graph(make)


def test_a_capture_between_replays_is_no_step(make: cases.Make, capsys: pytest.CaptureFixture[str]) -> None:
    cases.a_capture_between_replays_is_no_step(make, capsys)


# What a capture allocates, and whether it waits.


def allocated_while_capturing(bench: GraphBench) -> dict[str, int]:
    """What torch's allocator did between the first and the last call of a capture, and how much of it is kept."""
    forward, found = bench.forward, {}

    def watched(bs: int) -> None:
        if not torch.cuda.is_current_stream_capturing():
            return forward(bs)
        before = torch.cuda.memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            forward(bs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = torch.cuda.memory_stats()
        for name in ("allocation.all.allocated", "allocated_bytes.all.allocated", "allocated_bytes.all.current"):
            found[name] = after[name] - before[name]
        return None

    bench.forward = watched  # type: ignore[method-assign]
    bench.capture(4)
    return found


def test_a_capture_allocates_nothing_and_waits_for_nothing(make: cases.Make) -> None:
    found = allocated_while_capturing(make(Settings()))
    assert set(found.values()) == {0}, found


@pytest.mark.parametrize("settings", [cases.VALIDATE, cases.GUARD, cases.SHADOW], ids=["validate", "guard", "shadow"])
def test_a_capture_with_validation_takes_what_reductions_need_and_gives_it_back(
    make: cases.Make, settings: Settings
) -> None:
    """From the graph's own memory, inside torch; our own tensors are all there before."""
    found = allocated_while_capturing(make(settings))
    print(found)
    assert found["allocated_bytes.all.current"] == 0
    assert found["allocated_bytes.all.allocated"] < 1 << 20


def test_memory_does_not_grow_with_replays(make: cases.Make) -> None:
    bench = make(cases.VALIDATE)
    bench.capture(4)
    batch = bench.cases([50, 20, 7])
    for _ in range(3):
        bench.replay(4, batch)
    bench.settle()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        bench.replay(4, batch)
    bench.settle()
    assert torch.cuda.memory_allocated() <= before


# What it costs.


def test_a_step_is_not_held_up_by_fetching(make: cases.Make) -> None:
    """The host must not wait for a replay that is under way: it comes by while the device is busy."""
    bench = make(cases.VALIDATE)
    bench.capture(1)
    batch = bench.cases([3000])
    bench.replay(1, batch)
    bench.settle()
    torch.cuda._sleep(400_000_000)  # a few tenths of a second
    done = torch.cuda.Event()
    bench.router.replay_begins(1)
    bench.graphs[1].replay()
    done.record()
    for _ in range(3):
        bench.router.before_step()
        bench.router.replay_begins(1)
    assert not done.query()
    torch.cuda.synchronize()


def test_the_selftest_takes_less_than_half_a_second(kernel: VerifyKernel) -> None:
    """A worker runs it once, so it is the first run of a process. Counted are making the cases, their copies, the first
    launches, and float64 on the CPU; not torch's import, the context, nor compiling and loading the kernel.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
    command = [sys.executable, "-m", "kdtree_patch", "selftest", "--json"]
    done = subprocess.run(
        command, cwd=REPO, env={**env, "KDTREE_CONFIG": kernel.config.name}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    print(f"self-test, the first of its process: {found['seconds'] * 1e3:.0f} ms")
    assert found["target"] == kernel.target
    assert found["seconds"] < 0.5


@pytest.mark.parametrize("every", [1, 1000])
def test_what_a_compared_layer_costs(make: cases.Make, every: int) -> None:
    """Printed, for the documentation: microseconds a layer of a replay, at bs 1 and a prefix of 3,000 tokens."""
    for name, settings in (("alone", Settings()), ("guarded", Settings(guard_rel=0.05, validate_every=every))):
        bench = make(settings, layers=8)
        bench.capture(1)
        batch = bench.cases([3000])
        bench.replay(1, batch)  # this one is due
        bench.router.before_step()
        bench.write_metadata(batch, 1)
        bench.router.replay_begins(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        bench.graphs[1].replay()
        start.record()
        for _ in range(20):
            bench.graphs[1].replay()
        end.record()
        torch.cuda.synchronize()
        print(f"every={every} {name}: {start.elapsed_time(end) * 1e3 / 20 / 8:.1f} us a layer")
        assert bench.ledger.disabled is None
