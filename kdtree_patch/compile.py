"""The CUDA source to a binary: a cubin by NVRTC, or a library for the CPU by g++; through the cache on disk, in a
process of its own.

A worker needs the cubin when SGLang constructs its backend, and knows that it will when the backend's module is
imported, much earlier. `CompileJob` uses the time between. It starts a second Python process rather than a thread, for
reasons that were all seen to happen: NVRTC 13 calls cuInit, which no process may do before it forks; an interpreter
that exits while one of its threads is inside NVRTC dies with SIGSEGV or SIGABRT; and importing cupy needs a change to
os.environ, which is not safe beside other threads. (The lock of the interpreter is not among them: NVRTC is called
without it, and a thread beside it was never held up for more than 5 ms.)

Nothing here creates a CUDA context. No text from outside reaches a compiler's options, and nothing reaches a shell.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from kdtree_patch import cache, nvml
from kdtree_patch.log import get_logger
from kdtree_patch.tiles import FP8_POOLS

# In a repository they lie beside the package; a wheel has them within it.
_HERE = Path(__file__).resolve().parent
KERNELS = _HERE / "kernels" if (_HERE / "kernels").is_dir() else _HERE.parent / "kernels"
SOURCE_NAME = "verify_attn_flash.cu"

# Target of NVRTC -> the first NVRTC that has it.
NVRTC_SINCE: dict[str, tuple[int, int]] = {
    "sm_80": (11, 1),
    "sm_86": (11, 1),
    "sm_89": (11, 8),
    "sm_90": (11, 8),
    "sm_90a": (12, 0),
    "sm_100": (12, 8),
    "sm_120": (12, 8),
    "sm_120a": (12, 8),
}
NVRTC_TARGETS = tuple(NVRTC_SINCE)
# The targets that `cubin_target` may answer for the portable configuration; the others compile but run on one compute
# capability only.
GPU_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# The one target of the hopper configuration. A cubin holds one configuration: nobody waits for the other to compile.
# Nor does it hold more than one type of the KV pool: one of fp8 is the second part of a target, `sm_120-fp8_e4m3`.
HOPPER_TARGET = "sm_90a"

HOST_FLAGS: dict[str, tuple[str, ...]] = {
    # -O2 runs no faster, and takes half as long again to compile.
    "host": ("-O1",),
    # Under -fsanitize=thread the compiler reports each plain load and store, and kernels/host brings the other end.
    "host-races": (
        *("-O2", "-fsanitize=thread", "-nodefaultlibs"),
        *("-Wl,--no-as-needed", "-lstdc++", "-lm", "-lc", "-lgcc_s"),
    ),
    "host-asan": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
HOST_TARGETS = tuple(HOST_FLAGS)

# Jetson and Drive parts: NVIDIA states that binaries of desktop parts do not run on them.
EMBEDDED = frozenset({(8, 7), (8, 8), (10, 1), (11, 0)})

# A compilation takes seconds; who is still waiting after this many gives up.
JOB_LIMIT = 900.0
_JOB_NOTICE = 5.0
_GXX_LIMIT = 600.0


class CompileError(Exception):
    """There is no binary. `reason` is a code for the log, the message says what to do."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class KernelResources:
    """What ptxas says about one function. Shared memory is the static part; registers are 0 for a function that is not
    a kernel.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclass(frozen=True)
class CompileResult:
    target: str
    cubin: bytes
    log: str
    kernels: tuple[KernelResources, ...]
    compiler: str
    seconds: float


# -------------------------------------------------------------------------------------------------------------- targets


def with_pool(target: str, pool: str | None) -> str:
    """The target for an fp8 pool, a name of `tiles.FP8_POOLS`; None for one of the queries' type."""
    return target if pool is None else f"{target}-{pool}"


def parts_of(target: str) -> tuple[str, str | None]:
    """The other way round."""
    for pool in FP8_POOLS:
        if target.endswith(f"-{pool}"):
            return target.removesuffix(f"-{pool}"), pool
    return target, None


def _pool_option(target: str) -> tuple[str, ...]:
    pool = parts_of(target)[1]
    return () if pool is None else (f"-DKDTREE_POOL={FP8_POOLS[pool]}",)


def own_config(capability: tuple[int, int]) -> str:
    """The configuration made for a compute capability, which `auto` means."""
    return "hopper" if capability == (9, 0) else "portable"


def cubin_target(capability: tuple[int, int], config: str = "auto") -> str | None:
    """The target whose cubin has a configuration and runs on a compute capability: the same major, the highest minor
    that is not above it. None if there is none; hopper is for 9.0 alone.
    """
    if config == "auto":
        config = own_config(capability)
    if config == "hopper":
        return HOPPER_TARGET if capability == (9, 0) else None
    if capability in EMBEDDED:
        return None
    major, minor = capability
    fitting = [t for t in GPU_TARGETS if divmod(int(t[3:]), 10)[0] == major and divmod(int(t[3:]), 10)[1] <= minor]
    return fitting[-1] if fitting else None


def unsupported_reason(capability: tuple[int, int]) -> str:
    """Why `cubin_target` answers None."""
    have = f"compute capability {capability[0]}.{capability[1]}"
    if capability in EMBEDDED:
        return f"{have} is an embedded part, on which cubins of the desktop parts do not run"
    if capability < (8, 0):
        return f"{have} is too old: the kernel needs 8.0 (A100) or later"
    return f"{have} is not known to this version, which has cubins for {', '.join(GPU_TARGETS)}"


def refusal(gpu: str, capability: tuple[int, int], config: str) -> tuple[str, str]:
    """Why `cubin_target` answers None in a configuration: a code for the log, and what there is to say of `gpu`."""
    if cubin_target(capability) is None:
        return "compute_capability", f"{gpu}: {unsupported_reason(capability)}"
    return (
        "configuration",
        f"the {config} configuration needs compute capability 9.0, {gpu} has {capability[0]}.{capability[1]}: "
        "unset KDTREE_CONFIG",
    )


def visible_targets(library: str = nvml.LIBRARY, config: str = "auto") -> list[str]:
    """The targets that serve this host's GPUs in a configuration, each once. No CUDA call, no context. Empty without
    GPUs or without NVML.

    CUDA_VISIBLE_DEVICES is not looked at: a cubin too many costs seconds of a process that nobody waits for.
    """
    try:
        found, _ = nvml.gpus(library)
    except (OSError, AttributeError, nvml.NvmlError):
        return []
    targets = (cubin_target(gpu.capability, config) for gpu in found)
    return list(dict.fromkeys(target for target in targets if target is not None))


# ---------------------------------------------------------------------------------------------------------------- NVRTC


def import_cupy(cache_dir: Path | None = None) -> Any:
    """`import cupy`, which creates its own cache directory and fails where HOME cannot be written: it gets one inside
    ours instead.

    A CUPY_CACHE_DIR of the user is kept if it can be used. The variable is put back afterwards, because other users of
    cupy and child processes are none of our business; releases before 14 read it at each compilation, later ones once,
    on import.
    """
    before = os.environ.get("CUPY_CACHE_DIR")
    if "cupy" not in sys.modules and (before is None or not _can_hold_files(before)):
        os.environ["CUPY_CACHE_DIR"] = str(_cupy_directory(cache_dir))
    try:
        return importlib.import_module("cupy")
    except Exception as error:
        raise CompileError("cupy_missing", f"cupy cannot be imported ({_one_line(error)}): {_INSTALL_CUPY}") from error
    finally:
        if os.environ.get("CUPY_CACHE_DIR") != before:
            if before is None:
                del os.environ["CUPY_CACHE_DIR"]
            else:
                os.environ["CUPY_CACHE_DIR"] = before


_INSTALL_CUPY = "install cupy-cuda12x or cupy-cuda13x, whichever fits the CUDA version of torch"
_INSTALL_NVRTC = (
    "install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for CUDA 12) into the Python environment of the service"
)


def _can_hold_files(directory: str) -> bool:
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _cupy_directory(cache_dir: Path | None) -> Path:
    def use(private: cache.PrivateDirectory) -> Path:
        directory = private.path / "cupy"
        directory.mkdir(mode=0o700, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise cache.CacheUnusable("it is read-only")
        return directory

    try:
        directory, temporary = cache.first_usable(cache_dir, use)
    except cache.CacheUnusable as error:
        raise CompileError("cache_unwritable", f"there is no directory to keep files in ({error})") from error
    if temporary:
        cache.remove_at_exit(directory.parent)
    return directory


def _load_nvrtc(cache_dir: Path | None) -> Any:
    import_cupy(cache_dir)
    try:
        nvrtc = importlib.import_module("cupy.cuda.nvrtc")
    except ImportError:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    try:
        nvrtc.getVersion()
    except Exception as error:
        raise CompileError("compiler_missing", f"cupy finds no NVRTC ({_one_line(error)}): {_INSTALL_NVRTC}") from error
    return nvrtc


def nvrtc_version(cache_dir: Path | None = None) -> tuple[int, int]:
    """Of the NVRTC that would compile. Raises CompileError."""
    major, minor = _load_nvrtc(cache_dir).getVersion()
    return int(major), int(minor)


def _check_nvrtc(nvrtc: Any, target: str) -> str:
    """The version of NVRTC, or CompileError if it does not have the target: another architecture's cubin would not
    load.
    """
    version = tuple(nvrtc.getVersion())
    have = f"NVRTC {version[0]}.{version[1]}"
    target, _ = parts_of(target)
    since = NVRTC_SINCE[target]
    if version < since:
        raise CompileError(
            "nvrtc_too_old",
            f"{have} cannot compile for {target}, {since[0]}.{since[1]} and later can: {_INSTALL_NVRTC}, not older",
        )
    try:
        listed = {int(arch) for arch in nvrtc.getSupportedArchs()}
    except Exception:  # not every cupy passes this call on; then the version has to do
        return have
    number = int(re.sub(r"\D", "", target))
    if listed and number not in listed:
        reason = "nvrtc_too_old" if number > max(listed) else "compile_failed"
        names = ", ".join(f"sm_{arch}" for arch in sorted(listed))
        raise CompileError(
            reason, f"{have} cannot compile for {target}, only for {names}: {_INSTALL_NVRTC} in another version"
        )
    return have


def nvrtc_options(target: str) -> tuple[str, ...]:
    """Decided by the target alone."""
    arch, _ = parts_of(target)
    return ("-std=c++17", f"-arch={arch}", *_pool_option(target), "--ptxas-options=-v", "-lineinfo")


def compile_cubin(target: str, kernels: Path = KERNELS, cache_dir: Path | None = None) -> CompileResult:
    """Compiles the kernel in this process, without looking into the cache. Raises CompileError. Needs no GPU and no
    driver.
    """
    if parts_of(target)[0] not in NVRTC_SINCE:
        raise ValueError(f"{target} is not one of {', '.join(NVRTC_TARGETS)}")
    nvrtc = _load_nvrtc(cache_dir)
    compiler = _check_nvrtc(nvrtc, target)
    return _run_nvrtc(nvrtc, compiler, target, _cuda_sources(kernels))


def _run_nvrtc(nvrtc: Any, compiler: str, target: str, sources: dict[str, bytes]) -> CompileResult:
    started = time.monotonic()
    # NVRTC gets what the source includes from us: it must not look for it in the directories of this host.
    headers = {name.encode(): source for name, source in sources.items() if name != SOURCE_NAME}
    source = sources[SOURCE_NAME].decode(errors="replace")
    program = nvrtc.createProgram(source, SOURCE_NAME, list(headers.values()), list(headers))
    try:
        try:
            nvrtc.compileProgram(program, list(nvrtc_options(target)))
        except Exception as error:
            log = nvrtc.getProgramLog(program)
            reason = "compiler_missing" if "libnvrtc-builtins" in log else "compile_failed"
            raise CompileError(reason, f"{compiler} for {target}: {_first_lines(log) or _one_line(error)}") from error
        log = nvrtc.getProgramLog(program)
        cubin = bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    if len(cubin) < _ELF_HEADER or not cubin.startswith(b"\x7fELF"):
        raise CompileError("compile_failed", f"{compiler} returned no cubin for {target}")
    return CompileResult(target, _whole(cubin), log, parse_resources(log), compiler, time.monotonic() - started)


_ELF_HEADER = 64


def _whole(cubin: bytes) -> bytes:
    """With its last byte, which cupy's getCUBIN cuts off, as if it ended a string: a zero of the last table of headers.
    The driver loads it either way; nvdisasm and readelf do not.
    """
    tables = struct.unpack_from("<QQ", cubin, 32)
    _, *shapes = struct.unpack_from("<5H", cubin, 52)  # of each table, the size of an entry and how many there are
    end = max(start + size * number for start, size, number in zip(tables, shapes[::2], shapes[1::2], strict=True))
    return cubin + b"\0" if end == len(cubin) + 1 else cubin


_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> tuple[KernelResources, ...]:
    """Reads the lines that ptxas writes under -v, one group a function:

    ptxas info    : Function properties for NAME
    ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 254 registers, used 16 barriers, 400 bytes smem

    The last line is missing for a device function that was not inlined; it is reported because it can spill too.
    """
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            current = found.setdefault(match[1], {})
        elif match := _FRAME.search(line):
            current.update(stack=int(match[1]), spill_stores=int(match[2]), spill_loads=int(match[3]))
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            current.update(registers=int(match[1]), static_shared=int(shared[1]) if shared else 0)
    fields = ("registers", "spill_stores", "spill_loads", "stack", "static_shared")
    return tuple(KernelResources(name, *(found[name].get(field, 0) for field in fields)) for name in sorted(found))


# ------------------------------------------------------------------------------------------------------------------ g++

# Variables that would add headers or options behind our back: what goes into a binary is in its key.
_GXX_UNWANTED = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "GCC_COMPARE_DEBUG",
)
_GXX_COMMON = ("-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-strict-aliasing", "-DKDTREE_HOST")


def _gxx_command() -> list[str]:
    """CXX as make understands it, a program and perhaps words that go before its options (`ccache g++`); g++ if it is
    not set.
    """
    try:
        command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError:
        raise CompileError(
            "compiler_missing", f"CXX={os.environ['CXX']!r} is not a command: name a C++17 compiler, or unset it"
        ) from None
    program = shutil.which(command[0])
    if program is None:
        hint = (
            "CXX names it: name another C++17 compiler, or unset it"
            if os.environ.get("CXX")
            else "install g++, or set CXX to a C++17 compiler"
        )
        raise CompileError("compiler_missing", f"{command[0]} is not found in PATH; {hint}")
    return [program, *command[1:]]


def _run_gxx(command: list[str], scratch: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _GXX_UNWANTED}
    environment["LC_ALL"] = "C"
    if scratch is not None:
        environment["TMPDIR"] = scratch
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_GXX_LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise CompileError("compile_failed", f"{command[0]} took longer than {_GXX_LIMIT:.0f} s") from None
    except OSError as error:
        raise CompileError(
            "compiler_missing", f"{command[0]} cannot be run ({error.strerror}): set CXX to another one"
        ) from error


def sanitizer_runtime() -> str:
    """The library to put into LD_PRELOAD of a process that loads a `host-asan` binary."""
    return _run_gxx([*_gxx_command(), "-print-file-name=libasan.so"]).stdout.strip()


def _build_library(command: list[str], target: str, kernels: Path, directory: Path) -> bytes:
    """Works in a folder inside the cache's directory, g++ too, so that what a kill leaves behind is removed with it."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{_family(target)}-", suffix=".tmp", dir=directory) as scratch:
            output = os.path.join(scratch, "library.so")
            done = _run_gxx([*command, "-o", output, str(kernels / "host" / "launch.cpp")], scratch)
            if done.returncode != 0:
                raise CompileError("compile_failed", f"{command[0]} for {target}: {_first_lines(done.stdout)}")
            return Path(output).read_bytes()
    except OSError as error:
        raise CompileError("compile_failed", f"{command[0]} for {target}: {_one_line(error)}") from error


# ------------------------------------------------------------------------------------------------------ cached binaries


@dataclass(frozen=True)
class _Plan:
    """What to make and what it is called: the key covers every byte that goes in."""

    target: str
    key: str
    suffix: str
    compiler: str
    make: Callable[[Path], bytes]  # of a directory to work in


def _plan(target: str, kernels: Path, cache_dir: Path | None) -> _Plan:
    arch, _ = parts_of(target)
    if arch in NVRTC_SINCE:
        cuda = _cuda_sources(kernels)
        nvrtc = _load_nvrtc(cache_dir)
        compiler = _check_nvrtc(nvrtc, target)
        key = _digest([_version(), target, compiler, *nvrtc_options(target), *_named(cuda)])
        return _Plan(target, key, ".cubin", compiler, lambda _: _run_nvrtc(nvrtc, compiler, target, cuda).cubin)
    if arch in HOST_FLAGS:
        gxx = _gxx_command()
        # Under -v with our options g++ would link an a.out, and print a temporary name that is another one every time.
        compiler = _run_gxx([*gxx, "--version"]).stdout
        command = [*gxx, *HOST_FLAGS[arch], *_GXX_COMMON, *_pool_option(target)]
        sources = _host_sources(kernels)
        key = _digest([_version(), target, compiler, *command, *sources])

        def make(directory: Path) -> bytes:
            library = _build_library(command, target, kernels, directory)
            if _host_sources(kernels) != sources:
                raise CompileError("compile_failed", f"{kernels} has changed while it was being compiled")
            return library

        return _Plan(target, key, ".so", command[0], make)
    raise ValueError(f"{target} is not one of {', '.join((*NVRTC_TARGETS, *HOST_TARGETS))}")


def cached(target: str, cache_dir: Path | None = None, kernels: Path = KERNELS) -> Path | None:
    """The path that `cached_binary` would return without compiling, or None. Makes no directory and no file.

    Raises CompileError, as `cached_binary` would before it compiles.
    """
    plan = _plan(target, kernels, cache_dir)
    return cache.look_up(_family(target), plan.suffix, plan.key, cache_dir)


def keep(result: CompileResult, cache_dir: Path | None = None, kernels: Path = KERNELS) -> Path:
    """Puts what `compile_cubin` returned into the cache, where services will find it."""
    plan = _plan(result.target, kernels, cache_dir)
    return _settled(_fetch(replace(plan, make=lambda _: result.cubin), cache_dir))


def cached_binary(target: str, cache_dir: Path | None = None, kernels: Path = KERNELS) -> Path:
    """The path of the kernel's binary for a target, a .cubin or a .so; compiles it, in this process, if the cache does
    not have it.

    Raises CompileError.
    """
    return _settled(_fetch(_announced(_plan(target, kernels, cache_dir)), cache_dir))


def _settled(entry: cache.Entry) -> Path:
    if entry.temporary:
        cache.remove_at_exit(entry.path.parent)
    return entry.path


def _fetch(plan: _Plan, cache_dir: Path | None) -> cache.Entry:
    try:
        return cache.fetch(_family(plan.target), plan.suffix, plan.key, plan.make, cache_dir)
    except cache.CacheUnusable as error:
        raise CompileError("cache_unwritable", f"there is no directory to keep the kernel in ({error})") from error


def _family(target: str) -> str:
    return f"{Path(SOURCE_NAME).stem}-{target}"


def _announced(plan: _Plan) -> _Plan:
    def make(directory: Path) -> bytes:
        started = time.monotonic()
        binary = plan.make(directory)
        get_logger().info(
            "compiled %s for %s in %.1f s (%s)", SOURCE_NAME, plan.target, time.monotonic() - started, plan.compiler
        )
        return binary

    return replace(plan, make=make)


def _digest(parts: Iterable[bytes | str]) -> str:
    """Each part with its length before it, so that no two lists of parts give the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _cuda_sources(kernels: Path) -> dict[str, bytes]:
    """The kernel and every header beside it, by name: all that NVRTC sees."""
    files = [kernels / SOURCE_NAME, *sorted(kernels.glob("*.cuh"))]
    return {file.name: _read_source(file) for file in files}


def _named(sources: dict[str, bytes]) -> list[bytes | str]:
    """For the key: each file after its name."""
    return [part for source in sources.items() for part in source]


def _host_sources(kernels: Path) -> list[bytes | str]:
    """The same and every file of kernels/host, each after its name."""
    host = kernels / "host"
    files = sorted(p for p in host.rglob("*") if p.is_file() and not p.name.startswith("."))
    if not (host / "launch.cpp").is_file():
        raise CompileError("package_broken", f"{host / 'launch.cpp'} is missing: the installation is not complete")
    sources = {str(file.relative_to(kernels)): _read_source(file) for file in files}
    return _named(_cuda_sources(kernels) | sources)


def _read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompileError(
            "package_broken", f"{path} cannot be read ({error.strerror}): the installation is not complete"
        ) from error


def _version() -> str:
    return str(getattr(sys.modules.get("kdtree_patch"), "__version__", ""))


def _one_line(error: BaseException) -> str:
    text = " ".join(re.sub("={4,}", " ", str(error)).split())  # cupy frames its messages
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _first_lines(log: str, count: int = 5) -> str:
    """The first errors of a compiler's log, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return " | ".join(errors[:count])[:1000]


# ---------------------------------------------------------------------------------------------------- the other process

_ANSWER = b"kdtree-answer "

# sys.path comes on standard input: the process must find the same cupy, and PYTHONPATH is taken from it so that
# nobody's sitecustomize runs a second time. Our own folder is on the path only for as long as it takes to import this.
_CHILD = (
    "import json, sys; order = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:] = [order['root'], *order['path']]; "
    "from kdtree_patch.compile import _serve_job; del sys.path[0]; _serve_job(order)"
)
_READY = ""  # the name under which the other process says that it has come this far
_CHILD_UNWANTED = ("PYTHONPATH", "PYTHONINSPECT", "PYTHONSTARTUP")
# How a process ends when the compiler inside it breaks. That would happen here as well, and take the service with it.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class CompileJob:
    """Brings binaries into the cache in another process while this one goes on; `result` waits for one of them.

    What fails is stored and raised by `result`. The other process ends when this one does, however that comes about,
    because its standard input ends then; and a process that dies in the middle of compiling leaves no lock, no broken
    file and no g++ behind. If something else than the compiler has ended it, `result` compiles.
    """

    def __init__(self, targets: Sequence[str], cache_dir: Path | None = None, kernels: Path = KERNELS):
        self.targets = tuple(targets)
        self._cache_dir = cache_dir
        self._kernels = kernels
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._answers: dict[str, dict[str, Any]] = {}
        self._ended = False
        self._changed = threading.Condition()

    def start(self) -> CompileJob:
        """Returns at once and never raises. If no process can be started, `result` compiles."""
        if self._process is not None or not self.targets:
            return self
        try:
            self._process = subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", _CHILD],
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # neither a Ctrl-C at the terminal nor somebody's waitpid(0) is meant for it
            )
            assert self._process.stdin is not None and self._process.stdout is not None
            order = json.dumps(self._order()).encode() + b"\n"
            if self._process.stdin.write(order) != len(order):
                raise OSError("the order did not fit into the pipe")
            threading.Thread(
                target=self._listen, args=(self._process, self._process.stdout), name="kdtree-compile", daemon=True
            ).start()
        except Exception as error:
            get_logger().info(
                "no process could be started for compiling (%s): it will be done when the kernel is needed",
                _one_line(error),
            )
            if self._process is not None:
                self._process.kill()
            self._process = None
        return self

    def result(self, target: str) -> Path:
        """The path of the target's binary. Waits if need be; raises CompileError."""
        if self._process is None or os.getpid() != self._owner or target not in self.targets:
            # Not started, or this is a child made by fork, which has neither the thread nor the answers.
            return cached_binary(target, self._cache_dir, self._kernels)
        answer = self._wait_for(target)
        if answer is None:
            return cached_binary(target, self._cache_dir, self._kernels)
        if "reason" in answer:
            raise CompileError(answer["reason"], answer["message"])
        entry = cache.Entry(Path(answer["path"]), answer["key"], answer["temporary"])
        path = _settled(entry)
        return path if cache.is_whole(entry) else cached_binary(target, self._cache_dir, self._kernels)

    def _wait_for(self, target: str) -> dict[str, Any] | None:
        """The answer, or None if the other process could not be started or was killed: no reason to run stock."""
        assert self._process is not None

        def settled() -> bool:
            return target in self._answers or self._ended

        with self._changed:
            if not self._changed.wait_for(settled, _JOB_NOTICE):
                get_logger().info("waiting for the kernel to be compiled for %s", target)
                self._changed.wait_for(settled, JOB_LIMIT)
            answer = self._answers.get(target)
            started = _READY in self._answers
        if answer is not None:
            return answer
        if self._ended and not started:
            return None
        if self._ended:
            status = self._process.wait()
            how = f"ended with status {status} and no answer"
            if -status not in _CRASHES:
                get_logger().warning("the process that compiles for %s %s: compiling here", target, how)
                return None
        else:
            _kill_group(self._process)
            how = f"took longer than {JOB_LIMIT:.0f} s"
        return {"reason": "compile_failed", "message": f"the process that compiles for {target} {how}"}

    def _order(self) -> dict[str, Any]:
        return {
            "root": str(Path(__file__).resolve().parent.parent),
            "path": absolute_path(),
            "targets": self.targets,
            "cache_dir": None if self._cache_dir is None else os.path.abspath(self._cache_dir),
            "kernels": os.path.abspath(self._kernels),
            "level": get_logger().level,
        }

    def _listen(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        try:
            for line in iter(output.readline, b""):
                if line.startswith(_ANSWER):
                    answer = json.loads(line[len(_ANSWER) :])
                    with self._changed:
                        self._answers[answer["target"]] = answer
                        self._changed.notify_all()
            with contextlib.suppress(OSError):
                # Not reaped yet: until then nobody else can be given its number.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                _kill_group(process)
            process.wait()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the other process and the g++ that it may have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def absolute_path() -> list[str]:
    """sys.path for a process with another history. The empty entry, whatever directory one happens to be in, is left
    out.
    """
    return [os.path.abspath(entry) for entry in sys.path if entry]


def interpreter_flags() -> list[str]:
    """For another process of this interpreter, those that decide what it imports."""
    flags = ["-I"] if sys.flags.isolated else ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    return flags + ["-S"] * sys.flags.no_site


def child_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _CHILD_UNWANTED}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # NVRTC may call cuInit; it shall not wake the GPUs
    return environment


def _serve_job(order: dict[str, Any]) -> None:
    """The other process: one line on standard output for each target, and an early end if the process that started it
    is gone.
    """
    # What cupy or anybody prints goes to standard error; the answers have their own descriptor.
    answers = os.dup(1)
    with contextlib.suppress(OSError):  # a service without standard error
        os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    get_logger().setLevel(order["level"])
    cache_dir = None if order["cache_dir"] is None else Path(order["cache_dir"])

    def say(**answer: Any) -> None:
        with contextlib.suppress(OSError):  # nobody is left to read it
            os.write(answers, _ANSWER + json.dumps(answer).encode() + b"\n")

    say(target=_READY)
    for target in order["targets"]:
        try:
            entry = _fetch(_announced(_plan(target, Path(order["kernels"]), cache_dir)), cache_dir)
            say(target=target, path=str(entry.path), key=entry.key, temporary=entry.temporary)
        except CompileError as error:
            say(target=target, reason=error.reason, message=str(error))
        except Exception as error:
            say(target=target, reason="compile_failed", message=_one_line(error))
    # Without the interpreter's clean-up, which would race with the thread that watches standard input.
    os._exit(0)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # this process and its g++: it leads a group of its own
