"""The demo on a terminal: the log lines scroll by, and below them a field of layers fills up. Uses rich."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kdtree_patch.demo import Check, Story, first_advice, headline

CELL = len("L60 2.2e-04  ")


class LiveScreen:
    """On a terminal the field is redrawn as the lines come. Into a file go the lines, and at the end the field."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=140)
        self._spinner = Spinner("dots", text=stage(Story(), layers))
        self._live = Live(self._spinner, console=self._console, refresh_per_second=8, transient=True)
        if self._console.is_terminal:
            self._live.start()

    def show(self, story: Story, line: str | None) -> None:
        if line is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._live.is_started:
            self._spinner.update(text=stage(story, self._layers))
            self._live.update(Group(self._field(story), self._spinner))

    def close(self) -> None:
        self._live.stop()

    def verdict(self, story: Story, checks: list[Check]) -> None:
        console = self._console
        if not checks[0].passed:
            for line in story.other:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
        console.print(self._field(story))
        console.print()
        for line in headline(story):
            console.print(line, markup=False, highlight=False)
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for check in checks:
            table.add_row(mark(check.passed), check.name, Text(check.seen))
        console.print(table)
        if advice := first_advice(checks):
            console.print(advice, style="yellow", markup=False, highlight=False, soft_wrap=True)
        console.print(mark(all(check.passed for check in checks), "PASS", "FAIL"))

    def _field(self, story: Story) -> Table:
        """All layers in rows, each with its rel, green within the limit."""
        columns = max(1, min(8, self._console.width // CELL))
        field = Table.grid(padding=(0, 2, 0, 0))
        cells = [cell(story, index) for index in range(self._layers)]
        for start in range(0, self._layers, columns):
            field.add_row(*cells[start : start + columns])
        return field


def cell(story: Story, index: int) -> Text:
    layer = story.layers.get(index)
    if layer is None:
        return Text(f"L{index:<3}   -   ", style="dim")
    return Text(f"L{index:<3}{layer.rel:.1e}", style="green" if layer.rel <= story.limit else "bold red")


def mark(passed: bool, good: str = "ok", bad: str = "FAIL") -> Text:
    return Text(good, style="bold green") if passed else Text(bad, style="bold red")


def stage(story: Story, layers: int) -> str:
    if not story.backend:
        return "starting: SGLang is imported, and the kernel compiled unless it is in the cache"
    if not story.done:
        return f"{len(story.layers)} of {layers} layers"
    return "done"
