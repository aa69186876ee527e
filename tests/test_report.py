"""What a report finds in a log, and how it says so. How a line is read is tests/test_report_lines.py's affair."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_patch import __main__ as command_line
from kdtree_patch import arguments, report, report_judge, report_show, report_tally
from kdtree_patch.report_judge import Finding
from kdtree_patch.report_show import Report
from kdtree_patch.report_tally import Log

REPO = Path(__file__).resolve().parents[1]
LAYERS, RANKS = 6, 4
BF16, FP16 = 2e-3, 2e-4

Rel = Callable[[int, int, int], float]  # of a step, a layer, a rank


def installed(rank: int, **facts: object) -> str:
    words = {"version": "0.1.0", "mode": "shadow", "validate": 1, "gpu": "H200", "tp_rank": rank} | facts
    return "[kdtree] installed " + " ".join(f"{key}={value}" for key, value in words.items())


def shapes(bs: int, prefix: int, q_len: int = 9) -> str:
    mask = q_len * (prefix + q_len)
    return (
        f"[kdtree] shapes q=({bs * q_len}, 8, 576) kv_buf=(195012, 576) bs={bs} q_len={q_len} Dl=512 Dr=64 "
        f"kv_len_max={prefix} scale=0.14468 mask=({mask},)"
    )


def layer(number: int, rel: float, rank: int | None = 0, more: str = "") -> str:
    tail = more + ("" if rank is None else f" tp_rank={rank}")
    return f"[kdtree] L{number} max_abs_diff={rel / 2:.4e} mean={rel / 50:.4e} rel={rel:.4e}{tail}"


def noisy(rel: float) -> float:
    return rel * random.uniform(0.85, 1.15)


def steps(rel: Rel, count: int = 8, ranks: Iterable[int] = range(RANKS), first: int = 0) -> list[str]:
    """`count` verify steps of all layers of all ranks."""
    return [
        layer(number, noisy(rel(step, number, rank)), rank)
        for step in range(first, first + count)
        for number in range(LAYERS)
        for rank in ranks
    ]


def service(rel: Rel, count: int = 8) -> list[str]:
    return [*map(installed, range(RANKS)), shapes(1, 21), *steps(rel, count)]


def logged(*lines: str, name: str = "x.log", all_starts: bool = False) -> Log:
    log = Log(name, all_starts)
    log.read(line.encode() for line in lines)
    return log


def findings(*lines: str) -> list[Finding]:
    return list(Report.of([logged(*lines)]).findings)


def the_one(*lines: str) -> Finding:
    found = findings(*lines)
    assert len(found) == 1, [one.code for one in found]
    assert found[0].check
    return found[0]


@pytest.fixture(autouse=True)
def same_noise() -> None:
    random.seed(7)


# ----------------------------------------------------------------------------------------------------- nothing is wrong


@pytest.mark.parametrize("rel", [BF16, FP16, 0.0])
def test_rounding_is_no_finding(rel: float) -> None:
    found = Report.of([logged(*service(lambda *_: rel))])
    assert list(found.findings) == []
    assert found.verdict.startswith("nothing found: 192 layer lines, 6 layers, 4 ranks; rel up to ")


@pytest.mark.parametrize("stock", [0.03, 0.14, 0.2])
def test_nor_is_that_of_the_stock_kernel_with_an_fp8_pool(stock: float) -> None:
    """It rounds queries and weights to fp8. A wrong answer is found all the same, and so is a drift beyond that."""
    plain = service(lambda *_: stock)
    fp8 = [line.replace(" gpu=H200", " gpu=H200 target=sm_90a-fp8_e4m3") for line in plain]
    assert fp8 != plain and findings(*plain) != [] and findings(*fp8) == []
    wrong = service(lambda *_: 1.0)
    assert (
        the_one(*(line.replace(" gpu=H200", " gpu=H200 target=sm_90a-fp8_e4m3") for line in wrong)).code == "near_one"
    )


def test_nor_is_the_rounding_of_a_layer_that_has_ten_times_that_of_others() -> None:
    """fp16 next to bf16: both are rounding."""
    assert findings(*service(lambda step, number, rank: BF16 if number == 3 else FP16)) == []
    assert findings(*service(lambda step, number, rank: BF16 if rank == 3 else FP16)) == []
    assert findings(*service(lambda step, number, rank: FP16 * 1.5**step if step < 6 else BF16, 12)) == []


@pytest.mark.parametrize(
    "line",
    [
        "declined reason=forward_mode scope=call such calls run stock",
        "declined reason=max_len_unknown scope=call layer=0 such calls run stock",
        "declined reason=draft_only this backend only decodes drafts; the service runs stock",
        "WARNING cached kernel /x is torn: compiling it again",
        "compiled verify_attn_flash.cu for sm_90 in 20.0 s (NVRTC)",
        "calls served=1000 forward_mode=61",
        "L2 max_abs_diff=1.0000e-03 mean=1.0000e-05 rel=2.0000e-03 stock_nan=512 tp_rank=0",
    ],
)
def test_what_is_normal(line: str) -> None:
    assert findings(*service(lambda *_: BF16), f"[kdtree] {line}") == []


def test_no_layer_line_is_said() -> None:
    found = Report.of([logged(installed(0, mode="on", validate=0), "[kdtree] calls served=100000")])
    assert not found.findings and "there is no layer line" in found.verdict
    assert any("KDTREE_VALIDATE=1" in note for note in found.notes)


# ------------------------------------------------------------------------------------------------- the classic mistakes


def test_near_one_everywhere() -> None:
    """The lines of the original service: no rank, no `installed`."""
    lines = [
        layer(number, rel, None) for _ in range(3) for number, rel in enumerate((1.0837, 0.97, 1.2, 0.9, 1.1, 1.05))
    ]
    found = the_one(shapes(1, 21), *lines)
    assert found.code == "near_one"
    assert [check.partition(":")[0] for check in found.check[:3]] == ["columns", "the mask's row stride", "V"]
    assert "mask of 270, q_len x (prefix + q_len) = 9 x (21 + 9) = 270" in found.seen


def test_mask_that_is_too_short_is_seen() -> None:
    short = shapes(1, 21).replace("mask=(270,)", "mask=(189,)")
    found = the_one(short, *steps(lambda *_: 1.0))
    assert found.code == "near_one" and any("the mask is too short" in line for line in found.seen)


def test_more_than_rounding_everywhere() -> None:
    assert the_one(*service(lambda *_: 0.08)).code == "off"


@pytest.mark.parametrize("wrong", [0.9, 0.05])
def test_some_batch_sizes(wrong: float) -> None:
    lines = list(map(installed, range(RANKS)))
    for bs, prefix, rel in ((1, 21, BF16), (4, 300, wrong), (2, 200, BF16), (8, 100, wrong), (3, 40, BF16)):
        lines += [shapes(bs, prefix)] * RANKS + steps(lambda *_: rel, 1)  # noqa: B023 - called at once
    found = the_one(*lines)
    assert found.code == "batch_size"
    assert found.title == "wrong at batch sizes 4, 8 alone, right at 1, 2, 3"
    assert "pointer arrays" in found.check[0] and "mask_indptr" in found.check[0]


def test_many_shapes_are_shown_from_first_to_last_and_the_wrong_ones_among_them() -> None:
    prefixes = range(20, 420, 20)
    lines = list(map(installed, range(RANKS)))
    for bs, rel in ((1, BF16), (3, 0.8), (2, BF16)):
        for prefix in prefixes:
            lines += [shapes(bs, prefix), *steps(lambda *_: rel, 1)]  # noqa: B023 - called at once
    found = the_one(*lines)
    assert found.code == "batch_size" and found.seen[-1] == f"and {3 * len(prefixes) - 8} more"
    wrong, right = found.seen[:4], found.seen[4:8]
    assert all(line.startswith("bs 3,") for line in wrong) and "prefix 20:" in wrong[0] and "prefix 400:" in wrong[-1]
    assert right[0].startswith("bs 1, q_len 9, prefix 20:") and right[-1].startswith("bs 2, q_len 9, prefix 400:")

    lines = list(map(installed, range(RANKS)))
    for prefix in prefixes:
        lines += [shapes(1, prefix), *steps(lambda *_: prefix * 1e-3, 1)]  # noqa: B023 - called at once
    found = the_one(*lines)
    assert found.code == "context" and len(found.seen) == 9
    assert "prefix 20:" in found.seen[0] and "prefix 400:" in found.seen[7]


def test_large_batch_sizes_with_longer_prefixes() -> None:
    """It jumps, where accumulation would rise."""
    lines = list(map(installed, range(RANKS)))
    for bs, prefix, rel in ((1, 21, BF16), (2, 40, BF16), (4, 300, 0.9), (8, 4000, 0.9)):
        lines += [shapes(bs, prefix), *steps(lambda *_: rel, 1)]  # noqa: B023 - called at once
    assert the_one(*lines).code == "batch_size"


def test_a_length_from_which_on_it_is_wrong() -> None:
    lines = list(map(installed, range(RANKS)))
    for bs, prefix, q_len, rel in ((1, 21, 9, BF16), (2, 40, 9, BF16), (2, 4000, 8, 0.9), (1, 9000, 7, 0.9)):
        lines += [shapes(bs, prefix, q_len), *steps(lambda *_: rel, 1)]  # noqa: B023 - called at once
    found = the_one(*lines)
    assert found.code == "context" and found.title.endswith("at 9,000")


def test_growing_with_the_context() -> None:
    lines = list(map(installed, range(RANKS)))
    for prefix, q_len, rel in ((21, 9, BF16), (1024, 8, 0.006), (8192, 7, 0.03), (65536, 6, 0.2)):
        lines += [shapes(1, prefix, q_len), *steps(lambda *_: rel, 1)]  # noqa: B023 - called at once
    found = the_one(*lines)
    assert found.code == "context"
    assert "at a prefix of 21" in found.title and "at 65,536" in found.title
    assert "accumulation" in found.check[0] and "split" in found.check[1]


def test_growing_over_time() -> None:
    found = the_one(*service(lambda step, *_: BF16 * 1.2**step, 16))
    assert found.code == "time" and "accumulation" in found.check[0]


def test_one_rank() -> None:
    found = the_one(*service(lambda step, number, rank: 0.9 if rank == 2 else BF16))
    assert found.code == "one_rank" and found.title == "rank 2 differs from the rest"
    assert found.check[0].startswith("that GPU: ") and "rank 2: gpu=H200" in found.seen


def test_one_rank_that_is_no_wrong_answer() -> None:
    assert the_one(*service(lambda step, number, rank: 0.012 if rank == 0 else BF16)).code == "one_rank"


def test_one_rank_of_another_file() -> None:
    """A file for each node: the ranks are compared over all of them."""
    logs = [
        logged(*map(installed, ranks), *steps(lambda s, n, rank: 0.9 if rank == 3 else BF16, ranks=ranks), name=name)
        for name, ranks in (("a/node.log", (0, 1)), ("b/node.log", (2, 3)))
    ]
    (found,) = Report.of(logs).findings
    assert (found.code, found.title) == ("one_rank", "rank 3 differs from the rest")


def test_most_ranks_are_not_some() -> None:
    assert the_one(*service(lambda step, number, rank: 0.9 if rank else BF16)).code == "layers"


def test_some_layers() -> None:
    found = the_one(*service(lambda step, number, rank: 0.3 if number in (1, 2, 5) else BF16))
    assert found.code == "layers" and found.title == "not as the rest: L1-L2, L5 in every rank"


def test_a_layer_of_a_rank() -> None:
    found = the_one(*service(lambda step, number, rank: 0.015 if (number, rank) == (4, 1) else BF16))
    assert found.code == "layers" and found.title == "not as the rest: L4 (rank 1)"


def test_single_calls() -> None:
    lines = service(lambda step, number, rank: 0.5 if (step, number, rank) == (3, 4, 1) else BF16)
    found = the_one(*lines)
    assert found.code == "now_and_then"
    line = next(number for number, text in enumerate(lines, 1) if "rel=4" in text or "rel=5" in text)
    assert found.seen[0] == f"the worst: x.log:{line}, L4, rank 1"


@pytest.mark.parametrize("words", ["rel=2.0000e-03 nan=3", "rel=inf", "rel=nan"])
def test_nan(words: str) -> None:
    line = f"[kdtree] L2 max_abs_diff=1.0000e-03 mean=1.0000e-05 {words} tp_rank=1"
    found = the_one(*service(lambda *_: BF16), line)
    assert found.code == "not_finite" and "in 1 lines: L2 (rank 1)" in found.title
    assert found.seen == ["the first: x.log:198, L2"] and "kv_indices" in found.check[0]


def test_two_faults_are_two_findings() -> None:
    def rel(step: int, number: int, rank: int) -> float:
        return 0.9 if rank == 2 else 0.3 if number == 1 else BF16

    assert [one.code for one in findings(*service(rel))] == ["one_rank", "layers"]


# --------------------------------------------------------------------------------------------- what processes have said


@pytest.mark.parametrize(
    ("line", "code", "title"),
    [
        (
            "ERROR disabled reason=guard layer=3 rel=9.0e-01 limit=0.05 tp_rank=2; x",
            "disabled",
            "the guard has tripped",
        ),
        (
            "ERROR disabled reason=guard_elsewhere tp_rank=0 of=2 of_layer=3 of_pid=7 x; x",
            "disabled",
            "stock, as the guard of another rank has tripped (rank 0)",
        ),
        ("ERROR disabled reason=launch_failed E; x", "disabled", "the kernel was turned off: launch_failed"),
        ("declined reason=contract a; the service runs stock", "stays_stock", "a worker stays stock: contract"),
        (
            "ERROR declined reason=bad_setting a; the service runs stock",
            "stays_stock",
            "a worker stays stock: bad_setting",
        ),
        (
            "declined reason=kv_dtype scope=call layer=0 x",
            "calls_declined",
            "a kind of verify call is left to the stock",
        ),
        ("ERROR oh", "error", "errors"),
        ("WARNING validation failed: OutOfMemoryError: x", "not_compared", "calls could not be compared"),
    ],
)
def test_lines_that_are_findings(line: str, code: str, title: str) -> None:
    found = the_one(*service(lambda *_: BF16), f"[kdtree] {line}")
    assert found.code == code and found.title.startswith(title)
    assert f"x.log:198: {line}" in found.seen


def test_quiet_decline_where_nothing_is_installed() -> None:
    assert the_one("[kdtree] declined reason=no_speculation x; the service runs stock").code == "stays_stock"


def test_a_rank_is_missing() -> None:
    lines = [installed(rank) for rank in (0, 1, 3)] + steps(lambda *_: BF16, ranks=(0, 1, 3))
    assert the_one(*lines).code == "rank_missing"


def test_a_rank_says_no_layer() -> None:
    found = the_one(*map(installed, range(RANKS)), *steps(lambda *_: BF16, ranks=(0, 1, 2)))
    assert found.code == "no_layer_lines" and found.title.endswith("rank 3")


def test_validation_that_says_nothing() -> None:
    assert findings(installed(0), "[kdtree] calls served=0 shadow=100") == []
    assert the_one(installed(0), "[kdtree] calls served=0 shadow=1000").code == "no_layer_lines"


def test_ranks_that_differ_in_version_are_noted() -> None:
    log = logged(installed(0), installed(1, version="0.2.0"))
    assert "x.log: the workers differ in version: 0.1.0, 0.2.0" in Report.of([log]).notes


def test_no_line_at_all() -> None:
    found = the_one("INFO: ready", "kdtree")
    assert found.code == "no_line" and "2 lines" in found.title and any("PYTHONPATH" in check for check in found.check)


# --------------------------------------------------------------------------------------------------------------- starts


def test_the_last_start_is_judged() -> None:
    bad, good = service(lambda *_: 0.9), service(lambda *_: BF16)
    report = Report.of([logged(*bad, *good)])
    assert not report.findings and report.logs[0].number == 2 and report.logs[0].starts[3] == 2
    assert "x.log: 2 starts; the last one is judged, and 192 layer lines" in report.notes[0]
    assert Report.of([logged(*good, *bad)]).findings


def test_all_starts_are_judged_together_if_asked() -> None:
    bad, good = service(lambda *_: 0.9), service(lambda *_: BF16)
    report = Report.of([logged(*bad, *good, *good, all_starts=True)])
    assert report.findings and report.logs[0].start.lines == 3 * 192
    assert "all 3 starts are judged together" in report.notes[0]


def test_a_rank_that_declines_before_another_installs_belongs_to_the_new_start() -> None:
    declined = "[kdtree] declined reason=selftest_failed x; the service runs stock"
    assert the_one(*service(lambda *_: BF16), declined, installed(0), *steps(lambda *_: BF16, ranks=[0])).code == (
        "stays_stock"
    )
    for served in (*service(lambda *_: BF16)[-2:], shapes(1, 21), "[kdtree] calls served=10"):
        assert findings(installed(0), declined, served, *service(lambda *_: BF16)) == [], served


def test_lines_without_a_rank_are_those_of_their_process() -> None:
    lines = [f"h1 python[{100 + rank}]: {installed(rank)}" for rank in range(2)]
    log = logged(*lines, "h1 python[101]: [kdtree] ERROR oh", "[2026-11-29 11:02:03 TP0] [kdtree] ERROR no")
    assert [event.rank for event in log.start.events.values()] == [1, 0]
    through_one = logged(*[line.replace("[101]", "[100]") for line in lines], "h python[100]: [kdtree] ERROR oh")
    assert [event.rank for event in through_one.start.events.values()] == [None]


# --------------------------------------------------------------------------------------------------------------- bounds


def test_median_is_right_to_three_percent() -> None:
    values = [BF16 * 1.37**number for number in range(-9, 12)]
    random.shuffle(values)
    spread = report_tally.Spread()
    for value in values:
        spread.add(value, report_tally.log_of(value))
    assert spread.median == pytest.approx(sorted(values)[10], rel=0.03)
    assert report_tally.Spread.of([spread, spread]).median == spread.median


def test_time_folds_and_keeps_its_ends() -> None:
    log = logged(*service(lambda step, *_: BF16 if step < 500 else 2 * BF16, 1000))
    cell = log.start.ranks[1].cells[2]
    assert sum(cell.counts) == cell.calls == 1000 and log.start.shift == 4
    first, last = report_judge.ends([cell]) or (0, 0)
    assert last / first == pytest.approx(2, rel=0.1)


def test_memory_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_CELLS", "MAX_SHAPES", "MAX_EVENTS"):
        monkeypatch.setattr(report_tally, name, 5)
    lines = []
    for number in range(50):
        lines += [layer(number, BF16, number % 7), shapes(number + 1, number), f"[kdtree] WARNING {number}"]
        lines += [f"[kdtree] declined reason=r{number} scope=call", f"[kdtree] calls served=1 c{number}=2"]
    log = logged(*lines)
    start = log.start
    assert (start.cells, len(start.shapes), len(start.events), len(start.routed)) == (5, 5, 10, 5)
    assert start.left_out == 4 * 45 and any("beyond what a report keeps" in note for note in Report.of([log]).notes)


def test_a_million_lines_take_seconds() -> None:
    """Of the processor, since a busy machine has its own clock: 5 us a line on one core of a server, and no more memory
    for ten times the lines. `python -m kdtree_patch report` on a million of them has been timed; this is a tenth."""
    lines = [line.encode() for line in service(lambda *_: BF16, 50)]
    log = Log("x")
    started = time.process_time()
    for _ in range(100_000 // len(lines)):
        log.read(lines[5:])
    assert time.process_time() - started < 4
    assert log.start.lines > 90_000 and log.start.cells == LAYERS * RANKS


# ---------------------------------------------------------------------------------------------------------- the command


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kdtree_patch", "report", *map(str, words)])
        with tempfile.TemporaryFile() as file:
            file.write(stdin)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
            try:
                status = command_line.main()
            except SystemExit as exit:
                status = int(exit.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return written(tmp_path / "good.log", service(lambda *_: BF16))


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return written(tmp_path / "bad.log", service(lambda *_: 0.9))


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_verdict_comes_first(command: Command, good: Path, bad: Path) -> None:
    status, output, error = command(good)
    assert (status, error) == (0, "") and output.startswith("nothing found: 192 layer lines")
    status, output, error = command(bad)
    assert (status, error) == (1, "") and output.startswith("1 finding: rel is near 1 everywhere")
    for words in ("   check:", "\nranks\n", "\nlayers, over all ranks\n", "\nshapes\n", "rank 3", "L5"):
        assert words in output
    assert "\x1b" not in output


@pytest.mark.parametrize("lines", [[], ["INFO: ready"]])
def test_log_without_a_line_is_a_finding(lines: list[str], command: Command, tmp_path: Path) -> None:
    status, output, _ = command(written(tmp_path / "empty.log", lines))
    assert status == 1 and output.startswith("1 finding: there is no [kdtree] line") and "PYTHONPATH" in output


def test_standard_input(command: Command, good: Path, bad: Path) -> None:
    status, output, _ = command("-", stdin=bad.read_bytes())
    assert status == 1 and "near 1" in output
    status, output, _ = command(good, "-", stdin=b"")
    assert status == 0 and "note: standard input: no [kdtree] line" in output


def test_compressed_log_is_said_to_be_one(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "x.log.1.gz"
    path.write_bytes(gzip.compress(b"[kdtree] installed tp_rank=0"))
    status, output, error = command(path)
    assert (status, output) == (2, "") and f"zcat {path} | python -m kdtree_patch report -" in error
    spaced = path.rename(tmp_path / "a b.gz")
    status, output, error = command(spaced)
    assert (status, output) == (2, "") and f"zcat '{spaced}' | python -m kdtree_patch report -" in error
    status, output, error = command("-", stdin=spaced.read_bytes())
    assert (status, output) == (2, "") and "put zcat before it: ... | zcat | python -m kdtree_patch report -" in error


def test_interrupted_reading_is_judged(command: Command, bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`journalctl -f | report -` has no other end."""

    def chunks(*_: Any) -> Iterator[bytes]:
        yield bad.read_bytes()
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "_chunks", chunks)
    status, output, _ = command("-", bad)
    assert status == 1 and "near 1" in output and "interrupted after 197 lines" in output
    assert f"what came before is judged, and nothing of {bad}\n" in output
    # A file has an end, and half of it is not what was asked about.
    status, output, error = command(bad)
    assert (status, output) == (130, "") and error.startswith("report: interrupted; ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the following arguments are required: LOG"),
        (["/nonexistent.log"], "report: /nonexistent.log cannot be read: No such file or directory"),
        (["/"], "report: / is a folder, and not a log"),
        (["-", "-"], "report: standard input (-) can be read once"),
        (["a\x1b[2Jb"], "report: a\\x1b[2Jb cannot be read"),
        (["x", "--plot", "x.gif"], "x.gif must end in one of"),
    ],
    ids=str,
)
def test_wrong_usage(words: list[str], says: str, command: Command) -> None:
    status, output, error = command(*words)
    assert (status, output) == (2, "") and says in error and "Traceback" not in error


def test_a_file_that_is_missing_is_said_before_others_are_read(command: Command, good: Path) -> None:
    assert command(good, "/nonexistent.log")[:2] == (2, "")


def test_matplotlib_is_asked_for_first(command: Command, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    status, output, error = command(good, "--plot", good.parent / "f.png")
    assert (status, output) == (2, "") and "pip install matplotlib" in error


def test_without_rich(command: Command, bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, with_rich, _ = command(bad)
    monkeypatch.setattr(report_show, "find_spec", lambda name: None)
    _, without, _ = command(bad)
    assert [line.split() for line in without.splitlines()] == [line.split() for line in with_rich.splitlines()]


def test_json_is_one_document(command: Command, good: Path, bad: Path) -> None:
    nan = "[kdtree] L2 max_abs_diff=inf mean=1.0000e-05 rel=inf tp_rank=1\n"
    bad.write_text(bad.read_text() + nan)
    status, output, _ = command(good, bad, "--json")
    document = json.loads(output, parse_constant=lambda name: pytest.fail(name))
    assert status == 1 and document["good"] is False and document["findings"][0]["code"] == "not_finite"
    ours, theirs = document["files"]
    assert (ours["layer_lines"], theirs["ranks"][1]["layers"][2]["not_finite"]) == (192, 1)
    assert ours["ranks"][0]["shapes"][0]["bs"] == 1 and ours["ranks"][0]["layers"][5]["calls"] == 8
    assert document["thresholds"]["limit"] == report_judge.LIMIT


def test_nothing_of_a_log_reaches_the_terminal_raw(command: Command, tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07[bold red]\x9b2J\u202e\r"
    lines = [*service(lambda *_: BF16), f"[kdtree] ERROR {evil}", f"[kdtree] declined reason={evil} scope=call {evil}"]
    lines += [f'[kdtree] installed gpu="{evil}" tp_rank=77', f"[kdtree] L5 {evil}", f"[kdtree] disabled reason={evil}"]
    path = written(tmp_path / "evil.log", lines)
    for words in ([], ["--json"]):
        _, output, _ = command(path, *words)
        assert "owned" in output and "[bold red]" in output
        assert all(one.isprintable() or one == "\n" for one in output)
        # Nor is it markup of rich's, in a table.
        assert words or any("rank 77" in line and "[bold red]" in line for line in output.splitlines())


def test_colours_only_on_a_terminal(bad: Path) -> None:
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    words = [sys.executable, "-m", "kdtree_patch", "report", str(bad)]
    process = subprocess.Popen(words, cwd=REPO, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += (chunk := os.read(ours, 4096))
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
    os.close(ours)
    assert process.wait(60) == 1 and b"\x1b[1;31m1 finding" in shown
    piped = subprocess.run(words, cwd=REPO, env=env, capture_output=True, timeout=60)
    assert piped.returncode == 1 and b"\x1b" not in piped.stdout + piped.stderr


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_no_figure_is_cut_on_a_narrow_terminal(
    command: Command, bad: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    piped = command(bad)[1].splitlines()
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(width)), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", command(bad)[1]).splitlines()
    for name in (*(f"rank {rank}" for rank in range(RANKS)), *(f"L{number}" for number in range(LAYERS))):
        whole, here = (next(line for line in lines if f" {name} " in line[:10]) for lines in (piped, shown))
        figures = [word for word in whole.split() if re.fullmatch(r"[0-9.,e+-]+", word) and word != "-"]
        assert figures and [word for word in figures if word not in here.split()] == []


def test_reader_that_has_gone_is_no_finding(good: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "kdtree_patch", "report", str(good)]
    done = subprocess.run(words, cwd=REPO, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_progress_is_shown_for_large_input_on_a_terminal(
    command: Command, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LARGE", 10)
    assert command(good)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "100" in command(good)[2] or "kB" in command(good)[2]


# -------------------------------------------------------------------------------------------------------------- picture


def test_picture(command: Command, bad: Path, good: Path) -> None:
    path = bad.parent / "f.png"
    status, _, error = command(bad, good, "--plot", path)
    assert status == 1 and path.read_bytes().startswith(b"\x89PNG") and "is drawn" in error


def test_what_is_drawn() -> None:
    first = logged(*service(lambda step, number, rank: 0.5 if (number, rank) == (4, 1) and step == 3 else BF16))
    second = logged(shapes(2, 100), *steps(lambda *_: BF16, 2), shapes(4, 1000), *steps(lambda *_: BF16, 1))
    drawn = Report.of([first, second])
    picture, borders = report_show.heat(drawn)
    assert borders == [8, 11] and [len(row) for row in picture] == [11] * LAYERS
    assert [number for number in range(8) if picture[4][number] > 0.1] == [3]
    figure = report_show.draw(drawn)
    left, right = figure.axes[:2]
    points = {line.get_label(): list(line.get_xdata()) for line in right.lines[:-1]}
    assert points == {"bs 1": [21] * RANKS, "bs 2": [100] * RANKS, "bs 4": [1000] * RANKS}
    assert left.get_ylabel() == "layer" and right.lines[-1].get_label() == "limit 0.02"
    # A layer is at its number, and time is in passes where there is one file.
    mesh = left.collections[0]
    assert mesh.get_coordinates()[4][0].tolist() == [0, 3.5] and left.get_xlabel().endswith("one file after the other")
    alone = report_show.draw(Report.of([logged(*service(lambda *_: BF16, 200))])).axes[0]
    assert alone.get_xlabel().startswith("time: compared passes") and alone.get_xlim()[1] == pytest.approx(200, abs=8)


def test_nothing_to_draw_is_said_and_the_report_shown(command: Command, tmp_path: Path) -> None:
    status, output, error = command(written(tmp_path / "x.log", [installed(0)]), "--plot", tmp_path / "f.png")
    assert status == 2 and output.startswith("nothing found") and "nothing to plot" in error


def test_lines_of_graphs_have_no_shape() -> None:
    """They come late: the shapes line before them is another batch's."""
    log = logged(shapes(1, 21), *[layer(number, BF16, 0, " calls=4") for number in range(LAYERS)])
    assert all(not spread.lines for spread in log.start.ranks[0].shapes.values())
    assert log.start.ranks[0].cells[0].calls == 4


def test_a_worker_imports_none_of_it() -> None:
    """And the command imports no torch."""
    worker = "import sys, kdtree_patch.boot, kdtree_patch.plugin, kdtree_patch.hook, kdtree_patch.kernel"
    for imports, nothing in ((worker, "kdtree_patch.report"), ("import sys, kdtree_patch.report", "torch")):
        asked = f"{imports}; print([name for name in sys.modules if name.startswith({nothing!r})])"
        done = subprocess.run([sys.executable, "-c", asked], cwd=REPO, capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


# ------------------------------------------------------------------------------------------------------------- any text


pieces = st.one_of(
    st.builds(
        layer, st.integers(0, 9999), st.floats(0, 1e9), st.none() | st.integers(0, 9), st.sampled_from(["", " nan=1"])
    ),
    st.builds(installed, st.integers(0, 5)),
    st.builds(shapes, st.integers(0, 99), st.integers(0, 10**9), st.integers(0, 99)),
    st.builds("[kdtree] {} reason={} {}".format, st.sampled_from(["declined", "ERROR disabled"]), st.text(), st.text()),
    st.builds("[kdtree] calls {}={}".format, st.text(max_size=5), st.integers(0)),
    st.text(),
)


@given(st.lists(pieces, max_size=60), st.booleans())
@settings(deadline=None, max_examples=200)
def test_no_text_crashes_it(lines: list[str], all_starts: bool) -> None:
    log = Log("x", all_starts)
    log.read(line.encode("utf-8", "surrogateescape" if line.isascii() else "replace") for line in lines)
    found = Report.of([log, log])
    json.dumps(report_show.document(found), allow_nan=False)
    for _, headings, rows in report_show.tables(found):
        assert all(len(row) == len(headings) for row in rows)
    words: list[Any] = [
        found.verdict,
        *found.notes,
        *[text for one in found.findings for text in (one.title, *one.seen)],
    ]
    assert all(text.isprintable() for text in words)
