"""The run `load`: hundreds of requests of mixed lengths, sixteen at a time, some of which are given up in the middle,
on one server with CUDA graphs, validation and guard.

A request is given up in both of the ways that there are: its client closes the connection, or somebody asks for it to
be aborted. Between the parts of the run the prefix cache is flushed, which SGLang does only when nothing is running.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.e2e import gpus, tokens
from tests.e2e.client import Chunk, ServiceError
from tests.e2e.record import Record
from tests.e2e.server import Fleet, Server, ServerSpec

REQUESTS, AT_ONCE, PARTS = 500, 16, 3
LONGEST, MOST_NEW = 2048, 96
SETTLED = 100
LOOK_EVERY = 25  # requests
# MiB. One segment of torch's allocator is 20; what leaks with requests is more after four hundred of them.
GROWTH = 64
# Words that no log has while all is well.
TROUBLE = (
    "CUDA error",
    "CUDA out of memory",
    "illegal memory access",
    "Fatal Python error",
    "Scheduler hit an exception",
)


@dataclass(frozen=True)
class Request:
    """`ending`: `whole`, or given up after a few chunks, by `disconnect` or by `abort`."""

    number: int
    prompt: tuple[int, ...]
    new_tokens: int
    ending: str


def requests(count: int, vocab: int = 512, seed: int = 23) -> list[Request]:
    """The first ones are the longest there are, all at once, so that what the server needs it has from then on. One in
    ten is given up each way; some prompts begin as an earlier one does."""
    generator = random.Random(seed)
    made: list[Request] = []
    for number in range(count):
        first = number < AT_ONCE
        length = LONGEST if first else int(2 ** generator.uniform(2, 11))
        prompt = [generator.randrange(2, vocab) for _ in range(length)]
        if made and generator.random() < 0.25:
            earlier = generator.choice(made).prompt[: length // 2]
            prompt[: len(earlier)] = earlier
        ending = "whole" if first else generator.choices(("whole", "disconnect", "abort"), (8, 1, 1))[0]
        made.append(Request(number, tuple(prompt), MOST_NEW if first else generator.randint(8, MOST_NEW), ending))
    return made


@dataclass
class Tally:
    """What came of the requests; threads write to it. `memory` has (requests done, MiB)."""

    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    how_memory: str = ""
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, words: str) -> None:
        with self.lock:
            self.failures.append(words)


def carry_out(server: Server, request: Request) -> str:
    """Returns how it ended. Raises ServiceError if that is not how it should have."""
    client, prompt = server.client, [list(request.prompt)]
    if request.ending == "whole":
        answer = client.generate(prompt, request.new_tokens)[0]
        reason = (answer["meta_info"].get("finish_reason") or {}).get("type")
        if reason != "length" or len(answer["output_ids"]) != request.new_tokens:
            raise ServiceError(f"{len(answer['output_ids'])} of {request.new_tokens} tokens, ended by {reason}")
        return "whole"
    # SGLang aborts all whose id begins with the one that it is given.
    rid = f"e2e-{request.number:06}"
    stream: Iterator[Chunk] = client.stream(prompt, request.new_tokens, rid=[rid])
    with closing(stream):  # type: ignore[type-var]  # a generator is closed
        for number, chunk in enumerate(stream):
            reason = (chunk.answer["meta_info"].get("finish_reason") or {}).get("type")
            if number == 2 and request.ending == "disconnect":
                return "disconnected"
            if number == 2:
                client.abort(rid)
            if reason is not None:
                return "aborted" if reason == "abort" else "done before it was given up"
    return "done before it was given up"


def watch_memory(server: Server, nvml: gpus.Nvml | None, tally: Tally) -> None:
    if nvml is not None:
        size, tally.how_memory = gpus.memory_of(nvml, gpus.process_tree(server.pid))
        tally.memory.append((tally.done, size))


def size_of_a_part(count: int) -> int:
    return -(-count // PARTS)


def drive(server: Server, wanted: Sequence[Request], nvml: gpus.Nvml | None, record: Record) -> Tally:
    """All of them; the prefix cache is flushed between the parts."""
    tally = Tally()

    def one(request: Request) -> None:
        try:
            ended = carry_out(server, request)
            with tally.lock:
                tally.ended[ended] += 1
        except ServiceError as error:
            tally.failed(f"request {request.number} ({len(request.prompt)} tokens, {request.ending}): {error}")
        with tally.lock:
            tally.done += 1
            if tally.done % LOOK_EVERY == 0:
                watch_memory(server, nvml, tally)
            if tally.done % 100 == 0:
                record.say(f"load: {tally.done} requests, {len(tally.failures)} failed")

    size = size_of_a_part(len(wanted))
    for part in range(PARTS):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, wanted[part * size : (part + 1) * size]))
        if not server.alive:
            tally.failed("the server has ended")
            return tally
        if part < PARTS - 1:
            try:
                server.client.flush()
                tally.ended["flushed"] += 1
            except ServiceError as error:
                tally.failed(f"flush {part + 1}: {error}")
    return tally


def growth(memory: Sequence[tuple[int, int]], count: int) -> int | None:
    """MiB: from when the first hundred requests were done, and from the first look after each flush, which gives some
    back, to the most after that; the most of these. None if not all were measured.
    """
    flushes = [part * size_of_a_part(count) for part in range(1, PARTS)]
    grown = []
    for begin, settled in ((0, SETTLED), *((flush, flush + LOOK_EVERY) for flush in flushes)):
        before = [mib for done, mib in memory if begin < done <= settled]
        after = [mib for done, mib in memory if done > settled]
        if not before or not after:
            return None
        grown.append(max(after) - max(before))
    return max(grown)


def judge(record: Record, server: Server, wanted: Sequence[Request], tally: Tally) -> None:
    found = "; ".join(tally.failures[:5]) or f"of {len(wanted)}: {dict(tally.ended)}"
    record.bar("load: no request failed", not tally.failures, found)
    given_up = tally.ended["disconnected"], tally.ended["aborted"]
    record.bar(
        "load: requests were given up both ways", all(given_up), f"{given_up[0]} disconnected, {given_up[1]} aborted"
    )
    record.bar(
        f"load: the cache was flushed {PARTS - 1} times", tally.ended["flushed"] == PARTS - 1, tally.ended["flushed"]
    )
    log = server.log.read_text(errors="replace")
    trouble = [word for word in TROUBLE if word in log]
    record.bar("load: no crash", server.alive and not trouble, trouble or ("alive" if server.alive else "it has ended"))
    tripped = [line.text for line in server.kdtree if line.word == "disabled"]
    record.bar("load: the guard has not tripped", not tripped, tripped[:1] or "no")
    more = growth(tally.memory, len(wanted))
    found = "NVML told nothing" if more is None else f"{more} MiB {tally.how_memory}"
    record.bar(
        f"load: GPU memory grows by no more than {GROWTH} MiB after request {SETTLED}, and after each flush",
        more is not None and more <= GROWTH,
        found,
    )
    tokens.judge_lines(record, server)
    tokens.judge_validation(record, server)


def run(fleet: Fleet, record: Record, spec: ServerSpec, nvml: gpus.Nvml | None, count: int = REQUESTS) -> None:
    with record.attempt("load"):
        server = fleet.ready(spec.name)
        record.say(f"load: {count} requests, {AT_ONCE} at a time")
        wanted = requests(count)
        tally = drive(server, wanted, nvml, record)
        document: dict[str, Any] = {"requests": count, "ended": dict(tally.ended), "failures": tally.failures[:50]}
        record.document["load"] = document | {"memory_mib": tally.memory, "memory_of": tally.how_memory}
        judge(record, server, wanted, tally)
        record.server(server)
    fleet.stop(spec.name)
