"""A log's bytes to records: which lines are ours, and what they say. Nothing is remembered from line to line.

A service's log reaches us through many hands: journald and docker put their prefixes before a line, SGLang its own, a
terminal its colours, and two workers that write at once tear each other's lines. So a line is ours from its last
`[kdtree] ` on, and is taken only if it has the exact form in which it was written; anything else is torn. What is kept
of its text is made printable here, once: nothing that a log contains reaches a terminal as it was. Knows the prefix of
log.py and how commands escape text; tests/test_report_lines.py holds it against those who write.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kdtree_patch import exits
from kdtree_patch.log import PREFIX

MARK = PREFIX.encode()
# Bytes of a line, and characters of one that are looked at: the longest of ours, a guard's, has about 1,500.
MAX_LINE = 1 << 16
MAX_TEXT = 4000

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
# `{:.4e}` and nothing shorter: a figure that was cut (2.1340e-0, 2.1) would be a false alarm of a thousand times.
_FIGURE = rb"(\d\.\d{4}e[+-]\d{2,3}|inf|nan)"
_LAYER = re.compile(
    rb"L(\d{1,4}) max_abs_diff=" + _FIGURE + rb" mean=" + _FIGURE + rb" rel=" + _FIGURE + rb"((?: \w+=[^\s=]+)*)\s*\Z"
)
_SHAPES = re.compile(
    r"shapes q=\([\d, ]+\) kv_buf=\([\d, ]+\) bs=(\d{1,9}) q_len=(\d{1,9}) Dl=\d+ Dr=\d+ kv_len_max=(\d{1,15}|\?) "
    r"scale=\S+ mask=(?:\((\d{1,15}),\)|None)(?: \w+=\S+)*"
)
_FIELD = re.compile(r'(\w+)=("[^"]*"|\S+)')
_LEVELS = ("WARNING", "ERROR", "CRITICAL")
# What else is said at the level info.
_INFO = ("compiled ", "waiting for ", "no process could be started ")
_PID = re.compile(rb"\[(\d{1,10})\]: *\Z")
_SGLANG_RANK = re.compile(rb"[\[ ]TP(\d{1,4})[\] ]")


class Layer(NamedTuple):
    """A layer line. `calls` is None where the line is of one eager call."""

    layer: int
    max_abs_diff: float
    rel: float
    nan: int
    stock_nan: int
    calls: int | None
    rank: int | None


class Shapes(NamedTuple):
    text: str
    bs: int
    q_len: int
    prefix: int | None  # the longest of the batch, where it was known
    mask: int | None  # elements


class Said(NamedTuple):
    """Any other line. `kind` is installed, declined, calls, disabled, warning, error or info."""

    kind: str
    text: str
    fields: dict[str, str]

    @property
    def of_the_process(self) -> bool:
        """A decline for the life of a process, not for one kind of call."""
        return self.kind == "declined" and self.fields.get("scope") != "call"

    @property
    def reason(self) -> str:
        return self.fields.get("reason", "?")

    @property
    def rank(self) -> int | None:
        return _rank(self.fields.get("tp_rank"))


class Torn(NamedTuple):
    """Ours, and not whole, or not in a form that we write."""

    text: str


class Origin(NamedTuple):
    """What the words before a line tell of who wrote it."""

    pid: int | None
    rank: int | None


Record = Layer | Shapes | Said | Torn


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a log that comes in pieces, without their ends; of one that is too long, its beginning."""
    rest = b""
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        rest = (rest + first)[:MAX_LINE]
        if more:
            yield rest
            *whole, rest = more
            yield from whole
    if rest:
        yield rest


def parse(line: bytes) -> Record | None:
    """What a line says, or None if it is not ours."""
    at = line.rfind(MARK)
    if at < 0:
        # Without the space: a line that was cut right behind the prefix.
        return Torn(printable(line)) if line.endswith(MARK.rstrip()) else None
    words = line[at + len(MARK) :]
    if b"\x1b" in words:
        words = _ANSI.sub(b"", words)
    found = _LAYER.match(words)
    if found is not None:
        layer, max_abs_diff, _, rel, tail = found.groups()
        return Layer(int(layer), float(max_abs_diff), float(rel), *_tail(tail))
    return _other(words)


def torn_before(line: bytes) -> bool:
    """Whether a line of ours was cut short by the one that `parse` has read."""
    return line.count(MARK) > 1


def origin(line: bytes) -> Origin:
    before = line[: max(line.rfind(MARK), 0)]
    if not before:
        return Origin(None, None)
    if b"\x1b" in before:
        before = _ANSI.sub(b"", before)
    pid, rank = _PID.search(before), _SGLANG_RANK.search(before)
    return Origin(int(pid[1]) if pid else None, int(rank[1]) if rank else None)


def printable(text: bytes | str) -> str:
    """As it can be shown, and no longer than what is looked at."""
    if isinstance(text, bytes):
        text = text[: 4 * MAX_TEXT].decode("utf-8", errors="replace")
    return exits.printable(text[:MAX_TEXT])


@functools.lru_cache(maxsize=4096)
def _tail(tail: bytes) -> tuple[int, int, int | None, int | None]:
    """nan, stock_nan, calls and tp_rank of a layer line: the same few words again and again."""
    fields = dict(part.split("=", 1) for part in tail.decode(errors="replace").split(" ") if "=" in part)
    nan, stock_nan, calls = (_number(fields.get(name)) for name in ("nan", "stock_nan", "calls"))
    return nan or 0, stock_nan or 0, calls, _rank(fields.get("tp_rank"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch("[0-9]{1,15}", text) else None


def _rank(text: str | None) -> int | None:
    """Four digits at most: there are not so many ranks that a log could fill the memory with them."""
    return int(text) if text is not None and re.fullmatch("[0-9]{1,4}", text) else None


def _other(words: bytes) -> Record:
    text = printable(words.rstrip())
    if len(words) > 4 * MAX_TEXT:
        return Torn(text)
    level, _, rest = text.partition(" ")
    if level not in _LEVELS:
        level, rest = "", text
    word = rest.partition(" ")[0]
    if word == "shapes":
        found = _SHAPES.fullmatch(rest)
        if found is None:
            return Torn(text)
        bs, q_len, prefix, mask = found.groups()
        known = None if prefix == "?" else int(prefix)
        return Shapes(text, int(bs), int(q_len), known, int(mask) if mask else None)
    fields = _fields(rest)
    if word in ("declined", "disabled") and "reason" not in fields:
        return Torn(text)
    if word == "calls" and not fields:
        return Torn(text)
    if word in ("installed", "declined", "calls", "disabled"):
        return Said(word, text, fields)
    if level:
        return Said("warning" if level == "WARNING" else "error", text, fields) if rest else Torn(text)
    return Said("info", text, fields) if rest.startswith(_INFO) else Torn(text)


def _fields(text: str) -> dict[str, str]:
    """The first of each name. The last one of an error may have the semicolon of the words that follow."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        fields.setdefault(name, value.rstrip(";").strip('"'))
    return fields
