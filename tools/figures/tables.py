"""The tables of the documents that are filled from what the repository has: each stands between two comments, of which
the first names its kind and, where there is one, its run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdtree_patch import bench_report
from kdtree_patch.bench_shapes import shape_of
from kdtree_patch.exits import NotDone
from kdtree_patch.tiles import CONFIGS
from tests.e2e import report as e2e_report

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
    """Decoded tokens a second over stock's, by prompt and batch, with graphs and without."""
    speed = run.get("speed", {})
    rows = speed.get("rows")
    if not rows:
        raise NotDone(f"{path} has no figures of speed", "store a run of `make e2e` that has them")
    columns = sorted(
        {(row["mode"], row["bs"]) for row in rows}, key=lambda one: (list(e2e_report.MODES).index(one[0]), one[1])
    )
    headings = ["prompt", *(f"batch {bs}" + ("" if mode == "graph" else ", no graphs") for mode, bs in columns)]
    lines = [_row(headings), _row(["--:"] * len(headings))]
    for prefix in sorted({row["prefix"] for row in rows}):
        times = {(row["mode"], row["bs"]): row["times"] for row in rows if row["prefix"] == prefix}
        lines.append(_row([f"{prefix:,}", *(f"{times[one]:.1f}" if one in times else "" for one in columns)]))
    meta = run["meta"]
    missed = "; ".join(f"{one['bar']} ({one['found']})" for one in run["verdict"] if not one["ok"])
    return [
        *lines,
        "",
        f"Decoded tokens a second over stock's: SGLang {meta['versions']['sglang']} on one {meta['gpu']}, a model of "
        f"{speed['layers']} layers with {speed['heads']} heads, trees of {speed['draft_tokens']} draft tokens. "
        f"A run of `make e2e` on {meta['date']} ([{path}]({path})). "
        + (f"Bars that it missed: {missed}." if missed else "It kept all its bars."),
    ]


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
