"""A run for readers: read back from its file, tables, plot, verdict. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_patch.bench_report import read_json
from kdtree_patch.exits import NotDone, printable
from tests.e2e.tokens import NO_SECOND

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# What a reader needs of a run. A name with `?` may be missing; `*` stands for any. Of a tuple one has to fit.
_DOOR = {"step_ms": float, "tokens_per_s": float, "tokens_per_step": float}
_POINT = {"mode": str, "prefix": int, "bs": int, "times": float, "stock": _DOOR, "patched": _DOOR}
_SHARES = {"share_stock?": float, "share_patched?": float}
_ACCEPTED = {"accept_stock": float, "accept_patched": float}
_PROMPT = {"prompt": int, "how": str, "differs_at": (int, None), "margin?": (float, str, None), **_ACCEPTED}
_PAIRS = {"*": [_PROMPT]}
RUN = {
    "meta": {"date": str, "gpu?": str},
    "verdict": [{"bar": str, "ok": bool, "found": str}],
    "speed?": {"layers": int, "heads": int, "draft_tokens": int, "rows": [_POINT | _SHARES]},
    "tokens?": _PAIRS,
    "ranks?": {"tokens": _PAIRS},
}

MODES = {"graph": "with CUDA graphs", "eager": "without CUDA graphs"}


def read_run(path: Path) -> dict[str, Any]:
    """Raises NotDone for a file that is no run of ours."""
    document = read_json(path)
    where = misfit(document, RUN)
    if where is not None:
        words = f"{where} is missing, or not what a run has there" if where else "it is no JSON object with a verdict"
        raise NotDone(f"{path} is not a run of make e2e: {words}", "name a file that its --json has written")
    return dict(document)


def misfit(value: Any, shape: Any, where: str = "") -> str | None:
    """Where a value is not of a shape (`speed.rows.3.times`), or None if it is."""
    if isinstance(shape, tuple):
        return None if any(misfit(value, one) is None for one in shape) else where
    if shape is None:
        return where if value is not None else None
    if shape in (int, float):
        # What can be shown and drawn: no bool, no NaN, and not as many digits as Python's integers may have.
        number = isinstance(value, int if shape is int else (int, float)) and not isinstance(value, bool)
        return None if number and abs(value) < 1e15 else where
    if not isinstance(value, type(shape) if isinstance(shape, (dict, list)) else shape):
        return where
    parts: list[tuple[Any, Any]] = []
    if isinstance(shape, list):
        parts = [(index, shape[0]) for index in range(len(value))]
    elif isinstance(shape, dict) and "*" in shape:
        parts = [(name, shape["*"]) for name in value]
    elif isinstance(shape, dict):
        parts = [(name.rstrip("?"), one) for name, one in shape.items() if name.rstrip("?") in value or name[-1] != "?"]
    for name, one in parts:
        below = f"{where}.{name}" if where else str(name)
        if isinstance(value, dict) and name not in value:
            return below
        found = misfit(value[name], one, below)
        if found is not None:
            return found
    return None


def passed(document: dict[str, Any]) -> bool:
    """Every bar was kept, and there was one."""
    return bool(document["verdict"]) and all(one["ok"] for one in document["verdict"])


def text(words: object) -> Text:
    """A cell: whatever is in it is neither markup nor something that a terminal would obey."""
    from rich.text import Text

    return Text("\n".join(map(printable, str(words).split("\n"))))


def tables(document: dict[str, Any]) -> Iterator[Table]:
    if document.get("speed", {}).get("rows"):
        yield speed_table(document["speed"])
    found = document.get("tokens") or document.get("ranks", {}).get("tokens")
    if found:
        yield tokens_table(found)
    yield verdict_table(document["verdict"])


def speed_table(speed: dict[str, Any]) -> Table:
    from rich.table import Table

    words = "{layers} layers, {heads} heads, {draft_tokens} draft tokens".format(**speed)
    table = Table(title=f"Decoding, {words}: a verify step, and tokens a second")
    for name in (
        "",
        "prompt",
        "batch",
        "step, stock",
        "patched",
        "tokens/s, stock",
        "patched",
        "times",
        "tokens a step, stock",
        "patched",
        "attention, stock",
        "patched",
    ):
        table.add_column(name, justify="right")
    for row in speed["rows"]:
        stock, patched = row["stock"], row["patched"]
        table.add_row(
            text(row["mode"]),
            f"{row['prefix']:,}",
            str(row["bs"]),
            f"{stock['step_ms']:.2f} ms",
            f"{patched['step_ms']:.2f} ms",
            f"{stock['tokens_per_s']:,.0f}",
            f"{patched['tokens_per_s']:,.0f}",
            f"{row['times']:.2f}",
            *(f"{one['tokens_per_step']:.2f}" for one in (stock, patched)),
            *(f"{row[name]:.0%}" if name in row else "" for name in ("share_stock", "share_patched")),
        )
    return table


def tokens_table(pairs: dict[str, list[dict[str, Any]]]) -> Table:
    from rich.table import Table

    table = Table(title="Tokens: the first that differs from stock's, and tokens a step")
    for name in ("pair", "prompt", "how", "differs at", "stock's best two apart", "accepted, stock", "patched"):
        table.add_column(name, justify="right")
    for name, rows in pairs.items():
        for row in rows:
            table.add_row(
                text(name),
                str(row["prompt"]),
                text(row["how"]),
                "-" if row["differs_at"] is None else str(row["differs_at"]),
                _apart(row),
                f"{row['accept_stock']:.2f}",
                f"{row['accept_patched']:.2f}",
            )
    return table


def _apart(row: dict[str, Any]) -> Text:
    """How far stock's best two are apart where the tokens differ; `inf` is a string in a file."""
    if "margin" not in row:
        return text("")
    if row["margin"] is None:
        return text("neither chosen")
    if str(row["margin"]) == "inf":
        return text("second impossible")
    return text(f"{row['margin']:.3g}" if isinstance(row["margin"], float) else row["margin"])


def verdict_table(verdict: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="Verdict")
    for name in ("", "bar", "found"):
        table.add_column(name, overflow="fold")
    for one in verdict:
        # Runs until 2026-11-30 have a margin of inf in their words. Text, because what was found may have brackets.
        found = one["found"].replace("where stock's best two are inf apart", NO_SECOND)
        table.add_row("ok" if one["ok"] else "MISS", text(one["bar"]), text(found[:600]))
    return table


def plot(document: dict[str, Any], path: Path) -> None:
    """Times of stock's throughput over prompt length, and the step times behind them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document.get("speed", {}).get("rows")
    if not rows:
        raise NotDone("the run has no figures of speed", "draw one that has", "nothing has been drawn")
    figure, axes = pyplot.subplots(2, len(MODES), figsize=(11, 8), sharex=True, squeeze=False)
    for column, (mode, words) in enumerate(MODES.items()):
        times, steps = axes[0][column], axes[1][column]
        for color, bs in enumerate(sorted({row["bs"] for row in rows})):
            line = sorted(
                (row for row in rows if row["mode"] == mode and row["bs"] == bs), key=lambda row: row["prefix"]
            )
            if line:
                prefixes = [row["prefix"] for row in line]
                times.plot(prefixes, [row["times"] for row in line], "o-", color=f"C{color}", label=f"batch {bs}")
                for door, style in (("stock", "s--"), ("patched", "o-")):
                    step = [row[door]["step_ms"] for row in line]
                    steps.plot(prefixes, step, style, color=f"C{color}", label=f"batch {bs}, {door}")
        times.set(title=words, ylabel="decode tokens/s, patched / stock", xscale="log", yscale="log")
        times.axhline(1, color="grey", linewidth=0.8)
        steps.set(xlabel="prompt length", ylabel="verify step, ms", xscale="log", yscale="log")
        for one in (times, steps):
            one.grid(True, which="both", alpha=0.3)
            if one.lines:
                one.legend(fontsize="small")
    meta, speed = document["meta"], document["speed"]
    words = f"{meta.get('gpu', '')}: {speed['layers']} layers, {speed['heads']} heads, {meta['date']}"
    figure.suptitle(printable(words), parse_math=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
