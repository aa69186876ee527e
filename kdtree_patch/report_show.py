"""A report for readers: as text with its verdict first, as one document for scripts, as a picture.

Tables come by rich where it is installed, as on a developer's machine; a service's environment may not have it, and the
report has to be readable there too. Knows report_judge's findings and report_tally's sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_patch import exits, report_judge
from kdtree_patch.exits import NotDone
from kdtree_patch.report_judge import Finding, Names, ends, ones, ranks_of
from kdtree_patch.report_tally import SLOTS, Cell, Log, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = tuple[str, ...]
Table = tuple[str, Row, list[Row]]


@dataclass(frozen=True)
class Report:
    logs: Sequence[Log]
    names: Names
    findings: Sequence[Finding]
    notes: Sequence[str]

    @classmethod
    def of(cls, logs: Sequence[Log]) -> Report:
        names = Names(logs)
        return cls(logs, names, report_judge.judge(logs, names), report_judge.notes(logs, names))

    @property
    def verdict(self) -> str:
        if self.findings:
            first, count = self.findings[0].title, len(self.findings)
            return f"1 finding: {first}" if count == 1 else f"{count} findings, the first: {first}"
        everything = ones(self.logs)
        lines = sum(log.start.lines for log in self.logs)
        if not everything:
            return "nothing found, and nothing to judge rel by: there is no layer line"
        worst = max(everything, key=lambda one: one.cell.top)
        layers, ranks = len({one.layer for one in everything}), len({one.of for one in everything})
        where = f"L{worst.layer}, {self.names.rank(worst.log, worst.rank.number)}"
        return (
            f"nothing found: {lines:,} layer lines, {layers} layers, {ranks} rank{'s' if ranks > 1 else ''}; "
            f"rel up to {worst.cell.top:.1e} ({where}), which is rounding"
        )


# ----------------------------------------------------------------------------------------------------------------- text


def show(report: Report) -> None:
    """On standard output. Red and green only on a terminal."""
    screen = _Screen()
    screen.line(report.verdict, "bold red" if report.findings else "bold green")
    for number, finding in enumerate(report.findings, 1):
        screen.line(f"\n{number}. {finding.title}", "bold")
        for seen in finding.seen:
            screen.line(f"   {seen}")
        if finding.check:
            screen.line("   check:")
        for check in finding.check:
            screen.line(f"   - {check}")
    if report.notes:
        screen.line("")
    for note in report.notes:
        screen.line(f"note: {note}")
    for title, headings, rows in tables(report):
        if rows:
            screen.table(title, headings, rows)


class _Screen:
    """Lines and tables, with rich or without it."""

    def __init__(self) -> None:
        self._console: Any = None
        if find_spec("rich") is not None:
            from kdtree_patch.console import open_console

            self._console = open_console()

    def line(self, text: str, style: str = "") -> None:
        if self._console is None:
            print(text)
        else:
            self._console.print(text, style=style, markup=False, soft_wrap=True)

    def table(self, title: str, headings: Row, rows: Sequence[Row]) -> None:
        self.line(f"\n{title}", "bold")
        if self._console is None:
            widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
            for row in (headings, *rows):
                cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
                print(" ", "  ".join([*cells, row[-1]]).rstrip())
            return
        from rich import table as rich_table
        from rich.cells import cell_len
        from rich.text import Text

        room = self._console.width
        columns = list(zip(headings, *rows, strict=True))
        needed = _needed(columns, cell_len)
        if needed > room:
            columns = [column for column in columns if any(cell != "-" for cell in column[1:])]
            headings, *rows = zip(*columns, strict=True)
            needed = _needed(columns, cell_len)
        # rich would cut figures to make a table fit: 2.05e-03 to 2.05e-0. The terminal wraps, and loses nothing.
        table = rich_table.Table(box=None, padding=(0, 1), width=needed if needed > room else None)
        for heading in headings:
            last = heading is headings[-1]
            table.add_column(heading, justify="left" if last else "right", no_wrap=not last, overflow="fold")
        for row in rows:
            bad = row[-1].startswith("! ")
            table.add_row(*(Text(cell, style="bold red" if bad else "") for cell in row))
        self._console.print(table, crop=False)


def _needed(columns: Sequence[Row], length: Callable[[str], int], last: int = 20) -> int:
    """Terminal columns of a table with all but its last column whole; that one may fold at `last`."""
    widths = [max(map(length, column)) for column in columns]
    return sum(widths[:-1]) + min(widths[-1], last) + 2 * len(widths)


def tables(report: Report) -> list[Table]:
    """Title, headings and rows. A row whose last cell begins with `! ` is one that a reader should look at."""
    return [_ranks(report), _layers(report), _shapes(report), _declines(report), _events(report)]


def _ranks(report: Report) -> Table:
    rows = []
    for log in report.logs:
        for number, rank in ranks_of(log):
            said = rank.installed.fields if rank.installed else {}
            facts = " ".join(f"{key}={said[key]}" for key in ("mode", "gpu", "target", "version") if key in said)
            starts = log.starts[number]
            rows.append((report.names.rank(log, number), str(starts), *_figures(list(rank.cells.values())), facts[:80]))
    return "ranks", ("rank", "starts", *_FIGURES, "installed"), rows


def _layers(report: Report) -> Table:
    """A row for each layer, over all ranks: its worst rank is named."""
    cells: dict[int, list[report_judge.One]] = {}
    for one in ones(report.logs):
        cells.setdefault(one.layer, []).append(one)
    rows = []
    for layer, of_layer in sorted(cells.items()):
        worst = max(of_layer, key=lambda one: (one.cell.not_finite, one.cell.top))
        bad = any(one.cell.not_finite or one.cell.top > one.limit for one in of_layer)
        where = report.names.rank(worst.log, worst.rank.number)
        rows.append((f"L{layer}", *_figures([one.cell for one in of_layer]), ("! " if bad else "") + where))
    return "layers, over all ranks", ("layer", *_FIGURES, "worst in"), rows


_FIGURES = ("calls", "median rel", "worst rel", "max_abs_diff", "last/first", "not finite", "stock_nan")


def _figures(cells: Sequence[Cell]) -> Row:
    whole, trend = Spread.of(cells), ends(cells)
    return (
        f"{sum(cell.calls for cell in cells):,}",
        *((f"{whole.median:.2e}", f"{whole.top:.2e}") if whole.lines else ("-", "-")),
        f"{max((cell.max_abs_diff for cell in cells), default=0.0):.2e}",
        "-" if trend is None else f"{trend[1] / trend[0]:.2f}",
        str(sum(cell.not_finite for cell in cells) or "-"),
        str(sum(cell.stock_nan for cell in cells) or "-"),
    )


def _shapes(report: Report) -> Table:
    most = 32
    said: list[Row] = [
        (report.names.file(log), str(times), text.removeprefix("shapes "))
        for log in report.logs
        for text, times in log.start.shapes.items()
    ]
    rest: list[Row] = [("", "", f"and {len(said) - most} more")] if len(said) > most else []
    return "shapes", ("file", "times", "shape"), said[:most] + rest


def _declines(report: Report) -> Table:
    """By reason: how often it was said, and the largest count of one worker at its last `calls` line."""
    rows: list[Row] = []
    for log in report.logs:
        said: Counter[str] = Counter()
        for event in log.start.events.values():
            if event.said.kind == "declined":
                said[event.said.reason] += event.times
        counts = {name: calls for name, calls in log.start.routed.items() if name != "served"}
        for reason in dict.fromkeys([*said, *counts]):
            normal = "normal" if reason in report_judge.NORMAL else "! stock"
            calls = f"{counts[reason]:,}" if reason in counts else "-"
            rows.append((report.names.file(log), reason, f"{said[reason]:,}", calls, normal))
    return "declined, by reason", ("file", "reason", "said", "calls of a worker", "is"), rows


def _events(report: Report) -> Table:
    rows: list[Row] = []
    for log in report.logs:
        for event in log.start.events.values():
            if event.said.kind != "declined":
                rank = "-" if event.rank is None else str(event.rank)
                words = event.said.text[:300]
                rows.append((report.names.line(log, event.line), rank, str(event.times), words))
    most = 50
    rest: list[Row] = [("", "", "", f"and {len(rows) - most} more")] if len(rows) > most else []
    return "warnings, errors, guard", ("line", "rank", "times", "words"), rows[:most] + rest


# ------------------------------------------------------------------------------------------------------------- document


def document(report: Report) -> dict[str, Any]:
    """All of it, as printed with --json. A figure that does not exist is null."""
    thresholds = ("LIMIT", "ROUNDING", "FP8_LIMIT", "NEAR_ONE", "OUTLIER", "GROWTH")
    return {
        "good": not report.findings,
        "verdict": report.verdict,
        "findings": [asdict(finding) for finding in report.findings],
        "notes": list(report.notes),
        "thresholds": {name.lower(): getattr(report_judge, name) for name in thresholds},
        "files": [_file(log) for log in report.logs],
    }


def _file(log: Log) -> dict[str, Any]:
    start = log.start
    return {
        "file": log.name,
        "lines": log.lines,
        "kdtree_lines": log.ours,
        "torn": log.torn,
        "start": log.number,
        "layer_lines": start.lines,
        "layer_lines_of_earlier_starts": log.dropped,
        "shapes": dict(start.shapes),
        "calls": dict(start.routed),
        "ranks": [
            {
                "rank": number,
                "starts": log.starts[number],
                "installed": rank.installed.fields if rank.installed else None,
                **_numbers(list(rank.cells.values())),
                "shapes": [
                    {"bs": bs, "q_len": q_len, "prefix": prefix, "lines": spread.lines, "median_rel": spread.median}
                    for (bs, q_len, prefix), spread in rank.shapes.items()
                    if spread.lines
                ],
                "layers": [{"layer": layer, **_numbers([cell])} for layer, cell in sorted(rank.cells.items())],
            }
            for number, rank in ranks_of(log)
        ],
        "events": [
            {"kind": one.said.kind, "rank": one.rank, "line": one.line, "times": one.times, "text": one.said.text}
            for one in start.events.values()
        ],
    }


def _numbers(cells: Sequence[Cell]) -> dict[str, Any]:
    whole, trend = Spread.of(cells), ends(cells)
    return {
        "lines": sum(cell.lines for cell in cells),
        "calls": sum(cell.calls for cell in cells),
        "median_rel": whole.median if whole.lines else None,
        "worst_rel": whole.top if whole.lines else None,
        "max_abs_diff": _finite(max((cell.max_abs_diff for cell in cells), default=0.0)),
        "last_over_first": None if trend is None else trend[1] / trend[0],
        "not_finite": sum(cell.not_finite for cell in cells),
        "stock_nan": sum(cell.stock_nan for cell in cells),
        "worst_line": max(cells, key=lambda cell: (cell.not_finite, cell.top)).worst_line if cells else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -------------------------------------------------------------------------------------------------------------- picture


def plot(report: Report, path: Path) -> None:
    """Layers over time, coloured by the worst rel of all ranks; and rel over the prefix. The format is that of the
    file's ending. Raises NotDone."""
    figure = draw(report)
    exits.write(path, lambda part: figure.savefig(part, dpi=150), "--plot")


def draw(report: Report) -> Figure:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    everything = [one for one in ones(report.logs) if one.cell.lines]
    if not everything:
        raise NotDone(
            "there is no layer line with a rel, and so nothing to plot",
            "start the service with KDTREE_VALIDATE=1, or in shadow mode, for such lines",
            "nothing has been drawn",
        )
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    # A file's name is not a formula.
    figure.suptitle(report.verdict.replace("$", r"\$")[:150], fontsize=10)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))

    picture, borders = heat(report)
    # A column is a stretch of passes through the layers; of several files each has a length of its own.
    passes = 1 << report.logs[0].start.shift if len(report.logs) == 1 else 1
    times = [passes * column for column in range(borders[-1] + 1)]
    levels = [layer - 0.5 for layer in range(len(picture) + 1)]
    mesh = left.pcolormesh(times, levels, picture, norm=LogNorm(vmin=1e-5, vmax=1.0, clip=True), cmap="inferno")
    left.set_xlabel(
        "time: compared passes through the layers" if len(report.logs) == 1 else "time: one file after the other"
    )
    for border in borders[:-1]:
        left.axvline(border, color="white")
    left.set_ylabel("layer")
    figure.colorbar(mesh, ax=left, label="worst rel of all ranks")

    points: dict[int, list[tuple[int, float]]] = {}
    for rank in {one.of: one.rank for one in everything}.values():
        for (bs, _, prefix), spread in rank.shapes.items():
            if spread.lines and prefix is not None:
                # A logarithmic axis has no place for an empty prefix.
                points.setdefault(bs, []).append((max(prefix, 1), spread.median))
    for index, (bs, some) in enumerate(sorted(points.items())):
        right.plot(*zip(*sorted(some), strict=True), "o", color=f"C{index}", label=f"bs {bs}")
    limit = max(one.limit for one in everything)
    right.axhline(limit, color="grey", linestyle="--", label=f"limit {limit:g}")
    right.grid(True, which="major", alpha=0.3)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_ylim(1e-5, 2.0)
    right.set_xlabel("prefix, tokens")
    right.set_ylabel("median rel of all layers, a point for each rank")
    if points:
        right.legend(ncols=1 + len(points) // 12, fontsize="small")
    else:
        right.text(0.5, 0.5, "not known: no eager pass after a shapes line", ha="center", transform=right.transAxes)
    return figure


def heat(report: Report) -> tuple[list[list[float]], list[int]]:
    """Rows of layers from 0 on, a column for each stretch of time of each file, NaN where nothing was compared; and
    where the files end."""
    layers = 1 + max(one.layer for one in ones(report.logs))
    rows: list[list[float]] = [[] for _ in range(layers)]
    borders = []
    for log in report.logs:
        cells = [one for one in ones(report.logs) if one.log is log]
        width = max((slot + 1 for one in cells for slot in range(SLOTS) if one.cell.counts[slot]), default=0)
        part = [[math.nan] * width for _ in range(layers)]
        for one in cells:
            for slot in range(width):
                if one.cell.counts[slot] and not part[one.layer][slot] >= one.cell.tops[slot]:
                    part[one.layer][slot] = one.cell.tops[slot]
        for row, more in zip(rows, part, strict=True):
            row.extend(more)
        borders.append(len(rows[0]))
    return rows, borders
