"""sitecustomize.py and boot.py, in interpreters of their own: what they do to a process, and what they must never do.

SGLang is a stand-in with the real signatures (tests/stand_in.py). Each test counts or reads what the process has left
behind: standard output and error, the exit status, and files that a user's `sitecustomize` writes.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from kdtree_patch import boot
from kdtree_patch import compile as compiling
from kdtree_patch.settings import Settings
from tests import stand_in
from tests.stand_in import BACKEND, NEW, Drift
from tests.support.env import REPO

MODULE = "sglang.srt.layers.attention.triton_backend"
IMPORT = f"import sys, {MODULE} as backend; print('imported')"
FINDERS = "print(sum(type(f).__name__ == 'KdtreeBackendFinder' for f in sys.meta_path))"


def python(
    *arguments: str, path: tuple[Path | str, ...] = (REPO,), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter with `path` for PYTHONPATH and no KDTREE_* variable but those given.

    In a neutral directory: `-c` puts the current one on sys.path.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHON"))}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a user's own sitecustomize, which leaves a line in `runs` each time it is run."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"open({str(tmp_path / 'runs')!r}, 'a').write(__name__ + '\\n')\nimport sys\nMARK = 'theirs'\n"
    )
    return folder


def then(theirs: Path, code: str) -> None:
    with (theirs / "sitecustomize.py").open("a") as file:
        file.write(code + "\n")


def runs(theirs: Path) -> list[str]:
    file = theirs.parent / "runs"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    return stand_in.write(tmp_path / "sglang-stand-in", "0.5.23")


@pytest.fixture
def copy_of_ours(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(REPO / "kdtree_patch", folder / "kdtree_patch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "sitecustomize.py", folder)
    return folder


# A process that is not SGLang's.


def test_an_unrelated_process_is_left_alone() -> None:
    heavy = ("torch", "cupy", "wrapt", "kdtree_patch", "logging", "importlib.metadata")
    done = python("-c", f"import sys; print([name for name in {heavy} if name in sys.modules]); {FINDERS}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n1\n", "")


def test_an_unrelated_process_starts_as_fast_as_before(tmp_path: Path) -> None:
    """Under 20 ms more. CPU time of the child, medians of runs taken in turn: a busy machine must not decide this."""

    def milliseconds(path: tuple[Path, ...]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python("-c", "pass", path=path).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3

    pairs = [(milliseconds((tmp_path,)), milliseconds((REPO,))) for _ in range(21)]
    without, with_ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert with_ours - without < 20


def test_an_unrelated_process_needs_no_memory_to_speak_of(tmp_path: Path) -> None:
    """The most that it ever had resident, in KiB: with ours less than 1 MiB more."""
    code = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"

    def peak(path: tuple[Path, ...]) -> int:
        return int(python("-c", code, path=path).stdout)

    pairs = [(peak((tmp_path,)), peak((REPO,))) for _ in range(5)]
    without, with_ours = (statistics.median(sizes) for sizes in zip(*pairs, strict=True))
    print(f"{without} and {with_ours} KiB")
    assert with_ours - without < 1024


def test_isolated_interpreters_never_load_it() -> None:
    for flag in ("-I", "-E", "-S"):
        done = python(flag, "-c", f"import sys; {FINDERS}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_no_argv() -> None:
    """Embedded interpreters run sitecustomize before they set sys.argv."""
    code = f"import sys; del sys.argv; sys.path.insert(0, {str(REPO)!r}); import sitecustomize; {FINDERS}"
    done = python("-S", "-c", code, path=())
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


# The user's own sitecustomize.


def test_theirs_runs_once_under_its_own_name(theirs: Path) -> None:
    code = "import sys, sitecustomize as s; print(s.MARK, s is sys.modules['sitecustomize'], s.__spec__.name)"
    done = python("-c", code, path=(REPO, theirs))
    assert (done.returncode, done.stdout, done.stderr) == (0, "theirs True sitecustomize\n", "")
    assert runs(theirs) == ["sitecustomize"]


@pytest.mark.parametrize(
    "failure",
    [
        "raise ValueError('boom')",
        "import a_module_that_is_not_there",
        "raise ImportError('half of it', name='sitecustomize')",
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
        "syntax error",
    ],
)
def test_theirs_fails_as_it_would_without_us(theirs: Path, failure: str) -> None:
    then(theirs, failure)
    natively = python("-c", "print('up')", path=(theirs,))
    count = len(runs(theirs))
    chained = python("-c", "print('up')", path=(REPO, theirs))
    assert len(runs(theirs)) == 2 * count
    assert (chained.returncode, chained.stdout) == (natively.returncode, natively.stdout)
    # Tracebacks differ by our own frame, which is in the middle; how they end does not.
    assert chained.stderr.splitlines()[-1:] == natively.stderr.splitlines()[-1:]


def test_theirs_raising_does_not_disarm_us(theirs: Path, sglang: Path) -> None:
    then(theirs, "raise ValueError('boom')")
    done = python("-c", IMPORT, path=(REPO, theirs, sglang), KDTREE_MODE="onn")
    assert "Error in sitecustomize" in done.stderr and "ValueError: boom" in done.stderr
    assert "reason=bad_setting" in done.stderr


def test_theirs_first_means_ours_is_never_loaded(theirs: Path) -> None:
    done = python("-c", f"import sys; {FINDERS}; print({str(REPO)!r} in sys.path)", path=(theirs, REPO))
    assert (done.stdout, done.stderr) == ("0\nTrue\n", "")
    assert runs(theirs) == ["sitecustomize"]


def test_theirs_first_may_chain_to_ours(theirs: Path, tmp_path: Path) -> None:
    """As New Relic's and ddtrace's do. Theirs must not run again because of it, and a third one must run once."""
    then(
        theirs,
        "import importlib.machinery, importlib.util\n"
        "here = __file__.rpartition('/')[0]\n"
        "spec = importlib.machinery.PathFinder.find_spec('sitecustomize', [p for p in sys.path if p != here])\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n",
    )
    third = tmp_path / "third"
    third.mkdir()
    (third / "sitecustomize.py").write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('third\\n')")
    done = python("-c", f"import sys; {FINDERS}", path=(theirs, REPO, third))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert runs(theirs) == ["sitecustomize", "third"]


def test_ours_twice(theirs: Path, sglang: Path, copy_of_ours: Path, tmp_path: Path) -> None:
    """A copy, and the same folder under another name. Each line once, theirs once, and the first copy is the one."""
    (tmp_path / "link").symlink_to(REPO)
    path = (REPO, tmp_path / "link", copy_of_ours, theirs, sglang)
    code = f"import sys; {FINDERS}\n{IMPORT}; print(sys.modules['kdtree_patch'].__file__)"
    done = python("-c", code, path=path, KDTREE_MODE="onn")
    assert done.stdout == f"1\nimported\n{REPO / 'kdtree_patch' / '__init__.py'}\n"
    assert done.stderr.count("[kdtree]") == 1
    assert runs(theirs) == ["sitecustomize"]


def in_site_packages(tmp_path: Path, line: str) -> Path:
    """A folder that stands for site-packages: Python runs the line of its .pth file before any sitecustomize."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "editable.pth").write_text(line + "\n")
    return site


def with_site(site: Path, *path: Path, code: str = "pass", **variables: str) -> subprocess.CompletedProcess[str]:
    """An interpreter that reads the .pth files of `site`, then runs sitecustomize, as `site` does both."""
    start = f"import site; site.addsitedir({str(site)!r}); site.execsitecustomize(); {code}"
    return python("-S", "-c", start, path=path, **variables)


# As setuptools writes them for an editable install.
FINDER = """
import importlib.util, sys
class EditableFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "sitecustomize" and path is None:
            return importlib.util.spec_from_file_location(name, {file!r})
sys.meta_path.{place}EditableFinder)
"""


@pytest.mark.parametrize("mode", ["on", "off"])
def test_theirs_from_a_finder_of_its_own(theirs: Path, tmp_path: Path, mode: str) -> None:
    site = in_site_packages(tmp_path, "import editable_finder")
    finder = FINDER.format(file=str(theirs / "sitecustomize.py"), place="append(")
    (site / "editable_finder.py").write_text(finder)
    code = f"import sys; print(sys.modules['sitecustomize'].MARK); {FINDERS}"
    done = with_site(site, REPO, code=code, KDTREE_MODE=mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"theirs\n{int(mode == 'on')}\n", "")
    assert runs(theirs) == ["sitecustomize"]


def test_theirs_on_the_path_comes_before_that_of_a_later_finder(theirs: Path, tmp_path: Path) -> None:
    site = in_site_packages(tmp_path, "import editable_finder")
    other = tmp_path / "other.py"
    other.write_text("raise RuntimeError('a second one')")
    (site / "editable_finder.py").write_text(FINDER.format(file=str(other), place="append("))
    done = with_site(site, REPO, theirs)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert runs(theirs) == ["sitecustomize"]


def test_theirs_from_a_finder_before_the_path_may_chain_to_ours(theirs: Path, tmp_path: Path) -> None:
    """Such a finder is asked before ours could be found, so theirs is the one that runs already."""
    site = in_site_packages(tmp_path, "import editable_finder")
    finder = FINDER.format(file=str(theirs / "sitecustomize.py"), place="insert(0, ")
    (site / "editable_finder.py").write_text(finder)
    then(
        theirs,
        "import importlib.machinery, importlib.util\n"
        "spec = importlib.machinery.PathFinder.find_spec('sitecustomize')\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
    )
    done = with_site(site, REPO, code=f"import sys; {FINDERS}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert runs(theirs) == ["sitecustomize"]


def test_theirs_from_a_later_finder_may_load_ours_by_hand(theirs: Path, tmp_path: Path) -> None:
    site = in_site_packages(tmp_path, "import editable_finder")
    finder = FINDER.format(file=str(theirs / "sitecustomize.py"), place="append(")
    (site / "editable_finder.py").write_text(finder + "sys.meta_path.append(object())  # which finds nothing\n")
    then(
        theirs,
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('ours', {str(REPO / 'sitecustomize.py')!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
    )
    done = with_site(site, code=f"import sys; {FINDERS}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert runs(theirs) == ["sitecustomize"]


@pytest.mark.parametrize("place", ["append(", "insert(0, "])
def test_ours_from_a_finder_of_its_own(theirs: Path, tmp_path: Path, place: str) -> None:
    """As when this repository is itself installed as editable: not run again, not for ever, and theirs as ever."""
    site = in_site_packages(tmp_path, "import editable_finder")
    (site / "editable_finder.py").write_text(FINDER.format(file=str(REPO / "sitecustomize.py"), place=place))
    done = with_site(site, REPO, theirs, code=f"import sys; {FINDERS}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert runs(theirs) == ["sitecustomize"]
    # Our folder on the path, but not through PYTHONPATH: it stays there, so ours could be found again and again.
    start = f"import site, sys; sys.path.append({str(REPO)!r}); site.addsitedir({str(site)!r})"
    done = python("-S", "-c", f"{start}; site.execsitecustomize(); {FINDERS}", path=())
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_folder_named_sitecustomize_is_none(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize").mkdir()
    done = python("-c", "print('up')", path=(REPO, tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "up\n", "")


# What the service sees of our folder.


@pytest.mark.parametrize("mode", ["on", "off"])
def test_only_the_package_can_be_imported_from_our_folder(mode: str) -> None:
    """A folder `kernels` on sys.path makes transformers fail: it takes it for the package of that name."""
    code = (
        "import importlib.util as u, kdtree_patch; print(kdtree_patch.__file__)\n"
        "print([name for name in ('kernels', 'tests', 'docs', 'deploy', 'tools') if u.find_spec(name)])"
    )
    done = python("-c", code, KDTREE_MODE=mode)
    assert done.stdout == f"{REPO / 'kdtree_patch' / '__init__.py'}\n[]\n", done.stderr


def test_a_folder_that_pythonpath_does_not_name_stays() -> None:
    """Somebody who copies the files into site-packages must not lose site-packages."""
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); import sitecustomize; print({str(REPO)!r} in sys.path)"
    assert python("-S", "-c", code, path=()).stdout == "True\n"


def test_spawned_and_forked_children_are_armed_too(tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        f"def child(): {FINDERS.replace('print', 'sys.stdout.write(str')}); import kdtree_patch\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork'):\n"
        "        process = multiprocessing.get_context(method).Process(target=child)\n"
        "        process.start(); process.join(); assert process.exitcode == 0\n"
    )
    done = python("-u", str(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "11", "")


# The import of the backend. Whatever happens on our side, it succeeds, and there is one line.


def test_the_backend_is_wrapped_in_silence(sglang: Path) -> None:
    code = (
        f"{IMPORT}; cls = backend.TritonAttnBackend\n"
        "print(type(cls.__init__).__name__, type(cls.forward_extend).__name__, type(cls.forward_decode).__name__)\n"
        f"print(cls.__name__, cls.__module__); {FINDERS}"
    )
    done = python("-c", code, path=(REPO, sglang))
    assert done.stderr == ""
    wrapped = "FunctionWrapper"
    # An attribute read off the class is bound, so it shows as wrapt's bound wrapper.
    assert done.stdout == f"imported\nBound{wrapped} Bound{wrapped} function\nTritonAttnBackend {MODULE}\n0\n"


@pytest.mark.parametrize("mode", ["off", " OFF "])
def test_off_is_complete(theirs: Path, sglang: Path, mode: str) -> None:
    kind = "type(backend.TritonAttnBackend.forward_extend).__name__"
    code = f"{IMPORT}; print({kind}, [name for name in ('wrapt', 'kdtree_patch') if name in sys.modules])"
    done = python("-c", code, path=(REPO, theirs, sglang), KDTREE_MODE=mode)
    assert (done.stdout, done.stderr) == ("imported\nfunction []\n", "")
    assert runs(theirs) == ["sitecustomize"]


def assert_declined(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("[kdtree] ") and "declined reason=" in lines[0]
    assert lines[0].endswith("; the service runs stock")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("wrapt", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'wrapt'\", name='wrapt')", "No module named 'wrapt'"),
        ("raise AttributeError('half of it')", "AttributeError: half of it"),
        ("syntax error", "SyntaxError: "),
        ("class FunctionWrapper: pass", "register_post_import_hook"),
        ("def register_post_import_hook(hook, name): pass", "FunctionWrapper"),
    ],
)
@pytest.mark.parametrize("level", ["info", "error"])
def test_no_wrapt_that_would_do(tmp_path: Path, sglang: Path, wrapt: str, words: str, level: str) -> None:
    (tmp_path / "wrapt.py").write_text(wrapt)
    done = python("-c", IMPORT, path=(REPO, tmp_path, sglang), KDTREE_LOG_LEVEL=level)
    assert_declined(done, "reason=wrapt_missing", words, "pip install wrapt")


def test_a_wrapt_that_wants_to_end_the_process(tmp_path: Path, sglang: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise SystemExit(3)")
    assert_declined(python("-c", IMPORT, path=(REPO, tmp_path, sglang)), "reason=package_broken", "SystemExit: 3")


@pytest.mark.parametrize("file", ["boot.py", "hook.py"])
def test_control_c_passes(copy_of_ours: Path, sglang: Path, file: str) -> None:
    (copy_of_ours / "kdtree_patch" / file).write_text("raise KeyboardInterrupt")
    done = python("-c", IMPORT, path=(copy_of_ours, sglang))
    assert done.returncode != 0 and done.stdout == "" and done.stderr.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("__init__.py", "raise RuntimeError('torn')", "package_broken"),
        ("boot.py", "this is not python", "package_broken"),
        ("settings.py", None, "package_broken"),
        ("boot.py", "class Odd(BaseException): pass\nraise Odd('odd\\nand long')", "package_broken"),
        ("boot.py", "raise SystemExit(3)", "package_broken"),
        ("contract.py", "raise RuntimeError('torn')", "hook_failed"),
        ("contract.py", "raise SystemExit(3)", "hook_failed"),
        ("hook.py", "import a_module_that_is_not_there", "hook_failed"),
    ],
)
def test_our_own_package_broken(copy_of_ours: Path, sglang: Path, file: str, text: str | None, reason: str) -> None:
    broken = copy_of_ours / "kdtree_patch" / file
    broken.unlink() if text is None else broken.write_text(text)
    assert_declined(python("-c", IMPORT, path=(copy_of_ours, sglang)), f"reason={reason}")


def test_our_own_package_gone(copy_of_ours: Path, sglang: Path) -> None:
    shutil.rmtree(copy_of_ours / "kdtree_patch")
    assert_declined(python("-c", IMPORT, path=(copy_of_ours, sglang)), "reason=package_broken", "kdtree_patch")


def test_no_stderr_to_complain_on(copy_of_ours: Path, sglang: Path) -> None:
    (copy_of_ours / "kdtree_patch" / "boot.py").write_text("raise RuntimeError('torn')")
    code = f"import sys; sys.stderr.close()\n{IMPORT}"
    done = python("-c", code, path=(copy_of_ours, sglang))
    assert (done.returncode, done.stdout) == (0, "imported\n")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("KDTREE_MODE", "onn", "on, shadow, off"), ("KDTREE_MOED", "on", "nearest is KDTREE_MODE")],
)
def test_a_bad_setting(sglang: Path, variable: str, value: str, words: str) -> None:
    done = python("-c", f"{IMPORT}", path=(REPO, sglang), **{variable: value})
    assert_declined(done, "[kdtree] ERROR ", "reason=bad_setting", f"{variable}='{value}'", words)


def test_a_bad_setting_is_not_the_business_of_other_processes() -> None:
    assert python("-c", "pass", KDTREE_MODE="onn").stderr == ""


def test_an_unknown_sglang(tmp_path: Path) -> None:
    drift = Drift(NEW, "identity_kv_indices=False", "identity_kv_indices=False, q_descale=None")
    root = stand_in.write(tmp_path, "0.5.23", drift)
    code = f"{IMPORT}; assert type(backend.TritonAttnBackend.forward_extend).__name__ == 'function'"
    done = python("-c", code, path=(REPO, root))
    assert_declined(done, "reason=contract", "extend_attention_fwd(q_descale): unknown", " sglang=0.5.23 ")


RELOADS = {
    "reload": "import importlib; backend = importlib.reload(backend)",
    "import again": f"del sys.modules[{MODULE!r}]; import {MODULE} as backend",
}


@pytest.mark.parametrize("how", RELOADS)
def test_a_reload_runs_stock(sglang: Path, how: str) -> None:
    """wrapt calls its hook once. The new class is SGLang's own, and works; the old one keeps what it was given."""
    code = (
        f"{IMPORT}; old = backend.TritonAttnBackend; {RELOADS[how]}; new = backend.TritonAttnBackend\n"
        "print(new is old, type(new.forward_extend).__name__, type(old.forward_extend).__name__)\n"
        "new(None)"
    )
    done = python("-c", code, path=(REPO, sglang))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "imported\nFalse function BoundFunctionWrapper\n"


def test_an_import_that_fails_fails_as_before_and_may_be_tried_again(tmp_path: Path) -> None:
    once = "import os\nif os.environ.pop('FAIL', ''): raise ImportError('no sgl_kernel')\nclass TritonAttnBackend"
    root = stand_in.write(tmp_path, "0.5.23", Drift(BACKEND, "class TritonAttnBackend", once))
    code = f"try: import {MODULE}\nexcept ImportError as error: print(error)\n{IMPORT}"
    done = python("-c", code, path=(REPO, root), FAIL="1", KDTREE_MODE="onn")
    assert done.stdout == "no sgl_kernel\nimported\n"
    assert done.stderr.count("reason=bad_setting") == 1


def test_a_hook_of_theirs_on_the_same_module_runs_as_well(theirs: Path, sglang: Path) -> None:
    then(theirs, f"import wrapt\n@wrapt.when_imported({MODULE!r})\ndef hook(module): print('theirs', end=' ')")
    code = f"{IMPORT}; print(type(backend.TritonAttnBackend.forward_extend).__name__)"
    done = python("-c", code, path=(REPO, theirs, sglang))
    assert (done.stdout, done.stderr) == ("theirs imported\nBoundFunctionWrapper\n", "")


# Compiling ahead.


class FakeJob:
    made: list[FakeJob] = []

    def __init__(self, targets: list[str], cache_dir: Path | None):
        self.targets, self.cache_dir, self.started = targets, cache_dir, False
        self.made.append(self)

    def start(self) -> None:
        self.started = True


@pytest.mark.parametrize(
    ("worker", "targets", "compiles"), [(True, ["sm_120"], True), (False, ["sm_120"], False), (True, [], False)]
)
def test_only_a_worker_with_gpus_compiles_ahead(
    monkeypatch: pytest.MonkeyPatch, worker: bool, targets: list[str], compiles: bool
) -> None:
    FakeJob.made.clear()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object() if worker else None)
    monkeypatch.setattr(compiling, "visible_targets", lambda config: targets)
    monkeypatch.setattr(compiling, "CompileJob", FakeJob)
    job = boot.start_compiling(Settings(cache_dir=Path("/cache")))
    assert [job] == (FakeJob.made if compiles else [None])
    if compiles:
        assert FakeJob.made[0].started and FakeJob.made[0].targets == targets
        assert FakeJob.made[0].cache_dir == Path("/cache")


@pytest.mark.parametrize(
    ("words", "pool"),
    [
        ("", None),
        ("--kv-cache-dtype fp8_e4m3", "fp8_e4m3"),
        ("--kv-cache-dtype=fp8_e5m2", "fp8_e5m2"),
        ("--kv-cache-dtype fp8_e4m3 --kv-cache-dtype=auto", None),
        ("--kv-cache-dtype fp4_e2m1", None),
        ("--kv-cache-dtype", None),
    ],
)
def test_the_pool_that_the_service_was_started_with_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch, words: str, pool: str | None
) -> None:
    """A spawned process has the words of the first one."""
    FakeJob.made.clear()
    monkeypatch.setattr("multiprocessing.parent_process", object)
    monkeypatch.setattr(compiling, "visible_targets", lambda config: ["sm_120", "sm_89"])
    monkeypatch.setattr(compiling, "CompileJob", FakeJob)
    monkeypatch.setattr("sys.argv", ["launch_server.py", *words.split(), "--tp", "8"])
    boot.start_compiling(Settings())
    assert FakeJob.made[0].targets == [compiling.with_pool(target, pool) for target in ("sm_120", "sm_89")]
