"""The run `tokens`: a stock server and a patched one are asked the same, and answer with the same tokens.

Both are greedy, and results of the two kernels differ by rounding: where the two best tokens are as good as tied,
either may be chosen, and what follows is another text. So at the first difference the stock server is asked how far its
two best tokens are apart there. A difference counts as a tie if they are closer than `TIE`, and if the patched server
has chosen one of them. A kernel that computes wrongly differs where there is no tie. A DFLASH server refuses to say
log-probabilities: there a third server says them, stock too, without speculation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from tests.e2e import lines
from tests.e2e.client import Answer, ServiceError
from tests.e2e.plan import FP8_REL_LIMIT, REL_LIMIT, Pair
from tests.e2e.record import Record
from tests.e2e.server import Fleet, Server

LENGTHS = (5, 37, 200, 700)
# Its tokens are as good as tied on such checkpoints: with float32 attention in the place of ours it parts from stock,
# too, and no other prompt does. It is reported and no more.
NOT_JUDGED = 5
NEW_TOKENS = 48
# Log-probabilities. Rounding moves these models' logits by 0.05, in prefill, which is asked, in other ways than in
# verify; their best two are 1 apart on average.
TIE = 0.15
# Of the mean accepted length. The same tokens from the same draft are the same acceptance; but in a batch under graphs
# SGLang's draft is at times prepared from padding, so that it differs from run to run.
ACCEPTANCE = {"alone": 0.02, "batch": 0.15}
# Of a difference, where stock says -inf for the log-probability of its second token. The rule of ties says: none.
NO_SECOND = "where stock gives its second best token no probability at all, so no tie"


def prompts(vocab: int = 512, lengths: Sequence[int] = LENGTHS, seed: int = 7) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(2, vocab) for _ in range(length)] for length in lengths]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two lists of tokens differ, or one of them ends; None if they are the same."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def ask(server: Server) -> dict[str, list[Answer]]:
    """Each prompt alone, then all as one batch."""
    wanted = prompts()
    alone = [server.client.generate([prompt], NEW_TOKENS)[0] for prompt in wanted]
    return {"alone": alone, "batch": server.client.generate(wanted, NEW_TOKENS)}


def accept_length(answer: Answer) -> float:
    """Tokens a verify step, on average."""
    return float(answer["meta_info"].get("spec_accept_length") or 0.0)


def margin(server: Server, text: Sequence[int], chosen: int) -> float | None:
    """How far the best token after `text` is above the second; None if `chosen` is none of the two."""
    answer = server.client.generate([text], 1, return_logprob=True, top_logprobs_num=2)[0]
    try:
        best = answer["meta_info"]["output_top_logprobs"][0]
        (first, a, *_), (second, b, *_) = best[:2]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServiceError(f"{server.spec.name}: no log-probabilities in {str(answer)[:300]}") from error
    return abs(first - second) if chosen in (a, b) else None


def compare(margins: Server, answers: dict[str, dict[str, list[Answer]]]) -> list[dict[str, Any]]:
    """A row for each prompt, alone and in the batch. `answers` has those of both doors; `margins` is a stock server."""
    rows = []
    for how in ("alone", "batch"):
        for prompt, ours, theirs in zip(prompts(), answers["patched"][how], answers["stock"][how], strict=True):
            row: dict[str, Any] = {
                "prompt": len(prompt),
                "how": how,
                "tokens": len(ours["output_ids"]),
                "differs_at": first_difference(ours["output_ids"], theirs["output_ids"]),
                "accept_stock": round(accept_length(theirs), 3),
                "accept_patched": round(accept_length(ours), 3),
            }
            at = row["differs_at"]
            if at is not None and at < min(len(ours["output_ids"]), len(theirs["output_ids"])):
                text = prompt + theirs["output_ids"][:at]
                try:
                    row["margin"] = margin(margins, text, ours["output_ids"][at])
                except ServiceError as error:
                    row["no_margin"] = str(error)[:300]
            rows.append(row)
    return rows


def is_same(row: dict[str, Any]) -> bool:
    """The same tokens, up to a tie."""
    margin = row.get("margin")
    return row["differs_at"] is None or (margin is not None and margin < TIE)


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Where tokens differ, for the verdict."""
    found = []
    for row in rows:
        if row["differs_at"] is not None:
            where = f"prompt {row['prompt']} {row['how']} at token {row['differs_at']}"
            if "margin" in row and row["margin"] is None:
                where += ", with a token that is none of stock's best two"
            elif row.get("margin") == math.inf:
                where += f", {NO_SECOND}"
            elif "margin" in row:
                where += f", where stock's best two are {row['margin']:.3f} apart"
            elif "no_margin" in row:
                where += f" ({row['no_margin']})"
            found.append(where)
    return "; ".join(found) or f"all {sum(row['tokens'] for row in rows)} tokens the same"


def judged_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["prompt"] != NOT_JUDGED]


def judge_same(record: Record, bar: str, rows: Sequence[dict[str, Any]]) -> None:
    complete = all(row["tokens"] == NEW_TOKENS for row in rows)
    same = complete and all(map(is_same, judged_of(rows)))
    record.bar(f"{bar} (prompt {NOT_JUDGED} not judged)", same, describe(rows))


def judge_tokens(record: Record, name: str, rows: Sequence[dict[str, Any]]) -> None:
    judge_same(record, f"{name}: tokens as stock's", rows)
    for how, tolerance in ACCEPTANCE.items():
        # Of another text the acceptance is another.
        pairs = [
            (row["accept_stock"], row["accept_patched"])
            for row in judged_of(rows)
            if row["how"] == how and row["differs_at"] is None
        ]
        if pairs:
            stock, patched = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            found = f"stock {stock:.3f}, patched {patched:.3f} tokens a step"
            good = stock > 0 and abs(patched - stock) <= tolerance * stock
            record.bar(f"{name}: acceptance {how} within {tolerance:.0%} of stock's", good, found)


def judge_lines(record: Record, server: Server, ranks: int = 1) -> None:
    """The lines of a patched server that has served."""
    name, kdtree = server.spec.name, server.kdtree
    installed = sorted((line.rank for line in lines.installed(kdtree)), key=str)
    # With one rank SGLang need not say which it is.
    once = installed == list(range(ranks)) or (ranks == 1 and installed == [None])
    found = ", ".join("no rank" if rank is None else f"rank {rank}" for rank in installed) or "none"
    record.bar(f"{name}: installed once in each rank", once, found)
    record.bar(f"{name}: no error, no process that declines", not lines.alarms(kdtree), lines.alarms(kdtree) or "none")
    record.bar(f"{name}: calls served", lines.served(kdtree) > 0, lines.served(kdtree))


def judge_validation(record: Record, server: Server, limit: float = REL_LIMIT) -> None:
    layer_lines = [line for line in server.kdtree if line.is_layer]
    worst = lines.worst_rel(layer_lines)
    found = "no layer line" if worst is None else f"{worst:.2e} in {len(layer_lines)} layer lines"
    record.bar(f"{server.spec.name}: rel below {limit:g}", worst is not None and worst < limit, found)


def judge_stock(record: Record, server: Server) -> None:
    """A server without the patch says nothing of it: else the comparison is with ourselves."""
    found = [line.text for line in server.kdtree]
    record.bar(f"{server.spec.name}: no [kdtree] line", not found, found[:3] or "none")


def run(fleet: Fleet, record: Record, pairs: Sequence[Pair], pool: str | None = None) -> None:
    """With an fp8 `pool` the tokens are compared and not judged: there stock is further from the truth than we are."""
    document = record.document.setdefault("tokens", {})
    for one in pairs:
        with record.attempt(one.name):
            servers = {"stock": fleet.ready(one.stock.name), "patched": fleet.ready(one.patched.name)}
            margins = servers["stock"]
            if one.margins is not None:
                margins = servers["margins"] = fleet.ready(one.margins.name)
            record.say(f"{one.name}: prompts of {', '.join(map(str, LENGTHS))} tokens, alone and as a batch")
            rows = compare(margins, {door: ask(servers[door]) for door in ("stock", "patched")})
            document[one.name] = rows
            if pool is None:
                judge_tokens(record, one.name, rows)
            else:
                complete = all(row["tokens"] == NEW_TOKENS for row in rows)
                record.bar(f"{one.name}: answered with an {pool} pool (tokens not judged)", complete, describe(rows))
            judge_lines(record, servers["patched"])
            judge_stock(record, servers["stock"])
            if margins is not servers["stock"]:
                judge_stock(record, margins)
            if servers["patched"].spec.environ.get("KDTREE_VALIDATE") == "1":
                judge_validation(record, servers["patched"], REL_LIMIT if pool is None else FP8_REL_LIMIT)
            for server in servers.values():
                record.server(server)
        fleet.stop(*(spec.name for spec in one.specs))
