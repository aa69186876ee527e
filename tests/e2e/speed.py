"""The run `speed`: time of a verify step and decode tokens a second, by prompt length and batch size, for the stock
server and the patched one, with CUDA graphs and without.

The model has many layers and little else, so that attention has the share of a step that it has in a large model. What
is measured is a window of a stream: from the moment when all requests of the batch have their first token, which is
prefill's, until the first of them is done. Its tokens are what the server counts (`completion_tokens`); its steps are
those that the server counts in the end (`spec_verify_ct`), in proportion to the request's tokens inside the window.

What attention has of a step is worked out from two measurements: the kernels alone, one layer of the same shape, by
`python -m kdtree_patch bench` on the same GPU, times the number of layers; over the time of the step.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e import tokens
from tests.e2e.client import Chunk, ServiceError
from tests.e2e.plan import TREE, Pair
from tests.e2e.record import Record
from tests.e2e.server import REPOSITORY, Fleet, Server

NEW_TOKENS = 64
# The host of a machine that is not ours alone has spells, of seconds or of a minute, in which every step takes half as
# long again. So all points are gone through so many times, and after that, for so many seconds, those again whose
# servers have not both been as quick twice, within the noise.
ROUNDS = 3
PATIENCE = 150.0
# Decode tokens a second, patched over stock, at batch 1 with CUDA graphs: prompt length to what it has to be.
FACTORS = {8192: 3.0, 32768: 6.0}
# Two servers that do the same differ by this much from run to run.
NOISE = 0.03


@dataclass(frozen=True, order=True)
class Point:
    prefix: int
    bs: int

    def __str__(self) -> str:
        return f"{self.prefix},{self.bs}"


# The first one fills the prefix cache for all others: its prompts begin with theirs.
POINTS = tuple(Point(prefix, bs) for prefix in (32768, 8192, 1024) for bs in (16, 4, 1))


def parse_point(text: str) -> Point:
    """`8192,1`: prompt length and batch size."""
    prefix, bs = map(int, text.split(","))
    if not (1 <= prefix <= 39000 and 1 <= bs <= 16):
        raise ValueError(text)
    return Point(prefix, bs)


@dataclass(frozen=True)
class Window:
    """What happened between two moments of a stream."""

    seconds: float
    steps: float
    tokens: int

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def window(chunks: Iterable[Chunk], bs: int) -> Window:
    """From the first moment when each request has a token until the first request is done.

    Begins and ends with a chunk of the request that is done first, so that both ends are the same moment of a step.
    Raises ServiceError for a stream that has no such window.
    """
    of: list[list[Chunk]] = [[] for _ in range(bs)]
    for chunk in chunks:
        if not 0 <= chunk.index < bs:
            raise ServiceError(f"the stream has a request {chunk.index} in a batch of {bs}")
        of[chunk.index].append(chunk)
    if not all(of) or not all(one[-1].verify_steps for one in of):
        raise ServiceError("the stream has a request without verify steps: is speculation on?")
    first_done = min(of, key=lambda one: one[-1].at)
    all_decode = max(one[0].at for one in of)
    own = [chunk for chunk in first_done if chunk.at >= all_decode]
    if len(own) < 2 or own[-1].tokens == own[0].tokens:
        raise ServiceError("the requests of the batch were hardly decoded at the same time: ask for more tokens")

    def total(at: float) -> int:
        return sum(max(chunk.tokens for chunk in one if chunk.at <= at) for one in of)

    begin, end = own[0], own[-1]
    part = (end.tokens - begin.tokens) / (first_done[-1].tokens - first_done[0].tokens)
    return Window(end.at - begin.at, end.verify_steps * part, total(end.at) - total(begin.at))


class Prompts:
    """Sixteen long ones. A shorter one is the beginning of a longer one, and so in the prefix cache already."""

    def __init__(self, longest: int, vocab: int = 512):
        generator = random.Random(11)
        self._long = [[generator.randrange(2, vocab) for _ in range(longest)] for _ in range(16)]

    def of(self, point: Point) -> list[list[int]]:
        return [prompt[: point.prefix] for prompt in self._long[: point.bs]]


@dataclass(eq=False)
class Row:
    """A point, with graphs or without: the windows of both servers."""

    mode: str
    point: Point
    servers: Mapping[str, Server]
    windows: dict[str, list[Window]] = field(default_factory=dict)
    failed: bool = False  # it could not be measured once, and is missing
    said: str = ""  # of it, last

    def measure(
        self, prompts: Sequence[Sequence[int]], alone: Callable[[Server], AbstractContextManager[None]]
    ) -> None:
        """One window more of each server, taken while it is alone on the machine. Raises ServiceError."""
        for door, server in self.servers.items():
            with alone(server):
                chunks = server.client.stream(prompts, NEW_TOKENS, timeout=300)
            self.windows.setdefault(door, []).append(window(chunks, len(prompts)))

    @property
    def measurable(self) -> bool:
        return not self.failed and all(server.alive for server in self.servers.values())

    @property
    def settled(self) -> bool:
        return bool(self.windows) and all(map(settled, self.windows.values()))

    def found(self) -> dict[str, Any]:
        """Of the shortest window of each: without graphs a step is the host's; what else that does only adds to it."""
        row: dict[str, Any] = {"mode": self.mode, "prefix": self.point.prefix, "bs": self.point.bs}
        row |= {door: figures(of, self.point.bs) for door, of in self.windows.items()}
        row["times"] = round(row["patched"]["tokens_per_s"] / row["stock"]["tokens_per_s"], 2)
        return row


def in_rounds(rows: Sequence[Row]) -> Iterator[Row]:
    """Those to be measured next: all of them ROUNDS times, then for PATIENCE seconds those that are not settled."""
    for _ in range(ROUNDS):
        yield from (row for row in rows if row.measurable)
    deadline = time.monotonic() + PATIENCE
    while again := [row for row in rows if row.measurable and not row.settled]:
        for row in again:
            if time.monotonic() > deadline:
                return
            if row.measurable:
                yield row


def settled(windows: Sequence[Window]) -> bool:
    """Whether the two shortest windows are equally long, within the noise."""
    shortest, *others = sorted(one.step_ms for one in windows)
    return bool(others) and others[0] <= (1 + NOISE) * shortest


def figures(windows: Sequence[Window], bs: int) -> dict[str, Any]:
    best = min(windows, key=lambda one: one.step_ms)
    return {
        "step_ms": round(best.step_ms, 3),
        "tokens_per_s": round(best.tokens_per_s, 1),
        "tokens_per_step": round(best.tokens / best.steps / bs, 3),
        "steps": round(best.steps, 1),
        "repeats": len(windows),
        "spread": round(max(one.step_ms for one in windows) / best.step_ms - 1, 3),
    }


def warm_up(server: Server, sizes: Iterable[int]) -> None:
    """Whatever is compiled or loaded at the first request of its kind."""
    for bs in sizes:
        server.client.generate(tokens.prompts(lengths=[64 + bs] * bs, seed=bs), 8)


def run(
    fleet: Fleet, record: Record, pairs: Sequence[Pair], points: Sequence[Point], layers: int, kernels: bool
) -> None:
    rows: list[dict[str, Any]] = []
    record.document["speed"] = {"layers": layers, "heads": 8, **TREE, "new_tokens": NEW_TOKENS, "rows": rows}
    fleet.settle()
    ready: dict[str, dict[str, Server]] = {}
    for one in pairs:
        with record.attempt(one.name):
            both = {"stock": fleet.ready(one.stock.name), "patched": fleet.ready(one.patched.name)}
            for server in both.values():
                warm_up(server, sorted({point.bs for point in points}))
            ready[one.name] = both
    prompts = Prompts(max(point.prefix for point in points))
    wanted = [Row(name.rpartition("-")[2], point, both) for point in points for name, both in ready.items()]
    for row in in_rounds(wanted):
        try:
            row.measure(prompts.of(row.point), fleet.alone)
        except ServiceError as error:
            tails = "\n".join(server.tail() for server in row.servers.values())
            record.bar(f"speed-{row.mode} at {row.point} could be measured", False, f"{error}\n{tails}")
            row.failed = True
        rows[:] = [one.found() for one in wanted if one.windows and not one.failed]
        if row.failed:
            continue
        found = row.found()
        said = (
            f"{row.mode}, prompt {row.point.prefix:,}, batch {row.point.bs}: step {found['stock']['step_ms']:.1f} ms "
            f"stock, {found['patched']['step_ms']:.1f} ms patched; tokens/s x {found['times']}"
        )
        if said != row.said:
            record.say(said)
        row.said = said
        record.save()
    if kernels and rows:
        with record.attempt("the kernels alone"):
            add_shares(rows, measure_kernels(points, fleet.folder / "kernels.json"), layers)
    record.save()
    judge(record, rows, points)
    for both in ready.values():
        tokens.judge_lines(record, both["patched"])
        tokens.judge_stock(record, both["stock"])
        for server in both.values():
            record.server(server)
    fleet.stop(*(spec.name for one in pairs for spec in one.specs))


def measure_kernels(points: Sequence[Point], path: Path) -> dict[Point, dict[str, float]]:
    """us of one layer, ours and stock, cold. Raises ServiceError."""
    shapes = [f"{point.bs},{TREE['draft_tokens']},8,{point.prefix}" for point in points]
    command = [sys.executable, "-m", "kdtree_patch", "bench", "--shapes", *shapes, "--json", str(path)]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"bench: {error}") from error
    try:
        found = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise ServiceError(f"bench ended with {done.returncode} and no figures: {done.stderr[-600:]}") from error
    kernels: dict[Point, dict[str, float]] = {}
    for row in found:
        point = Point(row["prefix"], row["bs"])
        if point not in kernels and row["stock_us"] is not None:  # the configuration that a service takes comes first
            kernels[point] = {"stock_us": row["stock_us"], "kernel_us": row["kernel_cold_us"]}
    return kernels


def add_shares(rows: list[dict[str, Any]], kernels: dict[Point, dict[str, float]], layers: int) -> None:
    """What attention has of a step, by the kernels alone."""
    for row in rows:
        one = kernels.get(Point(row["prefix"], row["bs"]))
        if one is not None:
            row["kernels"] = one
            row["share_stock"] = round(layers * one["stock_us"] / 1000 / row["stock"]["step_ms"], 3)
            row["share_patched"] = round(layers * one["kernel_us"] / 1000 / row["patched"]["step_ms"], 3)


def judge(record: Record, rows: Sequence[dict[str, Any]], points: Sequence[Point]) -> None:
    missing = 2 * len(points) - len(rows)
    record.bar(
        "speed: every point measured", missing == 0, f"{missing} are missing" if missing else f"{len(rows)} points"
    )
    slower = [row for row in rows if row["times"] < 1 - NOISE]
    found = "; ".join(f"{row['mode']} {row['prefix']},{row['bs']}: {row['times']}" for row in slower)
    worst = min((row["times"] for row in rows), default=0.0)
    bar = f"speed: nowhere slower than stock (noise {NOISE:.0%})"
    record.bar(bar, not slower and bool(rows), found or f"the least is {worst} times stock's")
    for prefix, factor in FACTORS.items():
        if Point(prefix, 1) in points:
            times = [row["times"] for row in rows if (row["mode"], row["prefix"], row["bs"]) == ("graph", prefix, 1)]
            record.bar(
                f"speed: {factor:g} times stock's tokens/s at {prefix:,}, batch 1, with graphs",
                bool(times) and times[0] >= factor,
                f"{times[0]} times" if times else "not measured",
            )
    uneven = [row for row in rows if unequal(row)]
    found = "; ".join(f"{row['mode']} {row['prefix']},{row['bs']}" for row in uneven)
    record.bar("speed: tokens a step as stock's, within 15 %", not uneven, found or "all")


def unequal(row: dict[str, Any]) -> bool:
    """Throughput can only be compared if both accept alike."""
    stock, patched = (row[door]["tokens_per_step"] for door in ("stock", "patched"))
    return abs(patched - stock) > 0.15 * stock
