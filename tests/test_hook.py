"""The hook on a backend class of the real shape: what is wrapped, what an instance gets, and how it stays stock.

The class here has SGLang's signatures and does what SGLang's does with them: store, allocate the output, call the inner
function that `__init__` has put on the instance. tests/test_real_backend.py does the same with SGLang itself.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import wrapt

from kdtree_patch import hook, log
from kdtree_patch.settings import Settings
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support.cases import Case, reference

MARK = 100.0


def fresh_module(stock: Stock) -> ModuleType:
    """A module like sglang.srt.layers.attention.triton_backend, executed anew."""

    class TritonAttnBackend:
        def __init__(self, model_runner: Any, skip_prefill: bool = False, kv_indptr_buf: Any = None):
            self.extend_attention_fwd = torch.compiler.disable(stock.function)
            self.skip_prefill = skip_prefill
            self.num_draft_tokens = model_runner.num_draft_tokens
            self.req_to_token = torch.zeros(2, 8, dtype=torch.int32)
            self.use_mla = model_runner.use_mla
            self.enable_deterministic = model_runner.enable_deterministic
            self.dcp_size = model_runner.dcp_size
            self.case: Case = model_runner.case
            self.prepared: list[tuple[Any, ...]] = []

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.prepared.append(("eager", forward_batch.batch_size))

        def init_forward_metadata_capture_cuda_graph(
            self, bs: int, num_tokens: int, req_pool_indices: Any, seq_lens: Any, encoder_lens: Any, forward_mode: Any,
            spec_info: Any,
        ) -> None:  # fmt: skip
            self.prepared.append(("capture", bs))

        def init_forward_metadata_replay_cuda_graph(
            self, bs: int, req_pool_indices: Any, seq_lens: Any, seq_lens_sum: int, encoder_lens: Any,
            forward_mode: Any, spec_info: Any, seq_lens_cpu: Any,
        ) -> None:  # fmt: skip
            self.prepared.append(("replay", bs))

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            self.prepared.append(("capture" if in_capture else "replay", forward_batch.batch_size))

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: Any = True, sinks: Any = None,
            score_mod: Any = None, aux_tensors: Any = None,
        ) -> Any:  # fmt: skip
            """Stores, calls the inner function, returns the output."""
            values = arguments(self.case, q_extend=q, k_extend=k, v_extend=v, sinks=sinks)
            names = list(inspect.signature(stock.function).parameters)
            first = [values.pop(name) for name in names[:16]]
            self.extend_attention_fwd(*first, **values)
            return self.case.out

    module = ModuleType("sglang.srt.layers.attention.triton_backend")
    module.TritonAttnBackend = TritonAttnBackend  # type: ignore[attr-defined]
    return module


def a_runner(**changes: Any) -> SimpleNamespace:
    plain = dict(num_draft_tokens=3, use_mla=True, enable_deterministic=False, dcp_size=1, case=a_case(), tp_rank=5)
    return SimpleNamespace(**{**plain, **changes})


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a process in which nothing has been installed."""
    monkeypatch.setattr(hook, "_worker", None)
    before = log.get_logger().level
    log.set_level("info")
    yield
    log.get_logger().setLevel(before)


class Service:
    """A patched module, its stock function, its kernel, and what loading was asked for."""

    def __init__(self, settings: Settings | None = None, failure: Exception | None = None):
        self.stock = Stock()
        self.module = fresh_module(self.stock)
        self.kernel = FakeKernel(mark=MARK)
        self.failure = failure
        self.loads: list[torch.device] = []
        self.pools: list[torch.dtype | None] = []
        self.settings = settings or Settings()

    def load(self, device: torch.device, settings: Settings, job: Any, pool: torch.dtype | None) -> FakeKernel:
        self.loads.append(device)
        self.pools.append(pool)
        if self.failure:
            raise self.failure
        return self.kernel

    def install(self) -> type:
        hook.install(self.module, self.settings, None, self.load)
        return self.backend_class

    @property
    def backend_class(self) -> Any:
        return self.module.TritonAttnBackend

    def start(self, **runner: Any) -> Any:
        self.install()
        return self.backend_class(a_runner(**runner))


def forward(backend: Any, batch: Any = None, layer: Any = None, **how: Any) -> torch.Tensor:
    case = backend.case
    case.out.fill_(torch.nan)
    v = case.k_extend[..., :512].contiguous()
    return backend.forward_extend(case.q, case.k_extend, v, layer or a_layer(), batch or a_batch(), **how)


def served_by_us(backend: Any, out: torch.Tensor) -> bool:
    """Ours adds MARK; either result must be right, whoever served it."""
    ours = torch.allclose(out.double(), reference(backend.case) + MARK, atol=0.1)
    assert ours or torch.allclose(out.double(), reference(backend.case), atol=0.1)
    return ours


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "shapes" not in line]


# Captures and replays.


def around_graphs(monkeypatch: pytest.MonkeyPatch, *modes: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """A backend whose router notes what it is told, beside what the stock methods have done."""
    backend = Service(Settings(forward_modes=frozenset(modes or ("verify",)))).start()
    router = getattr(backend, hook.ROUTER)
    for name in ("before_step", "capture_begins", "replay_begins"):
        note = functools.partial(lambda name, *args: backend.prepared.append((name, *args)), name)
        monkeypatch.setattr(router, name, note)
    return backend, backend.prepared


VERIFY, DECODE = a_batch().forward_mode, a_batch(verify=False).forward_mode


def test_the_methods_of_old_releases_say_what_is_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, told = around_graphs(monkeypatch)
    backend.init_forward_metadata_capture_cuda_graph(8, 72, None, None, None, VERIFY, None)
    assert told == [("before_step",), ("capture", 8), ("capture_begins", 8, "verify")]
    told.clear()
    backend.init_forward_metadata_replay_cuda_graph(4, None, None, 9, None, VERIFY, None, seq_lens_cpu=None)
    assert told == [("before_step",), ("replay", 4), ("replay_begins", 4, "verify")]
    told.clear()
    backend.init_forward_metadata_replay_cuda_graph(
        bs=2, req_pool_indices=None, seq_lens=None, seq_lens_sum=9, encoder_lens=None, forward_mode=DECODE,
        spec_info=None, seq_lens_cpu=None,
    )  # fmt: skip
    assert told == [("before_step",), ("replay", 2)]


def test_the_method_of_new_releases_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, told = around_graphs(monkeypatch)
    backend.init_forward_metadata_out_graph(a_batch(batch_size=8), in_capture=True)
    backend.init_forward_metadata_out_graph(a_batch(batch_size=8))
    backend.init_forward_metadata_out_graph(a_batch(batch_size=4), True)
    backend.init_forward_metadata_out_graph(forward_batch=a_batch(verify=False, batch_size=4))
    assert [one for one in told if one[0].endswith("begins")] == [
        ("capture_begins", 8, "verify"),
        ("replay_begins", 8, "verify"),
        ("capture_begins", 4, "verify"),
    ]


def test_an_eager_step_says_so_before_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, told = around_graphs(monkeypatch)
    backend.init_forward_metadata(a_batch(batch_size=3))
    assert told == [("before_step",), ("eager", 3)]


def test_a_wrong_metadata_call_gets_the_stock_methods_words() -> None:
    backend = Service().start()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'forward_batch'"):
        backend.init_forward_metadata_out_graph()
    with pytest.raises(TypeError, match="missing 6 required"):
        backend.init_forward_metadata_capture_cuda_graph(8)


def test_a_backend_without_a_router_is_left_alone() -> None:
    backend = Service().start(num_draft_tokens=None)
    backend.init_forward_metadata_out_graph(a_batch(batch_size=8), in_capture=True)
    backend.init_forward_metadata(a_batch(batch_size=3))
    assert backend.prepared == [("capture", 8), ("eager", 3)]


# A served call.


def test_a_verify_call_is_served_and_another_is_not() -> None:
    service = Service()
    backend = service.start()
    assert served_by_us(backend, forward(backend))
    assert not served_by_us(backend, forward(backend, a_batch(verify=False)))
    assert hook.counts() == {("kernel", "verify"): 1, ("stock", "forward_mode"): 1}


MODE_NAMES = {
    "TARGET_VERIFY": "verify",
    "DRAFT_EXTEND": "draft_extend",
    "DRAFT_EXTEND_V2": "draft_extend",
    "EXTEND": "extend",
}


@pytest.mark.parametrize("asked", [("verify",), ("draft_extend",), ("extend",), ("verify", "draft_extend", "extend")])
def test_the_forward_modes_that_are_asked_for_are_served_and_no_others(asked: tuple[str, ...]) -> None:
    backend = Service(Settings(forward_modes=frozenset(asked))).start(case=a_case(mask="none"))
    served = set()
    for name in (*MODE_NAMES, "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND", "IDLE"):
        out = forward(backend, a_batch(verify=name == "TARGET_VERIFY", mode_name=name))
        if served_by_us(backend, out):
            served.add(name)
    assert served == {name for name, mode in MODE_NAMES.items() if mode in asked}
    routed = {reason: calls for (route, reason), calls in hook.counts().items() if route == "kernel"}
    assert routed == {mode: list(MODE_NAMES.values()).count(mode) for mode in asked}
    assert hook.counts()["stock", "forward_mode"] == 8 - sum(routed.values())


def test_a_mode_is_that_of_its_own_call() -> None:
    """A verify call within an extend call, as two-batch overlap may have it, and after one that failed."""
    backend = Service(Settings(forward_modes=frozenset({"verify", "extend"}))).start(case=a_case(mask="none"))
    router, inner, seen = getattr(backend, hook.ROUTER), backend.extend_attention_fwd, []

    def reenter(*args: Any, **kwargs: Any) -> None:
        seen.append(router.mode)
        if len(seen) == 1:
            forward(backend)
            seen.append(router.mode)
        inner(*args, **kwargs)

    backend.extend_attention_fwd = reenter
    forward(backend, a_batch(verify=False))
    assert seen == ["extend", "verify", "extend"]
    assert router.context is None and router.mode == "verify"


def test_graphs_of_other_modes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, told = around_graphs(monkeypatch, "verify", "draft_extend")
    draft = a_batch(verify=False, mode_name="DRAFT_EXTEND_V2", batch_size=8)
    backend.init_forward_metadata_out_graph(draft, in_capture=True)
    backend.init_forward_metadata_out_graph(a_batch(batch_size=8))
    backend.init_forward_metadata_out_graph(a_batch(verify=False, batch_size=8))
    assert [one for one in told if one[0].endswith("begins")] == [
        ("capture_begins", 8, "draft_extend"),
        ("replay_begins", 8, "verify"),
    ]


def test_extends_are_worth_a_kernel_without_speculation() -> None:
    service = Service(Settings(forward_modes=frozenset({"extend"})))
    backend = service.start(num_draft_tokens=None, case=a_case(mask="none"))
    assert served_by_us(backend, forward(backend, a_batch(verify=False)))


def test_layer_and_batch_by_keyword() -> None:
    service = Service()
    backend = service.start()
    case = backend.case
    v = case.k_extend[..., :512].contiguous()
    out = backend.forward_extend(q=case.q, k=case.k_extend, v=v, layer=a_layer(), forward_batch=a_batch())
    assert served_by_us(backend, out)
    out = backend.forward_extend(case.q, case.k_extend, v, a_layer(), forward_batch=a_batch(), save_kv_cache=False)
    assert served_by_us(backend, out)


def test_called_on_the_class() -> None:
    service = Service()
    backend = service.start()
    v = backend.case.k_extend[..., :512].contiguous()
    cls = service.backend_class
    assert served_by_us(
        backend, cls.forward_extend(backend, backend.case.q, backend.case.k_extend, v, a_layer(), a_batch())
    )


def test_a_subclass() -> None:
    service = Service()
    cls = service.install()

    class Forked(cls):  # type: ignore[misc,valid-type]
        def __init__(self, model_runner: Any):
            super().__init__(model_runner, skip_prefill=False)

        def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward_extend(*args, **kwargs)

    backend = Forked(a_runner())
    assert served_by_us(backend, forward(backend))


def test_wrong_calls_get_the_stock_methods_words() -> None:
    backend = Service().start()
    for args in ((), (1, 2, 3), (1, 2, 3, None, None), (1,) * 20):
        with pytest.raises((TypeError, AttributeError)):
            backend.forward_extend(*args)


@pytest.mark.parametrize("error", [ValueError("in stock"), KeyboardInterrupt()])
def test_an_exception_passes_and_leaves_no_context(error: BaseException) -> None:
    service = Service()
    backend = service.start()
    router = getattr(backend, hook.ROUTER)
    backend.extend_attention_fwd = lambda *args, **kwargs: (_ for _ in ()).throw(error)
    with pytest.raises(type(error)):
        forward(backend)
    assert router.context is None


def test_contexts_nest() -> None:
    """A two-batch overlap may enter the same instance again before it has left."""
    service = Service()
    backend = service.start()
    router = getattr(backend, hook.ROUTER)
    inner = backend.extend_attention_fwd
    seen = []

    def reenter(*args: Any, **kwargs: Any) -> None:
        seen.append(router.context[0].layer_id)
        if len(seen) == 1:
            forward(backend, layer=a_layer(8))
            seen.append(router.context[0].layer_id)
        inner(*args, **kwargs)

    backend.extend_attention_fwd = reenter
    forward(backend, layer=a_layer(7))
    assert seen == [7, 8, 7] and router.context is None


def test_torch_compile_does_not_look_inside() -> None:
    service = Service()
    backend = service.start()
    # How torch marks what it must not trace; SGLang's own function has the mark as well.
    assert backend.extend_attention_fwd._torchdynamo_disable is True

    def model(x: torch.Tensor) -> torch.Tensor:
        backend.case.q.copy_(x + 1)
        return forward(backend) * 2

    x = torch.randn_like(backend.case.q)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    assert set(hook.counts()) == {("kernel", "verify")}


def test_what_is_declined_passes_one_such_wrapper_not_two() -> None:
    """It costs as much as all the rest of a declined call."""
    service = Service()
    assert getattr(service.start(), hook.ROUTER).stock is service.stock.function


# The wrapping.


def wrappers_of_ours(method: Any) -> int:
    """How many of our wrappers lie on top of each other."""
    count = 0
    while method is not None:
        count += isinstance(method, wrapt.FunctionWrapper) and method._self_wrapper.__module__ == hook.__name__
        method = getattr(method, "__wrapped__", None)
    return count


def test_the_class_stays_the_class() -> None:
    service = Service()
    before = service.backend_class
    name, bases, forward_doc = before.__qualname__, before.__bases__, before.forward_extend.__doc__
    parameters = inspect.signature(before.forward_extend)
    after = service.install()
    assert after is before and after.__qualname__ == name and after.__bases__ == bases
    assert after.__name__ == "TritonAttnBackend"
    assert after.forward_extend.__name__ == "forward_extend" and after.forward_extend.__doc__ == forward_doc
    assert inspect.signature(after.forward_extend) == parameters
    assert isinstance(after(a_runner()), before)


def test_a_second_install_changes_nothing() -> None:
    service = Service()
    cls = service.install()
    methods = dict(vars(cls))
    service.install()
    assert dict(vars(cls)) == methods


def test_a_second_copy_of_our_module_does_not_wrap_again() -> None:
    """Two releases of ours in one process."""
    service = Service()
    cls = service.install()
    methods = dict(vars(cls))
    spec = importlib.util.spec_from_file_location("second_copy_of_hook", hook.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    copy.install(service.module, service.settings, None, service.load)
    assert dict(vars(cls)) == methods
    backend = cls(a_runner())
    assert served_by_us(backend, forward(backend)) and len(service.kernel.calls) == 1


def test_a_second_class_is_wrapped_once_and_shares_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()
    service.start()
    service.module = fresh_module(service.stock)
    backend = service.start()
    assert wrappers_of_ours(vars(service.backend_class)["forward_extend"]) == 1
    assert served_by_us(backend, forward(backend))
    assert len(service.loads) == 1 and len(lines(capsys)) == 1


class Foreign:
    """Somebody else's wrapper on forward_extend, made with wrapt, with functools, or without any manners."""

    def __init__(self) -> None:
        self.calls = 0

    def wrapt(self, method: Callable[..., Any]) -> Any:
        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            self.calls += 1
            return wrapped(*args, **kwargs)

        return wrapt.FunctionWrapper(method, wrapper)

    def functools(self, method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(instance: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return method.__get__(instance)(*args, **kwargs)

        return wrapper


@pytest.mark.parametrize("kind", ["wrapt", "functools"])
@pytest.mark.parametrize("order", ["below", "above"])
def test_somebody_elses_wrapper(kind: str, order: str) -> None:
    """Both run, in either order, and a second install still sees ours."""
    service, foreign = Service(), Foreign()
    cls = service.backend_class

    def patch() -> None:
        cls.forward_extend = getattr(foreign, kind)(vars(cls)["forward_extend"])

    if order == "below":
        patch()
    service.install()
    if order == "above":
        patch()
    service.install()
    assert wrappers_of_ours(vars(cls)["forward_extend"]) == 1
    backend = cls(a_runner())
    assert served_by_us(backend, forward(backend))
    assert foreign.calls == 1


def test_somebody_elses_inner_function_is_the_stock_one_then() -> None:
    """Replaced on the instance by a wrapper of __init__ below ours: what is declined goes to theirs."""
    service = Service()
    cls = service.backend_class
    theirs: list[str] = []
    init = cls.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        inner = self.extend_attention_fwd

        @functools.wraps(inner)
        def counted(*a: Any, **k: Any) -> Any:
            theirs.append("called")
            return inner(*a, **k)

        self.extend_attention_fwd = counted

    cls.__init__ = functools.wraps(init)(patched)
    backend = service.start()
    assert served_by_us(backend, forward(backend)) and theirs == []
    assert not served_by_us(backend, forward(backend, a_batch(verify=False))) and theirs == ["called"]


# One line a process.


def test_installed_is_said_once_and_says_what_one_asks_first(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(Settings(mode="shadow", validate=True))
    service.start()
    service.start()
    (line,) = lines(capsys)
    assert line.startswith("[kdtree] installed version=")
    fields = dict(word.split("=", 1) for word in line.split()[2:])
    assert fields["mode"] == "shadow" and fields["validate"] == "1"
    assert fields["torch"] == torch.__version__ and fields["wrapt"] == wrapt.__version__
    assert (fields["device"], fields["target"], fields["tp_rank"]) == ("cpu", "host", "5")
    assert "sglang" in fields
    assert service.loads == [torch.device("cpu")]


def test_the_lines_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA RTX PRO 6000", major=12, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = hook.about(Settings(), FakeKernel(device="cuda:3"), 3)
    assert (facts["device"], facts["gpu"], facts["cc"]) == ("cuda:3", "NVIDIA RTX PRO 6000", "12.0")


def test_the_rank_is_asked_of_what_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("tensor model parallel group is not initialized")

    old = SimpleNamespace(get_tensor_model_parallel_rank=refuse)
    assert hook.tp_rank(SimpleNamespace(tp_rank=0)) == 0
    assert hook.tp_rank(SimpleNamespace()) is None
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", old)
    assert hook.tp_rank(None) is None
    old.get_tensor_model_parallel_rank = lambda: 6
    assert hook.tp_rank(None) == 6
    new = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=7))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", new)
    assert hook.tp_rank(None) == 7


DECLINED = [
    (hook.Declined("cupy_missing", "install cupy-cuda13x"), {}, "cupy_missing install cupy-cuda13x; the service"),
    (
        hook.Declined("compile_failed", "no such arch"),
        {},
        "compile_failed no such arch; python -m kdtree_patch compile tries it; please report it; the service",
    ),
    (RuntimeError("oh\nno"), {}, "hook_failed RuntimeError: oh no; please report it; the service"),
    (None, dict(num_draft_tokens=None), "no_speculation there is no speculative decoding"),
    (None, dict(use_mla=False), "not_mla the model has no"),
    (None, dict(enable_deterministic=True), "deterministic deterministic inference"),
    (None, dict(dcp_size=2), "context_parallel with decode context parallelism"),
]


@pytest.mark.parametrize(("failure", "runner", "words"), DECLINED, ids=[words.split()[0] for _, _, words in DECLINED])
def test_a_process_that_cannot_be_served(
    failure: Exception | None, runner: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line however many backends it has, an untouched instance, and the loading tried once."""
    service = Service(failure=failure)
    for _ in range(3):
        backend = service.start(**runner)
        assert hook.ROUTER not in vars(backend)
        assert not served_by_us(backend, forward(backend))
    (line,) = lines(capsys)
    assert line.startswith(f"[kdtree] declined reason={words}")
    assert line.endswith("the service runs stock")
    assert hook.counts() == {}
    if isinstance(failure, hook.Declined):
        assert len(service.loads) == 1


@pytest.mark.parametrize("name", ["num_draft_tokens", "req_to_token", "extend_attention_fwd"])
def test_an_instance_that_lacks_something(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()
    cls = service.backend_class
    init = cls.__init__

    def lacking(self: Any, model_runner: Any) -> None:
        init(self, model_runner)
        delattr(self, name)

    cls.__init__ = lacking
    backend = service.start()
    (line,) = lines(capsys)
    assert line.startswith("[kdtree] declined reason=contract ")
    assert f'violations="TritonAttnBackend instance: missing attribute {name}"' in line
    assert line.endswith("; please report it: a later version may know this one; the service runs stock")
    assert hook.ROUTER not in vars(backend) and service.loads == []


def test_the_instance_is_changed_last_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the line; then the router; then, and with that the calls are routed, the inner function."""
    service = Service()
    order: list[str] = []

    def note(self: Any, name: str, value: object) -> None:
        if name in (hook.ROUTER, "extend_attention_fwd"):
            order.append(name)
        object.__setattr__(self, name, value)

    service.backend_class.__setattr__ = note
    monkeypatch.setattr(log, "installed", lambda **facts: order.append("installed"))
    service.start()
    assert order == ["extend_attention_fwd", "installed", hook.ROUTER, "extend_attention_fwd"]  # the first by SGLang


def test_a_line_that_fails_leaves_no_half_attached_instance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**facts: object) -> None:
        raise RuntimeError("no log")

    monkeypatch.setattr(log, "installed", broken)
    backend = Service().start()
    assert hook.ROUTER not in vars(backend) and not served_by_us(backend, forward(backend))
    assert hook.counts() == {}
    (line,) = lines(capsys)
    assert line.startswith("[kdtree] declined reason=hook_failed RuntimeError: no log; please report it; the service")


def test_metrics_are_asked_for_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("kdtree_patch.metrics.of_service", asked.append)
    service, server_args = Service(), SimpleNamespace(enable_metrics=True)
    for _ in range(2):
        service.start(server_args=server_args)
    assert asked == [server_args]


def test_draft_backends_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A speculative worker builds its target backend first, then some that only decode drafts: no line about those."""
    service = Service()
    target = service.start()
    drafts = [service.backend_class(a_runner(), skip_prefill=True) for _ in range(3)]
    dflash = service.start(use_mla=False)
    assert all(hook.ROUTER not in vars(backend) for backend in (*drafts, dflash))
    assert served_by_us(target, forward(target))
    assert len(lines(capsys)) == 1


def test_a_draft_backend_says_nothing_after_a_declined_target(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(failure=hook.Declined("compile_failed", "no"))
    service.start()
    service.backend_class(a_runner(), skip_prefill=True)
    assert len(lines(capsys)) == 1


def test_an_init_that_fails_fails_as_before() -> None:
    service = Service()
    cls = service.install()
    with pytest.raises(TypeError, match="model_runner"):
        cls()
    with pytest.raises(AttributeError, match="num_draft_tokens"):
        cls(None)
    assert service.loads == []


def test_two_devices_get_a_kernel_each() -> None:
    """Or one each cannot be had of; a failure on one is no failure on the other."""
    loads: list[str] = []

    def load(device: torch.device, settings: Settings, job: Any, pool: torch.dtype | None) -> FakeKernel:
        loads.append(str(device))
        if device.index == 1:
            raise hook.Declined("load_failed", "no")
        return FakeKernel(device=str(device))

    worker = hook.Worker(Settings(), None, load)
    assert worker.kernel_on(torch.device("cuda:0"), None) is worker.kernel_on(torch.device("cuda:0"), None)
    for _ in range(2):
        with pytest.raises(hook.Declined):
            worker.kernel_on(torch.device("cuda:1"), None)
    assert loads == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("pool", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_pool_gets_a_kernel_of_its_own(pool: torch.dtype) -> None:
    """A target model's backend and those of its draft model, which has another pool."""
    service = Service()
    for _ in range(2):
        service.start(kv_cache_dtype=pool)
        service.backend_class(a_runner(kv_cache_dtype=torch.bfloat16))
    assert service.pools == [pool, None]


@pytest.mark.parametrize(
    ("pool", "limit", "warned"),
    [
        (torch.float8_e4m3fn, 0.05, True),
        (torch.float8_e4m3fn, 0.5, False),
        (torch.float8_e4m3fn, None, False),
        (None, 0.05, False),
    ],
)
def test_a_guard_that_the_stock_kernels_own_rounding_would_trip_is_said(
    pool: torch.dtype | None, limit: float | None, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(Settings(guard_rel=limit))
    service.kernel = FakeKernel(pool=pool)
    service.start(kv_cache_dtype=pool)
    lines = [line for line in capsys.readouterr().err.splitlines() if "KDTREE_GUARD_REL" in line]
    assert len(lines) == warned
    if warned:
        assert lines[0].startswith("[kdtree] WARNING KDTREE_GUARD_REL=0.05 will trip")


@pytest.mark.parametrize("runner", [dict(), dict(kv_cache_dtype=torch.uint8), dict(kv_cache_dtype="fp8_e4m3")], ids=str)
def test_a_pool_of_a_type_that_is_not_known_gets_the_usual_kernel(runner: dict[str, Any]) -> None:
    """Which then declines its calls, for their pool is of another type than their queries."""
    service = Service()
    service.start(**runner)
    assert service.pools == [None]


# Loading the real kernel.


def no_cupy(*args: Any) -> Any:
    raise ModuleNotFoundError("No module named 'cupy'", name="cupy")


def other_import(*args: Any) -> Any:
    raise ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock")


def odd(*args: Any) -> Any:
    raise ValueError("cubin is torn")


def unavailable(*args: Any) -> Any:
    from kdtree_patch.kernel import KernelUnavailable

    raise KernelUnavailable("nvrtc_too_old", "NVRTC 12.4 cannot compile for sm_120")


@pytest.mark.parametrize(
    ("load", "reason", "detail"),
    [
        (no_cupy, "cupy_missing", "install cupy-cuda12x or cupy-cuda13x"),
        (other_import, "load_failed", "fastrlock"),
        (odd, "load_failed", "ValueError: cubin is torn"),
        (unavailable, "nvrtc_too_old", "cannot compile for sm_120"),
    ],
)
def test_what_the_kernel_says_becomes_the_reason(
    load: Callable[..., Any], reason: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdtree_patch.kernel.VerifyKernel.load", load)
    with pytest.raises(hook.Declined, match=detail) as declined:
        hook.load_kernel(torch.device("cuda:0"), Settings(), None)
    assert declined.value.reason == reason


@pytest.mark.parametrize("error", [RuntimeError("torn"), SystemExit(3)])
def test_a_kernel_module_that_cannot_be_imported(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torn:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "kdtree_patch.kernel":
                raise error

    monkeypatch.delitem(sys.modules, "kdtree_patch.kernel", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Torn(), *sys.meta_path])
    with pytest.raises(hook.Declined, match=type(error).__name__) as declined:
        hook.load_kernel(torch.device("cuda:0"), Settings(), None)
    assert declined.value.reason == "package_broken"


def test_devices_without_a_kernel() -> None:
    with pytest.raises(hook.Declined, match="xpu") as declined:
        hook.load_kernel(torch.device("xpu:0"), Settings(), None)
    assert declined.value.reason == "device"


def test_the_kernel_is_asked_for_with_the_cache_and_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("kdtree_patch.kernel.VerifyKernel.load", lambda *args: asked.append(args))
    settings, job = Settings(selftest=False), object()
    hook.load_kernel(torch.device("cuda:2"), settings, job, torch.float8_e5m2)  # type: ignore[arg-type]
    assert asked == [(torch.device("cuda:2"), None, job, "auto", torch.float8_e5m2)]
