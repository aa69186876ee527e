"""What surrounds the package: the command line as a whole, tools/setup.sh, and the GPU suite where there is no GPU."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kdtree_patch import __main__ as command_line
from kdtree_patch import bench, compile_command, demo, doctor, report, selftest_command
from tests.support.env import REPO


def start(*command: object, cwd: Path, stdout: int = subprocess.PIPE, **variables: object) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHON"))}
    env |= {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "command", [[], ["doctor"], ["demo"], ["compile"], ["selftest"], ["bench"], ["report"]], ids=str
)
def test_help_needs_only_the_standard_library(command: list[str], tmp_path: Path) -> None:
    """-S: without site-packages."""
    process = start(sys.executable, "-S", "-m", "kdtree_patch", *command, "--help", cwd=tmp_path, PYTHONPATH=REPO)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert output.startswith("usage: python -m kdtree_patch") and error == ""


@pytest.mark.parametrize("arguments", [["compile", "--arch", "host", "--json"], ["--help"]], ids=str)
def test_reader_that_has_gone_is_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    variables = dict(PYTHONPATH=REPO, CXX="no-such-compiler", KDTREE_CACHE_DIR=tmp_path / "cache")
    process = start(sys.executable, "-m", "kdtree_patch", *arguments, cwd=tmp_path, stdout=writer, **variables)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


# --------------------------------------------------------------------------------------------------------------- set-up


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which everything is set up, as far as tools/setup.sh can tell."""
    folder = tmp_path / "checkout"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(REPO / "tools" / "setup.sh", folder / "tools")
    for name in ("requirements", "requirements-dev", "requirements-gpu"):
        (folder / f"{name}.txt").touch()
    (folder / "constraints.txt").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    nothing = subprocess.run(["cksum"], input="", capture_output=True, text=True, check=True).stdout
    (folder / ".venv" / ".installed").write_text(nothing)
    for release in ("0.5.12", "0.5.23"):
        record = folder / ".venv" / f"sglang-{release}" / f"sglang-{release}.dist-info" / "RECORD"
        record.parent.mkdir(parents=True)
        record.touch()
    return folder


def set_up(checkout: Path, **variables: object) -> tuple[int, str]:
    process = start("tools/setup.sh", cwd=checkout, **variables)
    output, error = process.communicate(timeout=60)
    return process.returncode, output + error


def test_set_up_has_nothing_to_do(checkout: Path) -> None:
    assert set_up(checkout) == set_up(checkout, PYTHON="") == (0, "")


@pytest.mark.parametrize("same", [sys.executable, ".venv/bin/python"], ids=["its own", "itself"])
def test_python_that_the_environment_was_made_with_may_be_named(same: str, checkout: Path) -> None:
    assert set_up(checkout, PYTHON=same) == (0, "")


def test_another_python_than_the_environments_is_not_ignored(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "python3.12"
    other.write_text("#!/bin/sh\necho /usr/bin/python3.12\n")
    other.chmod(0o755)
    status, said = set_up(checkout, PYTHON=other)
    assert status == 1
    assert said.startswith(f"error: PYTHON={other} is /usr/bin/python3.12, but .venv was made with /")
    assert said.endswith(": delete .venv, or leave PYTHON out.\n") and said.count("\n") == 1


def test_python_that_does_not_exist_is_not_ignored(checkout: Path) -> None:
    assert set_up(checkout, PYTHON="/nonexistent/python") == (
        1,
        "error: PYTHON=/nonexistent/python is missing: name a Python 3.10 to 3.13, or leave PYTHON out.\n",
    )


# --------------------------------------------------------------------------------------------------------- CONTRIBUTING

CONTRIBUTING = (REPO / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^(?: {4}){1,2}(\S.*)$", CONTRIBUTING, re.MULTILINE)
INLINE = re.findall(r"`([^`\n]+)`", CONTRIBUTING)
LINES = [line for line in dict.fromkeys([*BLOCKS, *INLINE]) if re.match(r"make |\.ci/|\.venv/bin/|PYTHONPATH=", line)]
PYTEST = [line for line in LINES if " -m pytest " in line]
OURS = [line for line in LINES if " -m kdtree_patch " in line]
MAKE = [line for line in LINES if line.startswith("make ")]


def test_every_command_of_contributing_is_looked_at() -> None:
    rest = [line for line in LINES if line not in [*PYTEST, *OURS, *MAKE, ".ci/run"]]
    assert rest == [] and len(PYTEST) > 5 and len(OURS) > 3 and len(MAKE) > 6
    assert os.access(REPO / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("line", PYTEST)
def test_tests_that_contributing_names_are_there(line: str) -> None:
    words = shlex.split(line)[1:]
    done = subprocess.run(
        [sys.executable, *words, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=REPO, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    files = [word for word in words if word.endswith(".py")]
    # Of each file that is named there is a test: one that has been renamed would only shorten the list.
    assert [file for file in files if f"{file}::" not in done.stdout] == []


@pytest.mark.parametrize("line", OURS)
def test_commands_that_contributing_names_are_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for module in (bench, compile_command, demo, doctor, report, selftest_command):
        monkeypatch.setattr(module, "run", lambda arguments: ran.append(arguments.command) or 0)
    words = line.split(" -m kdtree_patch ")[1].split()
    monkeypatch.setattr(sys, "argv", ["kdtree_patch", *words])
    assert command_line.run_command() == 0 and ran == words[:1]


@pytest.mark.parametrize("line", MAKE)
def test_targets_that_contributing_names_are_there(line: str) -> None:
    done = subprocess.run(
        [*shlex.split(line), "--dry-run"],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_files_and_names_of_contributing_are_there() -> None:
    files = [
        word for word in INLINE if re.fullmatch(r"[\w./-]+/[\w.-]+/?|[\w-]+\.(md|txt|py)", word) and " " not in word
    ]
    assert len(files) > 10
    assert [name for name in files if not name.startswith(".venv") and not (REPO / name).exists()] == []
    names = [word for word in INLINE if re.fullmatch(r"[A-Z][A-Z_]{3,}|[a-z]+_[a-z_]+", word)]
    text = "\n".join(path.read_text() for path in [*REPO.glob("kdtree_patch/*.py"), *REPO.glob("t*/**/*.[ps][yh]")])
    assert len(names) > 8 and [name for name in names if name not in text] == []


# ------------------------------------------------------------------------------------------------------------ GPU suite


def test_gpu_suite_without_a_gpu_says_so_once() -> None:
    options = ["-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    process = start(sys.executable, "-m", "pytest", *options, cwd=REPO, CUDA_VISIBLE_DEVICES="")
    output, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert (output + error).count("the GPU suite needs an NVIDIA GPU") == 1
    assert "Traceback" not in output + error
