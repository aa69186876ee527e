"""The run `ranks`: what only shows with more than one rank, each on a GPU of its own.

All servers start at the same time, stock and patched alike, and each patched one with an empty cache: so what a cold
start costs is the difference between two servers that have had the same company.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e import gpus, lines, tokens
from tests.e2e.plan import Pair, Ranks
from tests.e2e.record import Record
from tests.e2e.server import Fleet, Server

# Seconds that a patched server may start later than a stock one.
START_UP = 3.0
COMPILED = "compiled verify_attn_flash.cu"
# Validated calls that one rank may have told and another not yet: three steps of the two layers. What a graph's replays
# have found comes a step or two late, as soon as a copy of each rank's own is done. Without graphs it comes at once.
LATE_CALLS = 6
NO_PROCESS = "NVML tells no process of these servers: a container without the host's process ids?"


class CompilerKiller(threading.Thread):
    """Kills the process that compiles into a cache, once: the one that holds the lock there. `killed` is its id."""

    def __init__(self, cache: Path):
        super().__init__(daemon=True)
        self.killed: int | None = None
        self._cache = cache
        self._over = threading.Event()

    def run(self) -> None:
        # Until the servers have started: how long it takes to one that compiles, nobody knows beforehand.
        while self.killed is None and not self._over.is_set():
            for lock in self._cache.glob("*.lock"):
                holder = gpus.holder_of_lock(lock)
                # Not a worker that looks into the cache for a moment.
                if holder is not None and "_serve_job" in gpus.command_line(holder):
                    self._over.wait(1.0)  # the other one shall be waiting by now
                    if gpus.holder_of_lock(lock) == holder:
                        os.kill(holder, signal.SIGKILL)
                        self.killed = holder
                        return
            self._over.wait(0.05)

    def end(self) -> None:
        self._over.set()
        self.join()


def ranks_of(kdtree: Sequence[lines.Line], word: str) -> list[int | None]:
    return sorted((line.rank for line in kdtree if line.word == word), key=str)


def judge_processes(record: Record, server: Server, ranks: int) -> None:
    """One line of its own from each rank; of other processes a stock line at most."""
    name, own = server.spec.name, [line for line in server.kdtree if line.of_the_process]
    once = ranks_of(own, "installed")
    record.bar(f"{name}: installed exactly once in each rank", once == list(range(ranks)), once)
    others = [line.text for line in own if line.word != "installed"]
    allowed = all("stock" in text for text in others)
    record.bar(f"{name}: other processes say that they are stock, or nothing", allowed, others or "nothing")
    errors = [line.text for line in server.kdtree if line.level == "ERROR"]
    record.bar(f"{name}: no error", not errors, errors[:2] or "none")


def served_by_rank(server: Server, ranks: int) -> list[str]:
    """The `calls` lines of a server, which name no rank: each one as often as there are ranks that served alike."""
    said = [line.text for line in server.kdtree if line.word == "calls"]
    return sorted({text for text in said if said.count(text) != ranks})


def judge_validated(record: Record, server: Server, ranks: int) -> None:
    """Each rank has validated the same calls, and none has found much. What each has found is in the document."""
    name, kdtree = server.spec.name, server.kdtree
    found: list[dict[str, Any]] = []
    for rank in sorted({line.rank for line in kdtree if line.is_layer}, key=str):
        own = [line for line in kdtree if line.rank == rank]
        found.append({"rank": rank, "calls": lines.compared(own), "rel": lines.worst_rel(own)})
    record.document.setdefault("ranks", {}).setdefault("validated", {})[name] = found
    late = 0 if "--disable-cuda-graph" in server.spec.options else LATE_CALLS
    calls = [one["calls"] for one in found]
    good = [one["rank"] for one in found] == list(range(ranks)) and max(calls) - min(calls) <= late
    words = f"{calls} calls on ranks {[one['rank'] for one in found]}"
    record.bar(f"{name}: validated as often on each rank", good, words)
    tokens.judge_validation(record, server)


def judge_pair(
    record: Record, one: Pair, servers: Mapping[str, Server], nvml: gpus.Nvml | None, ranks: int
) -> list[dict[str, Any]]:
    rows = tokens.compare(servers["stock"], {door: tokens.ask(server) for door, server in servers.items()})
    tokens.judge_tokens(record, one.name, rows)
    patched = servers["patched"]
    judge_processes(record, patched, ranks)
    tokens.judge_stock(record, servers["stock"])
    served = lines.served(patched.kdtree)
    uneven = served_by_rank(patched, ranks)
    record.bar(f"{one.name}: both ranks serve the same calls", served > 0 and not uneven, uneven or f"{served} each")
    if patched.spec.environ.get("KDTREE_VALIDATE") == "1":
        judge_validated(record, patched, ranks)
    if nvml is None:
        record.bar(f"{one.name}: GPUs of each process as with stock", False, "there is no NVML")
    else:
        of = {door: gpus.gpus_by_role(nvml, server.pid) for door, server in servers.items()}
        good = bool(of["stock"]) and of["patched"] == of["stock"]
        found = f"stock {of['stock']}, patched {of['patched']}" if any(of.values()) else NO_PROCESS
        record.bar(f"{one.name}: GPUs of each process as with stock", good, found)
    return rows


def judge_cold(record: Record, servers: Sequence[Server]) -> None:
    """One compilation in each cache, whatever the number of ranks; nobody was left without a kernel."""
    compiled = {server.spec.name: count(server, COMPILED) for server in servers}
    good = bool(compiled) and set(compiled.values()) == {1}
    record.bar("a cold cache: one rank compiles, the other waits and loads", good, compiled)


def judge_start_up(record: Record, started: Sequence[tuple[Server, Server]]) -> None:
    """`started` has (stock, patched) servers that were started next to each other."""
    later = [p.ready_s - s.ready_s for s, p in started if s.ready_s is not None and p.ready_s is not None]
    bar = f"start-up with a cold cache at most {START_UP:g} s later than stock's (median)"
    if not later:
        record.bar(bar, False, "no pair has started")
        return
    median = statistics.median(later)
    record.document["ranks"]["start_up_later_s"] = [round(one, 1) for one in later]
    record.bar(bar, median <= START_UP, f"{median:.1f} s; each: {', '.join(f'{one:.1f}' for one in later)}")


def count(server: Server, words: str) -> int:
    return sum(words in line.text for line in server.kdtree)


def served_lines(server: Server) -> list[str]:
    """What ranks say of calls that they have served: the layers of each step, and now and then how many calls."""
    return [line.text for line in server.kdtree if line.is_layer or line.word == "calls"]


def judge_trip(record: Record, server: Server, stock: Server, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """The guard of rank 1 trips at the first step, and all ranks are stock since. Rows of tokens, as `compare` gives
    them, of the answers until then and of those since.

    Asked once for that, and once more for the figures of the last replays before it, which come a step or two late: so
    a step whose ranks did not all take the same kernel is in these two. What is asked then is without any: each verify
    step of a rank that still served would be validated, and have its lines.
    """
    theirs = tokens.ask(stock)
    switching = [
        row for _ in range(2) for row in tokens.compare(stock, {"patched": tokens.ask(server), "stock": theirs})
    ]
    before = served_lines(server)
    rows = tokens.compare(stock, {"patched": tokens.ask(server), "stock": theirs})
    name, kdtree = server.spec.name, server.kdtree
    disabled = [line for line in kdtree if line.word == "disabled"]
    found = sorted(((line.rank, line.fields.get("reason"), line.fields.get("of")) for line in disabled), key=str)
    wanted = [(rank, "guard", None) if rank == 1 else (rank, "guard_elsewhere", "1") for rank in range(ranks)]
    record.bar(
        f"{name}: the guard trips on rank 1 alone, and each other rank goes stock with it",
        found == wanted,
        [line.text[:120] for line in disabled] or "no",
    )
    more = served_lines(server)[len(before) :]
    record.bar(
        f"{name}: no rank has served a call since",
        bool(before) and not more,
        more[:3] or f"none after {len(before)} lines",
    )
    errors = [line.text for line in kdtree if line.level == "ERROR" and line.word != "disabled"]
    record.bar(f"{name}: no other error", not errors, errors[:2] or "none")
    tokens.judge_same(record, f"{name}: tokens as stock's while the ranks switch", switching)
    tokens.judge_tokens(record, f"{name}, all ranks stock", rows)
    once = ranks_of(server.kdtree, "installed")
    record.bar(f"{name}: installed exactly once in each rank", once == list(range(ranks)), once)
    record.bar(
        f"{name}: it serves on", server.alive and server.client.healthy(), "answers" if server.alive else "it has ended"
    )
    return {"trip, switching": switching, "trip": rows}


def judge_killed(record: Record, server: Server, killer: CompilerKiller, ranks: int) -> None:
    name = server.spec.name
    found = f"process {killer.killed}" if killer.killed else "it was not seen in time"
    record.bar(f"{name}: the compiler was killed while it compiled", killer.killed is not None, found)
    tokens.ask(server)
    tokens.ask(server)  # what a graph's last replays have found comes with the next request
    judge_processes(record, server, ranks)
    again = [line.text for line in server.kdtree if "compiling here" in line.text or COMPILED in line.text]
    record.bar(f"{name}: another one compiles", count(server, COMPILED) >= 1, again or "no such line")
    judge_validated(record, server, ranks)


def run(
    fleet: Fleet, record: Record, wanted: Ranks, nvml: gpus.Nvml | None, ranks: int, killer: CompilerKiller
) -> None:
    document: dict[str, Any] = {"ranks": ranks, "tokens": {}}
    record.document["ranks"] = document
    fleet.settle()
    killer.end()
    started: list[tuple[Server, Server]] = []
    stock: Server | None = None
    for one in wanted.pairs:
        with record.attempt(one.name):
            servers = {"stock": fleet.ready(one.stock.name), "patched": fleet.ready(one.patched.name)}
            started.append((servers["stock"], servers["patched"]))
            record.say(f"{one.name}: prompts alone and as a batch")
            document["tokens"][one.name] = judge_pair(record, one, servers, nvml, ranks)
            for server in servers.values():
                record.server(server)
    judge_start_up(record, started)
    judge_cold(record, [patched for _, patched in started])
    with record.attempt(wanted.trip.name):
        stock = fleet.ready("noisy-graph-stock")
        server = fleet.ready(wanted.trip.name)
        document["tokens"] |= judge_trip(record, server, stock, ranks)
        record.server(server)
    with record.attempt(wanted.killed.name):
        server = fleet.ready(wanted.killed.name)
        judge_killed(record, server, killer, ranks)
        record.server(server)
    fleet.stop(*(spec.name for spec in wanted.specs))
