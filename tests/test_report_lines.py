"""Lines to records: each line is written by the code that writes it in a service, and read back. A change of a line
fails here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdtree_patch import cache, hook, log, report_read, report_tally
from kdtree_patch.ledger import Ledger
from kdtree_patch.report_read import Layer, Said, Shapes, Torn, origin, parse, printable
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from kdtree_patch.validate import CALLS, FIGURES, Difference
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments

pytestmark = pytest.mark.usefixtures("all_lines")

# As the original service wrote them.
SHAPES = (
    b"[kdtree] shapes q=(9, 8, 576) kv_buf=(195012, 576) bs=1 q_len=9 Dl=512 Dr=64 kv_len_max=21 scale=0.14468 "
    b"mask=(270,)"
)
LAYER = b"[kdtree] L56 max_abs_diff=1.6934e+00 mean=1.1948e-01 rel=1.0837e+00"

Written = Callable[[], list[Any]]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Written:
    """The records of what has been written since."""
    return lambda: [parse(line) for line in capsys.readouterr().err.encode().splitlines()]


def routed(setting: Settings, mark: float = 0.0, rank: int | None = 2, calls: int = 1, **changes: Any) -> VerifyRouter:
    """A router that has had `calls` verify calls of layer 3."""
    case, stock = a_case(), Stock(answer=None)
    facts = {"version": "0.1.0", "gpu": "NVIDIA H200"}
    router = VerifyRouter(stock.function, FakeKernel(mark=mark), setting, Ledger(), rank=rank, facts=facts)
    for _ in range(calls):
        router.context = (a_layer(3), a_batch())
        router(**arguments(case, **changes))
    return router


# ---------------------------------------------------------------------------------------------- held against who writes


def test_lines_of_the_original_service() -> None:
    assert parse(LAYER) == Layer(56, 1.6934, 1.0837, 0, 0, None, None)
    text = SHAPES.decode().removeprefix("[kdtree] ")
    assert parse(SHAPES) == Shapes(text, bs=1, q_len=9, prefix=21, mask=270)


@pytest.mark.parametrize("rank", [None, 0, 17])
@pytest.mark.parametrize("calls", [None, 4])
@pytest.mark.parametrize("nan", [0, 3])
@pytest.mark.parametrize("rel", [0.0, 1.3099e-4, 0.99999, 12345.0, 1e-120, math.inf])
def test_layer_line(rel: float, nan: int, calls: int | None, rank: int | None, written: Written) -> None:
    found = Difference(max_abs_diff=2 * rel, mean=rel / 10, rel=rel, nan=nan, stock_nan=2 * nan, calls=calls)
    log.get_logger().info("%s", found.line(12, rank))
    (one,) = written()
    assert isinstance(one, Layer)
    assert one == Layer(12, float(f"{2 * rel:.4e}"), float(f"{rel:.4e}"), nan, 2 * nan, calls, rank)


def test_figures_of_sums_are_read_back(written: Written) -> None:
    sums = [0.5] * FIGURES
    sums[CALLS] = 7.0
    log.get_logger().info("%s", Difference.of(sums, 7).line(0, 1))
    (one,) = written()
    assert (one.calls, one.rank, one.rel) == (7, 1, 1.0)


def test_lines_of_a_validated_call(written: Written) -> None:
    routed(Settings(validate=True))
    shapes, layer = written()
    assert isinstance(shapes, Shapes) and (shapes.bs, shapes.q_len, shapes.prefix) == (2, 3, 4)
    assert shapes.mask == a_case().custom_mask.numel()
    assert isinstance(layer, Layer) and (layer.layer, layer.rank, layer.calls) == (3, 2, None) and layer.rel < 1e-3


def test_shapes_line_without_a_mask_and_without_a_prefix(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdtree_patch.route.longest_prefix", lambda *args: "?")
    routed(Settings(), custom_mask=None, mask_indptr=None)
    (shapes,) = written()
    assert isinstance(shapes, Shapes) and (shapes.prefix, shapes.mask) == (None, None)


def test_line_of_the_guard(written: Written, tmp_path: Path) -> None:
    routed(Settings(guard_rel=0.05, guard_dump=tmp_path), mark=1.0)
    _, said = written()
    assert isinstance(said, Said) and (said.kind, said.reason, said.rank) == ("disabled", "guard", 2)
    assert said.fields["layer"] == "3" and float(said.fields["rel"]) > 0.05 and said.fields["limit"] == "0.05"
    assert said.fields["gpu"] == "NVIDIA H200" and said.fields["dump"].endswith(".pt")
    assert said.text.endswith("; verify calls run stock from here on")


def test_declined_call_and_counts(written: Written) -> None:
    router = routed(Settings(), calls=12)
    router.context = None
    router(**arguments(a_case()))
    router.context = (a_layer(3), a_batch())
    router(**arguments(a_case(), logit_cap=30.0))
    router.ledger.count_routed("kernel", "verify", 100)
    _, ten, mode, cap, hundred = written()
    assert (ten.kind, ten.fields) == ("calls", {"served": "10"})
    for one, reason in ((mode, "forward_mode"), (cap, "logit_cap")):
        assert (one.kind, one.reason, one.of_the_process) == ("declined", reason, False)
    assert hundred.fields == {"served": "112", "forward_mode": "1", "logit_cap": "1"}


def test_what_a_process_says_about_itself(written: Written) -> None:
    log.installed(**hook.about(Settings(mode="shadow", validate=True), FakeKernel(), 5))
    log.stays_stock("contract", "an SGLang", violations="a; b", sglang="9.9")
    log.get_logger().error("declined reason=bad_setting KDTREE_MODE='x' is not understood: on; the service runs stock")
    log.get_logger().warning("validation failed: %s", ValueError("no\nmemory"))
    log.get_logger().error("oh")
    installed, *declined, warning, error = written()
    assert (installed.kind, installed.rank, installed.fields["mode"]) == ("installed", 5, "shadow")
    assert installed.fields["validate"] == "1" and installed.fields["target"] == "host"
    assert [(one.kind, one.reason, one.of_the_process) for one in declined] == [
        ("declined", "contract", True),
        ("declined", "bad_setting", True),
    ]
    assert (warning.kind, warning.text) == ("warning", "WARNING validation failed: no memory")
    assert (error.kind, error.text) == ("error", "ERROR oh")


def test_ledger_disables(written: Written) -> None:
    Ledger().disable("launch_failed", 'CudaError: "700" x=1')
    (said,) = written()
    assert (said.kind, said.reason) == ("disabled", "launch_failed")


def test_every_other_line_at_info_is_known(written: Written) -> None:
    """What compile.py and cache.py say: their words as they stand in the source."""
    folder = Path(cache.__file__).parent
    source = "".join((folder / name).read_text() for name in ("compile.py", "cache.py"))
    said = [part.split('"')[1] for part in source.split("get_logger().info(")[1:]]
    assert len(said) == 4
    for words in said:
        log.get_logger().info("%s", words.replace("%s", "x").replace("%.1f", "1.0"))
    assert [one.kind for one in written()] == ["info"] * len(said)


# ---------------------------------------------------------------------------------------- torn, foreign, prefixed lines


@pytest.mark.parametrize(
    ("before", "pid", "rank"),
    [
        (b"Nov 29 11:02:03 h1 python3[4711]: ", 4711, None),
        (b"2026-11-29T11:02:03+0000 h1 sglang-k26[4711]: ", 4711, None),
        (b"2026-11-29T11:02:03.123456789Z ", None, None),
        (b"sglang-1  | ", None, None),
        (b"\x1b[36msglang-1  |\x1b[0m ", None, None),
        (b"[2026-11-29 11:02:03 TP3] ", None, 3),
        (b"[2026-11-29 11:02:03 DP0 TP12 EP1] ", None, 12),
        (b"Nov 29 11:02:03 h1 python3[4711]: [2026-11-29 11:02:03 TP3] ", None, 3),
        (b"Capturing:  33%|###   | 1/3 ", None, None),
        (b"", None, None),
    ],
)
def test_prefixes(before: bytes, pid: int | None, rank: int | None) -> None:
    assert parse(before + LAYER) == parse(LAYER)
    assert parse(before + SHAPES + b"\r") == parse(SHAPES)
    assert origin(before + LAYER) == (pid, rank)


def test_colours_within_a_line() -> None:
    assert parse(b"\x1b[32m[kdtree] \x1b[1mL56\x1b[0m" + LAYER[12:] + b"\x1b[0m") == parse(LAYER)


@pytest.mark.parametrize("whole", [LAYER, SHAPES, b"[kdtree] declined reason=contract x", b"[kdtree] calls served=10"])
def test_line_cut_anywhere_is_never_another_one(whole: bytes) -> None:
    """The last figure loses no digit unnoticed: 2.1340e-0 would be a wrong answer."""
    right = parse(whole)
    for end in range(len(whole)):
        one = parse(whole[:end])
        if whole in (LAYER, SHAPES):
            assert one is None or isinstance(one, Torn), whole[:end]
        else:
            assert one is None or isinstance(one, Torn) or type(one) is type(right)


@pytest.mark.parametrize(
    "line",
    [
        b"[kdtree]",
        b"[kdtree] ",
        b"[kdtree] words",
        b"[kdtree] L1 max_abs_diff=1e-3 mean=1e-5 rel=2e-3",
        b"[kdtree] L1 max_abs_diff=1.0000e-03 mean=1.0000e-05 rel=2.0000e-03 tp_rank=0 tp_",
        b"[kdtree] L99999 max_abs_diff=1.0000e-03 mean=1.0000e-05 rel=2.0000e-03",
        b"[kdtree] ERROR",
        b"[kdtree] ERROR disabled rea",
    ],
)
def test_torn(line: bytes) -> None:
    assert isinstance(parse(line), Torn)


def test_two_workers_on_one_line() -> None:
    """The second is whole, and the first is counted."""
    entry = report_tally.Log("x")
    entry.read([b"[kdtree] L5 max_abs_" + LAYER])
    assert (entry.start.lines, entry.torn) == (1, 1)
    assert set(entry.start.ranks[None].cells) == {56}


@pytest.mark.parametrize("line", [b"", b"kdtree", b"INFO: 200 OK", b"\xff\x00", LAYER.replace(b"[kdtree]", b"[kdtree")])
def test_foreign(line: bytes) -> None:
    assert parse(line) is None


def test_fields_may_follow() -> None:
    assert parse(LAYER + b" tp_rank=1 pp_rank=0") == Layer(56, 1.6934, 1.0837, 0, 0, None, 1)
    assert isinstance(parse(SHAPES + b" tp_rank=1"), Shapes)


def test_what_is_kept_can_be_printed() -> None:
    said = parse("[kdtree] ERROR \x1b]0;title\x07 \x1b[2J \u202e evil \x00 \x9b31m é".encode())
    assert isinstance(said, Said) and said.text.isprintable() and "é" in said.text
    assert printable("a\tb\x7f\n") == "a\\tb\\x7f\\n"


# --------------------------------------------------------------------------------------------------------------- pieces


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30), min_size=1))
@settings(deadline=None)
def test_lines_are_the_same_in_whatever_pieces_they_come(parts: list[bytes], sizes: list[int]) -> None:
    text, chunks, at = b"\n".join(parts), [], 0
    while at < len(text):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(text[at : at + size])
        at += size
    wanted = text.split(b"\n")
    assert list(report_read.lines(chunks)) == (wanted if wanted[-1] else wanted[:-1])


def test_line_without_an_end_takes_no_memory() -> None:
    chunks = [LAYER + b"\n", *[b"x" * 1_000_000] * 50, LAYER + b"\n" + LAYER]
    first, long, last = report_read.lines(chunks)
    assert (first, last) == (LAYER, LAYER) and len(long) == report_read.MAX_LINE


words = st.sampled_from(
    [b"[kdtree] ", b"\n", LAYER, SHAPES, b" tp_rank=0", b"ERROR ", b"declined reason=", b"installed ", b"\x1b["]
)
anything = st.lists(st.one_of(words, st.binary(max_size=12), st.text(max_size=12).map(str.encode)), max_size=40)


@given(anything)
@example([b"[kdtree] L0 max_abs_diff=0 mean=0 rel=0 a=\x1c\x00"])  # whitespace to str, and none to bytes
@settings(deadline=None, max_examples=300)
def test_arbitrary_text_is_read(parts: list[bytes]) -> None:
    entry = report_tally.Log("x")
    entry.read(report_read.lines([b"".join(parts)]))
    for event in entry.start.events.values():
        assert event.said.text.isprintable() and all(value.isprintable() for value in event.said.fields.values())
