"""Pictures of the kernel, drawn from its own source: who attends to what, and what lies where in shared memory.

layout.cpp is compiled with the headers of the CPU build and asked; nothing of the schedule or of the offsets is written
down a second time here.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_patch.exits import NotDone
from kdtree_patch.tiles import CONFIGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A mixed batch, small enough to be drawn: a long prefix, two shorter ones, and one shorter than a tile.
WORKERS, HEADS, Q_LEN = 12, 8, 9
PREFIXES = (2000, 700, 5, 900)

# For eyes that tell few colours apart (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#FFFFFF")


def read(repo: Path) -> dict[str, Any]:
    """What layout.cpp says, as {"schedule": ..., "memory": ...}. Takes a few seconds of g++. Raises NotDone."""
    cut = CONFIGS["portable"].cut_rows(Q_LEN, HEADS)
    words = [WORKERS, HEADS, Q_LEN, cut.row_blocks, cut.rows_per_block, *PREFIXES]
    with tempfile.TemporaryDirectory(prefix="kdtree-layout-") as folder:
        program = Path(folder) / "layout"
        try:
            compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
        except ValueError:
            what = f"CXX={os.environ['CXX']!r} is not a command"
            raise NotDone(what, "name a C++17 compiler, or unset it") from None
        flags = ["-std=c++17", "-O0", "-w", "-fno-strict-aliasing", "-DKDTREE_HOST", f"-I{repo / 'kernels'}"]
        _run([*compiler, *flags, str(repo / "tools" / "figures" / "layout.cpp"), "-o", str(program)])
        found = json.loads(_run([str(program), *map(str, words)]))
    schedule = dict(pieces=found["pieces"], workers=WORKERS, heads=HEADS, q_len=Q_LEN, prefixes=list(PREFIXES))
    return {"schedule": schedule, "memory": {name: found[name] for name in ("portable", "hopper", "swizzle")}}


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotDone(
            f"{command[0]} cannot be run ({error})", "install g++: the pictures of the kernel need it"
        ) from error
    if done.returncode:
        raise NotDone(f"{' '.join(command)}: {done.stderr.strip()[:2000]}", "mend tools/figures/layout.cpp")
    return done.stdout


def draw_schedule(schedule: dict[str, Any], path: Path) -> None:
    """A line for each worker, its pieces one after the other; the width of a piece is its number of tiles."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    for worker, pieces in groupby(schedule["pieces"], key=lambda piece: piece[0]):
        at = 0
        for _, request, row_block, first, last, tiles in pieces:
            width = last - first
            axes.barh(
                worker,
                width,
                left=at,
                color=COLOURS[request],
                alpha=0.95 - 0.4 * row_block,
                edgecolor="black",
                linewidth=0.8,
            )
            words = f"{first}-{last - 1}" if width > 1 else f"{first}"
            axes.text(at + width / 2, worker, words, ha="center", va="center", fontsize=7)
            if (first, last) != (0, tiles) and last != tiles:
                axes.plot(at + width, worker, marker=">", color="black", markersize=4)
            at += width
    axes.invert_yaxis()
    axes.set_yticks(range(schedule["workers"]), [f"worker {number}" for number in range(schedule["workers"])])
    axes.set_xlabel("tiles of 32 keys, one after the other (the numbers: which of the item)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    heads, q_len = schedule["heads"], schedule["q_len"]
    axes.set_title(f"{schedule['workers']} workers, 4 requests of q_len {q_len}, {heads} heads: two row blocks each")
    patches = [
        Patch(facecolor=COLOURS[number], edgecolor="black", label=f"request {number}, prefix {prefix:,}")
        for number, prefix in enumerate(schedule["prefixes"])
    ]
    patches.append(Patch(facecolor="#00000090", edgecolor="black", label="dark: row block 0, pale: row block 1"))
    axes.plot([], [], marker=">", color="black", linestyle="none", label="goes on in the next worker: combine")
    axes.legend(handles=[*patches, *axes.get_legend_handles_labels()[0]], loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def draw_memory(memory: dict[str, Any], path: Path) -> None:
    """The shared memory of a block in both configurations, to scale, and the swizzle of eight keys."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    portable, hopper, swizzle = figure.subplots(3, height_ratios=(2, 3, 4))
    _draw_block(portable, "portable", memory["portable"])
    _draw_block(hopper, "hopper", memory["hopper"])
    _draw_swizzle(swizzle, memory["swizzle"])
    figure.savefig(path)


def _draw_block(axes: Axes, name: str, block: dict[str, Any]) -> None:
    """Regions that lie over others are drawn below them, each on a level of its own."""
    end = level = 0
    for number, (words, start, size) in enumerate(block["regions"]):
        if start < end:
            level -= 1
        else:
            end = start + size
        colour = COLOURS[number % len(COLOURS)]
        label = f"{words}: {size:,}"
        axes.barh(level, size, left=start, height=0.8, color=colour, edgecolor="black", linewidth=0.8, label=label)
    axes.set_title(f"{name}, {block['rows']} rows: {block['bytes']:,} bytes of a block's shared memory")
    axes.set_xlim(0, block["bytes"])
    axes.set_yticks(range(0, level - 1, -1), ["", *["lies over"] * -level])
    axes.set_xlabel("bytes")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)


def _draw_swizzle(axes: Axes, swizzle: list[list[int]]) -> None:
    for key, banks in enumerate(swizzle):
        for unit, bank in enumerate(banks):
            axes.barh(key, 1, left=bank, height=1.0, color=COLOURS[unit], edgecolor="black", linewidth=0.8)
            axes.text(bank + 0.5, key, str(unit), ha="center", va="center")
    axes.set_xlim(0, 8)
    axes.set_ylim(7.5, -0.5)
    axes.set_xticks([i + 0.5 for i in range(8)], [f"{4 * i}-{4 * i + 3}" for i in range(8)])
    axes.set_yticks(range(8), [f"key {key}" for key in range(8)])
    axes.set_xlabel("banks")
    axes.set_title("portable: the banks of the eight 16-byte units of a 128-byte line, for eight keys")
