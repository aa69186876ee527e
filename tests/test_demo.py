"""`python -m kdtree_patch demo`: the reference case end to end on each SGLang release, and how the demo judges."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kdtree_patch import demo, demo_plot, demo_screen
from kdtree_patch.exits import NotDone
from tests.support.env import REPO, sglang_dir

INSTALLED = "[kdtree] installed version=0.1.0 device=cpu"
SHAPES = (
    "[kdtree] shapes q=(9, 8, 576) kv_buf=(1024, 576) bs=1 q_len=9 Dl=512 Dr=64 kv_len_max=21 scale=0.14468 mask=(270,)"
)


def run_demo(
    directory: Path, *arguments: str, pythonpath: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")} | variables
    env["PYTHONPATH"] = os.pathsep.join(str(entry) for entry in (REPO, pythonpath) if entry)
    command = [sys.executable, "-m", "kdtree_patch", "demo", *arguments]
    return subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=500)


def test_reference_case(release: str, tmp_path: Path) -> None:
    """bs 1, q_len 9, 8 heads, prefix 21, 61 layers: each validated, within 1e-3 of stock, and all of it printed."""
    report_file = tmp_path / "report.json"
    finished = run_demo(tmp_path, "--sglang", str(sglang_dir(release)), "--json", str(report_file))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert [line for line in lines if line.startswith("[kdtree] shapes ")] == [SHAPES]
    assert sum(line.startswith("[kdtree] installed ") for line in lines) == 1
    assert [int(found[1]) for line in lines if (found := re.match(r"\[kdtree\] L(\d+) max_abs_diff=", line))] == list(
        range(61)
    )
    assert lines[-1].strip() == "PASS"
    # A pipe gets lines and nothing that only a terminal understands.
    assert all(one.isprintable() for line in lines for one in line)
    report = json.loads(report_file.read_text())
    assert report["passed"] and report["worst_rel"] < 1e-3
    assert report["backend"]["sglang"] == release
    assert report["machine"]["dtype"] == "float16"
    assert report["done"]["routed"] == {"kernel verify": 61}


def test_a_batch_of_another_shape(tmp_path: Path) -> None:
    options = ["--bs", "3", "--prefix", "0", "--q-len", "4", "--heads", "3", "--layers", "2"]
    here = os.path.relpath(sglang_dir("0.5.12"), tmp_path)  # as a user would write it
    finished = run_demo(tmp_path, "--sglang", here, *options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "q=(12, 3, 576)" in finished.stdout and "kv_len_max=0" in finished.stdout and "mask=(48,)" in finished.stdout


def test_without_wrapt_it_fails_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise ImportError('not here')\n")
    options = ["--sglang", str(sglang_dir("0.5.12")), "--layers", "1"]
    finished = run_demo(tmp_path, *options, pythonpath=tmp_path)
    assert finished.returncode == 1
    assert "installed line: the reason is in: [kdtree] declined reason=wrapt_missing" in finished.stdout
    assert finished.stdout.splitlines()[-1].strip() == "FAIL"


def test_settings_of_the_caller_do_not_count(tmp_path: Path) -> None:
    options = ["--sglang", str(sglang_dir("0.5.12")), "--layers", "1"]
    finished = run_demo(tmp_path, *options, KDTREE_MODE="off", KDTREE_NONSENSE="1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    shown = " ".join(run_demo(tmp_path, "--help").stdout.split())
    assert "Of the environment's KDTREE_* variables only KDTREE_CACHE_DIR counts" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--sglang /nonexistent", "there is no package sglang in /nonexistent"),
        ("--prefix -1", "--prefix: '-1' is not a whole number, 0 or more"),
        ("--q-len 0", "--q-len: '0' is not a whole number, from 1 to 512"),
        ("--q-len 513", "--q-len: '513' is not a whole number, from 1 to 512"),
        ("--q-len x", "--q-len: 'x' is not a whole number, from 1 to 512"),
        ("--heads 129", "--heads: '129' is not a whole number, from 1 to 128"),
        ("--dtype float8", "invalid choice: 'float8'"),
        ("--device cpu --dtype bfloat16", "computes bfloat16 products wrongly"),
        ("--device cpu --bs 2 --slots 60", "--slots must be 61 or more: 60 tokens"),
        ("--json nowhere/report.json", "--json: there is no folder "),
        ("--json .", "--json: . is a folder"),
        ("--device cuda", "--device cuda needs an NVIDIA GPU, and CUDA_VISIBLE_DEVICES hides them all; "),
        ("--dtype bfloat16", "computes bfloat16 products wrongly"),
    ],
)
def test_wrong_usage_is_2(tmp_path: Path, arguments: str, words: str) -> None:
    """One line that says what is wrong, after argparse's own usage lines, before anything has run."""
    options = ["--sglang", str(sglang_dir("0.5.12")), *arguments.split()]
    finished = run_demo(tmp_path, *options, CUDA_VISIBLE_DEVICES="")
    assert finished.returncode == 2
    assert finished.stdout == "" and "Traceback" not in finished.stderr
    assert "demo: " in finished.stderr.splitlines()[-1] and words in finished.stderr.splitlines()[-1]


def test_the_device_is_a_gpu_only_where_one_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(demo, "visible_targets", lambda: [])
    assert demo.choose_device(None, tmp_path) == ("cpu", None)
    with pytest.raises(NotDone, match="there is none here"):
        demo.choose_device("cuda", tmp_path)
    monkeypatch.setattr(demo, "visible_targets", lambda: ["sm_90"])
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.choose_device("cuda", tmp_path) == ("cuda", None)
    assert demo.choose_device("cpu", tmp_path) == ("cpu", None)
    device, why = demo.choose_device(None, tmp_path)
    assert device == "cpu" and why is not None and "sglang-kernel" in why
    (tmp_path / "sgl_kernel").mkdir()
    assert demo.choose_device(None, tmp_path) == ("cuda", None)


# The verdict.


def case(**changes: object) -> demo.Case:
    options = dict(prefix=21, q_len=9, heads=8, layers=3, bs=1, slots=None, dtype=None)
    return demo.Case(argparse.Namespace(**{**options, **changes}), "cpu")


def story(*lines: str, routed: int = 3) -> demo.Story:
    told = demo.Story()
    told.hear("stdout", json.dumps({"event": "machine", "dtype": "float16", "gpu": None, "why": None, "torch": "2"}))
    for line in lines:
        told.hear("stderr", line)
    told.hear(
        "stdout", json.dumps({"event": "done", "stored": True, "routed": {"kernel verify": routed}, "seconds": 1})
    )
    told.hear("exit", "0")
    return told


def layer_line(layer: int, rel: str = "2.1e-04") -> str:
    return f"[kdtree] L{layer} max_abs_diff=1.0000e-03 mean=1.0000e-05 rel={rel} tp_rank=0"


LAYERS = [layer_line(layer) for layer in range(3)]


def failures(told: demo.Story) -> dict[str, str]:
    return {check.name: f"{check.seen}; {check.advice}" for check in demo.judge(case(), told) if not check.passed}


def test_a_good_run_passes() -> None:
    assert failures(story(INSTALLED, SHAPES, *LAYERS)) == {}


def test_missing_layers_are_named() -> None:
    found = failures(story(INSTALLED, SHAPES, LAYERS[0], LAYERS[2]))
    assert list(found) == ["layer lines"]
    assert "missing: L1" in found["layer lines"]


@pytest.mark.parametrize("rel", ["1.1e-03", "1.0837e+00", "nan", "inf"])
def test_one_bad_layer_fails_and_is_named(rel: str) -> None:
    found = failures(story(INSTALLED, SHAPES, LAYERS[0], layer_line(1, rel), LAYERS[2]))
    assert list(found) == ["worst rel"]
    assert "in L1" in found["worst rel"]
    assert "about 2e-3 is the rounding of bf16, about 2e-4 that of fp16; near 1 is a wrong" in found["worst rel"]


@pytest.mark.parametrize("wrong", ["mask=(189,)", "mask=None"])
def test_the_shapes_line_of_another_call_fails(wrong: str) -> None:
    found = failures(story(INSTALLED, SHAPES.replace("mask=(270,)", wrong), *LAYERS))
    assert list(found) == ["shapes line"]
    assert "mask=(270,)" in found["shapes line"]


def test_a_declined_process_fails_with_its_own_reason() -> None:
    declined = "[kdtree] declined reason=contract missing=x the service runs stock"
    told = story(declined, routed=0)
    assert set(failures(told)) == {"installed line", "shapes line", "layer lines", "worst rel", "served by our kernel"}
    assert demo.first_advice(demo.judge(case(), told)) == f"installed line: the reason is in: {declined}"


def test_calls_that_went_to_stock_fail() -> None:
    assert list(failures(story(INSTALLED, SHAPES, *LAYERS, routed=2))) == ["served by our kernel"]


def test_a_process_that_died_fails() -> None:
    told = story(INSTALLED, SHAPES, *LAYERS)
    told.status = "-11"
    assert list(failures(told)) == ["the process ran to its end"]


def test_spans() -> None:
    assert demo.spans([0, 1, 2, 7, 9, 10]) == "L0-L2, L7, L9-L10"
    assert demo.spans([]) == ""


def test_plain_screen_shows_lines_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """Where rich is not installed."""
    told = story(INSTALLED, SHAPES, *LAYERS[:2])
    screen = demo.PlainScreen()
    screen.show(told, LAYERS[0])
    screen.close()
    screen.verdict(told, demo.judge(case(), told))
    shown = capsys.readouterr().out
    assert shown.startswith(LAYERS[0])
    assert re.search("FAIL +layer lines +2 of 3", shown) and "missing: L2" in shown and shown.endswith("FAIL\n")


# What is seen.


def on_terminal(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """The demo on a terminal of 100 columns and 30 lines."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    env |= {"PYTHONPATH": str(REPO), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"} | variables
    command = [sys.executable, "-m", "kdtree_patch", "demo", "--sglang", str(sglang_dir("0.5.12")), *arguments]
    process = subprocess.Popen(command, env=env, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += chunk
    os.close(ours)
    return process.wait(60), shown.decode()


def test_a_table_fills_up_on_a_terminal_and_a_picture_is_drawn(tmp_path: Path) -> None:
    status, shown = on_terminal(tmp_path, "--layers", "3", "--plot", "demo.svg")
    assert status == 0 and shown.rstrip().endswith("demo: demo.svg is drawn")
    assert "0 of 3" in shown and "3 of 3" in shown and "\x1b[1;32mPASS" in shown
    # Drawn over, again and again; and the lines that an operator greps for, once each.
    assert shown.count("\x1b[1mmax_abs_diff") > 2 and shown.count("[kdtree] L1 max_abs_diff=") == 1
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<?xml") and "the mask of the first request" in picture


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"TERM": "dumb"}], ids=str)
def test_no_table_where_nobody_looks_on(tmp_path: Path, variables: dict[str, str]) -> None:
    status, shown = on_terminal(tmp_path, "--layers", "1", **variables)
    assert status == 0 and shown.rstrip().endswith("PASS")
    assert "\x1b" not in shown


def screen_of(layers: int, width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, width=width, height=height, color_system=None, force_terminal=True)
    monkeypatch.setattr(demo_screen, "open_console", lambda: console)
    screen = demo_screen.LiveScreen(layers)
    screen.close()
    shown.truncate(0)
    return screen, shown


@pytest.mark.parametrize(("width", "columns"), [(140, 4), (80, 2)], ids=["wide", "narrow"])
def test_all_layers_have_a_place(width: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, shown = screen_of(61, width, 40, monkeypatch)
    told = story(INSTALLED, SHAPES, *(layer_line(index) for index in range(60)), layer_line(60, "1.08e+00"))
    screen.verdict(told, demo.judge(case(layers=61), told))
    rows = [row for row in shown.getvalue().splitlines() if re.match(r" +L\d", row)]
    assert len(rows) == 21 and [len(row.split()) // columns for row in rows] == [3] * 19 + [2] * 2
    assert [word for row in rows for word in row.split() if word.startswith("L")][:3] == ["L0", "L21", "L42"]
    assert "1.08e+00" in rows[18] and "FAIL" in shown.getvalue()


def test_the_last_layers_where_there_is_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, _ = screen_of(200, 80, 24, monkeypatch)
    console = Console(width=80, color_system=None)
    for come, first, last in ((0, 0, 47), (100, 52, 99), (200, 152, 199)):
        told = story(INSTALLED, SHAPES, *(layer_line(index) for index in range(come)))
        with console.capture() as capture:
            console.print(screen._table(told, 12))
        numbers = [int(word[1:]) for word in capture.get().split() if re.fullmatch(r"L\d+", word)]
        assert (min(numbers), max(numbers), len(numbers)) == (first, last, 48)
        assert all(len(row) <= 80 for row in capture.get().splitlines())


def test_a_layer_that_is_no_number_is_drawn_as_a_bad_one() -> None:
    told = story(INSTALLED, SHAPES, LAYERS[0], layer_line(1, "nan"), layer_line(2, "0.0000e+00"))
    told.hear("stdout", json.dumps({"event": "call", "tree": ["100", "110", "101"]}))
    rel, elements, tree = demo_plot.draw(case(prefix=100, q_len=3), told).axes
    drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in rel.lines[:2]}
    assert drawn == {"within the limit": {0: 2.1e-4, 2: 1e-7}, "beyond it, or not a number": {1: 2.0}}
    assert not math.isnan(rel.get_ylim()[0]) and elements.get_xlabel() == "layer"
    assert [list(map(int, row[-3:])) for row in tree.images[0].get_array()] == [[2, 0, 0], [2, 2, 0], [2, 0, 2]]
    assert "the first 76 of the prefix are left out" in tree.get_xlabel()


def test_a_run_that_made_no_call_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    demo_plot.plot(case(), demo.Story(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("said", ["hello", "3", '{"a": 1}', "[]"])
def test_what_others_print_on_stdout_is_not_the_childs_report(said: str) -> None:
    told = story(INSTALLED, SHAPES, *LAYERS)
    told.hear("stdout", said)
    assert failures(told) == {} and list(told.other) == [said]
