"""The `[kdtree]` lines of a server's log, read back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "[kdtree] "


@dataclass(frozen=True)
class Line:
    """`word` is the first one that is no level (`installed`, `declined`, `calls`, `L3`, ...)."""

    text: str
    level: str
    word: str
    fields: Mapping[str, str]

    @property
    def rank(self) -> int | None:
        value = self.fields.get("tp_rank")
        return int(value) if value is not None and value.isdigit() else None

    @property
    def is_layer(self) -> bool:
        return re.fullmatch(r"L\d+", self.word) is not None

    @property
    def of_the_process(self) -> bool:
        """What a process says about itself, once: that it serves, or why it does not."""
        return self.word == "installed" or (self.word == "declined" and self.fields.get("scope") != "call")


def parse(text: str) -> list[Line]:
    """All that are in a log. A progress bar may stand before one on the same line."""
    found = []
    for line in text.splitlines():
        _, mark, rest = line.partition(MARK)
        if not mark:
            continue
        level, _, words = rest.partition(" ")
        if level not in ("WARNING", "ERROR"):
            level, words = "", rest
        # The last one of an error may have the semicolon of the words that follow.
        fields = dict(part.rstrip(";").split("=", 1) for part in _split(words) if "=" in part)
        found.append(Line(rest, level, words.split(" ", 1)[0], fields))
    return found


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError:  # a quotation mark in the words of an error
        return words.split()


def read(log: Path) -> list[Line]:
    try:
        return parse(log.read_text(errors="replace"))
    except OSError:
        return []


def installed(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.word == "installed"]


def served(lines: Iterable[Line]) -> int:
    """The most calls that a worker has said to have served. It says so after 10, after 100 and so on."""
    return max((int(line.fields.get("served", 0)) for line in lines if line.word == "calls"), default=0)


def compared(lines: Iterable[Line]) -> int:
    """The calls that the layer lines are about: one each, or as many as a line says that a graph has replayed."""
    return sum(int(line.fields.get("calls", 1)) for line in lines if line.is_layer)


def worst_rel(lines: Iterable[Line]) -> float | None:
    """The largest rel of the layer lines; infinite if one has a NaN of the kernel's own. None without such a line."""
    worst = None
    for line in lines:
        if line.is_layer:
            rel = float("inf") if "nan" in line.fields else float(line.fields["rel"])
            worst = rel if worst is None or rel > worst else worst
    return worst


def alarms(lines: Iterable[Line]) -> list[str]:
    """Errors, and processes that stay stock."""
    return [line.text for line in lines if line.level == "ERROR" or (line.of_the_process and line.word != "installed")]
