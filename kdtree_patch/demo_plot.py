"""The demo as a picture: how far the two kernels are apart in each layer, and the tree that was verified."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kdtree_patch.demo import Case, Story, headline

# A prefix is visible to all drafts, so its end is enough to see what a mask is.
PREFIX_SHOWN = 24


def plot(case: Case, story: Story, path: Path) -> None:
    """The format is that of the file's ending."""
    draw(case, story).savefig(path, dpi=150)


def draw(case: Case, story: Story) -> Figure:
    figure = Figure(figsize=(12, 7), layout="constrained")
    options = case.options
    words = "verify attention: bs {bs}, q_len {q_len}, {heads} heads, prefix {prefix}, {dtype}".format(**options)
    figure.suptitle("\n".join([words, *headline(story)[:2]]), fontsize=10)
    panels = figure.subplot_mosaic([["rel", "elements"], ["tree", "tree"]], height_ratios=(3, 2))
    left, right, below = panels["rel"], panels["elements"], panels["tree"]
    layers = [story.layers[index] for index in sorted(story.layers)]
    numbers = [layer.layer for layer in layers]

    # Zero and NaN have no place on a logarithmic axis, and a NaN must not look like a layer that is fine.
    lowest = 1e-7
    good = [layer for layer in layers if layer.rel <= story.limit]
    bad = [layer for layer in layers if not layer.rel <= story.limit]
    for some, style, label in ((good, "C0", "within the limit"), (bad, "C3", "beyond it, or not a number")):
        heights = [min(max(layer.rel, lowest), 2.0) if layer.rel == layer.rel else 2.0 for layer in some]
        if some:
            left.plot([layer.layer for layer in some], heights, "o", color=style, label=label)
    left.axhline(story.limit, color="grey", linestyle="--", label=f"limit {story.limit:.0e}")
    left.axhline(1.0, color="C3", linewidth=0.8, label="a wrong answer is near 1")
    left.set(yscale="log", ylim=(1e-5, 3.0), xlabel="layer", ylabel="rel: |ours - stock| / |stock|, L2")
    left.legend(fontsize="small", loc="center right")
    right.plot(numbers, [layer.max_abs_diff for layer in layers], "o", color="C0", label="largest")
    right.plot(numbers, [layer.mean for layer in layers], "s", color="C1", label="mean")
    right.set(yscale="log", xlabel="layer", ylabel="|ours - stock|, elements of the output")
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(-1, case.layers)
        axes.grid(True, which="major", alpha=0.3)

    tree = story.call.get("tree")
    if not tree:
        below.text(0.5, 0.5, "no call was made", ha="center", transform=below.transAxes)
        return figure
    shown = min(options["prefix"], PREFIX_SHOWN)
    mask = [[1] * shown + [2 * int(cell) for cell in row] for row in tree]
    below.imshow(mask, cmap="Blues", vmin=0, vmax=2.6, interpolation="nearest", aspect="auto")
    below.axvline(shown - 0.5, color="C3", linewidth=1.2)
    first = options["prefix"] - shown
    below.set_xticks(range(0, shown + len(tree), max(1, (shown + len(tree)) // 16)))
    below.set_xticklabels([str(first + int(tick)) for tick in below.get_xticks()])
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    left_out = f" (the first {first} of the prefix are left out)" if first else ""
    below.set(xlabel=f"column: prefix, then drafts from {options['prefix']} on{left_out}", ylabel="draft token")
    below.set_title("the mask of the first request: what each draft sees", fontsize=10)
    return figure
