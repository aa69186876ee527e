"""Faults put into a service with the patch, one after the other: what it does then.

Always one of two things: the call is the stock kernel's, with one line; or the exception comes out that would have come
out without the patch. Nothing is half done: the KV store has happened once, every row of the output is written, the
next call finds everything in order. A CUDA error that has taken the context with it is raised, whatever was going on.

`FAULTS` names each fault with its tests; those of a single part (the cache, the compiler) are with that part. The
service here is that of tests/test_hook.py: SGLang's signatures, store and output, and both kernels in torch, or ours
compiled for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kdtree_patch import cache, hook, tiles
from kdtree_patch import compile as compiling
from kdtree_patch import kernel as kernel_module
from kdtree_patch.settings import Settings
from tests.fakes import FakeKernel, a_case, a_layer
from tests.support.cases import host_kernel, reference
from tests.support.env import REPO
from tests.support.named_tests import functions, missing
from tests.support.reference import rel
from tests.support.small_sources import CountingCompiler, kernels_folder
from tests.test_hook import MARK, Service, a_runner, forward, fresh_process, lines, wrappers_of_ours

__all__ = ["fresh_process"]  # a fixture that every test here uses

HERE = "test_injected_faults.py"
FAULTS: dict[str, tuple[str, ...]] = {
    "NVRTC fails": (
        f"{HERE}::test_nvrtc_fails",
        "test_compile.py::test_source_error_shows_the_first_lines_of_the_log",
        "test_compile.py::test_nvrtc_library_missing",
        "test_compile.py::test_failure_is_kept_and_raised_by_result",
        "test_compile.py::test_compiler_that_crashes_its_process_is_not_let_into_this_one",
    ),
    "the module cannot be loaded": (
        f"{HERE}::test_the_module_cannot_be_loaded",
        f"{HERE}::test_loading_finds_the_context_lost",
        "test_hook.py::test_what_the_kernel_says_becomes_the_reason",
    ),
    "a launch fails": (
        f"{HERE}::test_a_launch_fails",
        f"{HERE}::test_a_launch_fails_and_takes_the_context",
        "test_route.py::test_an_error_that_took_the_context_is_not_swallowed",
        "test_validate.py::test_an_error_that_took_the_context_is_not_swallowed_by_validation",
        "test_selftest.py::test_a_fault_that_took_the_context_is_raised",
    ),
    "no memory for the workspace": (
        f"{HERE}::test_no_memory_for_the_workspace",
        "test_validate.py::test_no_memory_to_validate_with",
    ),
    "cupy raises in the middle of a call": (f"{HERE}::test_the_second_of_the_two_kernels_cannot_be_launched",),
    "another tool's wrapper raises inside ours": (
        f"{HERE}::test_another_tools_wrapper_raises_inside_ours",
        "test_hook.py::test_an_exception_passes_and_leaves_no_context",
        "test_hook.py::test_an_init_that_fails_fails_as_before",
    ),
    "the cache's disk is full": (
        f"{HERE}::test_every_disk_is_full",
        "test_cache.py::test_full_disk",
        "test_cache.py::test_every_disk_is_full",
    ),
    "a file of the cache is torn": (
        f"{HERE}::test_a_file_of_the_cache_is_torn",
        "test_cache.py::test_damaged_file_is_noticed_said_once_and_made_again",
        "test_cache.py::test_writer_killed_in_the_middle_leaves_no_file_under_the_name",
    ),
    "a signal while compiling": (
        f"{HERE}::test_a_signal_while_compiling",
        "test_compile.py::test_compiling_process_that_is_killed_is_no_reason_to_run_stock",
        "test_compile.py::test_compiling_process_ends_with_ours",
        "test_compile.py::test_exit_while_nvrtc_works_is_clean",
    ),
    "a fork after the install": (
        f"{HERE}::test_a_fork_after_the_install",
        "test_compile.py::test_result_in_a_child_made_by_fork",
        "test_boot.py::test_spawned_and_forked_children_are_armed_too",
    ),
    "two engines in one process": (
        f"{HERE}::test_two_engines_in_two_threads",
        f"{HERE}::test_two_engines_one_of_which_fails",
        "test_hook.py::test_a_second_class_is_wrapped_once_and_shares_the_kernel",
        "test_hook.py::test_two_devices_get_a_kernel_each",
        "test_graphs.py::test_two_backends",
    ),
    "a module is reloaded": (
        f"{HERE}::test_our_own_modules_reloaded",
        "test_boot.py::test_a_reload_runs_stock",
        "test_hook.py::test_a_second_copy_of_our_module_does_not_wrap_again",
        "test_log.py::test_a_reload_adds_no_second_handler_and_nothing_propagates",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_tests(fault: str) -> None:
    assert FAULTS[fault] and missing(FAULTS[fault]) == []


def test_every_test_of_this_file_is_named_for_a_fault() -> None:
    named = {name.partition("::")[2] for names in FAULTS.values() for name in names if name.startswith(HERE)}
    about_the_table = {"test_every_fault_has_its_tests", "test_every_test_of_this_file_is_named_for_a_fault"}
    assert named == {name for name in functions(Path(__file__)) if name.startswith("test_")} - about_the_table


# The service, and what must hold of each call.


class Watched(Service):
    """A service whose backends count their KV stores, and which may load its kernel as a real one does."""

    def __init__(self, kernel: Any = None, load: Callable[..., Any] | None = None, device: str = "cpu"):
        super().__init__()
        self.kernel = kernel or FakeKernel()
        if load is not None:
            self.load = load  # type: ignore[method-assign]
        watch(self.module, device)


def watch(module: ModuleType, device: str) -> None:
    backend = module.TritonAttnBackend
    init, plain = backend.__init__, backend.forward_extend

    @functools.wraps(init)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.stores = 0
        if device != "cpu":
            self.req_to_token = SimpleNamespace(device=torch.device(device))

    @functools.wraps(plain)
    def storing(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.stores += 1
        return plain(self, *args, **kwargs)

    backend.__init__, backend.forward_extend = constructed, storing


def call(backend: Any, layer: int = 0) -> None:
    """One call that must go well: one store, and every row of the output right."""
    before = backend.stores
    out = forward(backend, layer=a_layer(layer))  # fills the output with NaN first
    assert backend.stores == before + 1
    assert rel(out, reference(backend.case)) < 1e-3


def stock_and_one_line(service: Watched, backend: Any, captured: Sequence[str], *words: str) -> None:
    """Three calls, all the stock kernel's, and of the whole process one line, with these words."""
    stock_calls = len(service.stock.calls)
    for layer in range(3):
        call(backend, layer)
    assert len(service.stock.calls) == stock_calls + 3
    (line,) = captured
    assert line.startswith("[kdtree] declined reason=") and line.endswith("; the service runs stock")
    for word in words:
        assert word in line, line
    assert hook.ROUTER not in vars(backend)


class CudaError(RuntimeError):
    """As cupy's: it has the status."""

    def __init__(self, status: int):
        super().__init__(f"CUDA_ERROR {status}")
        self.status = status


# NVRTC and the module.


def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as loading asks: the properties of one, and cupy without a driver."""
    properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("source", ["this is no CUDA", "__global__ void half("])
def test_nvrtc_fails(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real one, on a source that it refuses; nothing stays in the cache."""
    a_gpu(monkeypatch)
    broken = functools.partial(compiling.cached_binary, kernels=kernels_folder(tmp_path, source))
    monkeypatch.setattr(compiling, "cached_binary", broken)
    service = Watched(load=hook.load_kernel, device="cuda:0")
    service.settings = Settings(cache_dir=tmp_path / "cache")
    backend = service.start()
    captured = [line for line in lines(capsys) if "compiling for sm_80" not in line]
    stock_and_one_line(service, backend, captured, "compile_failed", "NVRTC", "error")
    assert list((tmp_path / "cache").glob("*.cubin")) == []


def cupy_whose_module(error: Exception) -> SimpleNamespace:
    def refuse(path: str) -> Any:
        raise error

    return SimpleNamespace(RawModule=refuse, cuda=SimpleNamespace(Device=lambda index: contextlib.nullcontext()))


def a_module_that_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Watched:
    a_gpu(monkeypatch)
    monkeypatch.setattr(compiling, "cached_binary", lambda *args: Path("/a.cubin"))
    monkeypatch.setattr(compiling, "import_cupy", lambda *args: cupy_whose_module(error))
    return Watched(load=hook.load_kernel, device="cuda:0")


def test_the_module_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """209: no kernel image for this device."""
    service = a_module_that_raises(CudaError(209), monkeypatch)
    backend = service.start()
    service.start()  # a second backend does not try again
    stock_and_one_line(service, backend, lines(capsys), "load_failed", "CudaError: CUDA_ERROR 209")


def test_loading_finds_the_context_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody else's kernel has faulted, and ours is the first to be told: nobody is served by going on."""
    service = a_module_that_raises(CudaError(700), monkeypatch)
    with pytest.raises(CudaError, match="700"):
        service.start()
    assert lines(capsys) == []


def test_no_memory_for_the_workspace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights have left too little."""
    a_gpu(monkeypatch)
    monkeypatch.setattr(compiling, "cached_binary", lambda *args: Path("/a.cubin"))
    monkeypatch.setattr(kernel_module, "gpu_launcher", lambda *args: None)
    empty = torch.empty

    def none_left(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 22.00 MiB")
        return empty(*size, **options)

    service = Watched(load=hook.load_kernel, device="cuda:0")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", none_left)
        backend = service.start()
    stock_and_one_line(service, backend, lines(capsys), "out_of_memory", "OutOfMemoryError: CUDA out of memory")


# Launches.


def test_a_launch_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """1 is an invalid value, 2 no memory, 701 too many resources: the context lives."""
    for status in (1, 2, 701):
        hook._worker = None
        service = Watched(FakeKernel(error=CudaError(status)))
        backend = service.start()
        for layer in range(3):
            call(backend, layer)
        assert (len(service.kernel.calls), len(service.stock.calls)) == (1, 3)
        errors = [line for line in lines(capsys) if "ERROR" in line]
        assert len(errors) == 1 and f"disabled reason=launch_failed CudaError: CUDA_ERROR {status}" in errors[0]


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_a_launch_fails_and_takes_the_context(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Raised out of forward_extend, with the store done once, and without a second try by the stock kernel."""
    service = Watched(FakeKernel(error=CudaError(700)))
    service.settings = Settings(mode=mode, validate=mode == "shadow")
    backend = service.start()
    with pytest.raises(CudaError, match="700"):
        forward(backend)
    assert backend.stores == 1 and len(service.stock.calls) == (mode == "shadow")
    assert getattr(backend, hook.ROUTER).context is None
    assert not [line for line in lines(capsys) if "ERROR" in line or "declined" in line]


@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_the_second_of_the_two_kernels_cannot_be_launched(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours has already written to the output, and its workspace is full of what nobody will combine. The stock kernel
    writes every row.
    """
    kernel = host_kernel(compiling.cached_binary("host"), config=config)
    launch, launched = kernel._launcher, []

    def interrupted(steps: Sequence[Any], params: int) -> None:
        launch(steps[:1], params)
        launched.append(steps[0][0])
        raise CudaError(1)

    kernel._launcher = interrupted
    service = Watched(kernel)
    backend = service.start(case=a_case(prefixes=[70, 5]))
    for layer in range(3):
        call(backend, layer)
    assert len(launched) == 1 and len(service.stock.calls) == 3
    assert sum("ERROR" in line for line in lines(capsys)) == 1


# Other tools.


@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
@pytest.mark.parametrize("what", ["forward_extend", "extend_attention_fwd"])
def test_another_tools_wrapper_raises_inside_ours(what: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A tracer below our wrapper, of the method or of the inner function, with a fault of its own: its exception comes
    out as it would without us, and the calls after it are served.
    """

    class Theirs({"Exception": Exception, "BaseException": BaseException}[kind]):  # type: ignore[misc]
        pass

    service = Watched()
    failing = [True]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if failing[0]:
                raise Theirs("in a tracer")
            return function(*args, **kwargs)

        return traced

    cls = service.backend_class
    if what == "forward_extend":
        cls.forward_extend = wrap(cls.forward_extend)
    backend = service.start()
    if what == "extend_attention_fwd":
        backend.extend_attention_fwd = wrap(backend.extend_attention_fwd)
    for _ in range(2):
        with pytest.raises(Theirs, match="in a tracer"):
            forward(backend)
        assert getattr(backend, hook.ROUTER).context is None
    failing[0] = False
    call(backend)
    assert len(service.kernel.calls) == 1
    assert [line for line in lines(capsys) if "ERROR" in line or "WARNING" in line] == []


# The cache.


class CopyingCompiler:
    """A g++ that brings the library that is there already: the real one takes a minute."""

    def __init__(self, folder: Path):
        built = compiling.cached_binary("host")
        self.path, self.log = folder / "g++", folder / "g++.log"
        self.path.write_text(
            "#!/bin/sh\n"
            'case "$1" in --version) echo "copying g++ 1"; exit;; esac\n'
            f"echo once >> {self.log}\n"
            'while [ "$1" != -o ]; do shift; done\n'
            f'cp {built} "$2"\n'
        )
        self.path.chmod(0o755)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopyingCompiler:
    copying = CopyingCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(copying.path))
    return copying


def test_every_disk_is_full(
    compiler: CopyingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(cache, "_fresh_directory", None)
    service = Watched(load=hook.load_kernel)
    service.settings = Settings(cache_dir=tmp_path / "cache")
    backend = service.start()
    captured = [line for line in lines(capsys) if "compil" not in line]
    stock_and_one_line(service, backend, captured, "cache_unwritable", "No space left on device")


def test_a_file_of_the_cache_is_torn(
    compiler: CopyingCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaded torn it would take the process with it. It is made again, and the kernel served."""
    settings = Settings(cache_dir=tmp_path / "cache", selftest=False)
    for attempt in range(3):
        hook._worker = None
        service = Watched(load=hook.load_kernel)
        service.settings = settings
        call(service.start())
        assert (len(service.stock.calls), compiler.runs) == (0, 1 + attempt)
        said = lines(capsys)
        assert sum("torn or altered" in line for line in said) == min(attempt, 1)
        (library,) = (tmp_path / "cache").glob("*.so")
        torn = library.read_bytes()[: 50_000 * (1 + attempt)]
        library.unlink()  # the one that is loaded stays as it is
        library.write_bytes(torn)


# Processes and signals.


WAITING = """
import os, signal, sys, time
from pathlib import Path
from kdtree_patch.compile import CompileJob
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
job = CompileJob(["host"], Path(sys.argv[2]), Path(sys.argv[1])).start()
print("waiting", job._process.pid, flush=True)
try:
    path = job.result("host")
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    print(path.name, len(heard), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_while_compiling(number: signal.Signals, tmp_path: Path) -> None:
    """To the worker that waits for its kernel: a handler runs and the waiting goes on; Ctrl-C is a KeyboardInterrupt,
    as it would be anywhere in a constructor; what ends the worker ends the compilation too.
    """
    slow = CountingCompiler(tmp_path, 2.0 if number == signal.SIGUSR1 else 60.0)
    arguments = [str(kernels_folder(tmp_path, 'extern "C" int answer() { return 42; }\n')), str(tmp_path / "cache")]
    worker = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments], env={**os.environ, "CXX": str(slow.path), "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE, text=True, cwd=REPO,
    )  # fmt: skip
    assert worker.stdout is not None
    word, child = worker.stdout.readline().split()
    assert word == "waiting"
    while not slow.pids:
        time.sleep(0.05)
    time.sleep(0.3)
    worker.send_signal(number)
    said = worker.communicate(timeout=30)[0].split()
    if number == signal.SIGUSR1:
        assert worker.returncode == 0
        assert said[0].startswith("verify_attn_flash-host-") and said[1] == "1"
    elif number == signal.SIGINT:
        assert (worker.returncode, said) == (0, ["interrupted"])
    else:
        assert worker.returncode == -number
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: str) -> bool:
    """Not one that has ended and that nobody has asked after, as some containers have them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


FORKED = """
import os, sys, torch
torch.set_num_threads(1)  # the child of a fork has no pool of them
from tests import test_injected_faults as faults
from kdtree_patch import hook
service = faults.Watched(faults.host_kernel(faults.Path(sys.argv[1])))
backend = service.start()
faults.call(backend)
child = os.fork()
for layer in range(1 if child else 2):
    faults.call(backend, layer)
assert len(service.stock.calls) == 0
print(sorted(hook.counts().items()), flush=True)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""


def test_a_fork_after_the_install(tmp_path: Path) -> None:
    """Both go on, and each counts for itself."""
    library = str(compiling.cached_binary("host"))
    done = subprocess.run(
        [sys.executable, "-c", FORKED, library], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[(('kernel', 'verify'), {calls})]" for calls in (2, 3)]


# Two engines.


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_two_engines_in_two_threads(switching: None) -> None:
    """Each with its own instance, and both with the one kernel of the device: neither computes with the other's
    arguments.
    """
    service = Watched(host_kernel(compiling.cached_binary("host")))
    backends = [service.start(case=a_case(prefixes=[4 + 30 * i, 0], seed=i, heads=1 + i)) for i in range(2)]
    right = [reference(backend.case) for backend in backends]
    wrong: list[float] = []

    def run(number: int) -> None:
        for layer in range(100):
            out = forward(backends[number], layer=a_layer(layer))
            if not rel(out, right[number]) < 1e-3:
                wrong.append(rel(out, right[number]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and service.stock.calls == []
    assert [backend.stores for backend in backends] == [100, 100]
    assert hook.counts() == {("kernel", "verify"): 200}


def test_two_engines_one_of_which_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """They share the device, so what one has learnt of the kernel holds for the other: both run stock, one line."""
    service = Watched(FakeKernel(mark=MARK))
    first, second = service.start(), service.start(case=a_case(prefixes=[9, 30]))
    forward(first), forward(second)
    assert len(service.kernel.calls) == 2
    service.kernel.error = CudaError(1)
    for backend in (first, second):
        call(backend)
    assert len(service.kernel.calls) == 3
    assert sum("ERROR" in line for line in lines(capsys)) == 1


# Reloads.


@pytest.mark.parametrize("name", ["hook", "route", "ledger", "kernel"])
def test_our_own_modules_reloaded(name: str) -> None:
    """What is installed goes on as it was; what is installed anew is wrapped once, and served."""
    before = {key: module for key, module in sys.modules.items() if key.startswith("kdtree_patch")}
    service = Watched(FakeKernel())
    backend = service.start()
    state = dict(vars(before[f"kdtree_patch.{name}"]))
    try:
        reloaded = importlib.reload(before[f"kdtree_patch.{name}"])
        call(backend)
        installed = reloaded if name == "hook" else hook
        installed.install(service.module, service.settings, None, service.load)
        again = service.backend_class(a_runner())
        call(again)
        assert wrappers_of_ours(vars(service.backend_class)["forward_extend"]) == 1
        assert service.stock.calls == [] and len(service.kernel.calls) == 2
    finally:
        vars(before[f"kdtree_patch.{name}"]).update(state)
