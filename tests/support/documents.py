"""What stands in the repository's documents: commands, names between backticks, links, headings, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.env import REPO

# Of commands, and of everything else that may stand in a fence.
COMMANDS, CODE, TEXT = "sh", "python", "text"

_FENCE = re.compile(r"^```(?P<kind>\S*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What a shell takes for a comment, outside of quotes.
_COMMENT = re.compile(r"""^((?:[^'"#]|'[^']*'|"[^"]*"|(?<!\s)#)*?)\s+#.*$""")


def documents() -> list[Path]:
    """Every one that somebody might follow."""
    return [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md")), REPO / "tests" / "data" / "README.md"]


@dataclass(frozen=True)
class Document:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(REPO).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def prose(self) -> str:
        """Without fences."""
        return _FENCE.sub("", self.text)

    def fences(self) -> Iterator[tuple[str, str]]:
        """Kind and content of each."""
        for match in _FENCE.finditer(self.text):
            yield match["kind"], match["body"]

    def commands(self) -> list[str]:
        """One a line, without comments and with single spaces."""
        lines = [line for kind, body in self.fences() if kind == COMMANDS for line in body.splitlines()]
        return [" ".join(_COMMENT.sub(r"\1", line).split()) for line in lines if line.strip() and line[0] != "#"]

    def code(self) -> list[str]:
        return [body for kind, body in self.fences() if kind == CODE]

    def spans(self) -> list[str]:
        """What stands between backticks in a line."""
        return _SPAN.findall(self.prose)

    def links(self) -> list[str]:
        """To places in the repository."""
        return [target for target in _LINK.findall(self.prose) if not re.match(r"[a-z]+:", target)]

    def anchors(self) -> set[str]:
        """As GitHub makes them of headings."""
        headings = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def table(self, heading: str) -> list[list[str]]:
        """The cells of each row of the first table below a heading, without its own headings."""
        _, found, rest = self.text.partition(f"\n{heading}\n")
        assert found, f"{self.name} has no {heading}"
        rest = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
        table = re.search(r"^\|.*\n\|[-:| ]+\n((?:\|.*\n)*)", rest, re.MULTILINE)
        assert table, f"{self.name} has no table below {heading}"
        # A bar in a code span may not be written with a backslash in this repository's tables, so any bar ends a cell.
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]


def all_documents() -> list[Document]:
    return [Document(path) for path in documents()]


def document(name: str) -> Document:
    return Document(REPO / name)


def spans_of(cell: str) -> list[str]:
    return _SPAN.findall(cell)
