"""docs/security.md: every answer has its tests, and those that have no better home are here."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.host import release
from tests.support.env import REPO
from tests.support.named_tests import missing
from tests.support.small_sources import CUDA_SOURCE, kernels_folder

PAGE = (REPO / "docs" / "security.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| threat ")]
# What runs in a service, and what runs on a host as root. `deploy` itself, on the operator's machine, is pyinfra's
# client: its commands are strings for a shell over there, and tests/test_deploy_words.py is about their words.
IN_SERVICE = [REPO / "sitecustomize.py", *sorted((REPO / "kdtree_patch").glob("*.py"))]
ON_HOST = sorted((REPO / "deploy" / "host").glob("*.py"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_every_answer_has_its_tests(row: str) -> None:
    *_, tests, _ = row.split("|")
    named = re.findall(r"`tests/([^`]+)`", tests)
    assert named and missing(named) == []


def test_the_page_has_the_threats() -> None:
    assert len(ROWS) >= 12


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Each call of a file, by the dotted name of what is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", [*IN_SERVICE, *ON_HOST], ids=lambda path: str(path.relative_to(REPO)))
def test_nothing_that_is_read_becomes_code(path: Path) -> None:
    assert imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "code", "yaml"} == set()
    readers = {"eval", "exec", "compile", "torch.load", "torch.jit.load", "np.load", "numpy.load"}
    assert {name for name, _ in calls(path)} & readers == set()


@pytest.mark.parametrize("path", [*IN_SERVICE, *ON_HOST], ids=lambda path: str(path.relative_to(REPO)))
def test_no_shell_is_started(path: Path) -> None:
    for name, call in calls(path):
        assert name not in {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}, name
        assert not any(keyword.arg == "shell" for keyword in call.keywords), ast.unparse(call)


HOSTILE = """
import sys
from pathlib import Path
from kdtree_patch import boot
from kdtree_patch.compile import CompileJob
from kdtree_patch.settings import Settings
settings = Settings.from_environ(__import__("os").environ)
path = CompileJob(["sm_80"], settings.cache_dir, Path(sys.argv[1])).start().result("sm_80")
print(path.read_bytes()[:4])
"""


def test_nothing_from_the_environment_reaches_a_shell(tmp_path: Path) -> None:
    """A worker's compilation, in the compiling process and out of it, where everything that it reads is a command."""
    command = f"$(touch {tmp_path}/pwned);`touch {tmp_path}/pwned`;touch {tmp_path}/pwned #"
    names = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "CUPY_CACHE_DIR", "CUDA_PATH", "CUDA_HOME", "CXX", "CC", "NVCC")
    names += ("NVCC_APPEND_FLAGS", "CUPY_NVRTC_OPTIONS", "CXXFLAGS", "LD_PRELOAD", "SHELL", "PS4", "BASH_ENV", "ENV")
    environment = {
        **os.environ,
        **dict.fromkeys(names, command),
        "PYTHONPATH": f"{REPO}{os.pathsep}/{command.replace(':', '')}",
        "KDTREE_CACHE_DIR": f"{tmp_path}/cache {command.replace('/', '_')}",
    }
    kernels = kernels_folder(tmp_path / "kernels $(touch pwned)", CUDA_SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(kernels)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith(r"b'\x7fELF'"), done.stderr
    assert list(tmp_path.rglob("pwned")) == []


def test_of_a_release_the_service_may_write_to_its_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a transaction puts it in place, for a service of uid 65534. Only root may give a folder away: here it is noted
    what is given.
    """
    given: dict[int, tuple[int, int]] = {}

    def give(descriptor: int, user_id: int, group_id: int) -> None:
        given[os.fstat(descriptor).st_ino] = (user_id, group_id)

    monkeypatch.setattr(os, "fchown", give)
    folder = tmp_path / "releases" / "r1"
    (folder / "kdtree_patch").mkdir(parents=True)
    (folder / "cache").mkdir()
    (folder / "kdtree_patch" / "boot.py").write_text("")
    release.own_cache(folder, 65534, 65534)
    writable = []
    for path in sorted(folder.rglob("*")):
        info = path.stat()
        if info.st_ino in given or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            writable.append(path.relative_to(folder).as_posix())
    assert writable == ["cache/65534"] and [*given.values()] == [(65534, 65534)]
    assert stat.S_IMODE((folder / "cache" / "65534").stat().st_mode) == 0o700
