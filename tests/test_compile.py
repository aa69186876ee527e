"""From source to binary: targets, NVRTC, g++, the job in its own process, the command. Failures say what to do."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest

from kdtree_patch import cache, compile_command, tiles
from kdtree_patch import compile as compiling
from kdtree_patch.compile import CompileError, CompileJob, cached_binary, compile_cubin
from kdtree_patch.exits import NotDone
from tests.support.nvml import fake_nvml
from tests.support.small_sources import (
    CUDA_SOURCE,
    HOST_SOURCE,
    SPILLING_SOURCE,
    CountingCompiler,
    kernels_folder,
    python,
)


@pytest.fixture
def host_kernels(tmp_path: Path) -> Path:
    return kernels_folder(tmp_path / "host-kernels", HOST_SOURCE)


@pytest.fixture
def cuda_kernels(tmp_path: Path) -> Path:
    return kernels_folder(tmp_path / "cuda-kernels", CUDA_SOURCE)


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.delenv("CXX", raising=False)
    return directory


def environment(**variables: object) -> dict[str, str]:
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def finish(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    output, error = process.communicate(timeout=60)
    assert process.returncode == status, (output, error)
    return output, error


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


# -------------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_target_of_a_compute_capability(capability: tuple[int, int], target: str):
    assert compiling.cubin_target(capability) == target


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((6, 1), "too old"),
        ((7, 0), "too old"),
        ((7, 5), "too old"),
        ((8, 7), "embedded"),
        ((10, 1), "embedded"),
        ((11, 0), "embedded"),
        ((13, 0), "not known to this version"),
    ],
)
def test_compute_capability_without_a_target(capability: tuple[int, int], words: str):
    assert compiling.cubin_target(capability) is None
    reason = compiling.unsupported_reason(capability)
    assert words in reason and f"{capability[0]}.{capability[1]}" in reason


def test_targets_of_this_host(tmp_path: Path):
    library = fake_nvml(tmp_path, [(12, 0), None, (8, 9), (7, 5), (12, 0), (12, 1)])
    assert compiling.visible_targets(library) == ["sm_120", "sm_89"]
    library = fake_nvml(tmp_path, [(12, 0), (9, 0), (9, 0)])
    assert compiling.visible_targets(library) == ["sm_120", "sm_90a"]
    assert compiling.visible_targets(library, config="portable") == ["sm_120", "sm_90"]
    assert compiling.visible_targets(library, config="hopper") == ["sm_90a"]


def test_no_targets_when_nvml_is_absent_fails_or_is_something_else(tmp_path: Path):
    assert compiling.visible_targets(str(tmp_path / "libnone.so")) == []
    assert compiling.visible_targets(fake_nvml(tmp_path, [(12, 0)], init=9)) == []
    assert compiling.visible_targets("libm.so.6") == []


def test_import_is_light_and_touches_no_gpu():
    code = """
import kdtree_patch.compile
heavy = [name for name in ("cupy", "torch", "numpy", "cuda") if name in sys.modules]
print(heavy, "libcuda" in open("/proc/self/maps").read())
"""
    output, error = finish(python(code))
    assert output.strip() == "[] False" and error == ""


# ---------------------------------------------------------------------------------------------------------------- NVRTC


def fake_nvrtc(version: tuple[int, int], archs: tuple[int, ...] | None) -> types.SimpleNamespace:
    def supported() -> tuple[int, ...]:
        if archs is None:
            raise RuntimeError("nvrtcGetSupportedArchs is not in this NVRTC")
        return archs

    def compile_program(*arguments: object) -> None:
        raise AssertionError("compiled for something else")

    return types.SimpleNamespace(getVersion=lambda: version, getSupportedArchs=supported, createProgram=compile_program)


OLD_ARCHS = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)


@pytest.mark.parametrize("archs", [OLD_ARCHS, None], ids=["listed", "not listed"])
@pytest.mark.parametrize(
    ("target", "version"),
    [("sm_100", (12, 4)), ("sm_120", (12, 4)), ("sm_120a", (12, 6)), ("sm_89", (11, 4)), ("sm_90a", (11, 8))],
)
def test_old_nvrtc_is_said_and_nothing_else_is_compiled(
    target: str,
    version: tuple[int, int],
    archs: tuple[int, ...] | None,
    tmp_path: Path,
    cuda_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(compiling, "_load_nvrtc", lambda cache_dir: fake_nvrtc(version, archs))
    for attempt in (
        lambda: compile_cubin(target, cuda_kernels),
        lambda: cached_binary(target, tmp_path / "cache", cuda_kernels),
    ):
        with pytest.raises(CompileError) as caught:
            attempt()
        assert caught.value.reason == "nvrtc_too_old"
        message = str(caught.value)
        assert f"NVRTC {version[0]}.{version[1]} cannot compile for {target}" in message
        assert "install nvidia-cuda-nvrtc" in message


def test_architecture_that_nvrtc_does_not_list(cuda_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    """A new NVRTC gives up old parts, and one that calls itself new enough may still lack a part."""
    for target, archs, reason in (("sm_80", (90, 100, 120), "compile_failed"), ("sm_120", (80, 90), "nvrtc_too_old")):
        monkeypatch.setattr(compiling, "_load_nvrtc", lambda cache_dir, archs=archs: fake_nvrtc((14, 0), archs))
        with pytest.raises(CompileError, match=f"cannot compile for {target}, only for") as caught:
            compile_cubin(target, cuda_kernels)
        assert caught.value.reason == reason


def test_nvrtc_library_missing(cuda_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    def missing() -> tuple[int, int]:
        raise RuntimeError('Failure finding "nvrtc"')

    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.ModuleType("cupy.cuda"))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvrtc", types.SimpleNamespace(getVersion=missing))  # type: ignore[misc]
    with pytest.raises(CompileError, match="install nvidia-cuda-nvrtc") as caught:
        compile_cubin("sm_80", cuda_kernels)
    assert caught.value.reason == "compiler_missing"


FAILURE = """
from pathlib import Path
from kdtree_patch.compile import CompileError, CompileJob, cached_binary
for attempt in (
    lambda: CompileJob([sys.argv[3]], Path(sys.argv[2]), Path(sys.argv[1])).start().result(sys.argv[3]),
    lambda: cached_binary(sys.argv[3], Path(sys.argv[2]), Path(sys.argv[1])),
):
    try:
        print(attempt())
    except CompileError as error:
        print(error.reason, error)
"""


def test_cupy_missing(tmp_path: Path, cuda_kernels: Path):
    """In a real interpreter and through the job, whose process must look in the same places as this one."""
    (tmp_path / "shadow" / "cupy").mkdir(parents=True)
    (tmp_path / "shadow" / "cupy" / "__init__.py").write_text("raise ImportError('No module named cupy')\n")
    variables = environment(PYTHONPATH=tmp_path / "shadow")
    output, error = finish(python(FAILURE, cuda_kernels, tmp_path / "cache", "sm_80", env=variables))
    lines = output.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0].startswith(
        "cupy_missing cupy cannot be imported (ImportError: No module named cupy): install cupy-"
    )
    assert error == ""


def test_cupy_imports_where_home_cannot_be_written(tmp_path: Path, cuda_kernels: Path):
    """cupy makes a directory below HOME when it is imported, and fails if it cannot."""
    variables = environment(HOME="/dev/null/nonexistent")
    variables.pop("CUPY_CACHE_DIR", None)
    code = "import cupy"
    assert python(code, env=variables, stderr=subprocess.DEVNULL).wait(60) != 0, "cupy no longer needs this"
    code = """
import os
from pathlib import Path
from kdtree_patch.compile import import_cupy
before = dict(os.environ)
cupy = import_cupy(Path(sys.argv[1]))
print(cupy.__name__, dict(os.environ) == before)
"""
    output, error = finish(python(code, tmp_path / "cache", env=variables))
    assert output.strip() == "cupy True" and error == ""
    assert (tmp_path / "cache" / "cupy").is_dir()
    output, error = finish(python(FAILURE, cuda_kernels, tmp_path / "cache", "sm_80", env=variables))
    assert set(output.split()) == {str(next((tmp_path / "cache").glob("*.cubin")))}
    assert len(re.findall("compiled", error)) == 1


def test_directory_that_the_user_gave_cupy_is_kept_if_it_can_be_used(tmp_path: Path):
    code = """
import os
from pathlib import Path
from kdtree_patch.compile import import_cupy
import_cupy(Path(sys.argv[1]))
print(os.environ["CUPY_CACHE_DIR"])
"""
    for given, used in ((tmp_path / "theirs", tmp_path / "theirs"), ("/dev/null/theirs", tmp_path / "cache" / "cupy")):
        output, error = finish(python(code, tmp_path / "cache", env=environment(CUPY_CACHE_DIR=given)))
        assert output.strip() == str(given) and error == ""
        assert used.is_dir()
    assert not (tmp_path / "cache" / "kernel_cache").exists()


def test_everything_unwritable_is_cache_unwritable(cuda_kernels: Path):
    code = """
import tempfile
from pathlib import Path
from kdtree_patch import compile as compiling
tempfile.tempdir = "/dev/null"
try:
    compiling.cached_binary("sm_80", Path("/dev/null/cache"), Path(sys.argv[1]))
except compiling.CompileError as error:
    print(error.reason)
"""
    variables = environment(HOME="/dev/null/nonexistent")
    variables.pop("CUPY_CACHE_DIR", None)
    output, error = finish(python(code, cuda_kernels, env=variables))
    assert output.strip() == "cache_unwritable", error


def test_old_toolkit_in_the_environment_does_not_matter(tmp_path: Path, cuda_kernels: Path):
    """The source includes nothing and no -I is given, so the headers of another toolkit cannot get in."""
    old = tmp_path / "cuda-11.0"
    (old / "include").mkdir(parents=True)
    (old / "lib64").mkdir()
    (old / "include" / "cuda_fp16.h").write_text("#error an old toolkit\n")
    (old / "lib64" / "libnvrtc.so").write_text("not a library\n")
    variables = environment(CUDA_PATH=old, CUDA_HOME=old)
    output, error = finish(python(FAILURE, cuda_kernels, tmp_path / "cache", "sm_80", env=variables))
    assert all(line.endswith(".cubin") for line in output.splitlines())
    assert [line.split()[1] for line in error_lines(error)] == ["compiled"]


def test_source_error_shows_the_first_lines_of_the_log(tmp_path: Path):
    kernels = kernels_folder(tmp_path, 'extern "C" __global__ void broken() { nonsense(); }\n')
    with pytest.raises(CompileError) as caught:
        compile_cubin("sm_90", kernels)
    assert caught.value.reason == "compile_failed"
    assert re.search(
        r'NVRTC \d+\.\d+ for sm_90: verify_attn_flash\.cu\(1\): error: identifier "nonsense"', str(caught.value)
    )
    assert "\n" not in str(caught.value)


def test_headers_beside_the_source_reach_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And only those: one of the same name in the directory of the service is somebody else's."""
    kernels = kernels_folder(tmp_path, '#include "part.cuh"\nextern "C" __global__ void KERNEL() {}\n')
    service = tmp_path / "service"
    service.mkdir()
    (service / "part.cuh").write_text("#define KERNEL theirs\n")
    monkeypatch.chdir(service)
    (kernels / "part.cuh").write_text("#define KERNEL ours\n")
    assert [kernel.name for kernel in compile_cubin("sm_80", kernels).kernels] == ["ours"]


def test_source_missing(tmp_path: Path):
    for target in ("sm_90", "host"):
        with pytest.raises(CompileError, match="the installation is not complete") as caught:
            cached_binary(target, tmp_path / "cache", tmp_path / "nothing")
        assert caught.value.reason == "package_broken"


def test_resources_are_read_from_the_log():
    log = """ptxas info    : 194 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
ptxas         .     400 bytes stack frame, 1116 bytes spill stores, 1228 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 400 bytes cumulative stack size, 368 bytes cmem[0]
ptxas info    : Compile time = 738.341 ms
ptxas info    : Function properties for not_inlined
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 4000 bytes smem, 368 bytes cmem[0]
"""
    assert compiling.parse_resources(log) == (
        compiling.KernelResources("first", 80, 0, 0, 0, 4000),
        compiling.KernelResources("not_inlined", 0, 8, 12, 16, 0),
        compiling.KernelResources("second", 64, 1116, 1228, 400, 0),
    )


@pytest.mark.parametrize("target", compiling.NVRTC_TARGETS)
def test_the_headers_of_a_cubin_lie_within_it(target: str, tmp_path: Path):
    """The driver takes one that has lost its end; readelf and nvdisasm, with which it is looked at, do not."""
    cubin = compile_cubin(target, kernels_folder(tmp_path, SPILLING_SOURCE)).cubin
    starts = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", cubin, 54)
    assert programs > 0 and sections > 0
    ends = starts[0] + program_size * programs, starts[1] + section_size * sections
    assert max(ends) <= len(cubin)


def test_spills_of_a_real_kernel_are_seen(tmp_path: Path):
    result = compile_cubin("sm_80", kernels_folder(tmp_path, SPILLING_SOURCE))
    (kernel,) = result.kernels
    assert kernel.name == "crowded" and kernel.registers == 64
    assert kernel.spill_stores > 0 and kernel.spill_loads > 0
    assert result.cubin.startswith(b"\x7fELF")


def test_options_are_decided_by_the_target_alone(monkeypatch: pytest.MonkeyPatch):
    before = {target: compiling.nvrtc_options(target) for target in compiling.NVRTC_TARGETS}
    for name in ("NVCC_APPEND_FLAGS", "CUPY_NVRTC_OPTIONS", "KDTREE_OPTIONS", "CXXFLAGS"):
        monkeypatch.setenv(name, "-DEVIL")
    assert {target: compiling.nvrtc_options(target) for target in compiling.NVRTC_TARGETS} == before
    assert all(option.count(target) <= 1 for target, options in before.items() for option in options)


def test_unknown_target_is_a_mistake_of_the_caller(tmp_path: Path):
    with pytest.raises(ValueError, match="sm_70"):
        cached_binary("sm_70", tmp_path / "cache")
    with pytest.raises(ValueError, match="host"):
        compile_cubin("host")


# ------------------------------------------------------------------------------------------------------------------ g++


def test_library_for_the_cpu(tmp_path: Path, host_kernels: Path, capsys: pytest.CaptureFixture[str]):
    path = cached_binary("host", tmp_path / "cache", host_kernels)
    assert re.fullmatch(r"verify_attn_flash-host-[0-9a-f]{16}\.so", path.name)
    assert ctypes.CDLL(str(path)).answer() == 42
    assert cached_binary("host", tmp_path / "cache", host_kernels) == path
    assert len(error_lines(capsys.readouterr().err)) == 1  # compiled, once


@pytest.mark.parametrize("target", compiling.HOST_TARGETS)
def test_library_is_built_once_and_nothing_lands_in_the_working_directory(
    target: str, tmp_path: Path, host_kernels: Path, temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert len({cached_binary(target, tmp_path / "cache", host_kernels) for _ in range(2)}) == 1
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1
    assert list((tmp_path / "here").iterdir()) == list(temporary_directory.iterdir()) == []


def test_killed_build_leaves_its_files_in_the_cache(tmp_path: Path, host_kernels: Path, temporary_directory: Path):
    """Where the next compilation removes them; nobody would in the temporary directory."""
    compiler = CountingCompiler(tmp_path, 40)
    code = "from pathlib import Path\nfrom kdtree_patch.compile import cached_binary\n"
    code += "cached_binary('host', Path(sys.argv[2]), Path(sys.argv[1]))"
    variables = environment(CXX=compiler.path)
    process = python(code, host_kernels, tmp_path / "cache", env=variables, start_new_session=True)
    try:
        wait_until_compiling(compiler)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (left,) = (tmp_path / "cache").glob(".verify_attn_flash-host-*.tmp")
    assert list(temporary_directory.iterdir()) == []
    os.utime(left, (0, 0))
    cached_binary("host", tmp_path / "cache", host_kernels)
    assert not left.exists()


def test_sanitizers_are_in_the_sanitizer_build(tmp_path: Path):
    kernels = kernels_folder(tmp_path, 'extern "C" int answer(int n) { int a[4] = {}; return a[n]; }\n')
    path = cached_binary("host-asan", tmp_path / "cache", kernels)
    code = "import ctypes; print(ctypes.CDLL(sys.argv[1]).answer(int(sys.argv[2])))"
    variables = environment(LD_PRELOAD=compiling.sanitizer_runtime(), ASAN_OPTIONS="detect_leaks=0")
    assert finish(python(code, path, 3, env=variables))[0].strip() == "0"
    process = python(code, path, 4, env=variables)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and ("out of bounds" in error or "stack-buffer-overflow" in error)


@pytest.mark.parametrize("cxx", ["", "no-such-compiler", "g++; touch pwned", "'unfinished", "$(touch pwned)"])
def test_compiler_missing(cxx: str, tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", cxx)
    if not cxx:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(CompileError) as caught:
        cached_binary("host", tmp_path / "cache", host_kernels)
    assert caught.value.reason == "compiler_missing"
    assert "install g++" in str(caught.value) if not cxx else "CXX" in str(caught.value)
    assert not (tmp_path / "pwned").exists()


def test_no_shell_sees_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    kernels = kernels_folder(tmp_path / "a $(touch pwned); touch pwned", HOST_SOURCE)
    assert ctypes.CDLL(str(cached_binary("host", tmp_path / "cache", kernels))).answer() == 42
    assert not (tmp_path / "pwned").exists()


def test_compiler_that_cannot_be_run(tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "broken-g++"
    broken.write_text("not a program")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CompileError, match="cannot be run") as caught:
        cached_binary("host", tmp_path / "cache", host_kernels)
    assert caught.value.reason == "compiler_missing"


def test_cxx_may_have_words_before_the_options(tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "env g++")
    assert ctypes.CDLL(str(cached_binary("host", tmp_path / "cache", host_kernels))).answer() == 42


def test_host_source_error(tmp_path: Path):
    with pytest.raises(CompileError, match="nonsense") as caught:
        cached_binary("host", tmp_path / "cache", kernels_folder(tmp_path, "nonsense here;\n"))
    assert caught.value.reason == "compile_failed"


def test_headers_from_the_environment_do_not_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "outside.h").write_text("")
    source = '#if __has_include("outside.h") || __has_include(<outside.h>)\n#error it got in\n#endif\n' + HOST_SOURCE
    kernels = kernels_folder(tmp_path, source)
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "outside"))
    cached_binary("host", tmp_path / "cache", kernels)


def test_every_source_byte_is_in_the_name(tmp_path: Path, host_kernels: Path):
    def name(target: str = "host") -> str:
        return cached_binary(target, tmp_path / "cache", host_kernels).name

    names = [name()]
    for file, text in (
        ("verify_attn_flash.cu", HOST_SOURCE + "// changed\n"),
        ("host/launch.cpp", '#include "../verify_attn_flash.cu"\n\n'),
        ("host/device.h", ""),
        ("host/deep/more.h", ""),
    ):
        (host_kernels / file).parent.mkdir(exist_ok=True)
        (host_kernels / file).write_text(text)
        names.append(name())
    (host_kernels / "host" / "device.h").rename(host_kernels / "host" / "devices.h")
    names.append(name())
    assert len(set(names)) == len(names)
    assert name() == names[-1]


def test_target_options_compiler_and_version_are_in_the_name(
    tmp_path: Path, cuda_kernels: Path, monkeypatch: pytest.MonkeyPatch
):
    import kdtree_patch

    names = []

    def plan() -> None:
        names.append(compiling._plan("sm_90", cuda_kernels, tmp_path / "cache").key)

    plan()
    monkeypatch.setattr(compiling, "_check_nvrtc", lambda nvrtc, target: "NVRTC 99.0")
    plan()
    monkeypatch.setattr(compiling, "nvrtc_options", lambda target: ("-DOTHER",))
    plan()
    monkeypatch.setattr(kdtree_patch, "__version__", "other", raising=False)
    plan()
    names.append(compiling._plan("sm_90a", cuda_kernels, tmp_path / "cache").key)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("target", ["sm_80", "host"])
def test_headers_beside_the_source_are_in_the_name(target: str, tmp_path: Path, cuda_kernels: Path):
    keys = []
    for change in (
        lambda header: None,
        lambda header: header.write_text("// one\n"),
        lambda header: header.write_text("// two\n"),
        lambda header: header.rename(header.with_name("other.cuh")),
    ):
        change(cuda_kernels / "part.cuh")
        keys.append(compiling._plan(target, cuda_kernels, tmp_path / "cache").key)
    assert len(set(keys)) == len(keys)


def test_source_that_changes_while_it_is_compiled(tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch):
    """The binary would go into the cache under the name of a source that it was not made from."""
    real = compiling._build_library

    def build(*arguments: Any) -> bytes:
        (host_kernels / "verify_attn_flash.cu").write_text(HOST_SOURCE + "// edited\n")
        return real(*arguments)

    monkeypatch.setattr(compiling, "_build_library", build)
    with pytest.raises(CompileError, match="has changed while"):
        cached_binary("host", tmp_path / "cache", host_kernels)
    assert list((tmp_path / "cache").glob("*.so")) == []


# ------------------------------------------------------------------------------------------------------------------ job


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_job_brings_binaries(tmp_path: Path, host_kernels: Path, capfd: pytest.CaptureFixture[str]):
    job = CompileJob(["host", "host-asan"], tmp_path / "cache", host_kernels).start()
    assert job.start() is job
    path = job.result("host")
    assert ctypes.CDLL(str(path)).answer() == 42
    assert job.result("host") == path == cached_binary("host", tmp_path / "cache", host_kernels)
    assert job.result("host-asan").exists()
    assert len(re.findall("^\\[kdtree\\] compiled", capfd.readouterr().err, re.MULTILINE)) == 2


def test_job_compiles_in_another_process(tmp_path: Path, cuda_kernels: Path):
    """This one imports no cupy, calls no cuInit, and is free while NVRTC works."""
    fake = tmp_path / "driver" / "libcuda.so.1"
    fake.parent.mkdir()
    source = tmp_path / "driver.cpp"
    source.write_text(
        '#include <cstdio>\n#include <unistd.h>\nextern "C" int cuInit(unsigned) {\n'
        f'  FILE* log = fopen("{tmp_path}/calls", "a"); fprintf(log, "%d\\n", getpid()); fclose(log); return 100;\n}}\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", fake, source], check=True)
    code = """
import ctypes, os
from pathlib import Path
from kdtree_patch.compile import CompileJob
path = CompileJob(["sm_80"], Path(sys.argv[2]), Path(sys.argv[1])).start().result("sm_80")
ours = [line for line in open(sys.argv[3]) if int(line) == os.getpid()] if os.path.exists(sys.argv[3]) else []
ctypes.CDLL("libcuda.so.1").cuInit(0)
seen = [line for line in open(sys.argv[3]) if int(line) == os.getpid()]
print(path.name, "cupy" in sys.modules, len(ours), len(seen))
"""
    libraries = os.pathsep.join(filter(None, (str(fake.parent), os.environ.get("LD_LIBRARY_PATH"))))
    arguments = (cuda_kernels, tmp_path / "cache", tmp_path / "calls")
    output, error = finish(python(code, *arguments, env=environment(LD_LIBRARY_PATH=libraries)))
    name, cupy, ours, seen = output.split()
    assert name.startswith("verify_attn_flash-sm_80-") and (cupy, ours, seen) == ("False", "0", "1")
    assert [line.split()[1] for line in error_lines(error)] == ["compiled"]


def test_eight_workers_with_a_job_each_compile_once(tmp_path: Path, cuda_kernels: Path):
    code = """
from pathlib import Path
from kdtree_patch.compile import CompileJob
print(CompileJob(["sm_90"], Path(sys.argv[2]), Path(sys.argv[1])).start().result("sm_90"))
"""
    workers = [python(code, cuda_kernels, tmp_path / "cache") for _ in range(8)]
    finished = [finish(worker) for worker in workers]
    assert len({output for output, _ in finished}) == 1
    assert sum(error.count("[kdtree] compiled") for _, error in finished) == 1


def test_failure_is_kept_and_raised_by_result(tmp_path: Path, host_kernels: Path):
    (host_kernels / "verify_attn_flash.cu").write_text("nonsense here;\n")
    job = CompileJob(["host"], tmp_path / "cache", host_kernels).start()
    for _ in range(2):
        with pytest.raises(CompileError, match="nonsense") as caught:
            job.result("host")
        assert caught.value.reason == "compile_failed"


def test_job_without_start_or_for_another_target_compiles_here(tmp_path: Path, host_kernels: Path):
    assert CompileJob(["host"], tmp_path / "cache", host_kernels).result("host").exists()
    assert CompileJob([], tmp_path / "cache", host_kernels).start().result("host").exists()


@pytest.mark.parametrize("interpreter", ["/nonexistent/python", "/bin/false", "reads and ends", ""])
def test_interpreter_that_does_not_start_again_is_no_reason_to_run_stock(
    interpreter: str, tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch
):
    if interpreter == "reads and ends":
        interpreter = str(tmp_path / "interpreter")
        Path(interpreter).write_text("#!/bin/sh\nread order\nexit 1\n")
        Path(interpreter).chmod(0o755)
    monkeypatch.setattr(sys, "executable", interpreter)
    path = CompileJob(["host"], tmp_path / "cache", host_kernels).start().result("host")
    assert ctypes.CDLL(str(path)).answer() == 42


def wait_until_compiling(compiler: CountingCompiler) -> None:
    deadline = time.monotonic() + 30
    while not compiler.count:
        assert time.monotonic() < deadline, "no compiler was started"
        time.sleep(0.01)


def killed_job(
    number: signal.Signals, tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[CompileJob, int]:
    """A job whose process is ended while its g++ works, and the process id of that g++."""
    compiler = CountingCompiler(tmp_path, 40)
    monkeypatch.setenv("CXX", str(compiler.path))
    job = CompileJob(["host"], tmp_path / "cache", kernels).start()
    wait_until_compiling(compiler)
    assert job._process is not None
    os.kill(job._process.pid, number)
    monkeypatch.delenv("CXX")
    return job, compiler.pids[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_compiling_process_that_is_killed_is_no_reason_to_run_stock(
    number: signal.Signals, tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    job, gxx = killed_job(number, tmp_path, host_kernels, monkeypatch)
    assert ctypes.CDLL(str(job.result("host"))).answer() == 42
    assert gone(gxx), "g++ has outlived the process that started it"
    warning, compiled = capsys.readouterr().err.splitlines()
    assert f"ended with status {-number} and no answer: compiling here" in warning and " compiled " in compiled


def test_compiler_that_crashes_its_process_is_not_let_into_this_one(
    tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch
):
    job, gxx = killed_job(signal.SIGSEGV, tmp_path, host_kernels, monkeypatch)
    with pytest.raises(CompileError, match="ended with status -11") as caught:
        job.result("host")
    assert caught.value.reason == "compile_failed"
    assert gone(gxx)


def test_wait_is_bounded(tmp_path: Path, host_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(compiling, "_JOB_NOTICE", 0.1)
    monkeypatch.setattr(compiling, "JOB_LIMIT", 1.0)
    compiler = CountingCompiler(tmp_path, 5)
    monkeypatch.setenv("CXX", str(compiler.path))
    job = CompileJob(["host"], tmp_path / "cache", host_kernels).start()
    with pytest.raises(CompileError, match="took longer than 1 s"):
        job.result("host")
    assert job._process is not None and gone(job._process.pid)
    assert "[kdtree] waiting for the kernel to be compiled for host" in capsys.readouterr().err


EXITING = """
import os, signal, threading, time
from pathlib import Path
from kdtree_patch.compile import CompileJob
job = CompileJob([sys.argv[3]], Path(sys.argv[2]), Path(sys.argv[1])).start()
print(job._process.pid, flush=True)
time.sleep(float(sys.argv[4]))
if sys.argv[5] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["returns", "killed"])
def test_compiling_process_ends_with_ours(how: str, tmp_path: Path, host_kernels: Path):
    compiler = CountingCompiler(tmp_path, 40)
    arguments = (host_kernels, tmp_path / "cache", "host", 0.5, how)
    started = time.monotonic()
    process = python(EXITING, *arguments, env=environment(CXX=compiler.path))
    output, error = finish(process, 0 if how == "returns" else -signal.SIGKILL)
    assert time.monotonic() - started < 20, "the interpreter waited for the compiler"
    assert gone(int(output)), "the process that compiles has outlived the one that asked for it"
    assert error == ""


@pytest.mark.parametrize("seconds", [0.0, 0.6, 1.0, 1.4])
def test_exit_while_nvrtc_works_is_clean(seconds: float, tmp_path: Path):
    """In a thread of the same process this ends in SIGSEGV or SIGABRT, in about half of the attempts."""
    kernels = kernels_folder(tmp_path, SPILLING_SOURCE.replace("160", "1200"))
    process = python(EXITING, kernels, tmp_path / "cache", "sm_90", seconds, "returns")
    output, error = finish(process, 0)
    assert gone(int(output))
    assert [line for line in error_lines(error) if not line.startswith("[kdtree] compiled ")] == []


def test_result_in_a_child_made_by_fork(tmp_path: Path, host_kernels: Path):
    code = """
import os
from pathlib import Path
from kdtree_patch.compile import CompileJob
job = CompileJob(["host"], Path(sys.argv[2]), Path(sys.argv[1])).start()
child = os.fork()
print(job.result("host"), flush=True)
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""
    output, _ = finish(python(code, host_kernels, tmp_path / "cache"))
    first, second = output.split()
    assert first == second


def test_sitecustomize_of_the_user_is_not_run_a_second_time(tmp_path: Path, host_kernels: Path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); print('noise on standard output')\n"
    )
    variables = environment(PYTHONPATH=tmp_path / "site", PYTHONINSPECT="")
    output, _ = finish(python(FAILURE, host_kernels, tmp_path / "cache", "host", env=variables))
    assert output.split()[-1].endswith(".so")
    assert (tmp_path / "runs").read_text() == "x"


def test_log_level_reaches_the_compiling_process(tmp_path: Path, host_kernels: Path):
    code = "from kdtree_patch import log; log.set_level('warning')\n" + FAILURE
    output, error = finish(python(code, host_kernels, tmp_path / "cache", "host"))
    assert output.count(".so") == 2 and error == ""


# -------------------------------------------------------------------------------------------------------------- command


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    compile_command.add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["compile", *words])
    return int(arguments.run(arguments))


@pytest.fixture
def small_kernels(cuda_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command on a small source, of which it expects only what is in it."""
    real = compile_command.examine
    monkeypatch.setattr(compile_command, "examine", lambda target, cache_dir: real(target, cache_dir, cuda_kernels))
    monkeypatch.setattr(compile_command, "dynamic_shared", lambda target: {"answer": 1024})
    monkeypatch.setenv("KDTREE_CACHE_DIR", str(tmp_path / "cache"))
    return cuda_kernels


def test_command_prints_a_table_and_fills_the_cache(
    small_kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command("--arch", "sm_80", "sm_90", "--arch", "sm_80") == 0
    output = capsys.readouterr().out
    assert re.findall(r"^sm_\d+", output, re.MULTILINE) == ["sm_80", "sm_90"]
    assert re.search(r"^  answer +\d+ +0 +0 +1,024$", output, re.MULTILINE)
    assert str(cached_binary("sm_90", tmp_path / "cache", small_kernels)) in output
    assert capsys.readouterr().err == ""  # it was there: nothing was compiled again


def test_command_in_json(small_kernels: Path, capsys: pytest.CaptureFixture[str]):
    assert command("--arch", "sm_80", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (report,) = document["targets"]
    assert document["findings"] == report["findings"] == []
    assert report["target"] == "sm_80" and Path(report["path"]).stat().st_size > report["bytes"]
    (kernel,) = report["kernels"]
    assert kernel["name"] == "answer" and kernel["spill_stores"] == 0 and kernel["shared"] == 1024


def test_command_finds_spills(small_kernels: Path, capsys: pytest.CaptureFixture[str]):
    (small_kernels / "verify_attn_flash.cu").write_text(SPILLING_SOURCE + CUDA_SOURCE)
    assert command("--arch", "sm_80") == 1
    assert re.search(r"FINDING crowded spills \d+ bytes", capsys.readouterr().out)


def test_command_finds_too_much_shared_memory(
    small_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compile_command, "dynamic_shared", lambda target: {"answer": 101_377})
    assert command("--arch", "sm_80") == 1
    assert "answer takes 101377 bytes of shared memory, more than 101376" in capsys.readouterr().out


def test_command_does_not_make_up_what_depends_on_the_gpu(
    small_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compile_command, "dynamic_shared", lambda target: {"answer": None})
    assert command("--arch", "sm_80") == 0
    assert re.search(r"^  answer +\d+ +0 +0 +-$", capsys.readouterr().out, re.MULTILINE)
    assert command("--arch", "sm_80", "--json") == 0
    assert json.loads(capsys.readouterr().out)["targets"][0]["kernels"][0]["shared"] is None


@pytest.mark.parametrize(
    ("target", "configurations"),
    [("sm_80", ("portable",)), ("sm_90", ("portable",)), ("sm_90a", ("hopper",))],
)
def test_command_knows_every_kernel_and_what_it_asks_for(target: str, configurations: tuple[str, ...]):
    asked = compile_command.dynamic_shared(target)
    variants = [variant for name in configurations for variant in tiles.CONFIGS[name].variants]
    assert {name for name, size in asked.items() if size is None} == {
        variant.combine_name(element) for variant in variants for element in tiles.ELEMENTS
    }
    for variant in variants:
        assert asked[variant.kernel_name("bf16")] == variant.shared_bytes


def test_command_allows_each_kernel_what_its_parts_allow():
    used = compiling.KernelResources("kernel", 100, 0, 0, 0, 0)
    assert [compile_command.configuration(target).shared_limit for target in ("sm_80", "sm_90", "sm_90a")] == [
        101_376,
        101_376,
        232_448,
    ]
    assert compile_command.judge(used, 101_376, 101_376) == []
    assert compile_command.judge(used, 101_377, 101_376) == [
        "kernel takes 101377 bytes of shared memory, more than 101376"
    ]


def test_command_finds_a_missing_kernel(
    small_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compile_command, "dynamic_shared", lambda target: {"answer": 0, "other": 0})
    assert command("--arch", "sm_80") == 1
    assert "other is not in the cubin" in capsys.readouterr().out


def test_command_reports_failures_and_goes_on(
    small_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (small_kernels / "verify_attn_flash.cu").write_text(HOST_SOURCE + "#ifndef KDTREE_HOST\nnonsense here;\n#endif\n")
    assert command("--arch", "sm_80", "host", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert [bool(report["findings"]) for report in document["targets"]] == [True, False]
    assert document["findings"][0].startswith("sm_80: compile_failed: ")


def test_command_takes_the_gpus_of_the_host(
    small_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compiling, "visible_targets", lambda config: ["sm_89"])
    assert command() == 0
    assert re.findall(r"^sm_\d+", capsys.readouterr().out, re.MULTILINE) == ["sm_89"]
    monkeypatch.setattr(compiling, "visible_targets", lambda config: [])
    assert command() == 0
    assert tuple(re.findall(r"^sm_\d+a?", capsys.readouterr().out, re.MULTILINE)) == compiling.GPU_TARGETS


def test_wrong_usage(small_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        command("--arch", "sm_70")
    assert caught.value.code == 2
    monkeypatch.setenv("KDTREE_MODE", "maybe")
    capsys.readouterr()
    with pytest.raises(NotDone, match="KDTREE_MODE='maybe' is not understood; .*: allowed are on, shadow, off"):
        command("--arch", "sm_80")


@pytest.mark.parametrize("target", [*compiling.NVRTC_TARGETS, *compiling.HOST_TARGETS])
def test_an_fp8_pool_is_part_of_a_target(target: str) -> None:
    assert compiling.parts_of(target) == (target, None) and compiling.with_pool(target, None) == target
    for pool in tiles.FP8_POOLS:
        assert compiling.parts_of(compiling.with_pool(target, pool)) == (target, pool)


def test_each_pool_has_a_binary_of_its_own(tmp_path: Path, host_kernels: Path) -> None:
    """Compiled with its option, and never taken for another one's."""
    (host_kernels / "host" / "launch.cpp").write_text(
        "enum { AsQueries, E4m3, E5m2 };\n#ifndef KDTREE_POOL\n#define KDTREE_POOL AsQueries\n#endif\n"
        'extern "C" int answer() { return KDTREE_POOL; }\n'
    )
    targets = [compiling.with_pool("host", pool) for pool in (None, *tiles.FP8_POOLS)]
    paths = [cached_binary(target, tmp_path / "cache", host_kernels) for target in targets]
    assert [ctypes.CDLL(str(path)).answer() for path in paths] == [0, 1, 2]


def test_command_compiles_for_an_fp8_pool(small_kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--arch", "sm_120", "--kv-cache-dtype", "fp8_e5m2", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)["targets"]
    assert report["target"] == "sm_120-fp8_e5m2" and report["path"].endswith(".cubin")


def test_no_other_type_is_an_fp8_pool(small_kernels: Path) -> None:
    with pytest.raises(SystemExit):
        command("--arch", "sm_120", "--kv-cache-dtype", "fp4_e2m1")
