"""`bench --host`: what one routed call costs the host, in Python and in launches, beside the stock call's own.

A model makes one call a layer, and in eager mode the GPU waits for the host whenever a call costs the host more than
it costs the GPU. What is measured is a step of 61 calls with the queue to the GPU empty at its start: the host never
waits for the GPU, so that the time is its own. The wrapper of `forward_extend`, the router and the packing of
parameters are the real ones. On a GPU both kernels are launched; without one nothing is, ours ends where the driver
would be called, and the stock call, which is a Triton launch, cannot be measured.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from kdtree_patch import hook, log
from kdtree_patch.bench_measure import SCALE, Stock, inputs, stock_arguments
from kdtree_patch.bench_shapes import Shape
from kdtree_patch.kernel import VerifyKernel
from kdtree_patch.route import Ledger, VerifyRouter
from kdtree_patch.settings import Settings

REFERENCE = Shape(1, 9, 8, 21)
LAYERS = 61
STEPS = 200
# As many blocks as an H200 has multiprocessors; the number hardly matters to the host.
WORKERS = 132
# What forward_extend passes by name; the rest goes by position.
BY_NAME = {
    "logit_cap": 0.0,
    "sliding_window_size": -1,
    "sinks": None,
    "window_kv_offsets": None,
    "xai_temperature_len": -1,
}


class Backend:
    """As much of SGLang's backend as a call passes through: `forward_extend`, and the inner function it calls."""

    def __init__(self, inner: Stock, args: tuple[Any, ...]):
        # SGLang wraps the stock function like this, and the hook the router.
        self.extend_attention_fwd = torch.compiler.disable(inner)
        self._args = args

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> None:
        self.extend_attention_fwd(*self._args, **BY_NAME)


class HookedBackend(Backend):
    """With our wrapper around `forward_extend`, which goes around a method of the class itself."""

    forward_extend = Backend.forward_extend


hook.wrap(HookedBackend, "forward_extend", hook.around_forward_extend)


def extend_attention_fwd(
    q_extend: Any, k_extend: Any, v_extend: Any, o_extend: Any, k_buffer: Any, v_buffer: Any, qo_indptr: Any,
    kv_indptr: Any, kv_indices: Any, custom_mask: Any, is_causal: Any, mask_indptr: Any, max_len_extend: Any,
    k_scale: Any, v_scale: Any, sm_scale: Any = None, logit_cap: Any = 0.0, skip_prefix_custom_mask: Any = True,
    sliding_window_size: Any = -1, sinks: Any = None, window_kv_offsets: Any = None, xai_temperature_len: Any = -1,
) -> None:  # fmt: skip
    """The stock function's parameters, for where SGLang is not at hand: binding them is part of the cost."""


def kernel_without_gpu() -> VerifyKernel:
    """Packs the parameters of a call and launches nothing."""
    return VerifyKernel(torch.device("cpu"), lambda steps, params: None, WORKERS, "host")


def measure_host(kernel: VerifyKernel, stock: Stock | None, steps: int = STEPS) -> dict[str, Any]:
    """us of host time a call, medians over `steps` steps: `routed_us` and `stock_us` through forward_extend, and the
    parts of the routed call: `hook_us` for the wrapper, `router_us` for binding, decision and counting, `launch_us` for
    packing and launching. `stock_us` is None without SGLang or without a GPU.
    """
    on_gpu = kernel.device.type == "cuda"
    call = inputs(REFERENCE, kernel.device.type)
    function = stock if on_gpu and stock is not None else extend_attention_fwd
    args = positional(function, call)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True), seq_lens_cpu=None, seq_lens_sum=REFERENCE.prefix
    )
    layer = SimpleNamespace(layer_id=0)
    level = log.get_logger().level
    log.set_level("error")  # the lines of a service are not what somebody who runs a benchmark wants to see
    try:
        router = VerifyRouter(function, kernel, Settings(), Ledger())
        backend = HookedBackend(router.__call__, args)
        setattr(backend, hook.ROUTER, router)
        plain = Backend(function, args)

        def launch() -> None:
            kernel.launch(**call, q_len=REFERENCE.q_len, scale=SCALE)

        def through(a_backend: Backend) -> Callable[[], None]:
            q, k = call["q"], call["k_extend"]
            return lambda: a_backend.forward_extend(q, k, k, layer, batch, save_kv_cache=False)

        def route() -> None:
            router.context = (layer, batch)
            backend.extend_attention_fwd(*args, **BY_NAME)

        runs = dict(routed=through(backend), inner=route, launch=launch)
        if function is stock:
            runs["stock"] = through(plain)
        us = per_call_us(runs, on_gpu, steps)
        # A router that declines is quick, and would be timed for one that serves.
        calls = 2 * (steps + 1) * LAYERS
        if router.ledger.counts != {("kernel", "verify"): calls}:
            raise RuntimeError(f"of {calls} calls to be timed the router did not serve all: {router.ledger.counts}")
    finally:
        log.get_logger().setLevel(level)
    return dict(
        **dict(shape=REFERENCE._asdict(), device=kernel.device.type, calls_a_step=LAYERS),
        **dict(routed_us=round(us["routed"], 2), stock_us=round(us["stock"], 2) if "stock" in us else None),
        hook_us=round(us["routed"] - us["inner"], 2),
        router_us=round(us["inner"] - us["launch"], 2),
        launch_us=round(us["launch"], 2),
    )


def positional(function: Stock, call: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments up to sm_scale in the order of the function's release, as forward_extend passes them."""
    named = stock_arguments(function, call, torch.empty_like(call["out"]), REFERENCE.q_len, SCALE)
    names = list(inspect.signature(function).parameters)
    return tuple(named[name] for name in names[: names.index("sm_scale") + 1])


def per_call_us(runs: Mapping[str, Callable[[], None]], on_gpu: bool, steps: int) -> dict[str, float]:
    """The medians over the steps of a call's share of the host's time. The runs take turns, so that what else happens
    on the machine meets them all.
    """
    times: dict[str, list[int]] = {name: [] for name in runs}
    for step in range(steps + 1):
        for name, run in runs.items():
            if on_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter_ns()
            for _ in range(LAYERS):
                run()
            if step > 0:  # the first one compiles and fills caches
                times[name].append(time.perf_counter_ns() - started)
    if on_gpu:
        torch.cuda.synchronize()
    return {name: statistics.median(found) / LAYERS / 1e3 for name, found in times.items()}
