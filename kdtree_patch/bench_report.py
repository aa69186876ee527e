"""The benchmark's results for readers: a run read back from its file, the tables, the plot. Needs no GPU.

A run is one document: {"meta": {command, gpu, versions, date, ceilings}, "rows": [...]},
a row being {bs, q_len, heads, prefix, kv_dtype, config, kernel_us, kernel_cold_us, stock_us, floor_us, rel, peers}.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_patch.bench_shapes import shape_of
from kdtree_patch.exits import NotDone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType
    from rich.table import Table

Row = Mapping[str, Any]

# Triton's own error against float64 on these shapes is 0.0017 to 0.0018.
REL_LIMIT = 0.002

_NAME_ANOTHER = "name a file that --json of this command has written"
_NUMBER = (int, float)
_ABOUT = {"command": str, "gpu": str, "date": str, "versions": dict}
_META = {**_ABOUT, "ceilings": dict}
_ROW: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("bs", "q_len", "heads", "prefix"), int),
    **dict.fromkeys(("kv_dtype", "config"), str),
    **dict.fromkeys(("kernel_us", "kernel_cold_us", "floor_us"), _NUMBER),
    **dict.fromkeys(("stock_us", "rel"), (*_NUMBER, type(None))),
    "peers": dict,
}
_MODES_ROW: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("bs", "q_len", "heads", "prefix", "page_size"), int),
    **dict.fromkeys(("kind", "mask", "config"), str),
    "kernel_cold_us": _NUMBER,
    **dict.fromkeys(("stock_us", "rel"), (*_NUMBER, type(None))),
}


def read_json(path: Path) -> Any:
    """Raises NotDone, which says why, for a file that is none."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise NotDone(f"{path} cannot be read: {error.strerror}", _NAME_ANOTHER) from error
    except (ValueError, RecursionError) as error:  # the second of brackets within brackets, thousands of them
        raise NotDone(f"{path} is not JSON ({error})", _NAME_ANOTHER) from error


def read_run(path: Path) -> dict[str, Any]:
    """A run as the benchmark wrote it. Raises NotDone for anything else."""
    run: dict[str, Any] = read_json(path)
    for what in violations(run):
        raise NotDone(f"{path} is not a run of the benchmark: {what}", _NAME_ANOTHER)
    return run


def read_modes(run: Any, path: Path) -> list[dict[str, Any]]:
    """The rows of a run of `--modes`, which this file is. Raises NotDone unless they are as they were written."""
    wrong = [] if isinstance(run.get("meta"), dict) and isinstance(run["modes"], list) else ["it has no meta and modes"]
    if not wrong:
        wrong += _missing("meta", run["meta"], _ABOUT)
        for number, row in enumerate(run["modes"]):
            wrong += _missing(f"modes[{number}]", row, _MODES_ROW)
    if wrong:
        raise NotDone(f"{path} is not a run of the benchmark: {wrong[0]}", _NAME_ANOTHER)
    rows: list[dict[str, Any]] = run["modes"]
    return rows


def violations(run: Any) -> Iterable[str]:
    """What is wrong with a run, in the order of the file."""
    if not isinstance(run, dict) or not isinstance(run.get("meta"), dict) or not isinstance(run.get("rows"), list):
        yield "it has no meta and rows"
        return
    if run["meta"].get("kind") == "prediction":
        yield "it is a prediction"
    yield from _missing("meta", run["meta"], _META)
    for number, row in enumerate(run["rows"]):
        yield from _missing(f"rows[{number}]", row, _ROW)


def _missing(where: str, values: Any, wanted: Mapping[str, type | tuple[type, ...]]) -> Iterable[str]:
    if not isinstance(values, dict):
        yield f"{where} is no object"
        return
    for name, kind in wanted.items():
        if name not in values:
            yield f"{where} has no {name}"
        elif not isinstance(values[name], kind) or isinstance(values[name], bool):
            yield f"{where} has {values[name]!r} for {name}"


def wrong(row: Row) -> bool:
    """Whether a row's result is not what attention is."""
    return row["rel"] is None or not row["rel"] < REL_LIMIT


def speed_up(row: Row) -> float | None:
    return None if row["stock_us"] is None else row["stock_us"] / row["kernel_cold_us"]


def percent_of_floor(row: Row) -> float:
    return 100 * row["floor_us"] / row["kernel_cold_us"]


# --------------------------------------------------------------------------------------------------------------- tables


def run_table(run: Mapping[str, Any]) -> RenderableType:
    rows = run["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    headings = ["bs", "q_len", "heads", "prefix", "config", "stock", *peers, "ours", "warm", "floor", "% of floor"]
    table = _table([*headings, "times", "rel"])
    for row in rows:
        times = speed_up(row)
        table.add_row(
            *(str(row[name]) for name in ("bs", "q_len", "heads", "prefix", "config")),
            *(_us(us) for us in (row["stock_us"], *(row["peers"].get(name) for name in peers))),
            *(_us(row["kernel_cold_us"]), _us(row["kernel_us"]), f"{row['floor_us']:.2f}"),
            *(f"{percent_of_floor(row):.0f}", "-" if times is None else f"{times:.1f}"),
            ("[bold red]" if wrong(row) else "") + ("not finite" if row["rel"] is None else f"{row['rel']:.5f}"),
        )
    return _titled(f"{run['meta']['gpu']}: us a layer, cold (warm: graph replays)", table)


def peers_line(run: Mapping[str, Any]) -> str | None:
    """What must be known of the peers' columns, if there are any."""
    peers = dict.fromkeys(name for row in run["rows"] for name in row["peers"])
    return f"{', '.join(peers)}: plain causal attention; they take no tree mask" if peers else None


def ceilings_line(ceilings: Mapping[str, float]) -> str:
    names = {
        "copy_tb_s": "copy {} TB/s",
        "product_tflops": "bf16 product {} TFLOP/s",
        "mma_sync_tflops": "mma.sync {} TFLOP/s",
    }
    return "ceilings: " + ", ".join(text.format(ceilings[name]) for name, text in names.items() if name in ceilings)


def host_table(host: Mapping[str, Any]) -> RenderableType:
    where = "both kernels launched" if host["device"] == "cuda" else "no GPU: nothing is launched, stock unknown"
    shape = ", ".join(f"{name} {number}" for name, number in host["shape"].items())
    table = _table(["routed", "of it hook", "router", "launch", "stock"])
    table.add_row(*(_us(host[f"{name}_us"], 2) for name in ("routed", "hook", "router", "launch", "stock")))
    return _titled(f"host time of one call, us ({shape}; {where})", table)


def prediction_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """The figures that a prediction starts from, how far its model is off where there are measurements, and itself."""
    gpus = [gpu["name"] for gpu in document["gpus"]]
    figures = _table(["GPU", "SMs", "TB/s", "bf16 TFLOP/s", "L2 MiB", "source"])
    figures.columns[-1].justify = "left"
    figures.columns[-1].overflow = "fold"
    for gpu in document["gpus"]:
        numbers = (gpu[name] for name in ("multiprocessors", "bandwidth_tb_s", "bf16_tflops", "l2_mib"))
        figures.add_row(gpu["name"], *map(str, numbers), gpu["source"])

    check = _table(["bs", "q_len", "heads", "prefix", "measured", "model", "off"])
    for row in document["check"]:
        us = (_us(row["measured_us"]), _us(row["predicted_us"]), f"{row['off_percent']:+.1f} %")
        check.add_row(*map(str, shape_of(row)), *us)

    table = _table(["bs", "q_len", "heads", "prefix", *gpus])
    shapes: dict[tuple[int, ...], dict[str, str]] = {}
    for row in document["rows"]:
        percent = 100 * row["floor_us"] / row["predicted_us"]
        cell = f"{_us(row['predicted_us'])} ({percent:.0f} %{' m' if row['bound'] == 'memory' else ''})"
        shapes.setdefault(shape_of(row), {})[row["gpu"]] = cell
    for shape, cells in shapes.items():
        table.add_row(*map(str, shape), *(cells[name] for name in gpus))

    reference = document["meta"]["reference"]
    return [
        _titled("public figures", figures),
        _titled(f"the model on the rows it comes from: {reference['gpu']}, {reference['date']}, cold us", check),
        _titled(
            "PREDICTION, not a measurement: us a layer, cold, portable configuration "
            "(percent of floor; m: bound by memory)",
            table,
        ),
    ]


def model_lines(document: Mapping[str, Any]) -> list[str]:
    model = document["model"]
    off = sorted(abs(row["off_percent"]) for row in document["check"])
    return [
        "us = start + cut * combine + max(tiles * operations / (tensor * rate), bytes / (memory * bandwidth))",
        f"start {model['start_us']:.1f} us, combine {model['combine_us']:.1f} us, "
        f"tensor {model['tensor_fraction']:.3f}, memory {model['memory_fraction']:.3f}, from the {len(off)} rows above",
        f"there the model is off by {off[len(off) // 2]:.1f} % in the median and {off[-1]:.1f} % at worst; "
        "on the GPUs of the prediction it has never been checked",
    ]


def _table(headings: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != "source")
    return table


def _titled(title: str, table: Table) -> RenderableType:
    """A table's own title would be wrapped to its width."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), table)


def _us(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


# ----------------------------------------------------------------------------------------------------------------- plot


def plot(run: Mapping[str, Any], path: Path) -> None:
    """Writes a picture: speed-up over stock and percent of floor over the prefix length, one line for each batch size
    (and configuration, if there are several). The format is that of the file's ending.

    A plot has one q_len and one number of heads: those that most rows have. Raises NotDone if nothing is left.
    """
    from matplotlib.figure import Figure

    # A logarithmic axis has no place for an empty prefix.
    rows = [row for row in run["rows"] if row["prefix"] > 0]
    if not rows:
        raise NotDone(
            "there is no row with a prefix", "leave out --plot, or draw a run that has one", "nothing has been drawn"
        )
    (q_len, heads), _ = Counter((row["q_len"], row["heads"]) for row in rows).most_common(1)[0]
    rows = [row for row in rows if (row["q_len"], row["heads"]) == (q_len, heads)]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"{run['meta']['gpu']}, {run['meta']['date']}: q_len {q_len}, {heads} heads, cold")
    left, right = figure.subplots(1, 2)
    lines(left, rows, "times faster than stock", speed_up)
    left.set_yscale("log")
    lines(right, rows, "percent of floor", percent_of_floor)
    right.set_ylim(0, 100)
    figure.savefig(path, dpi=150)


def lines(axes: Axes, rows: Sequence[Row], label: str, value: Any) -> None:
    configs = sorted({row["config"] for row in rows})
    batches = sorted({row["bs"] for row in rows})
    for config in configs:
        for index, bs in enumerate(batches):
            # Colour says the batch size, the line's style the configuration.
            points = {
                row["prefix"]: value(row)
                for row in rows
                if (row["config"], row["bs"]) == (config, bs) and value(row) is not None
            }
            if points:
                axes.plot(
                    *zip(*sorted(points.items()), strict=True),
                    color=f"C{index}",
                    linestyle=("-", "--", ":")[configs.index(config) % 3],
                    marker="o",
                    label=f"bs {bs}" + (f", {config}" if len(configs) > 1 else ""),
                )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("prefix, tokens")
    axes.set_ylabel(label)
    axes.grid(True, which="major", alpha=0.3)
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
