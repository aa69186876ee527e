"""`make figures`: draws docs/figures and fills tables of the documents, from what the repository has.

A run of the benchmark or of the real server in docs/results becomes a picture of the same name, drawn by the code that
draws `--plot`. The pictures of the kernel come from its own source (layout.cpp). Each picture says what it was drawn
from: tests/test_documents.py finds one that is out of date.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

from kdtree_patch import bench_report
from kdtree_patch.exits import NOT_DONE, NotDone, complain, run
from tests.e2e import report as e2e_report
from tools.figures import layout, tables

REPO = Path(__file__).resolve().parents[2]

Draw = Callable[[Any, Path], None]

# The same input is to give the same file, and a file of text that can be read and searched.
STYLE: Any = {"svg.hashsalt": "kdtree", "svg.fonttype": "none", "font.size": 9.0}


def pictures(repo: Path = REPO) -> Iterator[tuple[str, Any, Draw]]:
    """Name, what is drawn, and how. Raises NotDone for a result that is no kind of run."""
    for path in sorted((repo / "docs" / "results").glob("*.json")):
        content = bench_report.read_json(path)
        if isinstance(content, dict) and "rows" in content:
            yield path.stem, bench_report.read_run(path), bench_report.plot
        elif isinstance(content, dict) and "modes" in content:
            bench_report.read_modes(content, path)  # of other kinds of run there is nothing to draw
        elif "speed" in (run := e2e_report.read_run(path)):
            yield path.stem, run, e2e_report.plot
    kernel = layout.read(repo)
    yield "schedule", kernel["schedule"], layout.draw_schedule
    yield "shared-memory", kernel["memory"], layout.draw_memory


def stamp(content: Any) -> str:
    return f"<!-- make figures: {hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()} -->"


def save(content: Any, draw: Draw, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        draw(content, path)
    text = re.sub(r"\s*<dc:date>.*?</dc:date>", "", path.read_text())
    declaration, rest = text.split("\n", 1)
    path.write_text(f"{declaration}\n{stamp(content)}\n{re.sub(' +$', '', rest, flags=re.MULTILINE)}")


def main(repo: Path = REPO) -> int:
    folder = repo / "docs" / "figures"
    folder.mkdir(exist_ok=True)
    try:
        for name, content, draw in pictures(repo):
            save(content, draw, folder / f"{name}.svg")
            print(f"docs/figures/{name}.svg")
        for document in (repo / "README.md", *sorted((repo / "docs").glob("*.md"))):
            before = document.read_text()
            after = tables.filled(before, repo)
            if after != before:
                document.write_text(after)
                print(document.relative_to(repo))
    except NotDone as error:
        complain("figures", error)
        return NOT_DONE
    return 0


if __name__ == "__main__":
    sys.exit(run("figures", main))
