"""Sums to findings: what is not as it should be, which mistake it looks like, and what to check.

A finding is said once and for its most telling cause: what a rank explains is not said of its layers again, and what a
batch size explains is not said of everything. Knows report_tally's sums. All thresholds are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

from kdtree_patch.report_tally import SLOTS, Cell, Event, Log, Rank, Spread

_T = TypeVar("_T")

# rel that is not rounding. bf16 rounds to about 2e-3 and fp16 to 2e-4; `make deploy` refuses a service above the same.
LIMIT = 0.02
# Below it nothing is compared with anything: twice the rounding of bf16, whatever another layer has.
ROUNDING = 4e-3
# With an fp8 KV pool both: the stock kernel rounds queries and weights to fp8 before it multiplies, ours does not. On
# random inputs that alone puts the two 0.03 to 0.2 apart.
FP8_LIMIT = 0.3
# A wrong answer. Zeros are 1 away from the stock result, and something unrelated of the same size is 1.4.
NEAR_ONE = 0.5
# A layer or a rank differs from the rest if its median is so many times theirs. Real layers of one model differ by less
# than 2 from one another.
OUTLIER = 5.0
# rel has grown, over time or over the prefix, if its end is so many times its beginning: rounding does not grow.
GROWTH = 3.0
# What holds of so many of the layers holds of all of them.
MOST = 0.8
# Passes through the layers that it takes to speak of time.
PASSES = 6
# Routed calls after which layer lines must have come where validation is on: more than three steps of 300 layers.
SILENT_CALLS = 1000

# Calls that belong to the stock kernel by their nature, and those that shadow mode gives it.
NORMAL = frozenset({"forward_mode", "empty_batch", "max_len_unknown", "shadow"})
# Said of backends that have no verify calls; no fault where another backend of the service has installed.
QUIET = frozenset({"no_speculation", "draft_only", "not_mla"})
# Facts of the installed line in which the ranks of one service do not differ.
SAME = ("version", "mode", "validate", "guard_rel", "sglang", "torch", "cupy", "wrapt", "gpu", "cc", "target")

_SELFTEST = "python -m kdtree_patch selftest (--device cuda:N) in the service's environment"
_DUMP = "KDTREE_GUARD_REL=0.05 with KDTREE_GUARD_DUMP=FOLDER saves the inputs and both results of such a call"
_LINES = 'docs/operations.md, "Log lines"'
_CALLS = 'docs/limits.md, "Calls that are left to the stock kernel"'
_WORKERS = 'docs/limits.md, "Workers that stay stock"'
_TURNED_OFF = 'docs/limits.md, "Kernels that are turned off"'
_TRIPPED = {"guard": "the guard has tripped", "guard_elsewhere": "stock, as the guard of another rank has tripped"}
_DISABLED = {
    "guard": ["the line holds what a bug report needs, and `dump=` the file, if there is one"],
    "guard_elsewhere": [
        "nothing in these ranks: they went stock because the guard of the rank that `of=` names has tripped; that "
        "rank's own line has the details"
    ],
    "guard_failed": [
        "the line, or a WARNING before it, says why the guard could not look; memory: leave the service some more"
    ],
    "launch_failed": ["the line has the driver's error; restart the service when it is mended"],
    "v_not_latent": ["this model's V is not the latent part of K: do not use the patch with it"],
}


@dataclass(frozen=True)
class Finding:
    """`code` is for scripts. `check` says what to do, the likeliest first."""

    code: str
    title: str
    seen: list[str] = field(default_factory=list)
    check: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class One:
    """A layer of a rank of a file, with its median."""

    log: Log
    rank: Rank
    layer: int
    cell: Cell
    median: float

    @property
    def of(self) -> tuple[int, int | None]:
        return id(self.log), self.rank.number

    @property
    def has_fp8(self) -> bool:
        """Whether its worker's kernel is one for an fp8 pool."""
        said = self.rank.installed
        return said is not None and "-fp8_" in said.fields.get("target", "")

    @property
    def limit(self) -> float:
        return FP8_LIMIT if self.has_fp8 else LIMIT

    @property
    def rounding(self) -> float:
        return FP8_LIMIT if self.has_fp8 else ROUNDING


class Names:
    """Ranks as they are called: with the file where two files have a rank of one number."""

    def __init__(self, logs: Sequence[Log]):
        numbers = [number for log in logs for number in log.start.ranks]
        self._doubled = {number for number in numbers if numbers.count(number) > 1}
        short = [PurePath(log.name).name for log in logs]
        self._several = len(logs) > 1
        self._files = {
            id(log): name if short.count(name) == 1 else log.name for log, name in zip(logs, short, strict=True)
        }

    def rank(self, log: Log, number: int | None) -> str:
        name = "unnumbered rank" if number is None else f"rank {number}"
        return f"{name} of {self.file(log)}" if number in self._doubled else name

    def file(self, log: Log) -> str:
        return self._files[id(log)]

    def line(self, log: Log, line: int) -> str:
        return f"{self.file(log)}:{line}"


def judge(logs: Sequence[Log], names: Names) -> list[Finding]:
    """All findings, the gravest first. None: nothing is wrong as far as the logs tell."""
    if not any(log.ours for log in logs):
        return [_no_line(logs)]
    return [
        *_processes(logs, names),
        *_figures(logs, names),
        *_missing(logs, names),
        *_warnings(logs, names),
    ]


def notes(logs: Sequence[Log], names: Names) -> list[str]:
    """What is no fault, and has to be known of the report."""
    said = []
    for log in logs:
        name = names.file(log)
        if log.number > 1:
            which = (
                f"all {log.number} starts are judged together"
                if log.all_starts
                else (
                    f"{log.number} starts; the last one is judged, and {log.dropped:,} layer lines of those before are "
                    "not (--all-starts judges them all)"
                )
            )
            said.append(f"{name}: {which}")
        if log.torn:
            line, text = log.first_torn or (0, "")
            said.append(
                f"{name}: {log.torn:,} torn or unknown lines were skipped, the first in line {line}: {text[:80]}"
            )
        if log.interrupted:
            rest = f", and nothing of {', '.join(log.unread)}" if log.unread else ""
            said.append(f"{name}: reading was interrupted after {log.lines:,} lines; what came before is judged{rest}")
        if log.start.left_out:
            said.append(f"{name}: {log.start.left_out:,} lines are beyond what a report keeps, and are in no figure")
        if log.ours == 0:
            said.append(f"{name}: no [kdtree] line")
        installed = [rank.installed for rank in log.start.ranks.values() if rank.installed is not None]
        for fact in SAME:
            values = sorted({one.fields.get(fact, "none") for one in installed})
            if len(values) > 1:
                said.append(f"{name}: the workers differ in {fact}: {', '.join(values)}")
    if not any(log.start.lines for log in logs):
        said.append("no layer line to judge: KDTREE_VALIDATE=1 or KDTREE_MODE=shadow has them written")
    return said


def ones(logs: Sequence[Log]) -> list[One]:
    return [
        One(log, rank, layer, cell, cell.median)
        for log in logs
        for _, rank in ranks_of(log)
        for layer, cell in sorted(rank.cells.items())
    ]


def ranks_of(log: Log) -> list[tuple[int | None, Rank]]:
    """In order, and what says no rank last."""
    return sorted(log.start.ranks.items(), key=lambda pair: (pair[0] is None, pair[0] or 0))


def ends(cells: Iterable[Cell]) -> tuple[float, float] | None:
    """rel (its geometric mean) in the first third of the time and in the last, or None if there are too few passes."""
    cells = list(cells)
    slots = [slot for slot in range(SLOTS) if any(cell.counts[slot] for cell in cells)]
    if len(slots) < PASSES:
        return None
    third = len(slots) // 3

    def mean(part: Sequence[int]) -> float:
        count = sum(cell.counts[slot] for cell in cells for slot in part)
        return float(10 ** (sum(cell.logs[slot] for cell in cells for slot in part) / count))

    return mean(slots[:third]), mean(slots[-third:])


def spans(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 7] as "L0-L2, L7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(f"L{number}" for number in run) for run in runs)


# --------------------------------------------------------------------------------------------- what processes have said


def _no_line(logs: Sequence[Log]) -> Finding:
    count = sum(log.lines for log in logs)
    return Finding(
        "no_line",
        f"there is no [kdtree] line in {count:,} lines: no worker has loaded the patch, or this is not the log",
        check=[
            "the right log: the lines are on the service's standard error (journalctl -u UNIT, docker logs NAME 2>&1)",
            "the right time: `installed` or `declined` comes once, when a worker has loaded its weights",
            "PYTHONPATH of the service: the folder comes first in it, before another sitecustomize",
            "the interpreter's flags: -I, -E and -S ignore PYTHONPATH or sitecustomize",
            "KDTREE_MODE=off says nothing; a service without the Triton attention backend says nothing either",
        ],
    )


def _processes(logs: Sequence[Log], names: Names) -> list[Finding]:
    """Kernels that were turned off, workers that stay stock, other errors, kinds of call that are not served."""
    found = []
    # Whose guard has tripped comes before those that went along.
    disabled = sorted(_by_reason(logs, "disabled").items(), key=lambda one: one[0] == "guard_elsewhere")
    for reason, events in disabled:
        title = _TRIPPED.get(reason, f"the kernel was turned off: {reason}")
        check = _DISABLED.get(reason, [_TURNED_OFF])
        found.append(Finding("disabled", f"{title} ({_who(events, names)})", _quote(events, names), check))
    for reason, events in _by_reason(logs, "declined").items():
        stays = [(log, one) for log, one in events if one.said.of_the_process]
        if reason in QUIET:
            stays = [(log, one) for log, one in stays if not _installed(log)]
        if stays:
            title = f"a worker stays stock: {reason} ({_who(stays, names)})"
            found.append(Finding("stays_stock", title, _quote(stays, names), [f"{_WORKERS}: {reason}"]))
        calls = [(log, one) for log, one in events if not one.said.of_the_process]
        if calls and reason not in NORMAL:
            title = f"a kind of verify call is left to the stock kernel: {reason}"
            check = [f"{_CALLS}: {reason}; whether the service can do without it"]
            found.append(Finding("calls_declined", title, _quote(calls, names), check))
    errors = [(log, one) for log in logs for one in log.start.events.values() if one.said.kind == "error"]
    # `ERROR declined` of a setting, for one, is of its own kind; these are all others.
    if errors:
        found.append(Finding("error", f"errors ({_who(errors, names)})", _quote(errors, names), [_LINES]))
    return found


def _by_reason(logs: Sequence[Log], kind: str) -> dict[str, list[tuple[Log, Event]]]:
    found: dict[str, list[tuple[Log, Event]]] = {}
    for log in logs:
        for event in log.start.events.values():
            if event.said.kind == kind:
                found.setdefault(event.said.reason, []).append((log, event))
    return found


def _who(events: Sequence[tuple[Log, Event]], names: Names) -> str:
    who = dict.fromkeys(names.rank(log, one.rank) if one.rank is not None else names.file(log) for log, one in events)
    return ", ".join(list(who)[:8]) + (" and others" if len(who) > 8 else "")


def _quote(events: Sequence[tuple[Log, Event]], names: Names, most: int = 3) -> list[str]:
    lines = [
        f"{names.line(log, one.line)}: {one.said.text[:400]}" + (f" ({one.times} times)" if one.times > 1 else "")
        for log, one in events[:most]
    ]
    return lines + ([f"and {len(events) - most} more"] if len(events) > most else [])


def _installed(log: Log) -> list[int | None]:
    return [number for number, rank in log.start.ranks.items() if rank.installed is not None]


def _missing(logs: Sequence[Log], names: Names) -> list[Finding]:
    """Ranks that have said nothing, and layer lines that should be there."""
    found = []
    known = sorted({number for log in logs for number in _installed(log) if number is not None})
    gaps = [number for number in range(known[0], known[-1]) if number not in known] if known else []
    if gaps:
        which = ", ".join(map(str, gaps[:16]))
        found.append(
            Finding(
                "rank_missing",
                f"rank {which} has not said `installed`, and its neighbours have",
                check=[
                    "a worker that says neither `installed` nor `declined` has not loaded the patch, or died before"
                ],
            )
        )
    with_lines = {(id(one.log), one.rank.number) for one in ones(logs)}
    for log in logs:
        silent = [number for number in _installed(log) if (id(log), number) not in with_lines]
        validates = [
            number
            for number in silent
            if (said := log.start.ranks[number].installed) is not None
            and (said.fields.get("validate") == "1" or said.fields.get("mode") == "shadow")
        ]
        others = any(where == id(log) and number is not None for where, number in with_lines)
        routed = log.start.routed["served"] + log.start.routed["shadow"]
        if validates and (others or (not log.start.lines and routed >= SILENT_CALLS)):
            who = ", ".join(names.rank(log, number) for number in validates[:16])
            found.append(
                Finding(
                    "no_layer_lines",
                    f"validation is on, and there is no layer line of {who}",
                    check=["a WARNING or an ERROR of that worker above; KDTREE_VALIDATE_EVERY, if it is large"],
                )
            )
    return found


def _warnings(logs: Sequence[Log], names: Names) -> list[Finding]:
    """Those of validation itself: what could not be compared is in no figure."""
    events = [
        (log, one)
        for log in logs
        for one in log.start.events.values()
        if one.said.kind == "warning" and "validation" in one.said.text
    ]
    if not events:
        return []
    title = f"calls could not be compared, and are in no figure here ({_who(events, names)})"
    return [Finding("not_compared", title, _quote(events, names), [_LINES])]


# -------------------------------------------------------------------------------------------------------------- figures


def _figures(logs: Sequence[Log], names: Names) -> list[Finding]:
    found = []
    left = ones(logs)
    if finding := _not_finite(left, names):
        found.append(finding)
    left = [one for one in left if one.cell.lines]
    if not left:
        return found
    finding, left = _one_rank(left, names)
    if finding:
        found.append(finding)
    if finding := _by_shape(left):
        return [*found, finding]
    bad = _bad(left)
    if bad and len(bad) >= MOST * len(left):
        # All that time could still tell is when it began.
        return [*found, _growing_in_time(left, names) or _everywhere(left, bad)]
    if finding := _growing_in_time(left, names):
        return [*found, finding]
    if bad:
        found.append(_some_layers(left, bad, names))
    fine = {(one.of, one.layer) for one in left} - {(one.of, one.layer) for one in bad}
    if finding := _now_and_then([one for one in left if (one.of, one.layer) in fine], names):
        found.append(finding)
    return found


def _not_finite(all_of_them: Sequence[One], names: Names) -> Finding | None:
    bad = [one for one in all_of_them if one.cell.not_finite]
    if not bad:
        return None
    ranks = _ranks(bad, names)
    first = min(bad, key=lambda one: one.cell.worst_line)
    count = sum(one.cell.not_finite for one in bad)
    every = len({one.layer for one in bad}) == len({one.layer for one in all_of_them})
    where = "all layers" if every else spans(one.layer for one in bad)
    return Finding(
        "not_finite",
        f"NaN or infinity of the kernel's own in {count:,} lines: {where} ({ranks})",
        [f"the first: {names.line(first.log, first.cell.worst_line)}, L{first.layer}"],
        [
            "slots: kv_indices that point outside the pool, or at rows that nobody has written",
            "rows that see no column: they must become 0, not 0 / 0 (where stock has the NaN, the field is stock_nan)",
            "NaN in one rank alone: that GPU; in one layer alone: its weights",
            _DUMP,
        ],
    )


def _bad(some: Sequence[One]) -> list[One]:
    """Those over the limit, and those that stand out from the rest."""
    typical = _middle([one.median for one in some])
    return [
        one
        for one in some
        if one.median > one.limit or (len(some) > 2 and one.median > max(one.rounding, OUTLIER * typical))
    ]


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else math.nan


def _one_rank(left: list[One], names: Names) -> tuple[Finding | None, list[One]]:
    """The ranks that differ from the others, if they are not most of them. Returns what is left without them."""
    medians: dict[tuple[int, int | None], float] = {}
    for key in dict.fromkeys(one.of for one in left):
        medians[key] = _middle([one.median for one in left if one.of == key])
    if len(medians) < 2:
        return None, left
    typical = _middle(list(medians.values()))
    rounding = max(one.rounding for one in left)
    out = {key for key, median in medians.items() if median > max(rounding, OUTLIER * typical)}
    if not out:  # they are half of the ranks at most, being above the middle one
        return None, left
    bad = [one for one in left if one.of in out]
    which = _ranks(bad, names)
    seen = [f"median rel {max(medians[key] for key in out):.1e}, and {typical:.1e} in the others"]
    for one in {one.of: one for one in bad}.values():
        said = one.rank.installed
        if said is not None:
            facts = " ".join(f"{k}={said.fields[k]}" for k in ("device", "gpu", "cc", "target") if k in said.fields)
            seen.append(f"{names.rank(one.log, one.rank.number)}: {facts}")
    check = [
        f"that GPU: {_SELFTEST}",
        "that GPU: nvidia-smi -q -d ECC, Xid lines in the kernel's log, another slot or card",
        "what that worker has alone: its compiled kernel (KDTREE_CACHE_DIR), another version in its `installed` line",
    ]
    finding = Finding("one_rank", f"{which} differs from the rest", seen, check)
    return finding, [one for one in left if one.of not in out]


def _ranks(some: Iterable[One], names: Names) -> str:
    who = list(dict.fromkeys(names.rank(one.log, one.rank.number) for one in some))
    return ", ".join(who[:8]) + (" and others" if len(who) > 8 else "")


def _by_shape(left: Sequence[One]) -> Finding | None:
    """Whether rel grows with the prefix, or is high for some batch sizes alone."""
    points: dict[tuple[int, int, int | None], list[Spread]] = {}
    for rank in {one.of: one.rank for one in left}.values():
        for key, spread in rank.shapes.items():
            if spread.lines:
                points.setdefault(key, []).append(spread)
    medians = {key: Spread.of(spreads).median for key, spreads in points.items()}
    limit, rounding = max(one.limit for one in left), max(one.rounding for one in left)
    bad = {key for key, median in medians.items() if median > limit}
    sizes = {bs for bs, _, _ in medians}
    known = [(bs, prefix, median) for (bs, _, prefix), median in medians.items() if prefix is not None]
    # Over all batch sizes only what rises in steps is growth: right for small ones and wrong for large ones is theirs.
    curves = [_curve([point for point in known if point[0] == bs], rounding, steps=1) for bs in sorted(sizes)]
    growing = next(filter(None, [_curve(known, rounding, steps=2), *curves]), None)
    bad_sizes = {bs for bs, _, _ in bad}
    good_sizes = sizes - bad_sizes
    if growing is not None:
        first, last = growing
        return Finding(
            "context",
            f"rel grows with the context: {first[1]:.1e} at a prefix of {first[0]:,}, {last[1]:.1e} at {last[0]:,}",
            _shape_lines(medians),
            [
                "accumulation: products and the running sum in float32, the running maximum rescaled at every tile",
                "split and combine of long prefixes: try KDTREE_CONFIG=portable, which is another kernel on Hopper",
                _SELFTEST,
                _DUMP,
            ],
        )
    if bad_sizes and good_sizes:
        one = "batch size" if len(bad_sizes) == 1 else "batch sizes"
        return Finding(
            "batch_size",
            f"wrong at {one} {_listed(bad_sizes)} alone, right at {_listed(good_sizes)}",
            _shape_lines(medians, bad),
            [
                "pointer arrays: qo_indptr and kv_indptr have bs + 1 entries, mask_indptr is used as bs starts",
                "offsets from the second request on: each mask has its own row stride, prefix + q_len of that request",
                "a batch size that CUDA graphs pad: requests of prefix 1 at its end",
                _DUMP,
            ],
        )
    return None


def _curve(
    points: Sequence[tuple[int, int, float]], rounding: float, steps: int
) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """The ends of (prefix, rel), if it rises in `steps` steps or more and never falls back; or None."""
    of_prefix: dict[int, list[float]] = {}
    for _, prefix, median in points:
        of_prefix.setdefault(prefix, []).append(median)
    curve = [(prefix, _middle(medians)) for prefix, medians in sorted(of_prefix.items())]
    if len(curve) < 2 or curve[-1][1] <= max(rounding, GROWTH * curve[0][1]):
        return None
    pairs = [(earlier[1], later[1]) for earlier, later in zip(curve, curve[1:], strict=False)]
    # Rounding may make it dip by a little.
    steady = all(later > 0.8 * earlier for earlier, later in pairs)
    return (curve[0], curve[-1]) if steady and sum(later > 1.2 * earlier for earlier, later in pairs) >= steps else None


def _shape_lines(
    medians: dict[tuple[int, int, int | None], float], bad: Iterable[tuple[int, int, int | None]] = (), most: int = 8
) -> list[str]:
    """Eight shapes at most, from the first to the last: four of `bad`, if there are some, and four of the rest."""
    rows = sorted(medians.items(), key=lambda item: (item[0][0], item[0][2] or 0, item[0][1]))
    wrong = set(bad)
    groups = [[row for row in rows if row[0] in wrong], [row for row in rows if row[0] not in wrong]]
    room = most // 2 if all(groups) else most
    lines = [
        f"bs {bs}, q_len {q_len}, prefix {'?' if prefix is None else f'{prefix:,}'}: rel {median:.1e}"
        for group in groups
        for (bs, q_len, prefix), median in _spread_out(group, room)
    ]
    return lines + ([f"and {len(rows) - len(lines)} more"] if len(rows) > len(lines) else [])


def _spread_out(rows: Sequence[_T], most: int) -> list[_T]:
    """At most so many of them, evenly, with both ends."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(at * (len(rows) - 1) / (most - 1))] for at in range(most)]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _growing_in_time(left: Sequence[One], names: Names) -> Finding | None:
    """The ranks' layers together: one layer alone is _some_layers' affair."""
    worst: tuple[float, float, One] | None = None
    for key in dict.fromkeys(one.of for one in left):
        of_rank = [one for one in left if one.of == key]
        found = ends(one.cell for one in of_rank)
        if found is None or found[1] <= max(of_rank[0].rounding, GROWTH * found[0]):
            continue
        if worst is None or found[1] / found[0] > worst[1] / worst[0]:
            worst = (*found, of_rank[0])
    if worst is None:
        return None
    first, last, one = worst
    return Finding(
        "time",
        f"rel grows over time: {first:.1e} in the first third of the log, {last:.1e} in the last "
        f"({names.rank(one.log, one.rank.number)})",
        check=[
            "contexts that have grown longer: accumulation, or the split of long prefixes (KDTREE_CONFIG=portable)",
            "batches that have grown larger: pointer arrays; --plot shows where it begins",
            "memory that somebody writes over: " + _DUMP,
        ],
    )


def _everywhere(left: Sequence[One], bad: Sequence[One]) -> Finding:
    typical = _middle([one.median for one in bad])
    normal = max(one.rounding for one in left)
    seen = [f"{len(bad)} of {len(left)} (layer, rank) pairs, median rel {typical:.1e}, normal is up to {normal:.0e}"]
    seen += _mask_lines({id(one.log): one.log for one in left}.values())
    if typical < NEAR_ONE:
        return Finding(
            "off",
            f"rel is {typical:.1e} everywhere: more than rounding, less than a wrong answer",
            seen,
            [
                "the scale: `scale=` of the shapes line against the model's own",
                "a few columns too many or too few: the drafts' own columns, the end of the prefix",
                "precision: the element type of the KV pool, products in less than float32",
                _SELFTEST,
            ],
        )
    return Finding(
        "near_one",
        f"rel is near 1 everywhere ({typical:.1e}): a wrong answer, and mostly the columns or the stride",
        seen,
        [
            "columns: the prefix comes from kv_indices, the drafts come after it and are NOT in kv_indices",
            "the mask's row stride: prefix + q_len of that request, not the longest prefix",
            "V: the latent, columns 0 to 511 of the 576-wide row ([latent | rope]), not 64 to 575",
            "python -m kdtree_patch demo: the same call on this machine",
        ],
    )


def _mask_lines(logs: Iterable[Log]) -> list[str]:
    """Whether the mask of a single request has the cells that the combined layout asks for."""
    for log in logs:
        one = log.start.last_shapes.get(1)
        if one is None or one.mask is None or one.prefix is None:
            continue
        wanted = one.q_len * (one.prefix + one.q_len)
        sum_of = f"mask of {one.mask:,}, q_len x (prefix + q_len) = {one.q_len} x ({one.prefix:,} + {one.q_len})"
        return [f"{sum_of} = {wanted:,}" + ("" if one.mask >= wanted else ": the mask is too short")]
    return []


def _some_layers(left: Sequence[One], bad: Sequence[One], names: Names) -> Finding:
    typical = _middle([one.median for one in left])
    ranks = {one.of for one in left}
    which = spans(one.layer for one in bad)
    where = "in every rank" if {one.of for one in bad} == ranks else f"({_ranks(bad, names)})"
    worst = sorted(bad, key=lambda one: -one.median)[:5]
    return Finding(
        "layers",
        f"not as the rest: {which} {where if len(ranks) > 1 else ''}".rstrip(),
        [f"L{one.layer}, {names.rank(one.log, one.rank.number)}: median rel {one.median:.1e}" for one in worst]
        + [f"the rest: {typical:.1e}"],
        [
            "what these layers have of their own: heads, scale, KV pool, weights; large activations make rel larger",
            "in one rank alone: that GPU, " + _SELFTEST,
            _DUMP,
        ],
    )


def _now_and_then(fine: Sequence[One], names: Names) -> Finding | None:
    """Lines over the limit in layers that are right otherwise."""
    bad = [one for one in fine if one.cell.top > one.limit]
    if not bad:
        return None
    worst = max(bad, key=lambda one: one.cell.top)
    return Finding(
        "now_and_then",
        f"single calls are wrong: rel up to {worst.cell.top:.1e} in layers that are right otherwise",
        [
            f"the worst: {names.line(worst.log, worst.cell.worst_line)}, L{worst.layer}, "
            f"{names.rank(worst.log, worst.rank.number)}",
            f"{len(bad)} of {len(fine)} (layer, rank) pairs: {spans(one.layer for one in bad)}",
        ],
        [
            "what the batch was then: the lines around it; a batch size, a long prefix, a request that had just ended",
            "a mask that is no tree (parents after their children): there the two kernels differ rightly",
            _DUMP,
        ],
    )
