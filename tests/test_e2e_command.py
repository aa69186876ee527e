"""`python -m tests.e2e`: its words, the file it writes, what it shows; the checkpoints, and the options for SGLang."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e import __main__ as command
from tests.e2e import gpus, models, plan, report, tokens
from tests.e2e.client import ServiceError
from tests.e2e.record import Record
from tests.e2e.server import REPOSITORY, Fleet


def figures(step_ms: float) -> dict[str, Any]:
    tokens = {"tokens_per_s": 2000 / step_ms, "tokens_per_step": 2.0, "steps": 30, "repeats": 3, "spread": 0.01}
    return {"step_ms": step_ms, **tokens}


def a_run(ok: bool = True) -> dict[str, Any]:
    rows = [
        {
            **{"mode": mode, "prefix": prefix, "bs": bs, "times": prefix / 1000},
            **{"stock": figures(prefix / 100), "patched": figures(10.0)},
            **({"share_stock": 0.7, "share_patched": 0.1} if bs == 1 else {}),
        }
        for mode in ("graph", "eager")
        for prefix in (1024, 8192)
        for bs in (1, 4)
    ]
    difference = {"prompt": 37, "how": "alone", "tokens": 48, "differs_at": 7, "margin": 0.03}
    return {
        "meta": {"command": "x", "date": "2026-11-29", "gpu": "NVIDIA H200"},
        "verdict": [{"bar": "a bar [with brackets]", "ok": ok, "found": "what was found"}],
        "servers": {},
        "speed": {"layers": 24, "heads": 8, "draft_tokens": 16, "rows": rows},
        "tokens": {"same-graph": [{**difference, "accept_stock": 2.5, "accept_patched": 2.5}]},
    }


@pytest.mark.parametrize("ok", [True, False])
def test_a_stored_run_is_shown_with_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str], ok: bool) -> None:
    path, picture = tmp_path / "run.json", tmp_path / "run.png"
    path.write_text(json.dumps(a_run(ok)))
    assert command.main(["--from", str(path), "--plot", str(picture)]) == (0 if ok else 1)
    out = capsys.readouterr().out
    assert "8,192" in out and "81.92 ms" in out and "70%" in out and "a bar [with brackets]" in out
    assert out.endswith("PASS\n" if ok else "FAIL\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_difference_that_is_no_tie_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A margin of infinity; in a file it is a string, and in the words of older runs a figure."""
    row = {"prompt": 5, "how": "alone", "tokens": 48, "differs_at": 44, "accept_stock": 2.4, "accept_patched": 2.4}
    words = "prompt 5 alone at token 44, where stock gives its second best token no probability at all, so no tie"
    assert tokens.describe([{**row, "margin": float("inf")}]) == words
    run = a_run()
    run["tokens"]["same-graph"] += [{**row, "margin": "inf"}, {**row, "margin": None}]
    run["verdict"][0]["found"] = "prompt 5 alone at token 44, where stock's best two are inf apart"
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert command.main(["--from", str(tmp_path / "run.json")]) == 0
    out = capsys.readouterr().out
    assert "second impossible" in out and "neither chosen" in out and "0.03" in out
    assert words in " ".join(out.replace("│", " ").split()) and "inf " not in out


def test_tokens_a_step_of_both_servers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ratio of tokens a second has both in it, the time of a step and how many tokens that brings."""
    run = a_run()
    run["speed"]["rows"][0]["stock"]["tokens_per_step"] = 2.42
    run["speed"]["rows"][0]["patched"]["tokens_per_step"] = 2.74
    (tmp_path / "run.json").write_text(json.dumps(run))
    command.main(["--from", str(tmp_path / "run.json")])
    out = capsys.readouterr().out
    assert "tokens a step, stock" in out and "2.42" in out and "2.74" in out


def test_a_run_without_a_verdict_has_not_passed() -> None:
    assert not report.passed({"meta": {}, "verdict": []})


@pytest.mark.parametrize("text, words", [("{", "is not JSON"), ("[]", "not a run"), ('{"rows": []}', "not a run")])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, capsys, text: str, words: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    assert command.main(["--from", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert command.main(["--from", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("meta", None), ("meta.date", ...), ("verdict", {}), ("verdict.0", 1), ("verdict.0.bar", ...)),
        *(("verdict.0.ok", ...), ("verdict.0.ok", "false"), ("verdict.0.found", 1), ("speed", None), ("speed", 7)),
        *(("speed.rows", "abc"), ("speed.rows.7.stock", ...), ("speed.rows.0.times", "inf")),
        *(("speed.rows.0.prefix", 10**400), ("speed.rows.0.bs", True), ("speed.rows.0.share_stock", None)),
        *(("tokens", [1]), ("tokens.same-graph.0.margin", []), ("ranks", None), ("ranks", {})),
    ],
)
def test_a_run_that_is_not_of_its_shape_is_refused(tmp_path: Path, capsys, where: str, value: object) -> None:
    path, run = tmp_path / "run.json", a_run()
    *parents, name = [int(part) if part.isdigit() else part for part in where.split(".")]
    place = functools.reduce(lambda inner, part: inner[part], parents, run)
    if value is ...:
        del place[name]
    else:
        place[name] = value
    path.write_text(json.dumps(run))
    assert command.main(["--from", str(path), "--plot", str(tmp_path / "run.png")]) == 2
    where = "ranks.tokens" if value == {} and name == "ranks" else where
    assert f"is not a run of make e2e: {where} is missing, or not what a run has there; " in capsys.readouterr().err


def test_a_run_that_nests_without_an_end_is_refused(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.json"
    path.write_text("[" * 100_000)
    assert command.main(["--from", str(path)]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("stored", sorted(REPOSITORY.glob("docs/results/h200*-*.json")), ids=lambda path: path.stem)
def test_the_runs_that_are_kept_have_passed(stored: Path) -> None:
    if "verdict" in json.loads(stored.read_text()):
        assert report.passed(report.read_run(stored))


def test_nothing_of_a_stored_run_is_obeyed(tmp_path: Path, capsys) -> None:
    """Neither by the terminal, nor by what lays out tables and pictures."""
    path, run, evil = tmp_path / "run.json", a_run(), "\x1b[2J[/b]$\\x$\x07\n."
    run["meta"] |= {"date": evil, "gpu": evil}
    run["verdict"] = [{"bar": evil, "ok": True, "found": evil}]
    run["speed"]["rows"][0]["mode"] = evil
    run["tokens"] = {evil: [{**run["tokens"]["same-graph"][0], "how": evil, "margin": evil}]}
    path.write_text(json.dumps(run))
    assert command.main(["--from", str(path), "--plot", str(tmp_path / "run.png")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and r"\x1b[2J[/b]$\x$\x07" in out


@pytest.mark.parametrize(
    "words", [["--tp", "2"], ["--only", "load"], ["--layers", "2"], ["--json", "x.json"], ["--folder", "x"]]
)
def test_words_of_a_new_run_are_refused_beside_a_stored_one(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        command.parse(["--from", "run.json", *words])
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(f"e2e: {words[0]} is for a new run, and --from shows one that is there")
    # What `make e2e` puts there.
    command.parse(["--tp", "1", "--from", "run.json", "--plot", "x.png"])


def test_a_run_without_figures_cannot_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({name: value for name, value in a_run().items() if name != "speed"}))
    assert command.main(["--from", str(path), "--plot", str(tmp_path / "x.png")]) == 2


@pytest.mark.parametrize(
    "words",
    [
        *(["--only", "sped"], ["--points", "8192"], ["--tp", "0"], ["--layers", "1"]),
        *(["--kv-cache-dtype", "fp8_e4m3"], ["--only", "tokens", "--kv-cache-dtype", "fp4_e2m1"]),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.parse(words)
    assert refused.value.code == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "load"], "--only is for one GPU"),
        (["--points", "8192,1"], "--points is for one GPU"),
        (["--layers", "2"], "--layers is for one GPU"),
        (["--requests", "7"], "--requests is for one GPU"),
        (["--no-kernels"], "--no-kernels is for one GPU"),
        (["--plot", "x.png"], "--plot is for one GPU"),
        (["--plot", "x.png", "--layers", "2"], "--layers and --plot are for one GPU"),
        (["--side-by-side", "9"], "--side-by-side 9 is too few: with --tp 2 there are 10 servers, all at once"),
    ],
)
def test_words_that_two_ranks_would_not_heed_are_refused(words: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        command.parse(["--tp", "2", *words])
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(f"e2e: {said}")
    command.parse(words)  # with one they mean something


def test_two_ranks_are_asked_for_with_room_for_all_servers() -> None:
    assert command.parse(["--tp", "2", "--side-by-side", "10", "--start-timeout", "330"]).side_by_side == 10


def test_the_help_says_what_two_ranks_need(capsys) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "the run is `ranks`: 10 servers at once, seen to take 2.5 minutes on two H200s and 32 cores" in words


def test_runs_are_done_in_one_order() -> None:
    assert command.parse(["--only", "tokens,speed"]).only == ["speed", "tokens"]


def test_too_few_gpus_are_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class OneGpu:
        count = 1

    monkeypatch.setattr(gpus, "Nvml", OneGpu)
    assert command.main(["--tp", "2"]) == 2
    assert "--tp 2 needs as many GPUs, and torch sees 1 here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tp", "gpus_there", "said"),
    [
        (None, 0, "make e2e TP=1 needs as many NVIDIA GPUs, and this machine has 0; nothing has been done: run it"),
        ("2", 1, "make e2e TP=2 needs as many NVIDIA GPUs, and this machine has 1; nothing has been done: run it"),
        ("two", 1, "TP=two is not a number of GPUs, from 1 to 8; nothing has been done: leave it out"),
        ("1", 1, None),
        ("2", 3, None),
    ],
)
def test_a_machine_with_too_few_gpus_downloads_nothing(
    tmp_path: Path, tp: str | None, gpus_there: int, said: str | None
) -> None:
    script, devices, pip = tmp_path / "tools/e2e.sh", tmp_path / "dev", tmp_path / ".venv/e2e/bin/pip"
    for folder in (script.parent, devices, pip.parent):
        folder.mkdir(parents=True)
    for name in ["nvidiactl", *(f"nvidia{number}" for number in range(gpus_there))]:
        (devices / name).touch()
    for name in ("requirements-e2e.txt", "requirements.txt"):
        (tmp_path / name).touch()
    text = (REPOSITORY / "tools/e2e.sh").read_text()
    assert text.count("/dev/nvidia") == 1
    script.write_text(text.replace("/dev/nvidia", f"{devices}/nvidia"))
    pip.write_text("#!/bin/sh\necho downloads\n")
    pip.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name != "TP"} | ({} if tp is None else {"TP": tp})
    done = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True)
    if said is None:
        assert done.returncode == 0 and done.stdout.endswith("downloads\n")
    else:
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"e2e: {said}")
        assert done.stderr.count("\n") == 1


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=str)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus.Nvml().count == 1


class FakeNvml:
    count = 2

    def name(self) -> str:
        return "NVIDIA H200"

    def processes(self) -> list[dict[int, int]]:
        return [{}, {}]

    def used(self) -> int:
        return 5000


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of SGLang, and of GPUs."""
    fake = (str(Path(__file__).with_name("e2e_fake.py")),)
    monkeypatch.setattr(command, "Fleet", functools.partial(Fleet, program=fake))
    monkeypatch.setattr(gpus, "Nvml", FakeNvml)
    monkeypatch.setattr(signal, "signal", lambda *words: None)


def test_the_runs_follow_each_other_and_are_written_down(stand_ins: None, tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.json"
    words = ["--only", "tokens,load", "--requests", "150", "--layers", "2", "--json", str(path)]
    assert command.main([*words, "--folder", str(tmp_path / "folder"), "--side-by-side", "4"]) == 0
    stored = report.read_run(path)
    assert stored["meta"]["gpu"] == "NVIDIA H200" and stored["meta"]["command"].startswith("python -m tests.e2e --only")
    assert stored["load"]["requests"] == 150 and len(stored["tokens"]) == 7
    assert {"load-patched", "same-graph-stock", "dflash-graph-margins"} < set(stored["servers"])
    assert (tmp_path / "folder" / "load-patched.log").exists()
    assert capsys.readouterr().out.endswith("PASS\n")


def test_a_stored_run_says_what_it_ran_on_and_not_where(stand_ins: None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"SGLANG_X": "a", "NCCL_Y": "1", "KDTREE_MODE": "on", "CUDA_VISIBLE_DEVICES": "1,0"}
    kept_out = {"CUDA_VISIBLE_DEVICES_X": "0", "MY_SGLANG_X": "b", "HF_TOKEN": "secret"}
    for name in [name for name in os.environ if name.startswith(("SGLANG_", "NCCL_", "KDTREE_"))]:
        monkeypatch.delenv(name)
    for name, value in (given | kept_out).items():
        monkeypatch.setenv(name, value)
    path, folder = tmp_path / "run.json", tmp_path / "deep" / "folder"
    command.main(["--tp", "2", "--json", str(path), "--folder", str(folder)])
    meta, servers = (report.read_run(path)[name] for name in ("meta", "servers"))
    assert (meta["gpu"], meta["gpus"], meta["environ"]) == ("NVIDIA H200", 2, given)
    assert meta["command"] == "python -m tests.e2e --tp 2 --json run.json --folder deep/folder"
    options = servers["killed-patched"]["options"]
    assert options[options.index("--model-path") + 1] == "models/target"
    assert servers["killed-patched"]["environ"]["KDTREE_CACHE_DIR"] == "cache-killed"
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize("good", [True, False])
def test_the_logs_of_a_run_that_missed_a_bar_stay(stand_ins: None, tmp_path: Path, monkeypatch, capsys, good) -> None:
    def run(fleet: Fleet, record: Record, pairs: object, pool: str | None) -> None:
        record.bar("a bar", good, "")

    monkeypatch.setattr(command.tokens, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command.main(["--only", "tokens"]) == (0 if good else 1)
    left, said = list(tmp_path.iterdir()), capsys.readouterr().err
    if good:
        assert not left and "logs" not in said
    else:
        [folder] = left
        assert list(folder.glob("*.log")) and f"a bar was missed: the servers' logs are in {folder}\n" in said


def test_two_ranks_begin_with_empty_caches(stand_ins: None, tmp_path: Path, monkeypatch) -> None:
    caches = [tmp_path / f"cache-{name}" for name in ("same-graph", "noisy-eager", "trip", "killed")]
    for cache in caches:
        cache.mkdir()
        (cache / "kernel.cubin").write_text("of a run before")
    (tmp_path / "cache-of-others").mkdir()

    def run(fleet: Fleet, *words: object) -> None:
        assert fleet.started and not any(cache.exists() for cache in caches)
        raise KeyboardInterrupt

    monkeypatch.setattr(command.ranks, "run", run)
    assert command.main(["--tp", "2", "--folder", str(tmp_path)]) == 1
    assert (tmp_path / "cache-of-others").exists()


def test_a_cache_that_cannot_be_emptied_is_status_2(stand_ins: None, tmp_path: Path, capsys) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache-trip").symlink_to(tmp_path / "elsewhere")
    assert command.main(["--tp", "2", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "cache-trip cannot be emptied: " in said and "None" not in said and (tmp_path / "elsewhere").exists()


def full(path: Path, text: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_that_could_not_be_written_is_status_2(stand_ins: None, tmp_path: Path, monkeypatch, capsys) -> None:
    def run(fleet: Fleet, record: Record, pairs: object, pool: str | None) -> None:
        monkeypatch.setattr(Path, "write_text", full)
        record.bar("a bar", True, "")

    monkeypatch.setattr(command.tokens, "run", run)
    words = ["--only", "tokens", "--json", str(tmp_path / "run.json"), "--folder", str(tmp_path)]
    assert command.main(words) == 2
    out, err = capsys.readouterr()
    assert out.endswith("PASS\n") and "run.json cannot be written: No space left" in err.splitlines()[-1]


def test_two_ranks_are_another_run(stand_ins: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    # The stand-in has one rank, and no compiler.
    assert command.main(["--tp", "2", "--json", str(path), "--folder", str(tmp_path / "folder")]) == 1
    stored = report.read_run(path)
    assert stored["ranks"]["ranks"] == 2 and len(stored["servers"]) == 10
    assert stored["servers"]["same-graph-stock"]["options"][-1] == "16"


def test_a_run_that_is_interrupted_keeps_what_it_has(stand_ins: None, tmp_path: Path, monkeypatch) -> None:
    def interrupted(fleet: Fleet, record: Record, pairs: object, pool: str | None) -> None:
        record.bar("before", True, "")
        command.interrupt(15, None)

    monkeypatch.setattr(command.tokens, "run", interrupted)
    path = tmp_path / "run.json"
    assert command.main(["--only", "tokens", "--json", str(path), "--folder", str(tmp_path / "folder")]) == 1
    found = [(one["bar"], one["ok"]) for one in report.read_run(path)["verdict"]]
    assert found == [("before", True), ("the run was carried through", False)]


# The command with what stands in for SGLang and for a GPU, and a run that keeps a bar and does not end.
ENDLESS = """
import sys, time
from tests.e2e import __main__ as command, gpus
from tests.test_e2e_command import FakeNvml
from tests.test_e2e_server import FAKE
from tests.e2e.server import Fleet

def run(fleet, record, *words):
    record.bar("before", True, "")
    time.sleep(60)

gpus.Nvml = FakeNvml
command.Fleet = lambda *words: Fleet(*words, program=FAKE)
command.tokens.run = run
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "ignored", "status", "last"),
    [
        (signal.SIGKILL, "", -9, "it is under way, or was killed"),
        (signal.SIGTERM, "", 1, "it was interrupted"),
        (signal.SIGHUP, "", 1, "it was interrupted"),
        # Under nohup it goes on.
        (signal.SIGHUP, "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)", None, None),
    ],
)
def test_a_run_that_is_ended_by_a_signal_has_not_passed(
    tmp_path: Path, number: signal.Signals, ignored: str, status: int | None, last: str | None
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(a_run()))  # of another run, that has passed
    words = ["--only", "tokens", "--side-by-side", "4", "--json", str(path), "--folder", str(tmp_path / "folder")]
    driver = [sys.executable, "-c", ignored + ENDLESS, *words]
    with subprocess.Popen(driver, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while '"before"' not in path.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        try:
            assert process.wait(2 if status is None else 60) == status
        except subprocess.TimeoutExpired:
            assert status is None
        finally:
            process.kill()
    if last is not None:
        stored = report.read_run(path)
        assert [one["found"] for one in stored["verdict"]] == ["", last] and not report.passed(stored)


class TestRecord:
    def test_each_bar_is_in_the_file_at_once(self, tmp_path: Path) -> None:
        record = Record(tmp_path / "run.json", "command", quiet=True)
        record.bar("first", True, 1)
        stored = report.read_run(tmp_path / "run.json")
        assert [one["bar"] for one in stored["verdict"]] == ["first", "the run was carried through"]
        assert not report.passed(stored)
        record.bar("second", True, {"a": 2})
        record.end()
        stored = report.read_run(tmp_path / "run.json")
        assert [(one["ok"], one["found"]) for one in stored["verdict"]] == [(True, "1"), (True, "{'a': 2}")]
        assert report.passed(stored)

    def test_a_full_disk_ends_no_run_and_is_said_once(self, tmp_path: Path, monkeypatch, capsys) -> None:
        monkeypatch.setattr(Path, "write_text", full)
        record = Record(tmp_path / "run.json", "command")
        record.bar("first", True, 1)
        record.bar("second", True, 2)
        said = capsys.readouterr().err
        assert said.count("run.json cannot be written: No space left on device; ") == 1 and "the run goes on" in said
        assert len(record.document["verdict"]) == 2 and record.unsaved is not None
        assert list(tmp_path.iterdir()) == []

    def test_what_json_has_no_word_for_is_written_as_one(self, tmp_path: Path) -> None:
        record = Record(tmp_path / "run.json", "command", quiet=True)
        record.document["tokens"] = {"x": [{"margin": float("inf")}]}
        record.save()
        assert json.loads((tmp_path / "run.json").read_text())["tokens"]["x"][0]["margin"] == "inf"

    def test_what_is_below_the_folders_is_named_from_there(self, tmp_path: Path) -> None:
        record = Record(tmp_path / "run.json", "x --json=/home/me/runs/r.json /srv/home/me/x /home/me2/y", quiet=True)
        record.below(Path("/home/me/runs"), Path("/home/me"), Path("/"))
        record.bar("a", True, "(/home/me/runs/cache/k.lock) '/home/me/z' /tmp/w")
        stored = report.read_run(tmp_path / "run.json")
        assert stored["meta"]["command"] == "x --json=r.json /srv/home/me/x /home/me2/y"
        assert stored["verdict"][0]["found"] == "(cache/k.lock) 'z' /tmp/w"

    def test_a_server_that_fails_is_a_missed_bar(self) -> None:
        record = Record(None, "command", quiet=True)
        with record.attempt("load"):
            raise ServiceError("it ended")
        assert record.document["verdict"] == [{"bar": "load could be run", "ok": False, "found": "it ended"}]

    def test_a_mistake_of_ours_is_none(self) -> None:
        with pytest.raises(KeyError), Record(None, "command", quiet=True).attempt("load"):
            raise KeyError


class TestCheckpoints:
    def test_transformers_reads_them_and_every_weight_is_there(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig

        written = models.write_all(tmp_path, heads=16, deep_layers=3)
        for folder, layers in ((written.target, 2), (written.noisy, 2), (written.deep, 3), (written.shallow, 1)):
            config = AutoConfig.from_pretrained(folder)
            assert (config.model_type, config.kv_lora_rank, config.qk_rope_head_dim) == ("deepseek_v2", 512, 64)
            state = load_file(folder / "model.safetensors")
            assert config.num_hidden_layers == layers
            assert {int(name.split(".")[2]) for name in state if ".layers." in name} == set(range(layers))
            assert state["model.layers.0.self_attn.q_proj.weight"].shape == (16 * 192, config.hidden_size)
            assert state["lm_head.weight"].shape == (config.vocab_size, config.hidden_size)

    def test_a_dflash_draft_is_what_sglang_reads(self, tmp_path: Path) -> None:
        """The names and shapes are those of `sglang.srt.models.dflash`, which has no embedding and no head."""
        from safetensors.torch import load_file
        from transformers import AutoConfig

        written = models.write_all(tmp_path, heads=8, deep_layers=2)
        config, target = (AutoConfig.from_pretrained(folder) for folder in (written.dflash, written.target))
        assert config.architectures == ["DFlashDraftModel"] and config.block_size == models.DFLASH_BLOCK
        assert (config.hidden_size, config.vocab_size) == (target.hidden_size, target.vocab_size)
        # A layer's states are captured where the next one begins.
        assert max(config.dflash_config["target_layer_ids"]) + 1 < config.num_target_layers == target.num_hidden_layers
        assert config.dflash_config["mask_token_id"] < target.vocab_size
        layer = {
            "input_layernorm": (512,),
            "post_attention_layernorm": (512,),
            "self_attn.q_proj": (8 * 64, 512),
            "self_attn.k_proj": (2 * 64, 512),
            "self_attn.v_proj": (2 * 64, 512),
            "self_attn.o_proj": (512, 8 * 64),
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
            "mlp.gate_proj": (1024, 512),
            "mlp.up_proj": (1024, 512),
            "mlp.down_proj": (512, 1024),
        }
        expected = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
        expected |= {"fc.weight": (512, 512), "hidden_norm.weight": (512,), "norm.weight": (512,)}
        state = load_file(written.dflash / "model.safetensors")
        assert {name: tuple(weight.shape) for name, weight in state.items()} == expected
        assert {str(weight.dtype) for weight in state.values()} == {"torch.bfloat16"}

    def test_a_draft_is_near_its_target(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        written = models.write_all(tmp_path, heads=8, deep_layers=3)
        target, noisy, deep, shallow = (
            load_file(folder / "model.safetensors")
            for folder in (written.target, written.noisy, written.deep, written.shallow)
        )
        name = "model.layers.1.mlp.up_proj.weight"
        gap = (noisy[name].float() - target[name].float()).std() / target[name].float().std()
        assert 0.14 < float(gap) < 0.16
        assert all(deep[name].equal(weight) for name, weight in shallow.items())
        loud, quiet = (deep[f"model.layers.{layer}.mlp.down_proj.weight"].float().std() for layer in (0, 1))
        assert 9 < float(loud / quiet) < 11


def all_specs(folder: Path) -> dict[str, tuple[str, ...]]:
    checkpoints = models.Checkpoints.below(folder)
    pairs = plan.token_pairs(checkpoints) + plan.speed_pairs(checkpoints)
    specs = [spec for one in pairs for spec in one.specs] + [plan.load_spec(checkpoints)]
    return {spec.name: spec.options for spec in [*specs, *plan.rank_specs(checkpoints, 2, folder).specs]}


class TestPlan:
    def test_a_pair_differs_in_nothing_but_the_patch(self, tmp_path: Path) -> None:
        options = all_specs(tmp_path)
        pairs = [name.removesuffix("-stock") for name in options if name.endswith("-stock")]
        expected = {"same-graph", "noisy-eager", "chain-graph", "default-graph", "dflash-graph", "speed-graph"}
        assert expected <= set(pairs)
        assert all(options[f"{name}-stock"] == options[f"{name}-patched"] for name in pairs)

    def test_an_fp8_pool_is_that_of_all_servers_of_a_pair(self, tmp_path: Path) -> None:
        checkpoints = models.Checkpoints.below(tmp_path)
        plain, fp8 = plan.token_pairs(checkpoints), plan.token_pairs(checkpoints, "fp8_e5m2")
        for one, other in zip(plain, fp8, strict=True):
            for spec, with_pool in zip(one.specs, other.specs, strict=True):
                assert sorted(with_pool.options) == sorted([*spec.options, "--kv-cache-dtype", "fp8_e5m2"])

    def test_the_default_server_leaves_sglangs_own_options_alone(self, tmp_path: Path) -> None:
        default = all_specs(tmp_path)["default-graph-patched"]
        assert not set(plan.NOT_BY_DEFAULT) & set(default)
        assert set(plan.NOT_BY_DEFAULT) < set(all_specs(tmp_path)["chain-graph-patched"])

    def test_log_probabilities_come_from_the_same_target_without_speculation(self, tmp_path: Path) -> None:
        options = all_specs(tmp_path)
        margins, stock = options["dflash-graph-margins"], options["dflash-graph-stock"]
        assert not [word for word in margins if "speculative" in word]
        assert margins[margins.index("--model-path") + 1] == stock[stock.index("--model-path") + 1]

    def test_each_cold_server_has_a_cache_of_its_own(self, tmp_path: Path) -> None:
        checkpoints = models.Checkpoints.below(tmp_path)
        wanted = plan.rank_specs(checkpoints, 2, tmp_path)
        caches = [spec.environ["KDTREE_CACHE_DIR"] for spec in wanted.specs if spec.patched]
        assert len(set(caches)) == len(caches) == 6
        assert all("--tp" in spec.options for spec in wanted.specs)
