"""The second door: the wheel, what is in it, and SGLang's own loader of plugins on it."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kdtree_patch import __version__, boot
from tests import stand_in
from tests.support.env import RELEASES, REPO, child_env, sglang_dir
from tests.test_doctor import Host, assert_reason, fact

MODULE = boot.BACKEND_MODULE
# Each start of SGLang's takes ten seconds, so most things are tried on one release.
NEWEST = RELEASES[-1]
LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"
WRAPPED = f"""
import {MODULE} as backend
def wrappers(method):
    count = 0
    while method is not None:
        count += getattr(getattr(method, "_self_wrapper", None), "__module__", "") == "kdtree_patch.hook"
        method = getattr(method, "__wrapped__", None)
    return count
methods = vars(backend.TritonAttnBackend)
print(wrappers(methods["__init__"]), wrappers(methods["forward_extend"]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files, as setuptools leaves some of its own beside them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("kdtree_patch", "kernels"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "sitecustomize.py"):
        shutil.copy(REPO / name, folder)
    return folder


def build(folder: Path) -> Path:
    shutil.rmtree(folder / "out", ignore_errors=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "out"), str(folder))
    (built,) = (folder / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """Of the second of two builds: what is gone since the first does not go along."""
    gone = [checkout / "kdtree_patch" / "gone.py", checkout / "kernels" / "host" / "gone.h"]
    for path in gone:
        path.touch()
    assert sum("gone" in name for name in zipfile.ZipFile(build(checkout)).namelist()) == len(gone)
    for path in gone:
        path.unlink()
    return build(checkout)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def python(code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = child_env(None, variables, patched=False) | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("[kdtree]")]


def test_the_wheel_has_the_package_and_the_kernels_and_nothing_else(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(REPO).as_posix() for path in (REPO / "kernels").rglob("*") if path.suffix}
    modules = {f"kdtree_patch/{path.name}" for path in (REPO / "kdtree_patch").glob("*.py")}
    inside = {name for name in files if ".dist-info/" not in name}
    assert inside == modules | {f"kdtree_patch/{name}" for name in sources if "__pycache__" not in name}


def test_the_wheel_says_its_version_and_its_licence(wheel: Path) -> None:
    """The version of the package, in the name of the file and within; the text of the licence, not its name alone."""
    archive = zipfile.ZipFile(wheel)
    info = f"kdtree_patch-{__version__}.dist-info"
    assert wheel.name == f"kdtree_patch-{__version__}-py3-none-any.whl"
    facts = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert (facts["Version"], facts["License-Expression"]) == (__version__, "Apache-2.0")
    assert facts.get_all("License-File") == ["LICENSE"]
    assert archive.read(f"{info}/licenses/LICENSE") == (REPO / "LICENSE").read_bytes()
    assert b"Apache License\n                           Version 2.0" in (REPO / "LICENSE").read_bytes()


@pytest.fixture(scope="module", params=["cuda12", "cuda13"])
def extra(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of the extra, and where the folder is installed with it, from an index that has two wheels."""
    index, site = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("site") / "site"
    for name, version in (("wrapt", "1.16"), ("cupy-cuda12x", "13.6"), ("cupy-cuda13x", "13.6")):
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as file:
            file.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{stem}.dist-info/RECORD", "")
    only_there = ("--no-build-isolation", "--no-index", "--find-links", str(index))
    pip("install", *only_there, "--target", str(site), f"{checkout}[{request.param}]")
    return request.param, site


def test_an_extra_brings_wrapt_and_cupy(extra: tuple[str, Path]) -> None:
    name, site = extra
    brought = {one.metadata["Name"] for one in importlib.metadata.distributions(path=[str(site)])}
    assert brought == {"kdtree-patch", "wrapt", f"cupy-{name}x"}


def test_nothing_of_the_package_is_left(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, as pip uninstalls from one alone."""
    venv.create(tmp_path / "venv")
    there = ("--python", str(tmp_path / "venv"))
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    pip(*there, "install", "--no-deps", "--no-index", str(wheel))
    assert (site / "kdtree_patch" / "kernels").is_dir()
    pip(*there, "uninstall", "--yes", "kdtree-patch")
    assert list(site.glob("kdtree*")) == []


def test_the_version_is_in_one_place() -> None:
    assert 'dynamic = ["version"]' in (REPO / "pyproject.toml").read_text()
    (first,) = re.findall(r"^## \[(.+?)\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert first == __version__


def test_the_kernel_compiles_and_is_right_from_the_wheel(site: Path, tmp_path: Path) -> None:
    code = """
import sys
from kdtree_patch import __main__, compile
print(compile.KERNELS)
sys.argv = ["kdtree_patch", "selftest", "--device", "cpu"]
sys.exit(__main__.main())
"""
    done = python(code, site, KDTREE_CACHE_DIR=str(tmp_path / "cache"))
    first, *_, last = done.stdout.splitlines()
    assert first == str(site / "kdtree_patch" / "kernels")
    assert last.startswith("PASS on cpu (host)")


def test_one_name_for_the_backend() -> None:
    assert f'BACKEND = "{boot.BACKEND_MODULE}"' in (REPO / "sitecustomize.py").read_text()


def test_sglang_finds_the_plugin(site: Path, release: str) -> None:
    done = python(LOAD + WRAPPED, site, sglang_dir(release), SGLANG_PLUGINS="kdtree")
    assert done.stdout.splitlines()[-1] == "1 1"
    assert lines(done) == []


def test_an_empty_list_of_plugins_is_none(site: Path) -> None:
    done = python(LOAD + WRAPPED, site, sglang_dir(NEWEST), SGLANG_PLUGINS="")
    assert done.stdout.splitlines()[-1] == "1 1"


def test_other_plugins_alone(site: Path, release: str) -> None:
    code = f"{LOAD}; import sys; print('kdtree_patch' in sys.modules)"
    done = python(code, site, sglang_dir(release), SGLANG_PLUGINS="somebody_elses")
    assert done.stdout.splitlines()[-1] == "False"


ORDERS = {
    "plugin first": f"{LOAD}\nfrom kdtree_patch import plugin; plugin.install(){WRAPPED}",
    "backend first": f"import {MODULE}\n{LOAD}{WRAPPED}",
}


@pytest.mark.parametrize("code", ORDERS.values(), ids=ORDERS)
def test_both_doors_are_one_install(site: Path, code: str) -> None:
    """Ours first on PYTHONPATH, and the wheel behind it."""
    done = python(code, REPO, site, sglang_dir(NEWEST))
    assert done.stdout.splitlines()[-1] == "1 1"
    assert lines(done) == []


@pytest.mark.parametrize("path", [lambda site: [site], lambda site: [REPO, site]], ids=["plugin", "both"])
def test_what_is_wrong_is_said_once(site: Path, path: Callable[[Path], list[Path]]) -> None:
    done = python(LOAD + WRAPPED, *path(site), sglang_dir(NEWEST), KDTREE_MODE="onn")
    assert done.stdout.splitlines()[-1] == "0 0"
    assert len(lines(done)) == 1 and "reason=bad_setting" in lines(done)[0]


def test_the_plugin_off(site: Path) -> None:
    done = python(LOAD + WRAPPED, site, sglang_dir(NEWEST), KDTREE_MODE="off")
    assert (done.stdout.splitlines()[-1], lines(done)) == ("0 0", [])


def test_a_door_that_breaks_does_not_raise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kdtree_patch import plugin

    def broken(name: str) -> None:
        raise OSError("no")

    monkeypatch.setattr(boot, "arm", broken)
    plugin.install()
    line = "[kdtree] declined reason=boot_failed OSError: no; please report it; the service runs stock\n"
    assert capsys.readouterr().err == line


# ---------------------------------------------------------------------------------------------- what doctor says of it


@pytest.fixture
def host(site: Path, tmp_path: Path) -> Host:
    """The wheel in one folder with everything else, as pip puts it, and a SGLang that has plugins."""
    folder = tmp_path / "site-packages"
    shutil.copytree(site, folder)
    stand_in.write(folder, "0.5.12")
    (folder / "sglang" / "srt" / "plugins").mkdir()
    (folder / "sglang" / "srt" / "plugins" / "__init__.py").touch()
    (tmp_path / "host").mkdir()
    return Host(tmp_path / "host", folder, (9, 0))


@pytest.mark.parametrize("variables", [{}, {"SGLANG_PLUGINS": ""}, {"SGLANG_PLUGINS": "other, kdtree"}], ids=str)
def test_doctor_of_a_wheel_that_is_loaded(host: Host, variables: dict[str, str]) -> None:
    """SGLang takes an empty SGLANG_PLUGINS for one that is not set: test_an_empty_list_of_plugins_is_none."""
    document = host.says(path=(host.sglang,), **variables)
    assert document["verdict"] == "serve", document["because"]
    said = f"kdtree_patch {__version__}, through SGLang's plugins alone"
    assert fact(document, "sitecustomize", "the patch") == said
    assert fact(document, "SGLang", "version").startswith("0.5.12, ")


def test_doctor_of_a_wheel_that_sglang_is_told_to_leave_out(host: Host) -> None:
    """A wheel has no sitecustomize: no PYTHONPATH would help."""
    document = host.says(path=(host.sglang,), SGLANG_PLUGINS="other")
    assert_reason(
        document, "stock", "SGLANG_PLUGINS=other leaves kdtree out: add kdtree to SGLANG_PLUGINS, or unset it"
    )
    assert "PYTHONPATH" not in document["because"][0]


def test_doctor_of_a_wheel_without_its_entry_point(host: Host) -> None:
    (info,) = host.sglang.glob("kdtree_patch-*.dist-info")
    shutil.rmtree(info)
    assert_reason(host.says(path=(host.sglang,)), "stock", f"the package in {host.sglang}", "install it with pip")


def test_doctor_of_a_wheel_in_a_release_without_plugins(host: Host) -> None:
    shutil.rmtree(host.sglang / "sglang" / "srt" / "plugins")
    assert_reason(
        host.says(path=(host.sglang,)), "stock", "plugins: this release has none", "put a checkout on PYTHONPATH"
    )
