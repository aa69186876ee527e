"""Records to sums of bounded size: a log of any length costs no more memory than its layers and ranks do.

A `Log` is one file. In it a worker's `installed` line begins a new start of its rank, and with the first rank that says
it a second time the whole service has started anew: what came before is dropped, but for the number of lines, unless
all starts are asked for. Knows report_read's records and nothing of what is good or bad.

Each (rank, layer) has a histogram of rel, from which its median comes (to 3 %), and up to `SLOTS` stretches of time.
Time is counted in passes through the layers, since lines carry no clock of their own; when the slots are full two
become one. A shapes line is said once for a shape, so only the pass that follows it is known to have it, and none of a
CUDA graph's, whose lines come late.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kdtree_patch import report_read
from kdtree_patch.report_read import Layer, Record, Said, Shapes, Torn

SLOTS = 64
# Bounds for a log that is not what it seems: (rank, layer) of a start, shapes, different lines of a kind, processes.
MAX_CELLS = 16384
MAX_SHAPES = 256
MAX_EVENTS = 200
MAX_PIDS = 4096
# Buckets of the histogram in each factor of ten, and where it begins: rel 0 falls there too.
_BUCKETS = 40
_LOWEST = -9.0


class Spread:
    """A histogram of rel with its ends: the median of any number of values."""

    __slots__ = ("lines", "low", "top", "histogram")

    def __init__(self) -> None:
        self.lines = 0
        self.low = math.inf
        self.top = 0.0
        self.histogram: dict[int, int] = {}

    def add(self, rel: float, logarithm: float) -> None:
        """`logarithm` is `log_of(rel)`; rel is finite."""
        self.lines += 1
        if rel > self.top:
            self.top = rel
        if rel < self.low:
            self.low = rel
        bucket = int((logarithm - _LOWEST) * _BUCKETS)
        self.histogram[bucket] = self.histogram.get(bucket, 0) + 1

    @property
    def median(self) -> float:
        """NaN if there is none."""
        left = (self.lines + 1) // 2
        for bucket in sorted(self.histogram):
            left -= self.histogram[bucket]
            if left <= 0:
                middle = 10 ** ((bucket + 0.5) / _BUCKETS + _LOWEST)
                return min(max(middle, self.low), self.top)
        return math.nan

    @classmethod
    def of(cls, parts: Iterable[Spread]) -> Spread:
        whole = cls()
        for part in parts:
            whole.lines += part.lines
            whole.low, whole.top = min(whole.low, part.low), max(whole.top, part.top)
            for bucket, count in part.histogram.items():
                whole.histogram[bucket] = whole.histogram.get(bucket, 0) + count
        return whole


def log_of(rel: float) -> float:
    return math.log10(rel) if rel > 1e-9 else _LOWEST


class Cell(Spread):
    """One layer of one rank."""

    __slots__ = ("calls", "max_abs_diff", "not_finite", "stock_nan", "worst_line", "counts", "logs", "tops")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.max_abs_diff = 0.0
        self.not_finite = 0  # lines with a NaN that is ours alone, or whose rel is no number
        self.stock_nan = 0
        self.worst_line = 0
        self.counts = array("l", bytes(8 * SLOTS))
        self.logs = array("d", bytes(8 * SLOTS))
        self.tops = array("d", bytes(8 * SLOTS))

    def fold(self) -> None:
        """Two slots of time become one."""
        for slot in range(SLOTS // 2):
            one, two = 2 * slot, 2 * slot + 1
            self.counts[slot] = self.counts[one] + self.counts[two]
            self.logs[slot] = self.logs[one] + self.logs[two]
            self.tops[slot] = max(self.tops[one], self.tops[two])
        for slot in range(SLOTS // 2, SLOTS):
            self.counts[slot], self.logs[slot], self.tops[slot] = 0, 0.0, 0.0


class Rank:
    """One rank of a start. `number` is None for lines that say none."""

    def __init__(self, number: int | None):
        self.number = number
        self.installed: Said | None = None
        self.cells: dict[int, Cell] = {}
        self.shapes: dict[tuple[int, int, int | None], Spread] = {}  # (bs, q_len, prefix) of eager passes
        self.passes = 0
        self._last_layer = -1
        self._shape_number = 0
        self._shape: Spread | None = None

    def begin(self, layer: int, start: Start) -> None:
        """Called for each layer line before it is counted: a new pass begins with a layer that is not a later one."""
        last, self._last_layer = self._last_layer, layer
        # The same layer again is the next pass of a log that has only this layer, or another rank that says none.
        if layer > last >= 0 or (layer == last and len(self.cells) > 1):
            return
        self.passes += last >= 0
        self._shape = None
        if self._shape_number != start.shape_number and start.shape is not None:
            self._shape_number = start.shape_number
            key = (start.shape.bs, start.shape.q_len, start.shape.prefix)
            if key in self.shapes or len(self.shapes) < MAX_SHAPES:
                self._shape = self.shapes.setdefault(key, Spread())

    def add_to_shape(self, rel: float, logarithm: float) -> None:
        if self._shape is not None:
            self._shape.add(rel, logarithm)


@dataclass
class Event:
    """A line about a process or a kind of call, as often as it was said in the same words."""

    said: Said
    rank: int | None
    line: int  # where it was said first
    times: int = 1


class Start:
    """What is known of one start of a service, or of all of them."""

    def __init__(self) -> None:
        self.ranks: dict[int | None, Rank] = {}
        self.shapes: Counter[str] = Counter()
        self.shape: Shapes | None = None
        self.last_shapes: dict[int, Shapes] = {}  # by batch size
        self.shape_number = 0
        self.events: dict[tuple[int | None, str], Event] = {}  # by who said it, and its words
        self.routed: Counter[str] = Counter()  # of the `calls` lines, the largest count of each word
        self.left_out = 0  # lines beyond the bounds above
        self.lines = 0  # layer lines
        self.cells = 0
        self.shift = 0  # a slot is 2^shift passes
        self._since_served: list[tuple[int | None, Said, int]] = []
        self._kinds: Counter[str] = Counter()

    def rank(self, number: int | None) -> Rank:
        found = self.ranks.get(number)
        if found is None:
            found = self.ranks[number] = Rank(number)
        return found

    def add_layer(self, one: Layer, number: int | None, line: int) -> None:
        rank = self.ranks.get(number) or self.rank(number)
        rank.begin(one.layer, self)
        cell = rank.cells.get(one.layer)
        if cell is None:
            if self.cells >= MAX_CELLS:
                self.left_out += 1
                return
            self.cells += 1
            cell = rank.cells[one.layer] = Cell()
        if self._since_served:
            self._since_served.clear()
        self.lines += 1
        slot = rank.passes >> self.shift
        if slot >= SLOTS:
            self._fold()
            slot = rank.passes >> self.shift
        rel = one.rel
        cell.calls += 1 if one.calls is None else one.calls
        cell.stock_nan += one.stock_nan
        if one.max_abs_diff > cell.max_abs_diff:
            cell.max_abs_diff = one.max_abs_diff
        if one.nan or not (rel < math.inf and one.max_abs_diff < math.inf):
            if not cell.not_finite:
                cell.worst_line = line
            cell.not_finite += 1
        if not rel < math.inf:
            return
        if rel > cell.top and not cell.not_finite:
            cell.worst_line = line
        logarithm = log_of(rel)
        cell.add(rel, logarithm)
        cell.counts[slot] += 1
        cell.logs[slot] += logarithm
        if rel > cell.tops[slot]:
            cell.tops[slot] = rel
        if one.calls is None:
            rank.add_to_shape(rel, logarithm)

    def add_shapes(self, one: Shapes) -> None:
        self._since_served.clear()
        if one.text in self.shapes or len(self.shapes) < MAX_SHAPES:
            self.shapes[one.text] += 1
            self.last_shapes[one.bs] = one
        else:
            self.left_out += 1
        # Every rank says the same shape at about the same time.
        if one != self.shape:
            self.shape = one
            self.shape_number += 1

    def add_said(self, one: Said, number: int | None, line: int) -> None:
        if one.kind == "installed":
            self.rank(number).installed = one
            return
        if one.kind == "info":
            return
        if one.kind == "calls":
            for name, text in one.fields.items():
                if text.isdigit() and len(text) < 16 and (name in self.routed or len(self.routed) < MAX_EVENTS):
                    self.routed[name] = max(self.routed[name], int(text))
        else:
            self._remember(one, number, line)
        if one.kind in ("calls", "disabled") or (one.kind == "declined" and not one.of_the_process):
            self._since_served.clear()
        elif len(self._since_served) < MAX_EVENTS:
            self._since_served.append((number, one, line))

    def next(self) -> Start:
        """A new start, which begins with what processes have said since this one last served anything: a rank that
        declines may be faster than the first one that installs."""
        new = Start()
        for number, one, line in self._since_served:
            new.add_said(one, number, line)
        return new

    def _remember(self, one: Said, number: int | None, line: int) -> None:
        event = self.events.get((number, one.text))
        if event is not None:
            event.times += 1
        elif self._kinds[one.kind] < MAX_EVENTS:
            self._kinds[one.kind] += 1
            self.events[number, one.text] = Event(one, number, line)
        else:
            self.left_out += 1

    def _fold(self) -> None:
        self.shift += 1
        for rank in self.ranks.values():
            for cell in rank.cells.values():
                cell.fold()


class Log:
    """One file, line by line."""

    def __init__(self, name: str, all_starts: bool = False):
        self.name = name
        self.start = Start()
        self.starts: Counter[int | None] = Counter()  # `installed` lines of each rank
        self.number = 1  # of the start, from 1
        self.lines = 0
        self.ours = 0
        self.torn = 0
        self.first_torn: tuple[int, str] | None = None
        self.dropped = 0  # layer lines of earlier starts
        self.all_starts = all_starts
        self.interrupted = False
        self.unread: list[str] = []  # the logs that would have come next
        self._ranks_of_pids: dict[int, int | None] = {}

    def read(self, lines: Iterable[bytes]) -> None:
        parse, number = report_read.parse, self.lines
        for line in lines:
            number += 1
            record = parse(line)
            if record is None:
                continue
            self.ours += 1
            self.lines = number
            if type(record) is Layer and record.rank is not None:
                self.start.add_layer(record, record.rank, number)
            else:
                self._add(record, line)
            if report_read.torn_before(line):
                self._tear(Torn(report_read.printable(line)))
        self.lines = number

    def _add(self, record: Record, line: bytes) -> None:
        if isinstance(record, Torn):
            self._tear(record)
            return
        origin = report_read.origin(line)
        if isinstance(record, Shapes):
            self.start.add_shapes(record)
            return
        rank = record.rank if record.rank is not None else self._rank(origin)
        if isinstance(record, Layer):
            self.start.add_layer(record, rank, self.lines)
            return
        if record.rank is not None and origin.pid is not None:
            self._learn(origin.pid, record.rank)
        if record.kind == "installed":
            current = self.start.ranks.get(rank)
            if current is not None and current.installed is not None:
                self.number += 1
                if self.all_starts:
                    for one in self.start.ranks.values():
                        one.installed = None
                else:
                    self.dropped += self.start.lines
                    self.start = self.start.next()
            self.starts[rank] += 1
        self.start.add_said(record, rank, self.lines)

    def _rank(self, origin: report_read.Origin) -> int | None:
        if origin.rank is not None:
            return origin.rank
        return None if origin.pid is None else self._ranks_of_pids.get(origin.pid)

    def _learn(self, pid: int, rank: int) -> None:
        """A service whose workers all write through one process to the journal has one pid for all ranks, which says
        nothing."""
        if pid in self._ranks_of_pids:
            if self._ranks_of_pids[pid] != rank:
                self._ranks_of_pids[pid] = None
        elif len(self._ranks_of_pids) < MAX_PIDS:
            self._ranks_of_pids[pid] = rank

    def _tear(self, record: Torn) -> None:
        self.torn += 1
        if self.first_torn is None:
            self.first_torn = (self.lines, record.text)
