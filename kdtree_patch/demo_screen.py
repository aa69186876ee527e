"""The demo on a terminal: the log lines scroll by, and below them a table of the layers fills up. Uses rich."""

from __future__ import annotations

import time

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kdtree_patch.console import open_console
from kdtree_patch.demo import Check, Layer, Story, first_advice, headline

# A group of columns, full and short, and how wide it is.
FULL = (("layer", "max_abs_diff", "mean", "rel"), 44)
SHORT = (("layer", "rel"), 18)
# What a terminal needs beside the rows of the table: its head, the lines below it, and some lines of the log.
OTHER_ROWS = 12


class LiveScreen:
    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._began = time.monotonic()
        self._console = open_console()
        self._spinner = Spinner("dots")
        self._bar = ProgressBar(total=layers, width=24)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()
        self.show(Story(), None)

    def show(self, story: Story, line: str | None) -> None:
        if line is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._bar.update(len(story.layers))
        self._spinner.update(text=f"{stage(story)}, {time.monotonic() - self._began:.0f} s")
        foot = Table.grid(padding=(0, 2, 0, 0))
        foot.add_row(self._bar, Text(f"{len(story.layers)} of {self._layers}"), self._spinner)
        rows = max(1, self._console.height - OTHER_ROWS)
        self._live.update(Group(self._table(story, rows), foot, found(story)))

    def close(self) -> None:
        self._live.stop()

    def verdict(self, story: Story, checks: list[Check]) -> None:
        console = self._console
        if not checks[0].passed:
            for line in story.other:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
        groups = max(1, min(3, console.width // SHORT[1]))
        console.print(self._table(story, -(-self._layers // groups)))
        for line in headline(story):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for check in checks:
            table.add_row(mark(check.passed), check.name, Text(check.seen))
        console.print(table)
        if advice := first_advice(checks):
            console.print(advice, style="yellow", markup=False, highlight=False, soft_wrap=True)
        console.print(mark(all(check.passed for check in checks), "PASS", "FAIL"))

    def _table(self, story: Story, rows: int) -> Table:
        """The layers, from the top down and then from left to right, in `rows` rows; the last ones that have come where
        there is no room for all.
        """
        groups = -(-self._layers // rows)
        columns, width = FULL if groups * FULL[1] <= self._console.width else SHORT
        room = max(1, self._console.width // width)
        first = 0
        if groups > room:
            groups = room
            first = max(0, max(story.layers, default=0) + 1 - groups * rows)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for group in range(groups):
            for name in columns:
                table.add_column(("   " if group and name == "layer" else "") + name, justify="right", no_wrap=True)
        last = min(self._layers, first + groups * rows)
        for row in range(first, min(first + rows, last)):
            cells = [cell for index in range(row, last, rows) for cell in cells_of(story, index, columns)]
            table.add_row(*cells)
        return table


def cells_of(story: Story, index: int, columns: tuple[str, ...]) -> list[Text]:
    layer = story.layers.get(index)
    if layer is None:
        return [Text(f"L{index}", style="dim"), *[Text("-", style="dim")] * (len(columns) - 1)]
    figures = {"max_abs_diff": layer.max_abs_diff, "mean": layer.mean, "rel": layer.rel}
    shown = [Text(f"{figures[name]:.2e}") for name in columns[1:]]
    shown[-1].stylize(colour(story, layer))
    return [Text(f"L{index}"), *shown]


def colour(story: Story, layer: Layer) -> str:
    return "green" if layer.rel <= story.limit else "bold red"


def found(story: Story) -> Text:
    """The worst layer so far, and what it is held to."""
    worst = story.worst
    if worst is None:
        return Text()
    return Text(f"worst rel {worst.rel:.2e} in L{worst.layer}, limit {story.limit:.0e}", style=colour(story, worst))


def mark(passed: bool, good: str = "ok", bad: str = "FAIL") -> Text:
    return Text(good, style="bold green") if passed else Text(bad, style="bold red")


def stage(story: Story) -> str:
    if not story.machine:
        return "starting"
    if not story.backend:
        return "importing SGLang, and compiling what is not cached"
    return "done" if story.done else "both kernels, layer by layer"
