"""The documents against the code: every command in them is run here or parsed by its real parser and run by a test that
is named here; paths, settings, make targets, log lines, reason codes, figures and tables are what the code has.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pip._internal.commands import create_command

from deploy import options as deploy_options
from kdtree_patch import (
    bench,
    compile_command,
    contract,
    demo,
    doctor,
    report,
    report_judge,
    selftest_command,
    service_command,
    service_options,
    settings,
)
from kdtree_patch import compile as compiling
from kdtree_patch.exits import NotDone
from kdtree_patch.kernel import FP8_POOLS
from kdtree_patch.ledger import Ledger
from kdtree_patch.reference import rel
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from kdtree_patch.tiles import CONFIGS, LATENT, MAX_HEADS, MAX_Q_LEN, ROPE
from kdtree_patch.validate import Difference
from tests.e2e import __main__ as e2e
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support import said
from tests.support.documents import CODE, COMMANDS, TEXT, Document, all_documents, document, spans_of
from tests.support.env import REPO
from tools.figures import __main__ as figures
from tools.figures import layout, tables

ALL = all_documents()
# Commands of CONTRIBUTING.md are looked at by test_tooling.py; those that CHANGELOG.md speaks of need not be whole.
OF_USERS = [one for one in ALL if one.name not in ("CONTRIBUTING.md", "CHANGELOG.md")]
README, OPERATIONS, LIMITS = document("README.md"), document("docs/operations.md"), document("docs/limits.md")
DEPLOY_TARGETS = ("deploy", "status", "logs", "rollback", "undeploy")


def names(documents: list[Document]) -> list[str]:
    return [one.name for one in documents]


# ------------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Run:
    """A command that is run here, in a scene: its status, words of its output, a file that it leaves."""

    says: str
    status: tuple[int, ...] = (0,)
    leaves: str = ""


PATCHED = "cd / && PYTHONPATH=/opt/kdtree_patch python -m kdtree_patch"
SERVICE = "python -m sglang.launch_server --model-path MODEL --attention-backend triton --speculative-algorithm EAGLE"
IN_VENV = ".venv/bin/python -m"

RUN_HERE = {
    "git clone URL /opt/kdtree_patch": Run("", leaves="opt/kdtree_patch/sitecustomize.py"),
    f"{PATCHED} doctor -- {SERVICE}": Run("forward modes, if nothing but the options stands in the way", status=(0, 1)),
    f"{IN_VENV} kdtree_patch --help": Run("usage: python -m kdtree_patch"),
    f"{IN_VENV} kdtree_patch bench --from docs/results/h200.json --plot P.png": Run("ceilings: copy", leaves="P.png"),
    f"{IN_VENV} kdtree_patch bench --from docs/results/h200-modes.json": Run(
        "extends: ahead everywhere up to q_len 512"
    ),
    f"{IN_VENV} kdtree_patch bench --predict": Run("PREDICTION, not a measurement"),
    f"{IN_VENV} tests.e2e --from docs/results/h200-e2e.json": Run("PASS"),
    f"{IN_VENV} tests.e2e --from docs/results/h200x2-ranks.json": Run("PASS"),
    "journalctl -u sglang-k26 | python -m kdtree_patch report -": Run("nothing found: 4 layer lines"),
    "python -m kdtree_patch report node0.log node1.log --plot rel.png": Run("8 layer lines", leaves="rel.png"),
}

# What needs a GPU, a host or minutes: the test that runs the same.
ELSEWHERE = {
    "make demo": "tests/test_demo.py::test_reference_case",
    'make demo ARGS="--plot demo.png"': (
        "tests/test_demo.py::test_a_table_fills_up_on_a_terminal_and_a_picture_is_drawn"
    ),
    "make test": ".ci/run",  # itself
    "make bench": "tests/test_bench.py::test_run_measures_both_tables",
    'make bench ARGS="--sweep --json F --plot P.png"': "tests/test_bench.py::test_what_is_measured",
    'make bench ARGS="--modes --json F"': "tests/test_bench_modes.py::test_the_command",
    'make e2e ARGS="--json F --plot P.png"': (
        "tests/test_e2e_command.py::test_the_runs_follow_each_other_and_are_written_down"
    ),
    f"{IN_VENV} kdtree_patch bench --host": "tests/test_bench.py::test_host_time_without_a_gpu",
    "python -m pip install '/opt/kdtree_patch[cuda13]'": "tests/test_plugin.py::test_an_extra_brings_wrapt_and_cupy",
    "python -m pip wheel --no-deps --wheel-dir /tmp /opt/kdtree_patch": (
        "tests/test_plugin.py::test_the_wheel_has_the_package_and_the_kernels_and_nothing_else"
    ),
    f"cd / && python -m kdtree_patch doctor -- {SERVICE}": (
        "tests/test_plugin.py::test_doctor_of_a_wheel_that_is_loaded"
    ),
    f"KDTREE_MODE=shadow {SERVICE}": "tests/test_plugin.py::test_sglang_finds_the_plugin",
    "python -m pip uninstall kdtree-patch": "tests/test_plugin.py::test_nothing_of_the_package_is_left",
    f"{PATCHED} doctor --compile -- {SERVICE}": "tests/test_doctor.py::test_what_compile_and_self_test_find",
    f"{PATCHED} selftest": "tests/test_selftest.py::test_on_the_cpu",
    f"{PATCHED} compile": "tests/test_compile.py::test_command_prints_a_table_and_fills_the_cache",
    f"PYTHONPATH=/opt/kdtree_patch KDTREE_MODE=shadow {SERVICE}": "tests/test_real_backend.py::test_batches",
    "make deploy HOST=root@h1 UNIT=sglang-k26 DRY_RUN=1": (
        "tests/deploy/test_real_service.py::test_dry_run_changes_nothing_and_shows_what_would"
    ),
    "make deploy HOST=root@h1 UNIT=sglang-k26 MODE=shadow": "tests/deploy/test_real_service.py::test_deploy",
    "make deploy HOST=root@h1 UNIT=sglang-k26 MODE=on": (
        "tests/deploy/test_interrupted.py::test_mode_is_kept_where_none_is_named_and_comes_back"
    ),
    "make status HOST=root@h1 UNIT=sglang-k26": "tests/deploy/test_real_service.py::test_status_and_logs",
    "make logs HOST=root@h1 UNIT=sglang-k26": "tests/deploy/test_real_service.py::test_status_and_logs",
    "make rollback HOST=root@h1 UNIT=sglang-k26": "tests/deploy/test_interrupted.py::test_rollback_is_idempotent",
    "make undeploy HOST=root@h1 UNIT=sglang-k26": ("tests/deploy/test_real_service.py::test_undeploy_leaves_no_trace"),
    "DEPLOY_HOST=root@h1 DEPLOY_UNIT=sglang-k26 .venv/deploy/bin/python -m deploy status": (
        "tests/deploy/test_terminal.py::test_host_that_hangs_up"
    ),
}

# Blocks of Python, by their first line: run here, too.
CODE_RUN_HERE = {"docs/operations.md": "test_the_file_of_the_guard_is_read_and_run_as_the_document_says"}

EVERY_COMMAND = sorted({command for one in OF_USERS for command in one.commands()})


def test_every_command_is_run_here_or_has_a_test_that_runs_it() -> None:
    """A new command in a document goes into one of the two tables above; one that has gone goes out of it."""
    assert set(EVERY_COMMAND) == RUN_HERE.keys() | ELSEWHERE.keys()
    assert not RUN_HERE.keys() & ELSEWHERE.keys()
    assert {one.name: 1 for one in ALL for _ in one.code()}.keys() == CODE_RUN_HERE.keys()


@pytest.mark.parametrize(
    "node", sorted({*ELSEWHERE.values()} | {f"{__file__}::{name}" for name in CODE_RUN_HERE.values()})
)
def test_the_test_that_runs_it_is_there(node: str) -> None:
    file, _, name = node.partition("::")
    if name:
        tree = ast.parse((REPO / file).read_text())
        assert any(isinstance(one, ast.FunctionDef) and one.name == name for one in ast.walk(tree))
    else:
        commands = [command for command, where in ELSEWHERE.items() if where == file]
        assert all(re.search(rf"^{command}(?![\w-])", (REPO / file).read_text(), re.MULTILINE) for command in commands)


@pytest.mark.parametrize("one", OF_USERS, ids=names(OF_USERS))
def test_commands_stand_in_fences_that_say_so(one: Document) -> None:
    """Else nobody would find them here."""
    assert {kind for kind, _ in one.fences()} <= {COMMANDS, CODE, TEXT}
    programs = "make|python3?|git|cd|pip|ssh|journalctl|systemctl|sudo|export|curl|[A-Z_]+=\\S* "
    assert re.findall(rf"^(?: {{4,}}|\t)(?:\S*/)?(?:{programs})\b.*", one.prose, re.MULTILINE) == []
    # A name that goes on in the next line would not be seen as one, and everything up to the next one would be.
    assert [line for line in one.prose.splitlines() if line.count("`") % 2] == []
    text = "".join(body for kind, body in one.fences() if kind == TEXT)
    assert re.findall(rf"^\s*(?:\S*/)?(?:{programs})\b.*", text, re.MULTILINE) == []


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_its_real_parser_takes_every_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # output files are looked at
    parse(command)


@pytest.mark.parametrize(
    "command, error",
    [
        ("make demonstrate", "No rule to make target"),
        ("make bench ARGS=--swept", "unrecognized arguments: --swept"),
        ("make deploy HOST=h1 UNIT=u MODE=of", "MODE='of' is refused"),
        ("make deploy HOST=h1 UNIT=u DRYRUN=1", "DRYRUN"),
        ("make e2e ARGS='--only sped'", "sped"),
        ("python -m kdtree_patch report", "LOG"),
        ("cd / && python -m kdtree_patch selftset", "selftset"),
        ("KDTREE_MODE=of python -m kdtree_patch compile", "KDTREE_MODE='of'"),
        ("python -m sglang.launch_server --attention-backend flashinfer --speculative-algorithm EAGLE", "flashinfer"),
        ("DEPLOY_HOST=h1 python -m deploy status", "UNIT is missing"),
        ("kdtree report x.log", "kdtree"),
        ("python -m pip install /opt/kdtree_patch --wheel", "no such option: --wheel"),
        ("python -m pip install '/opt/kdtree_patch[cuda14]'", "cuda14"),
    ],
)
def test_and_refuses_wrong_ones(command: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=re.escape(error)):
        parse(command)


def parse(line: str) -> None:
    """Each command of a line, by the parser that it has at work. Raises what that one does."""
    words = shlex.split(line)
    while words:
        end = next((index for index, word in enumerate(words) if word in ("|", "&&")), len(words))
        parse_one(words[:end])
        words = words[end + 1 :]


def parse_one(words: list[str]) -> None:
    given = {}
    while "=" in words[0]:
        name, _, given[name] = words.pop(0).partition("=")
    Settings.from_environ(given)
    match words:
        case ["make", target, *rest]:
            parse_make(target, dict(word.split("=", 1) for word in rest))
        case [python, "-m", module, *rest] if Path(python).name == "python":
            parse_module(module, rest, given, words)
        case [program, *_] if program in ("cd", "git", "journalctl"):
            assert shutil.which(program) or program in ("cd", "journalctl")
        case _:
            raise AssertionError(f"nothing here knows {shlex.join(words)}")


def parse_make(target: str, given: dict[str, str]) -> None:
    known = {*deploy_options.NAMES} if target in DEPLOY_TARGETS else {"ARGS", "PYTHON", "TP", "E2E_PYTHON"}
    assert given.keys() <= known, f"{sorted(given.keys() - known)} means nothing to make {target}"
    command = ["make", "-n", target, *(f"{name}={value}" for name, value in given.items())]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if target in DEPLOY_TARGETS:
        deploy_options.Options.from_environ({f"DEPLOY_{name}": value for name, value in given.items()})
    words = shlex.split(given.get("ARGS", ""))
    if target in ("bench", "demo"):
        parse_module("kdtree_patch", [target, *words], {}, [])
    elif target == "e2e":
        parse_module("tests.e2e", ["--tp", given.get("TP", "1"), *words], {}, [])


def parse_module(module: str, words: list[str], given: dict[str, str], command: list[str]) -> None:
    if module in ("kdtree_patch", "tests.e2e"):
        heard = io.StringIO()
        with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(heard):
            try:
                our_parser().parse_args(words) if module == "kdtree_patch" else e2e.parse(words)
            except SystemExit as end:
                assert end.code == 0, heard.getvalue()
    elif module == "pip":
        heard = io.StringIO()
        with contextlib.redirect_stderr(heard):
            try:
                _, rest = create_command(words[0]).parse_args(words[1:])
            except SystemExit as end:
                raise AssertionError(heard.getvalue()) from end
        extras = re.findall(r"^(\w+) = \[\"cupy", (REPO / "pyproject.toml").read_text(), re.MULTILINE)
        assert {extra for word in rest for extra in re.findall(r"\[(.*)\]", word)} <= {*extras}, rest
    elif module == "deploy":
        assert words[0] in DEPLOY_TARGETS
        deploy_options.Options.from_environ(given)
    elif module == "sglang.launch_server":
        found = service_command.unwrap(command, {"PATH": "/bin"}, lambda path: "", lambda path: True)
        judged = [str(one) for one in service_options.judge(found) if one.effect == service_options.STOCK]
        assert not judged and service_command.python_path_problem(found) is None, judged
    else:
        raise AssertionError(f"nothing here knows the module {module}")


@lru_cache
def our_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kdtree_patch")
    commands = parser.add_subparsers(required=True)
    for command in (doctor, demo, compile_command, selftest_command, bench, report):
        command.add_parser(commands)
    return parser


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """A checkout in which `python` is this interpreter, and a log beside it in the journal and in files."""
    for path in REPO.iterdir():
        if path.name not in (".git", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    for rank in (0, 1):
        lines = [f"installed version=0.1.0 mode=shadow validate=1 tp_rank={rank}"]
        lines += [difference().line(layer, rank) for layer in range(4)]
        (tmp_path / f"node{rank}.log").write_text("".join(f"[kdtree] {line}\n" for line in lines))
    programs = {"python": f'exec {sys.executable} "$@"', "journalctl": f"cat {tmp_path}/node0.log"}
    for folder in ("bin", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
        for name, text in programs.items():
            (tmp_path / folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / folder / name).chmod(0o755)
    return tmp_path


def difference() -> Difference:
    return Difference(max_abs_diff=2e-3, mean=2e-4, rel=2e-3, nan=0, stock_nan=0)


@pytest.mark.parametrize("command", RUN_HERE)
def test_the_command_does_what_the_document_says(command: str, scene: Path) -> None:
    expected = RUN_HERE[command]
    there = scene / "opt" if command.startswith("git") else REPO.parent
    line = command.replace("URL", str(REPO)).replace(
        "/opt/kdtree_patch", f"{there}/{REPO.name}" if there == REPO.parent else f"{there}/kdtree_patch"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHON"))}
    env["PATH"] = f"{scene}/bin:{env['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=scene, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode in expected.status, done.stdout + done.stderr
    assert expected.says in done.stdout
    assert not expected.leaves or (scene / expected.leaves).stat().st_size > 0


@pytest.mark.parametrize("pool", [None, *FP8_POOLS])
def test_the_file_of_the_guard_is_read_and_run_as_the_document_says(
    pool: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = a_case(pool=pool, **({"k_scale": 0.5, "v_scale": 0.25} if pool else {}))
    kernel = FakeKernel(mark=1.0, pool=pool)
    router = VerifyRouter(
        Stock(answer=None).function, kernel, Settings(guard_rel=0.05, guard_dump=tmp_path), Ledger(), facts={}
    )
    router.context = (a_layer(3), a_batch())
    router(**arguments(case))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    (code,) = OPERATIONS.code()
    exec(compile(code, OPERATIONS.name, "exec"), {})
    facts, distance = capsys.readouterr().out.splitlines()
    assert "'layer': 3" in facts and facts.endswith(" []")
    assert float(re.findall(r"[\d.]+(?:e-\d+)?", distance)[0]) < 1e-3


# ----------------------------------------------------------------------------------------------- names in the documents


@lru_cache
def files() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    return tuple(listed.stdout.splitlines())


@lru_cache
def sources() -> str:
    """Of everything that a user meets."""
    folders = ("kdtree_patch/", "deploy/", "tests/e2e/", "tools/", "kernels/")
    some = [name for name in files() if name.startswith(folders) or name in ("Makefile", "sitecustomize.py")]
    return "\n".join((REPO / name).read_text() for name in some)


def is_there(path: str) -> bool:
    """A file or folder of the repository, by its path, its name or a pattern; or one that the code makes."""
    path = path.rstrip("/")
    folders = {parent.as_posix() for name in files() for parent in Path(name).parents}
    if any(fnmatch.fnmatch(name, path) or fnmatch.fnmatch(name, f"*/{path}") for name in (*files(), *folders)):
        return True
    return path.endswith((".json", ".conf")) and Path(path).name in sources()


@pytest.mark.parametrize("one", ALL, ids=names(ALL))
def test_every_path_exists(one: Document) -> None:
    ours = re.compile(
        r"(?:kdtree_patch|kernels|deploy|tests|docs|tools|\.ci)/[\w./*-]*|[\w./*-]+\.(?:py|cuh?|cpp|h|sh|md|json|toml|conf)"
    )
    missing = [span for span in one.spans() if ours.fullmatch(span) and not is_there(span)]
    for link in one.links():
        path, _, anchor = link.partition("#")
        target = (one.path.parent / path).resolve() if path else one.path
        if not target.exists() or (anchor and anchor not in Document(target).anchors()):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("one", ALL, ids=names(ALL))
def test_every_setting_make_target_and_option_exists(one: Document) -> None:
    assert set(re.findall(r"\bKDTREE_[A-Z_]*[A-Z]\b", one.text)) <= {*settings.VARIABLES}
    targets = {span.split()[1] for span in one.spans() if re.match(r"make [a-z-]+", span)}
    assert targets <= make_targets()
    others = ("pytest ", "git ", "pip ", "ssh ", "docker ", "journalctl ", "systemctl ", "nvidia-smi ")
    spans = [span for span in one.spans() if not span.startswith(others)]
    options = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}
    assert [option for option in options if option not in sources()] == []


@pytest.mark.parametrize("one", OF_USERS, ids=names(OF_USERS))
def test_commands_between_backticks_are_parsed_too(
    one: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for span in one.spans():
        if re.match(r"make [a-z]", span) and "…" not in span:
            target, *words = shlex.split(span)[1:]
            assert {word.partition("=")[0] for word in words} <= {*deploy_options.NAMES, "ARGS", "PYTHON", "TP"}, span
        elif match := re.match(r"(?:\S*/)?python -m kdtree_patch (\w+)(.*)", span):
            if match[2]:
                parse(span)
            else:
                assert match[1] in our_parser().format_help(), span


def make_targets() -> set[str]:
    (listed,) = re.findall(r"^\.PHONY: (.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    return set(listed.split())


# ----------------------------------------------------------------------------------------- what the documents must have


def test_every_setting_is_documented_with_its_values() -> None:
    rows = {spans_of(name)[0]: spans_of(values) for name, values, _ in README.table("## Settings")}
    assert tuple(rows) == settings.VARIABLES
    allowed = {
        "KDTREE_MODE": settings.MODES,
        "KDTREE_VALIDATE": settings.FLAGS,
        "KDTREE_SELFTEST": settings.FLAGS[::-1],
        "KDTREE_CONFIG": settings.CONFIGS,
        "KDTREE_FORWARD_MODES": settings.FORWARD_MODES,
        "KDTREE_LOG_LEVEL": settings.LOG_LEVELS,
    }
    assert {name: tuple(rows[name]) for name in allowed} == allowed


def test_every_make_target_and_word_of_deploy_is_documented() -> None:
    listed = [span for target, _, _ in README.table("## Make targets") for span in spans_of(target)]
    assert {span.removeprefix("make ") for span in listed} == make_targets()
    shown = subprocess.run(["make", "-s", "help"], cwd=REPO, capture_output=True, text=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == make_targets()
    _, _, below = README.text.partition("| word | default | meaning |\n|---|---|---|\n")
    rows = re.findall(r"^\| (.*?) \| (.*?)\| ", below.partition("\n\n")[0], re.MULTILINE)
    assert [name for words, _ in rows for name in spans_of(words)] == list(deploy_options.NAMES)
    options = deploy_options.Options.from_environ({"DEPLOY_HOST": "h1", "DEPLOY_UNIT": "u"})
    defaults = {spans_of(words)[0]: (spans_of(default) or [""])[-1] for words, default in rows}
    assert defaults["PREFIX"] == options.prefix and defaults["TIMEOUT"] == str(options.timeout)
    assert (defaults["DRY_RUN"], defaults["FORCE"]) == (str(int(options.dry_run)), str(int(options.force)))


def test_the_memory_that_the_server_run_needs_is_what_its_help_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        e2e.parse(["--help"])
    (needs,) = re.findall(r"one NVIDIA GPU with \d+ GB", " ".join(capsys.readouterr().out.split()))
    (row,) = [row for row in README.table("## Make targets") if row[0] == "`make e2e`"]
    assert row[2].startswith(needs)


def test_every_command_is_documented() -> None:
    every = set(re.findall(r"^    (\w+) ", our_parser().format_help(), re.MULTILINE))
    assert len(every) == 6
    text = "".join(one.text for one in ALL)
    assert [name for name in every if not re.search(rf"kdtree_patch {name}\b|make {name}\b", text)] == []


def documented_codes() -> Iterator[tuple[str, str]]:
    """Code and heading."""
    for heading in (
        "## Calls that are left to the stock kernel",
        "## Workers that stay stock",
        "## Kernels that are turned off",
    ):
        for row in LIMITS.table(heading):
            yield from ((code, heading) for code in spans_of(row[0]))


def test_every_reason_code_is_documented_and_none_that_is_not_there() -> None:
    assert {code for code, _ in documented_codes()} == said.codes().keys()
    pairs = list(documented_codes())
    assert len(pairs) == len(set(pairs))


def test_every_code_of_the_doctor_is_documented() -> None:
    assert said.judgements() - said.codes().keys() - {*OPERATIONS.spans()} == set()
    assert {"backend", "kv_dtype"} <= said.judgements()


def test_what_is_served_is_what_the_code_serves() -> None:
    rows = {row[0]: row[1] for row in README.table("## What is served")}
    targets = [divmod(int(target[3:]), 10) for target in compiling.GPU_TARGETS]
    assert rows["GPU"].startswith(f"compute capability {', '.join(f'{major}.{minor}' for major, minor in targets)};")
    assert f"{LATENT} + {ROPE} columns; 1 to {MAX_HEADS} heads" in rows["attention"]
    assert rows["drafts"].startswith(f"q_len 1 to {MAX_Q_LEN}:")
    for name, types in (("mask", contract.MASKS), ("indices", contract.INDICES)):
        assert rows[name].startswith(" or ".join(types)), name


def test_the_workspace_is_as_large_as_the_documents_say() -> None:
    a_worker = {}
    for name, config in CONFIGS.items():
        largest = config.variants[-1]
        # Two partial results, with a maximum and a sum for each row, and a row of cut_items.
        a_worker[name] = 2 * (largest.partial_bytes + largest.rows * 8) + 16
    small, large = a_worker["portable"], a_worker["hopper"]
    words = f"{small:,} bytes a multiprocessor, in the Hopper configuration of {large:,} (two partial results each;"
    assert f"{words} {small * 132 / 1e6:.0f} and {large * 132 / 1e6:.0f} MB on an H200)" in " ".join(
        LIMITS.text.split()
    )


@pytest.mark.parametrize(
    "dtype, unit, words", [(torch.bfloat16, 2.0**-8, "1.7e-3"), (torch.float16, 2.0**-11, "2.1e-4")]
)
def test_rounding_costs_what_the_document_says(dtype: torch.dtype, unit: float, words: str) -> None:
    numbers = torch.randn(1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cost = rel(numbers.to(dtype), numbers)
    assert "of 0.43 u, that is 1.7e-3 and 2.1e-4;" in " ".join(document("docs/kernel.md").text.split())
    assert cost == pytest.approx(0.43 * unit, rel=0.02) and cost == pytest.approx(float(words), rel=0.03)


def test_codes_are_found_where_they_are_written() -> None:
    """The finder finds: one of each way in which a code is given."""
    found = said.codes()
    for code, file in {
        "boot_failed": "plugin.py",  # stays_stock
        "bad_setting": "boot.py",  # in the words of a line
        "deterministic": "hook.py",  # an exception
        "compute_capability": "compile.py",  # returned
        "nvrtc_too_old": "compile.py",  # one of two
        "too_many_tiles": "route.py",  # decide
        "unexpected_arguments": "route.py",  # assigned
        "forward_mode": "route.py",  # counted
        "guard": "compare.py",  # by another name
        "guard_elsewhere": "compare.py",
        "validation_failed": "compare.py",  # beside its route
        "sinks": "contract.py",  # of the table
    }.items():
        assert found[code] == file


def test_every_log_line_is_documented_and_none_that_is_not_there() -> None:
    documented = [spans_of(row[0])[0] for row in OPERATIONS.table("## Log lines")]
    written = said.lines()
    assert len(written) > 20

    def covers(document: str, code: str) -> bool:
        # The last value of a line may have words of its own.
        return document == code or (code.endswith(" …") and document.startswith(code[:-1]))

    assert [line for line in written if not any(covers(other, line) for other in documented)] == []
    assert [line for line in documented if not any(covers(line, other) for other in written)] == []


def test_the_layer_line_has_the_form_that_is_documented() -> None:
    line = said.MADE_ELSEWHERE["…"]
    assert line is not None
    assert re.fullmatch(line.replace("…", r"\S+"), difference().line(56, None))


def test_what_the_code_says_of_the_documents_is_there() -> None:
    """Sections that messages send somebody to."""
    quoted = re.findall(r"""(docs/\w+\.md|README(?:\.md)?), "([^"]+)\"""", sources())
    assert len(quoted) >= 4
    for name, heading in quoted:
        path = name if name.endswith(".md") else f"{name}.md"
        assert f"# {heading}\n" in document(path).text, (name, heading)
    assert {report_judge._CALLS, report_judge._WORKERS} <= {f'{name}, "{heading}"' for name, heading in quoted}


# --------------------------------------------------------------------------------------------------- figures and tables


def test_figures_are_drawn_from_what_is_there_now() -> None:
    """If this fails: `make figures`."""
    drawn = {f"{name}.svg": figures.stamp(content) for name, content, _ in figures.pictures()}
    found = {path.name: path.read_text().splitlines()[1] for path in (REPO / "docs" / "figures").iterdir()}
    assert found == drawn


def test_tables_are_filled_from_what_is_there_now() -> None:
    """If this fails: `make figures`."""
    kinds = [kind for one in ALL for kind in re.findall(r"<!-- make figures: (\w+)", one.text)]
    assert sorted(kinds) == ["kernel", "server", "variants"]
    for one in ALL:
        assert tables.filled(one.text, REPO) == one.text


def test_the_table_of_a_server_says_what_its_figures_have_in_them(tmp_path: Path) -> None:
    """What is below 1, acceptance, and that stock's other setting is quicker: nothing that one has to know first."""

    def row(mode: str, prefix: int, stock: tuple[float, float], patched: tuple[float, float]) -> dict[str, Any]:
        both = {"stock": stock, "patched": patched}
        figures = {
            door: {"step_ms": ms, "tokens_per_step": tokens, "tokens_per_s": 1000 * tokens / ms}
            for door, (ms, tokens) in both.items()
        }
        times = figures["patched"]["tokens_per_s"] / figures["stock"]["tokens_per_s"]
        return {"mode": mode, "prefix": prefix, "bs": 1, **figures, "times": round(times, 2)}

    shares = {"share_stock": 0.81, "share_patched": 0.13}
    rows = [
        row("eager", 1024, (20.0, 2.0), (20.6, 2.0)),
        row("graph", 8192, (40.0, 2.4), (5.0, 2.7)) | shares,
        row("eager", 8192, (36.0, 2.4), (20.0, 2.4)),
    ]
    meta = {"versions": {"sglang": "0.5.12"}, "gpu": "G", "date": "D"}
    run = {"meta": meta, "verdict": [], "speed": {"layers": 24, "heads": 8, "draft_tokens": 16, "rows": rows}}
    lines = tables.server(run, "F")
    assert [line for line in lines if line.startswith("| 1,0") or line.startswith("| 8")] == [
        "| 1,024 | 1 |  |  |  | 0.97 |  |  |",
        "| 8,192 | 1 | 9.0 | 81% | 13% | 1.8 |  |  |",
    ]
    assert lines[-1] == (
        "The least figure is 0.97 (1,024, batch 1, without graphs); up to 3 % below 1 count as noise. "
        "Acceptance is in all of them, and of another text it is another. It differs most at 8,192, batch 1, with "
        "graphs: 2.40 tokens a step with stock and 2.70 patched; by the time of a step alone the 9.0 there would be "
        "8.0. At 8,192 stock takes longer with graphs than without: over stock without them the 9.0 at 8,192, batch 1, "
        "is 8.1."
    )


def test_every_figure_is_shown() -> None:
    shown = {Path(link).name for one in ALL for link in one.links() if link.endswith(".svg")}
    assert {path.name for path in (REPO / "docs" / "figures").iterdir()} - shown == set()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("docs", "kernels", "tools"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "README.md", tmp_path)
    return tmp_path


def test_make_figures_follows_its_sources(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another run, another schedule: other figures and tables. What is merely written otherwise changes nothing."""
    before = {path.name: path.read_text().splitlines()[1] for path in (copy / "docs" / "figures").iterdir()}
    change(copy / "docs/results/h200.json", r'"stock_us": 181.1', '"stock_us": 1810.9')
    change(copy / "kernels/verify_attn_flash.cu", "constexpr int kTileKeys = 32;", "constexpr int kTileKeys = 32; // x")
    change(copy / "kernels/verify_attn_flash.cu", "s.longer = line_tiles - s.share", "s.longer = 0 * s.share")
    assert figures.main(copy) == 0
    after = {path.name: path.read_text().splitlines()[1] for path in (copy / "docs" / "figures").iterdir()}
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} == {"h200.svg", "schedule.svg"}
    assert "| 1,811 us |" in (copy / "README.md").read_text()
    assert "README.md" in capsys.readouterr().out


def test_the_same_input_gives_the_same_figure(tmp_path: Path) -> None:
    name, content, draw = next(figures.pictures())
    for number in (1, 2):
        figures.save(content, draw, tmp_path / f"{number}.svg")
    assert (tmp_path / "1.svg").read_text() == (tmp_path / "2.svg").read_text()
    assert "<svg" in (tmp_path / "1.svg").read_text()


def test_make_figures_says_what_it_cannot_use(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "docs" / "results" / "a.json").write_text("{}")
    assert figures.main(copy) == 2
    assert "a.json is no" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["kernels docs/results/h200.json", "kernel", "variants docs/results/h200.json"])
def test_a_table_that_is_none_is_said(words: str) -> None:
    with pytest.raises(NotDone, match=f"there is no table <!-- make figures: {words} -->"):
        tables.filled(f"<!-- make figures: {words} -->\n<!-- end -->\n", REPO)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotDone, match=r"install g\+\+"):
        layout.read(REPO)
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(NotDone, match='CXX="\'g\\+\\+" is not a command; .*name a C\\+\\+17 compiler, or unset it'):
        layout.read(REPO)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
