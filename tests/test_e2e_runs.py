"""The runs of `make e2e` against a stand-in for SGLang: each bar is kept when all is well, and missed when not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import load, models, plan, ranks, speed, tokens
from tests.e2e.client import Chunk, ServiceError
from tests.e2e.record import Record
from tests.e2e.server import REPOSITORY, Fleet, ServerSpec

FAKE = (str(Path(__file__).with_name("e2e_fake.py")),)
RANKS = "|".join(
    [
        *("[kdtree] installed tp_rank=0", "[kdtree] installed tp_rank=1"),
        "[kdtree] compiled verify_attn_flash.cu for sm_90 in 20.0 s (NVRTC)",
        *("[kdtree] calls served=10", "[kdtree] calls served=10"),
        *(f"[kdtree] L0 max_abs_diff=1e-3 mean=1e-5 rel=2e-03 tp_rank={rank}" for rank in (0, 1)),
    ]
)
GUARD = "|[kdtree] ERROR disabled reason=guard layer=0 rel=2e-3 tp_rank=1; verify calls run stock"
ELSEWHERE = "|[kdtree] ERROR disabled reason=guard_elsewhere tp_rank=0 of=1 of_layer=0 of_pid=9 the guard; verify calls"
TRIPPED = RANKS + GUARD + ELSEWHERE


class Bed:
    """A fleet of stand-ins and the record of a run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.record = Record(folder / "run.json", "command", quiet=True)
        self.fleet = Fleet(folder, 20, 20.0, lambda text: None, FAKE)
        self.checkpoints = models.Checkpoints.below(folder)

    def missed(self) -> list[str]:
        return [one["bar"] for one in self.record.document["verdict"] if not one["ok"]]

    def found(self, bar: str) -> str:
        [found] = [one["found"] for one in self.record.document["verdict"] if bar in one["bar"]]
        return found


@pytest.fixture
def bed(tmp_path: Path):
    bed = Bed(tmp_path)
    with bed.fleet:
        yield bed


def with_environ(spec: ServerSpec, **environ: str) -> ServerSpec:
    return dataclasses.replace(spec, environ={**spec.environ, **environ})


# -------------------------------------------------------------------------------------------------------------- tokens


def run_tokens(
    bed: Bed,
    stock: dict[str, str] | None = None,
    name: str = "noisy-graph",
    pool: str | None = None,
    **patched: str,
) -> list[str]:
    [one] = [pair for pair in plan.token_pairs(bed.checkpoints, pool) if pair.name == name]
    one = dataclasses.replace(
        one,
        stock=with_environ(one.stock, **(stock or {})),
        patched=with_environ(one.patched, **patched),
        margins=one.margins and with_environ(one.margins, **(stock or {})),
    )
    bed.fleet.want(one.specs)
    tokens.run(bed.fleet, bed.record, [one], pool)
    return bed.missed()


def test_with_an_fp8_pool_tokens_are_told_and_not_judged(bed: Bed) -> None:
    assert run_tokens(bed, stock={"FAKE_MARGIN": "1.5"}, pool="fp8_e4m3", FAKE_DIFFER="0") == []
    assert "prompt 37 alone at token 0" in bed.found("answered with an fp8_e4m3 pool")


def test_an_answer_that_is_short_with_an_fp8_pool(bed: Bed) -> None:
    assert run_tokens(bed, pool="fp8_e4m3", FAKE_SHORT="1") != []


def test_the_same_tokens_keep_every_bar(bed: Bed) -> None:
    assert run_tokens(bed) == []
    assert bed.found("tokens as stock's") == "all 384 tokens the same"
    assert [one["prompt"] for one in bed.record.document["tokens"]["noisy-graph"]] == [5, 37, 200, 700] * 2
    assert not any(server.alive for server in bed.fleet.started)


def test_other_tokens_miss_it_and_say_where(bed: Bed) -> None:
    missed = run_tokens(bed, stock={"FAKE_MARGIN": "1.5"}, FAKE_DIFFER="0")
    assert missed == ["noisy-graph: tokens as stock's (prompt 5 not judged)"]
    assert "prompt 37 alone at token 0, where stock's best two are 1.500 apart" in bed.found("tokens as stock's")


def test_a_tie_of_stocks_own_is_no_difference(bed: Bed) -> None:
    assert run_tokens(bed, stock={"FAKE_MARGIN": "0.05"}, FAKE_DIFFER="0") == []
    assert "prompt 37 alone at token 0" in bed.found("tokens as stock's")


def test_a_token_that_is_none_of_stocks_best_two_is_no_tie(bed: Bed) -> None:
    # At token 20 the stand-in's best two are others than the token that the patched one says.
    assert run_tokens(bed, stock={"FAKE_MARGIN": "0.05"}, FAKE_DIFFER="20") != []
    assert "at token 20, with a token that is none of stock's best two" in bed.found("tokens as stock's")


@pytest.mark.parametrize(("margin", "missed"), [("0.05", []), ("1.5", ["tokens as stock's"])])
def test_where_the_pair_says_no_log_probabilities_a_third_server_does(bed: Bed, margin: str, missed: list[str]) -> None:
    found = run_tokens(bed, stock={"FAKE_MARGIN": margin}, name="dflash-graph", FAKE_DIFFER="0")
    assert len(found) == len(missed) and all(word in bar for word, bar in zip(missed, found, strict=True))
    assert f"where stock's best two are {float(margin):.3f} apart" in bed.found("tokens as stock's")
    assert set(bed.record.document["servers"]) == {f"dflash-graph-{one}" for one in ("stock", "patched", "margins")}
    assert not any(server.alive for server in bed.fleet.started)


def test_the_server_that_says_them_must_not_have_the_patch(bed: Bed) -> None:
    [one] = [pair for pair in plan.token_pairs(bed.checkpoints) if pair.name == "dflash-graph"]
    assert one.margins is not None
    one = dataclasses.replace(one, margins=dataclasses.replace(one.margins, patched=True))
    bed.fleet.want(one.specs)
    tokens.run(bed.fleet, bed.record, [one])
    assert bed.missed() == ["dflash-graph-margins: no [kdtree] line"]


def test_a_server_that_refuses_log_probabilities_is_told_as_that(bed: Bed) -> None:
    [one] = [pair for pair in plan.token_pairs(bed.checkpoints) if pair.name == "dflash-graph"]
    one = dataclasses.replace(one, patched=with_environ(one.patched, FAKE_DIFFER="0"), margins=None)
    bed.fleet.want(one.specs)
    tokens.run(bed.fleet, bed.record, [one])
    assert bed.missed() == ["dflash-graph: tokens as stock's (prompt 5 not judged)"]
    assert "answers 400" in bed.found("tokens as stock's")


def test_an_answer_that_is_short_misses_the_bar(bed: Bed) -> None:
    assert "noisy-graph: tokens as stock's (prompt 5 not judged)" in run_tokens(bed, FAKE_SHORT="1")
    assert "at token 47" in bed.found("tokens as stock's")


def test_both_being_short_is_not_the_same(bed: Bed) -> None:
    assert run_tokens(bed, stock={"FAKE_SHORT": "1"}, FAKE_SHORT="1") != []


@pytest.mark.parametrize(
    "lines, missed",
    [
        ("nothing", ["installed once in each rank", "calls served"]),
        ("[kdtree] installed tp_rank=0|[kdtree] installed tp_rank=0|[kdtree] calls served=10", ["installed once"]),
        ("[kdtree] installed tp_rank=0", ["calls served"]),
        ("[kdtree] installed|[kdtree] calls served=10", []),
        (
            "[kdtree] installed tp_rank=0|[kdtree] calls served=10|[kdtree] ERROR disabled reason=launch_failed x",
            ["no error"],
        ),
        (
            "[kdtree] declined reason=contract x; the service runs stock",
            ["installed once", "no error, no process that declines", "calls served"],
        ),
    ],
)
def test_a_patched_server_must_say_what_it_should(bed: Bed, lines: str, missed: list[str]) -> None:
    found = run_tokens(bed, FAKE_LINES=lines)
    assert len(found) == len(missed)
    assert all(word in bar for word, bar in zip(missed, found, strict=True))


def test_a_stock_server_must_not_have_the_patch(bed: Bed) -> None:
    server = bed.folder / "x-stock.log"
    server.write_text("[kdtree] installed tp_rank=0\n")
    bed.fleet.want([ServerSpec("plain", False, ())])
    stock = bed.fleet.ready("plain")
    with stock.log.open("a") as log:
        log.write("[kdtree] installed tp_rank=0\n")
    tokens.judge_stock(bed.record, stock)
    assert bed.missed() == ["plain: no [kdtree] line"]


@pytest.mark.parametrize("name", ["same-eager", "dflash-graph"])
def test_validation_is_judged_where_it_is_on(bed: Bed, name: str) -> None:
    lines = "[kdtree] installed|[kdtree] calls served=10|[kdtree] L0 max_abs_diff=1 mean=1 rel=6e-3"
    assert run_tokens(bed, name=name, FAKE_LINES=lines) == [f"{name}-patched: rel below 0.005"]


def test_a_server_that_dies_costs_its_pair_and_no_other(bed: Bed) -> None:
    first, second = plan.token_pairs(bed.checkpoints)[:2]
    first = dataclasses.replace(first, patched=with_environ(first.patched, FAKE_DIE_AT="2"))
    bed.fleet.want([*first.specs, *second.specs])
    tokens.run(bed.fleet, bed.record, [first, second])
    assert bed.missed() == [f"{first.name} could be run"]
    assert second.name in bed.record.document["tokens"]


def test_acceptance_that_differs_misses_the_bar(bed: Bed) -> None:
    row = {"prompt": 37, "how": "alone", "tokens": 48, "differs_at": None, "accept_stock": 2.0, "accept_patched": 1.9}
    tokens.judge_tokens(bed.record, "x", [row])
    assert bed.missed() == ["x: acceptance alone within 2% of stock's"]


def test_where_two_lists_differ() -> None:
    assert tokens.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert tokens.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert tokens.first_difference([1, 2], [1, 2, 3]) == 2


# --------------------------------------------------------------------------------------------------------------- speed


def chunk(at: float, index: int, count: int, steps: int | None = None) -> Chunk:
    """`steps` of the last of a request alone."""
    meta = {"completion_tokens": count} | ({} if steps is None else {"spec_verify_ct": steps})
    return Chunk(at, index, {"meta_info": meta})


def test_a_window_has_neither_prefill_nor_what_comes_after_the_first_is_done() -> None:
    # The second request begins two seconds late; the first one is done at 7, after 14 tokens and 7 steps.
    first = [chunk(at, 0, 1 + 2 * at, 7 if at == 7 else None) for at in range(8)]
    second = [chunk(at + 0.1, 1, 1 + 3 * (at - 2), 7 if at == 9 else None) for at in range(2, 10)]
    found = speed.window(sorted(first + second, key=lambda one: one.at), 2)
    # From 3, the first chunk of the first request after the second has begun at 2.1, to 7.
    assert (found.seconds, found.steps) == (4, 4)
    # Of the second request what had come by then: 4 at 3.1 is not there yet, nor is 16 at 7.1.
    assert found.tokens == (15 - 7) + (13 - 1)
    assert (found.step_ms, found.tokens_per_s) == (1000, 5)


@pytest.mark.parametrize(
    "chunks, words",
    [
        ([chunk(0, 0, 1), chunk(1, 0, 2)], "without verify steps"),
        ([chunk(0, 0, 1, 1)], "hardly decoded at the same time"),
        ([chunk(0, 0, 2), chunk(1, 0, 2, 1)], "hardly decoded at the same time"),
        ([chunk(0, 1, 1, 1)], "has a request 1"),
    ],
)
def test_a_stream_without_a_window_is_an_error(chunks: list[Chunk], words: str) -> None:
    with pytest.raises(ServiceError, match=words):
        speed.window(chunks, 1)


def test_requests_one_after_the_other_have_no_window() -> None:
    with pytest.raises(ServiceError, match="hardly decoded"):
        speed.window([chunk(0, 0, 1), chunk(1, 0, 3, 2), chunk(2, 1, 1), chunk(3, 1, 3, 2)], 2)


def run_speed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, *points: speed.Point, stock_ms: int, patched_ms: int
) -> list[str]:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "PATIENCE", 0.0)
    monkeypatch.setattr(speed, "NEW_TOKENS", 24)
    pairs = [
        dataclasses.replace(
            one,
            stock=with_environ(one.stock, FAKE_STEP_MS=str(stock_ms)),
            patched=with_environ(one.patched, FAKE_STEP_MS=str(patched_ms)),
        )
        for one in plan.speed_pairs(bed.checkpoints)
    ]
    bed.fleet.want(spec for one in pairs for spec in one.specs)
    speed.run(bed.fleet, bed.record, pairs, points, 24, kernels=False)
    return bed.missed()


def test_a_faster_server_keeps_the_bars(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    points = (speed.Point(32768, 1), speed.Point(8192, 1), speed.Point(64, 4))
    assert run_speed(bed, monkeypatch, *points, stock_ms=150, patched_ms=2) == []
    rows = bed.record.document["speed"]["rows"]
    assert [(row["mode"], row["prefix"], row["bs"]) for row in rows][:2] == [("graph", 32768, 1), ("eager", 32768, 1)]
    for row in rows:
        assert 149 < row["stock"]["step_ms"] < 200 and row["stock"]["tokens_per_step"] == pytest.approx(2, abs=0.2)
        assert row["times"] > 6


def test_a_server_that_is_no_faster_misses_them(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = run_speed(bed, monkeypatch, speed.Point(8192, 1), stock_ms=10, patched_ms=20)
    assert missed == [
        "speed: nowhere slower than stock (noise 3%)",
        "speed: 3 times stock's tokens/s at 8,192, batch 1, with graphs",
    ]
    assert "graph 8192,1: 0." in bed.found("nowhere slower")


class Stream:
    """A server whose windows of ten steps take so many seconds."""

    def __init__(self, name: str, asked: list[str], *seconds: float):
        self.name, self.asked, self.seconds = name, asked, iter(seconds)
        self.client = self
        self.alive = True

    def stream(self, prompts: Any, new_tokens: int, timeout: float) -> list[Chunk]:
        self.asked.append(self.name)
        return [chunk(0, 0, 1), chunk(next(self.seconds), 0, 21, 10)]


def a_row(mode: str, *streams: Stream) -> speed.Row:
    servers: Any = dict(zip(("stock", "patched"), streams, strict=True))
    return speed.Row(mode, speed.Point(64, 1), servers)


def test_the_shortest_window_of_each_counts_and_each_is_alone_in_its_own() -> None:
    asked: list[str] = []
    row = a_row("eager", Stream("stock", asked, 9.0, 1.0), Stream("patched", asked, 2.0, 3.0))

    @contextlib.contextmanager
    def alone(server: Any) -> Iterator[None]:
        asked.append("alone")
        yield
        asked.append("together")

    for _ in range(2):
        row.measure([[1]], alone)
    assert asked == ["alone", "stock", "together", "alone", "patched", "together"] * 2
    found = row.found()
    assert (found["stock"]["step_ms"], found["stock"]["repeats"], found["stock"]["spread"]) == (100.0, 2, 8.0)
    assert (found["patched"]["step_ms"], found["patched"]["tokens_per_step"], found["times"]) == (200.0, 2.0, 0.5)


def test_points_are_gone_through_in_rounds_and_the_unsettled_ones_again() -> None:
    asked: list[str] = []
    steady = a_row("graph", Stream("a", asked, *[1.0] * 9), Stream("b", asked, *[1.0] * 9))
    # The stock server of the other is quick twice in the fifth round, after a spell.
    uneven = a_row("eager", Stream("c", asked, 9.0, 1.0, 8.0, 7.0, 1.02, 5.0), Stream("d", asked, *[1.0] * 9))
    order = []
    for row in speed.in_rounds([steady, uneven]):
        order.append(row.mode)
        row.measure([[1]], lambda server: contextlib.nullcontext())
    assert order == ["graph", "eager"] * speed.ROUNDS + ["eager"] * 2


@pytest.mark.parametrize("how", ["it failed", "a server has ended"])
def test_what_cannot_be_measured_any_more_does_not_come_again(how: str) -> None:
    doubling = [2.0**i for i in range(9)]
    server = Stream("a", [], *doubling)
    row, order = a_row("eager", server, Stream("b", [], *doubling)), []
    for one in speed.in_rounds([row]):
        order.append(one.mode)
        one.measure([[1]], lambda server: contextlib.nullcontext())
        row.failed, server.alive = how == "it failed", how == "it failed"
    assert order == ["eager"]


def test_who_is_never_as_quick_twice_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PATIENCE", 0.0)
    doubling = [2.0**i for i in range(9)]
    row = a_row("eager", Stream("a", [], *doubling), Stream("b", [], *doubling))
    taken = 0
    for one in speed.in_rounds([row]):
        one.measure([[1]], lambda server: contextlib.nullcontext())
        taken += 1
    assert taken == speed.ROUNDS


def test_points_that_could_not_be_measured_are_missed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: Any) -> None:
        raise ServiceError("no window")

    monkeypatch.setattr(speed, "window", broken)
    missed = run_speed(bed, monkeypatch, speed.Point(64, 1), stock_ms=1, patched_ms=1)
    assert "speed-graph at 64,1 could be measured" in missed and "speed: every point measured" in missed


def test_shares_come_from_the_kernels_alone() -> None:
    row: dict[str, Any] = {"prefix": 8192, "bs": 1, "stock": {"step_ms": 40.0}, "patched": {"step_ms": 10.0}}
    speed.add_shares([row], {speed.Point(8192, 1): {"stock_us": 1250.0, "kernel_us": 25.0}}, 24)
    assert (row["share_stock"], row["share_patched"]) == (0.75, 0.06)


def test_what_the_benchmark_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"prefix": 8192, "bs": 1, "stock_us": 1250.0, "kernel_cold_us": 25.0, "config": "portable"},
        {"prefix": 8192, "bs": 1, "stock_us": 1250.0, "kernel_cold_us": 20.0, "config": "hopper"},
    ]

    def bench(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        assert command[command.index("--shapes") + 1 : command.index("--json")] == ["1,16,8,8192"]
        Path(command[-1]).write_text(json.dumps({"rows": rows}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", bench)
    found = speed.measure_kernels([speed.Point(8192, 1)], tmp_path / "kernels.json")
    assert found == {speed.Point(8192, 1): {"stock_us": 1250.0, "kernel_us": 25.0}}


def test_a_benchmark_that_fails_says_why(tmp_path: Path) -> None:
    # There is no GPU here; where there is one, there is no folder of that name to write to.
    with pytest.raises(ServiceError, match="bench ended with 2 and no figures"):
        speed.measure_kernels([speed.Point(8192, 1)], tmp_path / "none" / "kernels.json")


@pytest.mark.parametrize("text", ["8192", "8192,0", "40000,1", "1,17", "a,b", "1,2,3"])
def test_points_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        speed.parse_point(text)


# ---------------------------------------------------------------------------------------------------------------- load


class FakeNvml:
    """What each look at the memory finds; the last value from then on. By GPU, process to MiB, if `by_process`."""

    def __init__(self, *sizes: int):
        self.sizes = list(sizes)

    def processes(self) -> list[dict[int, int]]:
        return [{}, {}]

    def used(self) -> int:
        return self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]


def run_load(bed: Bed, nvml: FakeNvml, count: int = 200, **environ: str) -> list[str]:
    spec = with_environ(plan.load_spec(bed.checkpoints), FAKE_STEP_MS="1", **environ)
    bed.fleet.want([spec])
    load.run(bed.fleet, bed.record, spec, nvml, count)  # type: ignore[arg-type]
    return bed.missed()


def test_a_load_that_is_carried_out_keeps_the_bars(bed: Bed) -> None:
    assert run_load(bed, FakeNvml(5000)) == []
    ended = bed.record.document["load"]["ended"]
    assert ended["flushed"] == 2 and ended["whole"] > 140 and ended["disconnected"] and ended["aborted"]
    assert bed.found("GPU memory") == "0 MiB of the whole GPU"


def test_requests_that_fail_are_told(bed: Bed) -> None:
    missed = run_load(bed, FakeNvml(5000), FAKE_REFUSE="50")
    assert missed == ["load: no request failed"]
    assert "/generate answers 500" in bed.found("no request failed")


def test_answers_that_are_short_are_failures(bed: Bed) -> None:
    assert run_load(bed, FakeNvml(5000), FAKE_SHORT="1") == ["load: no request failed"]
    assert "95 of 96 tokens" in bed.found("no request failed")


def test_a_server_that_dies_under_load_is_told(bed: Bed) -> None:
    missed = run_load(bed, FakeNvml(5000), FAKE_DIE_AT="30")
    assert "load: no request failed" in missed and "load: no crash" in missed


def test_memory_that_grows_is_told(bed: Bed) -> None:
    # A look at every 25 requests, the fifth one after the first hundred.
    assert run_load(bed, FakeNvml(5000, 5001, 5001, 5001, 5010, 5066)) == [
        "load: GPU memory grows by no more than 64 MiB after request 100, and after each flush"
    ]
    assert bed.found("GPU memory") == "65 MiB of the whole GPU"


def test_memory_is_compared_with_what_a_flush_has_left() -> None:
    """A look at every 25 of 500 requests; flushes after 167 and 334, each of which gives something back."""
    looks = range(25, 501, 25)
    stored = json.loads((REPOSITORY / "docs/results/h200-e2e.json").read_text())["load"]
    assert [done for done, _ in stored["memory_mib"]] == list(looks)
    assert load.growth(stored["memory_mib"], 500) == 4
    for flush, at in ((1, 300), (2, 450)):
        leaks = [(done, 3000 - 100 * (done > 167) - 100 * (done > 334) + 65 * (done >= at)) for done in looks]
        assert max(size for done, size in leaks if done > 100) <= 3000
        assert load.growth(leaks, 500) == 65, flush
    # Of all parts together it is no more either.
    assert load.growth([(done, 3000 + done // 5) for done in looks], 500) == 80
    assert load.growth([(done, 3000) for done in looks if done < 334], 500) is None


def test_a_guard_that_trips_is_told(bed: Bed) -> None:
    lines = "[kdtree] installed|[kdtree] calls served=10|[kdtree] L0 max_abs_diff=1 mean=1 rel=2e-3"
    tripped = f"{lines}|[kdtree] ERROR disabled reason=guard layer=0 rel=1.0; x"
    assert "load: the guard has not tripped" in run_load(bed, FakeNvml(5000), FAKE_LINES=tripped)


def test_the_requests_are_the_same_each_time_and_begin_with_the_longest() -> None:
    made = load.requests(500)
    assert made == load.requests(500)
    assert {len(one.prompt) for one in made[: load.AT_ONCE]} == {load.LONGEST}
    assert max(len(one.prompt) for one in made) == load.LONGEST and min(len(one.prompt) for one in made) < 10
    endings = [one.ending for one in made]
    assert 30 < endings.count("abort") < 80 and 30 < endings.count("disconnect") < 80


# --------------------------------------------------------------------------------------------------------------- ranks


def run_ranks(bed: Bed, monkeypatch: pytest.MonkeyPatch, trip: str = TRIPPED, **environ: str) -> list[str]:
    monkeypatch.setattr(ranks.gpus, "gpus_by_role", lambda nvml, pid: {"rank 0": [0], "rank 1": [1]})
    monkeypatch.setenv("FAKE_LINES", environ.pop("lines", RANKS))
    wanted = plan.rank_specs(bed.checkpoints, 2, bed.folder)
    wanted = dataclasses.replace(wanted, trip=with_environ(wanted.trip, FAKE_LINES=trip, **environ))
    killer = ranks.CompilerKiller(bed.folder / "none")
    killer.start()
    bed.fleet.want(wanted.specs)
    ranks.run(bed.fleet, bed.record, wanted, object(), 2, killer)  # type: ignore[arg-type]
    return bed.missed()


def run_trip(bed: Bed, trip: str = TRIPPED, **environ: str) -> list[str]:
    """The server whose guard trips, and the stock one that it is compared with."""
    wanted = plan.rank_specs(bed.checkpoints, 2, bed.folder)
    stock = next(one.stock for one in wanted.pairs if one.name == "noisy-graph")
    bed.fleet.want([stock, with_environ(wanted.trip, FAKE_LINES=trip, **environ)])
    ranks.judge_trip(bed.record, bed.fleet.ready(wanted.trip.name), bed.fleet.ready(stock.name), 2)
    return bed.missed()


KILLED = "killed-patched: the compiler was killed while it compiled"


def test_ranks_that_are_well_keep_every_bar_but_the_one_that_needs_a_compiler(bed: Bed, monkeypatch) -> None:
    assert run_ranks(bed, monkeypatch) == [KILLED]
    assert set(bed.record.document["ranks"]["tokens"]) == {
        *("same-graph", "same-eager", "noisy-graph", "noisy-eager"),
        *("trip, switching", "trip"),
    }
    each = [{"rank": rank, "calls": 1, "rel": 2e-3} for rank in (0, 1)]
    validated = bed.record.document["ranks"]["validated"]
    assert validated == {f"{name}-patched": each for name in ("same-graph", "same-eager", "killed")}
    assert bed.found("same-eager-patched: validated") == "[1, 1] calls on ranks [0, 1]"


@pytest.mark.parametrize(
    "lines, bar",
    [
        (RANKS.replace("installed tp_rank=1", "installed tp_rank=0"), "installed exactly once in each rank"),
        (RANKS.replace("|[kdtree] calls served=10|", "|", 1), "both ranks serve the same calls"),
        (RANKS.replace("compiled verify", "found verify"), "a cold cache"),
        (RANKS + "|[kdtree] installed", "installed exactly once in each rank"),
        (RANKS + "|[kdtree] ERROR x", "no error"),
    ],
)
def test_ranks_that_are_not_miss_theirs(bed: Bed, monkeypatch, lines: str, bar: str) -> None:
    assert any(bar in missed for missed in run_ranks(bed, monkeypatch, lines=lines))


TOGETHER = "trip-patched: the guard trips on rank 1 alone, and each other rank goes stock with it"


@pytest.mark.parametrize(
    "trip",
    [
        RANKS,
        RANKS + GUARD,
        RANKS + ELSEWHERE,
        TRIPPED.replace("2e-3 tp_rank=1;", "2e-3 tp_rank=0;"),
        TRIPPED.replace("elsewhere tp_rank=0", "elsewhere tp_rank=1"),
        TRIPPED.replace("of=1", "of=0"),
        TRIPPED + ELSEWHERE,
        TRIPPED + "|[kdtree] ERROR disabled reason=launch_failed no; verify calls run stock",
    ],
)
def test_the_guard_has_to_trip_on_rank_1_and_to_bring_the_other_along(bed: Bed, monkeypatch, trip: str) -> None:
    assert run_trip(bed, trip) == [TOGETHER]


@pytest.mark.parametrize(
    "line", ["L1 max_abs_diff=1e-3 mean=1e-5 rel=2e-03 calls=1 tp_rank=0", "calls served=1000 forward_mode=3"]
)
def test_a_rank_that_serves_on_after_the_trip_is_told(bed: Bed, line: str) -> None:
    assert run_trip(bed, FAKE_EACH=f"[kdtree] {line}") == ["trip-patched: no rank has served a call since"]


def test_a_rank_that_has_never_served_has_not_gone_stock(bed: Bed) -> None:
    silent = "|".join(line for line in TRIPPED.split("|") if "L0" not in line and "calls" not in line.split()[1])
    assert run_trip(bed, silent) == ["trip-patched: no rank has served a call since"]


def test_another_error_with_the_trip_is_told(bed: Bed) -> None:
    assert run_trip(bed, TRIPPED + "|[kdtree] ERROR x") == ["trip-patched: no other error"]


def layer(rank: int, calls: str = "", rel: str = "2e-03") -> str:
    return f"|[kdtree] L0 max_abs_diff=1e-3 mean=1e-5 rel={rel}{calls} tp_rank={rank}"


OFTEN, BELOW = "validated as often on each rank", "rel below 0.005"


@pytest.mark.parametrize(
    ("mode", "more", "missed"),
    [
        ("eager", layer(0) + layer(1), []),
        ("eager", layer(0), [OFTEN]),
        # With graphs a rank may be a few steps late, and may tell of several at a time.
        ("graph", layer(0, " calls=50") + layer(1, " calls=24") + layer(1, " calls=20"), []),
        ("graph", layer(0, " calls=50") + layer(1, " calls=43"), [OFTEN]),
        ("eager", layer(0) + layer(1, rel="6e-3"), [BELOW]),
        ("eager", layer(2), [OFTEN]),
    ],
)
def test_each_rank_validates_the_same_calls(bed: Bed, monkeypatch, mode: str, more: str, missed: list[str]) -> None:
    [one] = [one for one in plan.rank_specs(bed.checkpoints, 2, bed.folder).pairs if one.name == f"same-{mode}"]
    one = dataclasses.replace(one, patched=with_environ(one.patched, FAKE_LINES=RANKS + more))
    monkeypatch.setattr(ranks.gpus, "gpus_by_role", lambda nvml, pid: {"rank 0": [0], "rank 1": [1]})
    bed.fleet.want(one.specs)
    servers = {"stock": bed.fleet.ready(one.stock.name), "patched": bed.fleet.ready(one.patched.name)}
    ranks.judge_pair(bed.record, one, servers, object(), 2)  # type: ignore[arg-type]
    assert bed.missed() == [f"same-{mode}-patched: {bar}" for bar in missed]


def test_no_layer_line_is_no_validation(bed: Bed, monkeypatch) -> None:
    silent = "|".join(line for line in RANKS.split("|") if "L0" not in line)
    missed = run_ranks(bed, monkeypatch, lines=silent)
    assert [bar for bar in missed if bar.startswith("same")] == [
        f"same-{mode}-patched: {bar}" for mode in ("graph", "eager") for bar in (OFTEN, BELOW)
    ]


SWITCHING = "trip-patched: tokens as stock's while the ranks switch (prompt 5 not judged)"
SWITCHED = "trip-patched, all ranks stock: tokens as stock's (prompt 5 not judged)"


# It is asked three times: four prompts, the first of which is not judged, and these as a batch.
@pytest.mark.parametrize(
    ("request_number", "token", "missed"),
    [
        *((2, 20, [SWITCHING]), (5, 20, [SWITCHING]), (7, 20, [SWITCHING]), (10, 20, [SWITCHING])),
        *((12, 20, [SWITCHED]), (15, 20, [SWITCHED])),
        # A prompt that is not judged, and a tie.
        *((1, 20, []), (6, 20, []), (2, 0, [])),
    ],
)
def test_tokens_are_judged_while_the_ranks_switch_and_since(
    bed: Bed, request_number: int, token: int, missed: list[str]
) -> None:
    assert run_trip(bed, FAKE_DIFFER=str(token), FAKE_DIFFER_AT=str(request_number)) == missed
    if (request_number, token) == (2, 20):
        assert "prompt 37 alone at token 20" in bed.found("while the ranks switch")


def test_a_deadlock_after_the_trip_is_told(bed: Bed, monkeypatch) -> None:
    missed = run_ranks(bed, monkeypatch, FAKE_REFUSE="3")
    assert "trip-patched could be run" in missed


@pytest.mark.parametrize(
    ("stock", "patched", "said"),
    [
        (
            {"rank 0": [0], "rank 1": [1]},
            {"rank 0": [0], "rank 1": [0, 1]},
            "stock {'rank 0': [0], 'rank 1': [1]}, patched {'rank 0': [0], 'rank 1': [0, 1]}",
        ),
        ({}, {"rank 0": [0]}, "stock {}, patched {'rank 0': [0]}"),
        ({}, {}, "NVML tells no process of these servers: a container without the host's process ids?"),
    ],
)
def test_gpus_that_are_not_as_with_stock_are_told(
    bed: Bed, monkeypatch, stock: dict[str, list[int]], patched: dict[str, list[int]], said: str
) -> None:
    seen = iter([stock, patched])
    monkeypatch.setattr(ranks.gpus, "gpus_by_role", lambda nvml, pid: next(seen))
    one = plan.rank_specs(bed.checkpoints, 2, bed.folder).pairs[0]
    monkeypatch.setenv("FAKE_LINES", RANKS)
    bed.fleet.want(one.specs)
    servers = {"stock": bed.fleet.ready(one.stock.name), "patched": bed.fleet.ready(one.patched.name)}
    ranks.judge_pair(bed.record, one, servers, object(), 2)  # type: ignore[arg-type]
    assert bed.missed() == ["same-graph: GPUs of each process as with stock"]
    assert bed.found("GPUs of each process") == said


def test_a_start_that_is_late_is_told(bed: Bed) -> None:
    class Started:
        def __init__(self, ready_s: float):
            self.ready_s = ready_s

    bed.record.document["ranks"] = {}
    pairs = [(Started(60.0), Started(60.0 + late)) for late in (0.5, 3.5, 9.0)]
    ranks.judge_start_up(bed.record, pairs)  # type: ignore[arg-type]
    assert bed.found("start-up") == "3.5 s; each: 0.5, 3.5, 9.0" and bed.missed()


def holder(folder: Path, words: str) -> subprocess.Popen[bytes]:
    """A process that holds a lock as a compiler does, with `words` in its command line."""
    script = f"import fcntl, sys, time; {words!r}; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script, str(folder / "family.lock")])
    deadline = time.monotonic() + 20
    while ranks.gpus.holder_of_lock(folder / "family.lock") != process.pid and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def test_the_compiler_that_holds_the_lock_is_killed(tmp_path: Path) -> None:
    compiler = holder(tmp_path, "_serve_job")
    killer = ranks.CompilerKiller(tmp_path)
    killer.start()
    assert compiler.wait(20) == -9
    killer.end()
    assert killer.killed == compiler.pid


def test_others_that_hold_the_lock_are_let_be(tmp_path: Path) -> None:
    worker = holder(tmp_path, "a worker")
    killer = ranks.CompilerKiller(tmp_path)
    killer.start()
    time.sleep(1.5)  # it looks again after one second
    killer.end()
    assert killer.killed is None and worker.poll() is None
    worker.kill()
    worker.wait()


def test_the_trip_narrows_the_limit_of_rank_1_alone(tmp_path: Path) -> None:
    """Behind our sitecustomize, as on a server."""
    program = """
import torch
from kdtree_patch import route
from kdtree_patch.ledger import Ledger
from kdtree_patch.settings import Settings
class Kernel:
    device = torch.device("cpu")
found = []
route.Both = lambda settings, *more: found.append(settings.guard_rel)
for rank in (0, 1):
    route.VerifyRouter(lambda q: None, Kernel(), Settings(guard_rel=0.05), Ledger(), rank, {})
print(found)
"""
    spec = ServerSpec("trip", True, (), {}, Path(ranks.__file__).with_name("trip"))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=spec.environment(), capture_output=True, text=True
    )
    assert done.stdout == "[0.05, 1e-09]\n", done.stderr
