"""The tables of the documents that are filled from what the repository has: each stands between two comments, of which
the first names its kind and, where there is one, its run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdtree_patch import bench_report
from kdtree_patch.bench_shapes import shape_of
from kdtree_patch.exits import NotDone
from kdtree_patch.tiles import CONFIGS
from tests.e2e import report as e2e_report
from tests.e2e.speed import NOISE

_BLOCK = re.compile(r"<!-- make figures: (?P<kind>\w+)(?: (?P<path>\S+))? -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str, repo: Path) -> str:
    """A document with its tables made again. Raises NotDone."""

    def table(match: re.Match[str]) -> str:
        kind, path = match["kind"], match["path"]
        if kind == "variants" and not path:
            lines = variants()
        elif kind in _KINDS and path:
            read, make = _KINDS[kind]
            lines = make(read(repo / path), path)
        else:
            raise NotDone(
                f"there is no table {match[0].splitlines()[0]}", "see tools/figures/tables.py for those there are"
            )
        return "\n".join([match[0].splitlines()[0], *lines, "<!-- end -->"])

    return _BLOCK.sub(table, text)


def kernel(run: Mapping[str, Any], path: str) -> list[str]:
    """One row for each shape, one pair of columns for each configuration; runs of the KV pool's own type alone."""
    rows = [row for row in run["rows"] if row["kv_dtype"] == "bfloat16"]
    configs = sorted({row["config"] for row in rows}, reverse=True)
    shapes: dict[tuple[int, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        shapes.setdefault(shape_of(row), {})[row["config"]] = row
    headings = ["batch, q_len, heads a rank, prefix", "SGLang's kernel"]
    headings += [word for config in configs for word in (config, "times")]
    lines = [_row(headings), _row(["---"] + ["--:"] * (len(headings) - 1))]
    for shape, measured in shapes.items():
        stock = next(iter(measured.values()))["stock_us"]
        cells = [", ".join(f"{number:,}" for number in shape), _us(stock)]
        for config in configs:
            one = measured.get(config)
            times = bench_report.speed_up(one) if one else None
            cells += [_us(one["kernel_cold_us"] if one else None), "" if times is None else f"{times:.0f}"]
        lines.append(_row(cells))
    meta = run["meta"]
    return [
        *lines,
        "",
        f"One layer on one {meta['gpu']}, bf16, tree mask, scattered slots, cold (L2 flushed before each call), "
        f"medians, all of one run of `{meta['command']}` on {meta['date']} with {_versions(meta['versions'])} "
        f"([{path}]({path})).",
    ]


def server(run: Mapping[str, Any], path: str) -> list[str]:
    """Decoded tokens a second over stock's, by prompt and batch, with graphs and without, and attention's share."""
    speed = run.get("speed", {})
    rows = speed.get("rows")
    if not rows:
        raise NotDone(f"{path} has no figures of speed", "store a run of `make e2e` that has them")
    of = {(row["prefix"], row["bs"], row["mode"]): row for row in rows}
    modes = [mode for mode in e2e_report.MODES if any(row["mode"] == mode for row in rows)]
    headings = ["prompt", "batch"]
    for mode in modes:
        headings += [f"{e2e_report.MODES[mode].replace(' CUDA', '')}, times", "attention, stock", "patched"]
    lines = [_row(headings), _row(["--:"] * len(headings))]
    for prefix, bs in sorted({(row["prefix"], row["bs"]) for row in rows}):
        cells = [f"{prefix:,}", str(bs)]
        for mode in modes:
            row = of.get((prefix, bs, mode), {})
            cells.append(f"{row['times']:.{1 if row['times'] >= 1 else 2}f}" if row else "")
            cells += [f"{row[name]:.0%}" if name in row else "" for name in ("share_stock", "share_patched")]
        lines.append(_row(cells))
    meta = run["meta"]
    missed = "; ".join(f"{one['bar']} ({one['found']})" for one in run["verdict"] if not one["ok"])
    return [
        *lines,
        "",
        "Decoded tokens a second over stock's, and what attention has of a step: SGLang "
        f"{meta['versions']['sglang']} on one {meta['gpu']}, a model of {speed['layers']} layers "
        f"with {speed['heads']} heads, trees of {speed['draft_tokens']} draft tokens. "
        f"A run of `make e2e` on {meta['date']} ([{path}]({path})). "
        + (f"Bars that it missed: {missed}." if missed else "It kept all its bars."),
        "",
        " ".join(filter(None, (_least(rows), _acceptance(rows), _stock_without_graphs(of)))),
    ]


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['prefix']:,}, batch {row['bs']}, {e2e_report.MODES[row['mode']].replace(' CUDA', '')}"


def _least(rows: Sequence[Mapping[str, Any]]) -> str:
    """A figure below 1 is not hidden by rounding."""
    least = min(rows, key=lambda row: row["times"])
    return (
        f"The least figure is {least['times']:.2f} ({_where(least)}); up to {100 * NOISE:.0f} % below 1 count as noise."
    )


def _acceptance(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where that of the two servers differs most."""
    row = max(rows, key=lambda row: abs(math.log(_accepted(row, "patched") / _accepted(row, "stock"))))
    steps = row["stock"]["step_ms"] / row["patched"]["step_ms"]
    return (
        "Acceptance is in all of them, and of another text it is another. It differs most at "
        f"{_where(row)}: {_accepted(row, 'stock'):.2f} tokens a step with stock and {_accepted(row, 'patched'):.2f} "
        f"patched; by the time of a step alone the {row['times']:.1f} there would be {steps:.1f}."
    )


def _accepted(row: Mapping[str, Any], door: str) -> float:
    return float(row[door]["tokens_per_step"])


def _stock_without_graphs(of: Mapping[tuple[int, int, str], Mapping[str, Any]]) -> str:
    """Where stock is quicker without graphs than with: the largest figure, over the quicker of the two."""
    slower = [
        (row["times"], prefix, bs, row["patched"]["tokens_per_s"] / eager["stock"]["tokens_per_s"])
        for (prefix, bs, mode), row in of.items()
        if mode == "graph"
        and (eager := of.get((prefix, bs, "eager")))
        and row["stock"]["step_ms"] > eager["stock"]["step_ms"]
    ]
    if not slower:
        return ""
    times, prefix, bs, over_quicker = max(slower)
    prompts = " and ".join(f"{one:,}" for one in sorted({one[1] for one in slower}))
    return (
        f"At {prompts} stock takes longer with graphs than without: over stock without them the {times:.1f} at "
        f"{prefix:,}, batch {bs}, is {over_quicker:.1f}."
    )


def variants() -> list[str]:
    """What a block takes in each configuration; registers are NVRTC's to say, see `compile`."""
    lines = [_row(["configuration", "rows", "keys a tile", "threads", "shared memory", "of"])]
    lines.append(_row(["---"] + ["--:"] * 5))
    for config in CONFIGS.values():
        for variant in config.variants:
            numbers = (variant.rows, config.tile_keys, variant.threads, variant.shared_bytes, config.shared_limit)
            lines.append(_row([f"`{config.name}`", *(f"{number:,}" for number in numbers)]))
    return lines


_KINDS = {"kernel": (bench_report.read_run, kernel), "server": (e2e_report.read_run, server)}


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} us" if value >= 100 else f"{value:.1f} us"


def _versions(versions: Mapping[str, str | None]) -> str:
    names = {"torch": "torch", "triton": "Triton", "cupy": "cupy", "sglang": "SGLang"}
    return ", ".join(f"{names[name]} {versions[name]}" for name in names if versions.get(name))
