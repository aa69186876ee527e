"""The benchmark's measurements on one GPU: the kernel, SGLang's own and the peers, one after the other in one run, and
what the GPU itself can do. Imported once there is a GPU to measure.

Times are those of `triton.testing.do_bench`, medians in us; it writes over the L2 cache before each call, because a
model's 61 layers do not stay there. Warm times are replays of a graph, on one input.
"""

from __future__ import annotations

import datetime
import inspect
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import torch

from kdtree_patch import __version__
from kdtree_patch.bench_peers import PEERS, installed_peers
from kdtree_patch.bench_shapes import KV_DTYPES, Shape, floor_us
from kdtree_patch.compile import KERNELS, import_cupy
from kdtree_patch.exits import NotDone
from kdtree_patch.kernel import KernelUnavailable, VerifyKernel
from kdtree_patch.route import is_fatal
from kdtree_patch.tiles import HEAD_DIM, LATENT

SCALE = 0.14468
GRAPH_CALLS = 10
# As kernels/ceilings.cu has it: independent accumulators of a warp, and operations of one product of m16n8k16.
MMA_ACCUMULATORS = 8
MMA_OPERATIONS = 2 * 16 * 8 * 16
MMA_THREADS = 256

Stock = Callable[..., Any]
Say = Callable[[str], None]


def load_kernel(config: str = "auto", pool: str | None = None) -> VerifyKernel:
    """The kernel on the current GPU, in a configuration (as `VerifyKernel.load` has it), for an fp8 pool or one of
    bf16. Raises NotDone.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        fp8 = None if pool is None else getattr(torch, KV_DTYPES[pool])
        return VerifyKernel.load(device, config=config, pool=fp8)
    except KernelUnavailable as error:
        raise NotDone(f"there is no kernel: {error.reason}: {error}", "see `python -m kdtree_patch doctor`") from error


def stock_kernel() -> Stock | None:
    """SGLang's `extend_attention_fwd`, or None with a word about it if this interpreter has no SGLang."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError:
        try:
            from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
        except ImportError as error:
            print(f"bench: SGLang cannot be imported ({error}); the stock kernel is not timed", file=sys.stderr)
            return None
    return extend_attention_fwd


# ------------------------------------------------------------------------------------------------------------- ceilings


def measure_ceilings() -> dict[str, float]:
    """What this GPU does on the things the kernel is made of: TB/s of a large copy (read and written), TFLOP/s of a
    large bf16 product, and TFLOP/s of mma.sync m16n8k16 in bf16 with all operands in registers, the rate of the floor.
    """
    return dict(
        copy_tb_s=round(copy_tb_s(), 2),
        product_tflops=round(product_tflops()),
        mma_sync_tflops=round(mma_sync_tflops()),
    )


def copy_tb_s(size: int = 2**31) -> float:
    from triton.testing import do_bench

    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return float(2 * size / do_bench(lambda: target.copy_(source), return_mode="median") / 1e9)


def product_tflops(size: int = 8192) -> float:
    from triton.testing import do_bench

    matrix = torch.randn(size, size, device="cuda").bfloat16()
    return float(2 * size**3 / do_bench(lambda: matrix @ matrix, return_mode="median") / 1e9)


def mma_sync_tflops(iterations: int = 16384) -> float:
    from triton.testing import do_bench

    cupy = import_cupy()
    device = torch.cuda.current_device()
    # Sixteen warps a multiprocessor: four for each of its schedulers, where two are enough on an H200.
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    sink = torch.empty(blocks * MMA_THREADS, dtype=torch.float32, device="cuda")
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=(KERNELS / "ceilings.cu").read_text(), options=("-std=c++17",))
        loop = module.get_function("mma_sync_loop")

        def run() -> None:  # on the default stream, which is torch's as well
            loop((blocks,), (MMA_THREADS,), (cupy.uint64(sink.data_ptr()), cupy.int32(iterations)))

        milliseconds = do_bench(run, return_mode="median")
    if not bool(sink.isfinite().all()):
        raise NotDone(
            "the mma.sync loop left something that is not a number",
            "see whether the GPU is sound (nvidia-smi, dmesg), and run it again",
            "its rate, and with it the floor, cannot be trusted",
        )
    return blocks * mma_operations_of_block(iterations) / milliseconds / 1e9


def mma_operations_of_block(iterations: int) -> int:
    return MMA_THREADS // 32 * iterations * MMA_ACCUMULATORS * MMA_OPERATIONS


# --------------------------------------------------------------------------------------------------------------- inputs


def inputs(shape: Shape, device: str = "cuda", fp8: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """N(0, 1) inputs of one verify call, by the names of `VerifyKernel.launch`: scattered slots, random trees. The pool
    is bf16, or of the type `fp8`.
    """
    bs, q_len, heads, prefix = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, generator=generator).bfloat16()

    steps = torch.arange(bs + 1, device=device)
    mask = torch.ones(bs, q_len, prefix + q_len, dtype=torch.bool, device=device)
    drafts = torch.rand(bs, q_len, q_len, device=device, generator=generator) > 0.5
    mask[:, :, prefix:] = drafts.tril() | torch.eye(q_len, dtype=torch.bool, device=device)
    slots = bs * prefix
    return dict(
        q=normal(bs * q_len, heads, HEAD_DIM),
        k_extend=normal(bs * q_len, 1, HEAD_DIM),
        out=torch.full((bs * q_len, heads, LATENT), torch.nan, device=device, dtype=torch.bfloat16),
        kv_pool=normal(slots + 64, 1, HEAD_DIM).to(fp8 or torch.bfloat16),
        qo_indptr=(steps * q_len).int(),
        kv_indptr=(steps * prefix).int(),
        kv_indices=torch.randperm(slots + 64, device=device, generator=generator)[:slots],
        custom_mask=mask.flatten(),
        mask_indptr=steps * q_len * (prefix + q_len),
    )


def stock_arguments(
    stock: Stock, call: Mapping[str, Any], out: torch.Tensor, q_len: int, scale: float
) -> dict[str, Any]:
    """The tensors of a call as SGLang's kernel takes them, by name: the order changed between releases."""
    arguments: dict[str, Any] = dict(
        q_extend=call["q"],
        k_extend=call["k_extend"],
        v_extend=call["k_extend"][..., :LATENT].contiguous(),
        o_extend=out,
        k_buffer=call["kv_pool"],
        v_buffer=call["kv_pool"][..., :LATENT],
        is_causal=True,
        max_len_extend=q_len,
        sm_scale=scale,
        **{name: call[name] for name in ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")},
    )
    if "k_scale" in inspect.signature(stock).parameters:
        arguments |= {name: call.get(name, 1.0) for name in ("k_scale", "v_scale")}
    return arguments


def bind_stock(
    stock: Stock, call: Mapping[str, Any], out: torch.Tensor, q_len: int, scale: float
) -> Callable[[], None]:
    """SGLang's kernel on the tensors of a call."""
    arguments = stock_arguments(stock, call, out, q_len, scale)
    return lambda: stock(**arguments)


def error_of(call: Mapping[str, torch.Tensor], shape: Shape) -> float:
    """rel of the output to float64, the larger of the first and the last request's; NaN if either is."""
    found = [request_error(call, shape, request) for request in {0, shape.bs - 1}]
    return math.nan if any(map(math.isnan, found)) else max(found)


def request_error(call: Mapping[str, torch.Tensor], shape: Shape, request: int) -> float:
    _, q_len, _, prefix = shape
    tokens = slice(request * q_len, (request + 1) * q_len)
    slots = call["kv_indices"][request * prefix : (request + 1) * prefix]
    pool = call["kv_pool"]
    stored = pool.view(torch.uint8) if pool.itemsize == 1 else pool  # not every torch can take rows of fp8
    keys = torch.cat([stored[slots].view(pool.dtype).double(), call["k_extend"][tokens].double()]).squeeze(1)
    visible = call["custom_mask"].view(shape.bs, q_len, 1, prefix + q_len)[request]
    scores = torch.einsum("qhd,kd->qhk", call["q"][tokens].double(), keys) * SCALE
    right = torch.einsum("qhk,kd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), keys[:, :LATENT])
    return float((call["out"][tokens].double() - right).norm() / right.norm())


# ------------------------------------------------------------------------------------------------------------ one shape


class Rivals:
    """The stock kernel and the peers that are installed. What fails on this GPU is said once and left out."""

    def __init__(self, stock: Stock | None, say: Say):
        self._stock = stock
        self._peers = {name: PEERS[name] for name in installed_peers()}
        self._say = say
        self._failed: set[str] = set()

    def times(self, call: Mapping[str, torch.Tensor], shape: Shape) -> tuple[float | None, dict[str, float]]:
        """Cold us of the stock kernel, and of each peer by name."""
        stock = self._stock
        stock_us = None
        if stock is not None:
            out = torch.empty_like(call["out"])
            stock_us = self._time("stock", lambda: bind_stock(stock, call, out, shape.q_len, SCALE))
        # The peers are given bf16 pools, as they do not all take others.
        peers = self._peers if call["kv_pool"].dtype == torch.bfloat16 else {}
        found = {name: self._time(name, partial(make, call, shape, SCALE)) for name, make in peers.items()}
        return stock_us, {name: us for name, us in found.items() if us is not None}

    def _time(self, name: str, make: Callable[[], Callable[[], Any]]) -> float | None:
        try:
            run = make()
            run()
            return cold_us(run)
        except Exception as error:
            if is_fatal(error):
                raise  # the context is lost: nothing that comes after it could be measured
            if name not in self._failed:
                self._failed.add(name)
                self._say(
                    f"{name} is left out where it fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                )
            return None


def cold_us(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median")) * 1e3


def warm_us(run: Callable[[], Any]) -> float:
    """us a call, replayed from a graph of ten."""
    from triton.testing import do_bench

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            run()
    return float(do_bench(graph.replay, warmup=20, rep=100, return_mode="median")) * 1e3 / GRAPH_CALLS


def measure_shape(
    shape: Shape, kernels: Sequence[VerifyKernel], rivals: Rivals, ceilings: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One row of the result for each kernel, as the benchmark's JSON has it. The kernels are on one device, and for one
    type of pool.
    """
    call = inputs(shape, kernels[0].device.type, kernels[0].pool)
    kv_dtype = str(call["kv_pool"].dtype).removeprefix("torch.")
    stock_us, peers = rivals.times(call, shape)
    rows = []
    for kernel in kernels:
        call["out"].fill_(torch.nan)

        def ours(kernel: VerifyKernel = kernel) -> None:
            kernel.launch(**call, q_len=shape.q_len, scale=SCALE)

        ours()
        rel = error_of(call, shape)
        rows.append(
            dict(
                **dict(shape._asdict(), kv_dtype=kv_dtype, config=kernel.config.name),
                **dict(kernel_us=round(warm_us(ours), 1), kernel_cold_us=round(cold_us(ours), 1)),
                stock_us=None if stock_us is None else round(stock_us, 1),
                floor_us=round(floor_us(shape, ceilings["copy_tb_s"], ceilings["mma_sync_tflops"], kv_dtype), 2),
                rel=None if math.isnan(rel) else round(rel, 6),
                peers={name: round(us, 1) for name, us in peers.items()},
            )
        )
    return rows


# -------------------------------------------------------------------------------------------------------------- the run


def about(command: str) -> dict[str, Any]:
    """What somebody who reads the figures later asks first."""
    names = ("torch", "triton", "cupy", "sglang", "flashinfer", "flash_mla")
    versions = {name: version_of(name) for name in names if name in sys.modules}
    return dict(
        command=command,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        date=datetime.date.today().isoformat(),
        versions=dict(kdtree_patch=__version__, **versions, python=platform.python_version()),
    )


def version_of(module: str) -> str | None:
    """Of a module that is imported, from itself or else from the package that brought it along."""
    version = getattr(sys.modules[module], "__version__", None)
    if version is None:
        distributions = metadata.packages_distributions().get(module, [])
        version = metadata.version(distributions[0]) if distributions else None
    return version
