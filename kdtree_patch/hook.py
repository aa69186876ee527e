"""wrapt on SGLang's Triton backend: where a verify call leaves SGLang's code, and where it comes back.

Methods of `TritonAttnBackend` are wrapped, on the class, which keeps its name and its identity (DFLASH looks the name
up):

* `__init__`, to replace the new instance's own `extend_attention_fwd` by a router. That attribute is the seam: what
  reaches it has been through SGLang's KV store, scales and output buffer, so these stay SGLang's in every release.
* `forward_extend`, to tell the router which layer and batch the inner call belongs to, which the inner call itself
  does not say. A call of a forward mode that is not routed is passed through at once.
* `init_forward_metadata` and its siblings for CUDA graphs, because a replay passes none of the methods above: they are
  where the host comes by once a step, and all that it learns of a replay.

Nothing here may cost a service its start: each wrapper runs the stock code first or around, and what fails on our
side is one line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
import wrapt

from kdtree_patch import __version__, contract, log, metrics
from kdtree_patch.ledger import Ledger, is_fatal
from kdtree_patch.route import Kernel, VerifyRouter
from kdtree_patch.settings import FP8_STOCK_REL, Settings

if TYPE_CHECKING:
    from kdtree_patch.compile import CompileJob

# On our wrappers. wrapt keeps `_self_` attributes on the wrapper and shows everything else of what is wrapped, so the
# mark is found through other people's wrapt wrappers as well, and by a second copy of this module.
MARK: Final = "_self_kdtree_patch"
# On an instance: its router. On the instance rather than in a table of ours, so that the two live and die together.
ROUTER: Final = "_kdtree_router"

FP8_TYPES: Final = frozenset(getattr(torch, name) for name in contract.FP8)

Method = Callable[..., Any]
Wrapper = Callable[[Method, Any, tuple[Any, ...], dict[str, Any]], Any]
LoadKernel = Callable[[torch.device, Settings, "CompileJob | None", "torch.dtype | None"], Kernel]


class Declined(Exception):
    """This process, or this backend, stays stock. `reason` is the code of the line, the message its detail.

    `quiet` is for what is in the nature of some backends: worth a line only if the process would otherwise say nothing.
    `alarming` is for what should not happen on any machine: its line is called an ERROR.
    """

    def __init__(self, reason: str, detail: str, *, quiet: bool = False, alarming: bool = False, **facts: object):
        super().__init__(detail)
        self.reason = reason
        self.quiet = quiet
        self.alarming = alarming
        self.facts = facts


class Worker:
    """One process: its settings, its kernels, what it has served, and the one line it has said about itself."""

    def __init__(self, settings: Settings, job: CompileJob | None, load: LoadKernel):
        self.settings = settings
        self.ledger = Ledger()
        self._job = job
        self._load = load
        self._kernels: dict[tuple[torch.device, torch.dtype | None], Kernel | Declined] = {}
        self._installed = False
        self._metered = False
        self._spoken = False

    def attach(self, backend: Any, runner: Any) -> None:
        """Gives a constructed backend its router, or says why not.

        The instance is changed last of all, and of it the inner function: whatever fails before that, the line
        included, leaves an instance whose calls go to the stock function.
        """
        try:
            if ROUTER in vars(backend):
                return
            check_worth_it(backend, self.settings.forward_modes)
            kernel = self.kernel_on(backend.req_to_token.device, fp8_pool(runner))
            rank = tp_rank(runner)
            if not self._metered:
                self._metered = True
                self.ledger.meters = metrics.of_service(getattr(runner, "server_args", None))
            facts = about(self.settings, kernel, rank)
            router = VerifyRouter(
                undisabled(backend.extend_attention_fwd), kernel, self.settings, self.ledger, rank, facts
            )
            # The stock function is wrapped like this too: torch.compile must not look inside.
            routed = torch.compiler.disable(router.__call__)
            if not self._installed:
                if kernel.pool is not None and (self.settings.guard_rel or math.inf) < FP8_STOCK_REL:
                    words = (
                        "KDTREE_GUARD_REL=%g will trip: with an fp8 KV pool the stock kernel itself rounds queries and "
                        "weights to fp8, and is up to %g off; set it higher"
                    )
                    log.get_logger().warning(words, self.settings.guard_rel, FP8_STOCK_REL)
                log.installed(**facts)
                self._installed = self._spoken = True
            setattr(backend, ROUTER, router)
            backend.extend_attention_fwd = routed
        except Declined as declined:
            self._say(declined)
        except Exception as error:
            if is_fatal(error):
                raise
            self._say(Declined("hook_failed", f"{type(error).__name__}: {error}"))

    def kernel_on(self, device: torch.device, pool: torch.dtype | None) -> Kernel:
        """The kernel on a device for a KV pool, see `fp8_pool`, loaded once. A failure is remembered too: draft
        backends must not each try again.
        """
        if (device, pool) not in self._kernels:
            try:
                self._kernels[device, pool] = self._load(device, self.settings, self._job, pool)
            except Declined as declined:
                self._kernels[device, pool] = declined
        kernel = self._kernels[device, pool]
        if isinstance(kernel, Declined):
            raise kernel
        return kernel

    def _say(self, declined: Declined) -> None:
        if self.ledger.first(("process", declined.reason)) and not (declined.quiet and self._spoken):
            self._spoken = True
            if declined.alarming:
                words = log.advised(declined.reason, str(declined))
                log.get_logger().error("declined reason=%s %s; the service runs stock", declined.reason, words)
            else:
                log.stays_stock(declined.reason, str(declined), **declined.facts)


# The worker of this process: if a second class is ever installed on, it shares kernels and counters.
_worker: Worker | None = None


def install(
    module: ModuleType, settings: Settings, job: CompileJob | None = None, load: LoadKernel | None = None
) -> None:
    """Wraps the backend of `module`, which the contract has been checked for. A second time changes nothing.

    Nobody calls it again after a reload of `module`: the new class runs stock.
    """
    global _worker
    if _worker is None:
        _worker = Worker(settings, job, load or load_kernel)
    backend = getattr(module, contract.BACKEND)
    wrap(backend, "__init__", functools.partial(around_init, _worker))
    wrap(backend, "forward_extend", around_forward_extend)
    wrap(backend, "init_forward_metadata", around_metadata)
    for name, around in AROUND_GRAPHS.items():
        if name in vars(backend):
            wrap(backend, name, around)


def undisabled(function: Any) -> Any:
    """A function that `torch.compiler.disable` has wrapped, without that wrapper: what calls it is wrapped like this
    too, and twice is once, for half a microsecond more. A wrapper of somebody else's, which functools.wraps may have
    given the same attributes, stays.
    """
    if getattr(function, "_torchdynamo_wrapper_id", None) == id(function):
        return getattr(function, "_torchdynamo_orig_callable", function)
    return function


def counts() -> Counter[tuple[str, str]]:
    """How many calls this process has served and declined: (route, reason) to number."""
    return Counter() if _worker is None else Counter(_worker.ledger.counts)


def wrap(cls: type, name: str, around: Callable[[Method], Wrapper]) -> None:
    """Puts a wrapper around a method, in the class's own dictionary, unless one of ours is there already."""
    method = vars(cls)[name]
    if not is_ours(method):
        wrapped = wrapt.FunctionWrapper(method, around(method))
        setattr(wrapped, MARK, True)
        setattr(cls, name, wrapped)


def is_ours(function: Any) -> bool:
    """True if our wrapper is this function or lies somewhere below it."""
    while function is not None:
        if getattr(function, MARK, False) is True:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def around_init(worker: Worker, method: Method) -> Wrapper:
    runner_at = position(method, "model_runner")

    def wrapper(wrapped: Method, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        worker.attach(instance, args[runner_at] if runner_at < len(args) else kwargs.get("model_runner"))
        return result

    return wrapper


def around_forward_extend(method: Method) -> Wrapper:
    layer_at, batch_at = position(method, "layer"), position(method, "forward_batch")

    def wrapper(wrapped: Method, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        router = getattr(instance, ROUTER, None)
        if router is None:
            return wrapped(*args, **kwargs)
        try:
            batch = args[batch_at] if batch_at < len(args) else kwargs["forward_batch"]
            layer = args[layer_at] if layer_at < len(args) else kwargs["layer"]
            mode = router.mode_of(batch.forward_mode)
        except (KeyError, AttributeError):
            mode = None  # a call that the stock method will refuse, in its own words
        if mode is None:
            return wrapped(*args, **kwargs)
        before = router.context, router.mode
        router.context, router.mode = (layer, batch), mode
        try:
            return wrapped(*args, **kwargs)
        finally:
            router.context, router.mode = before

    return wrapper


def around_metadata(method: Method) -> Wrapper:
    """An eager step."""

    def wrapper(wrapped: Method, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        router = getattr(instance, ROUTER, None)
        if router is not None:
            router.before_step()
        return wrapped(*args, **kwargs)

    return wrapper


def around_graph(asked: Callable[[Method], Callable[..., tuple[Any, int, bool]]]) -> Callable[[Method], Wrapper]:
    """A batch that is about to be captured or replayed. `asked` makes, of a method, a function of its arguments that
    tells: its forward mode, of how many requests it is, and whether it is captured."""

    def around(method: Method) -> Wrapper:
        ask = asked(method)

        def wrapper(wrapped: Method, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            router = getattr(instance, ROUTER, None)
            if router is None:
                return wrapped(*args, **kwargs)
            try:
                forward_mode, bs, captured = ask(*args, **kwargs)
                mode = router.mode_of(forward_mode)
            except (KeyError, AttributeError, IndexError):
                return wrapped(*args, **kwargs)  # a call that the stock method will refuse, in its own words
            router.before_step()
            result = wrapped(*args, **kwargs)
            if mode is not None and captured:
                router.capture_begins(bs, mode)
            elif mode is not None:
                router.replay_begins(bs, mode)
            return result

        return wrapper

    return around


def says_bs(captured: bool) -> Callable[[Method], Callable[..., tuple[Any, int, bool]]]:
    """Up to 0.5.12 there is a method each, which say the mode and the number of requests themselves."""

    def asked(method: Method) -> Callable[..., tuple[Any, int, bool]]:
        bs_at, mode_at = position(method, "bs"), position(method, "forward_mode")

        def ask(*args: Any, **kwargs: Any) -> tuple[Any, int, bool]:
            mode = args[mode_at] if mode_at < len(args) else kwargs["forward_mode"]
            bs = args[bs_at] if bs_at < len(args) else kwargs["bs"]
            return mode, bs, captured

        return ask

    return asked


def says_batch(method: Method) -> Callable[..., tuple[Any, int, bool]]:
    """From 0.5.13 on there is one method, which says a batch."""
    batch_at, capture_at = position(method, "forward_batch"), position(method, "in_capture")

    def ask(*args: Any, **kwargs: Any) -> tuple[Any, int, bool]:
        batch = args[batch_at] if batch_at < len(args) else kwargs["forward_batch"]
        captured = args[capture_at] if capture_at < len(args) else kwargs.get("in_capture", False)
        return batch.forward_mode, batch.batch_size, captured

    return ask


AROUND_GRAPHS: Final = {
    "init_forward_metadata_capture_cuda_graph": around_graph(says_bs(captured=True)),
    "init_forward_metadata_replay_cuda_graph": around_graph(says_bs(captured=False)),
    "init_forward_metadata_out_graph": around_graph(says_batch),
}


def position(method: Method, name: str) -> int:
    """Where a parameter of a method stands among its positional arguments, self not counted."""
    return list(inspect.signature(method).parameters).index(name) - 1


def check_worth_it(backend: Any, modes: frozenset[str]) -> None:
    """Raises Declined for a backend that will never make a call we could serve: nothing is loaded for it."""
    violations = contract.check_instance(backend)
    if violations:
        sglang = contract.sglang_version()
        raise Declined("contract", contract.UNKNOWN_RELEASE, violations="; ".join(violations), sglang=sglang)
    if not backend.num_draft_tokens and "extend" not in modes:
        raise Declined("no_speculation", "there is no speculative decoding, so there are no verify calls", quiet=True)
    if not getattr(backend, "use_mla", True):
        raise Declined("not_mla", "the model has no multi-head latent attention", quiet=True)
    if getattr(backend, "enable_deterministic", False):
        raise Declined("deterministic", "deterministic inference uses another kernel of SGLang")
    if getattr(backend, "dcp_size", 1) != 1:
        raise Declined("context_parallel", "with decode context parallelism a rank has only a part of each prefix")
    if getattr(backend, "skip_prefill", False):
        raise Declined("draft_only", "this backend only decodes drafts", quiet=True)


def fp8_pool(runner: Any) -> torch.dtype | None:
    """The type of the KV pool that the backend will be given, if it is one of fp8. The pool itself may not be there
    yet; the model runner has settled its type before it constructs a backend.
    """
    dtype = getattr(runner, "kv_cache_dtype", None)
    return dtype if dtype in FP8_TYPES else None


def load_kernel(
    device: torch.device, settings: Settings, job: CompileJob | None, pool: torch.dtype | None = None
) -> Kernel:
    """The real kernel. Imported here because it brings numpy and cupy along, which a stock service has no use for."""
    if device.type not in ("cuda", "cpu"):
        raise Declined("device", f"there is no kernel for {device.type} devices")
    try:
        from kdtree_patch.kernel import KernelUnavailable, VerifyKernel
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may call sys.exit() while it is imported
        raise Declined("package_broken", f"{type(error).__name__}: {error}") from error
    try:
        kernel = VerifyKernel.load(device, settings.cache_dir, job, settings.config, pool)
    except KernelUnavailable as error:
        raise Declined(error.reason, str(error)) from error
    except ImportError as error:
        if "cupy" not in f"{error.name} {error}".lower():
            raise Declined("load_failed", f"{type(error).__name__}: {error}") from error
        detail = f"({error}) install cupy-cuda12x or cupy-cuda13x into the service's environment"
        raise Declined("cupy_missing", detail) from error
    except Exception as error:
        if is_fatal(error):
            raise  # whoever has lost the context, the stock kernel will not find it either
        decline_for_memory(error)
        raise Declined("load_failed", f"{type(error).__name__}: {error}") from error
    if settings.selftest:
        try_out(kernel)
    return kernel


def decline_for_memory(error: Exception) -> None:
    """Raises Declined if the device had no memory left, in torch's words, cupy's or the driver's: nothing is wrong with
    the kernel then.
    """
    detail = f"{type(error).__name__}: {error}"
    if "out of memory" in detail.lower():
        raise Declined("out_of_memory", detail) from error


def try_out(kernel: Kernel) -> None:
    """Raises Declined if the kernel computes wrongly on its device, or cannot be tried."""
    from kdtree_patch import selftest

    try:
        wrong = [one for one in selftest.run(kernel) if not one.good]
    except Exception as error:
        if is_fatal(error):
            raise  # a fault of our kernel has taken the context with it: nothing that comes after could be right
        decline_for_memory(error)
        raise Declined("selftest_failed", f"{type(error).__name__}: {error}", alarming=True) from error
    if wrong:
        worst = max(wrong, key=lambda one: (one.rel != one.rel, one.rel))
        detail = f"{len(wrong)} cases are wrong, the worst {worst.name}: rel={worst.rel:.2e}, allowed {worst.limit:.0e}"
        raise Declined("selftest_failed", detail, alarming=True)


def about(settings: Settings, kernel: Kernel, rank: int | None) -> Mapping[str, object]:
    """The fields of the installed line: everything that somebody who reads a log from afar asks first."""
    device = kernel.device
    facts: dict[str, object] = {
        "version": __version__,
        "mode": settings.mode,
        "validate": int(settings.validate),
        "guard_rel": settings.guard_rel,
        "sglang": contract.sglang_version(),
        "torch": torch.__version__,
        "cupy": package_version("cupy"),
        "wrapt": package_version("wrapt"),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "cc": f"{properties.major}.{properties.minor}"}
    return facts | {"target": getattr(kernel, "target", None), "tp_rank": rank}


def package_version(name: str) -> str | None:
    """Of a module that is imported, from itself: cupy's distribution has a name for each CUDA version."""
    version = getattr(sys.modules.get(name), "__version__", None)
    if version is None and name in sys.modules:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
    return version


def tp_rank(runner: Any) -> int | None:
    """The tensor-parallel rank where it is known: on the model runner, or else from SGLang's running process groups.

    Only asks modules that are imported already, and takes any refusal for an answer: initialising SGLang's parallel
    state, or failing a start over a number in a log line, would be absurd.
    """
    asked: list[Callable[[], Any]] = [
        lambda: runner.tp_rank,
        lambda: sys.modules["sglang.srt.runtime_context"].get_parallel().tp_rank,
        lambda: sys.modules["sglang.srt.distributed.parallel_state"].get_tensor_model_parallel_rank(),
    ]
    for ask in asked:
        try:
            rank = ask()
        except Exception:
            continue
        if isinstance(rank, int):
            return rank
    return None
