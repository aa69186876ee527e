"""`python -m kdtree_patch bench`: the kernel and SGLang's own on one GPU, in one run, beside what the hardware allows.

Times are those of `triton.testing.do_bench`, which writes over the L2 cache before each call: a model's 61 layers do
not stay there. The floor of a shape is the larger of two times: the bytes it must move over the bandwidth of a large
copy, and its floating-point operations over the rate of a large bf16 product, both measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import platform
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdtree_patch import __version__
from kdtree_patch.arguments import output_file
from kdtree_patch.tiles import HEAD_DIM, LATENT

if TYPE_CHECKING:
    import torch

SCALE = 0.14468
# (bs, q_len, heads a rank, prefix)
SHAPES = (
    (1, 9, 8, 21),
    (1, 9, 8, 1024),
    (1, 9, 8, 4096),
    (1, 9, 8, 16384),
    (1, 9, 8, 65536),
    (1, 9, 8, 131072),
    (16, 9, 8, 4096),
    (16, 9, 8, 16384),
    (64, 9, 8, 4096),
    (1, 64, 8, 16384),
    (16, 9, 16, 8192),
    (16, 9, 128, 4096),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the kernel and SGLang's own on this GPU",
        description="Times one layer of verify attention in bf16 with a tree mask and scattered slots, our kernel and "
        "SGLang's in one run, each checked against float64. Needs an NVIDIA GPU, and SGLang where Python finds it. "
        "Exit status: 0 good, 1 a result was wrong, 2 wrong usage or no GPU.",
    )
    parser.add_argument("--json", type=output_file, metavar="F", help="also write the figures to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print("bench: torch sees no NVIDIA GPU here, and there is nothing to time without one", file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from kdtree_patch.kernel import VerifyKernel

    console = Console()
    stock = stock_kernel()
    kernel = VerifyKernel.load(torch.device("cuda", torch.cuda.current_device()))
    ceilings = measure_ceilings()
    rows = [
        measure(shape, kernel, stock, ceilings) for shape in track(SHAPES, "measuring", console=Console(stderr=True))
    ]
    table = Table(title=f"{torch.cuda.get_device_name()}: us a layer, cold", box=None, padding=(0, 1))
    for heading in ("bs", "q_len", "heads", "prefix", "stock", "ours", "warm", "floor", "% of floor", "times", "rel"):
        table.add_column(heading, justify="right")
    for row in rows:
        ours, floor = row["kernel_cold_us"], row["floor_us"]
        table.add_row(
            *(str(row[name]) for name in ("bs", "q_len", "heads", "prefix", "stock_us", "kernel_cold_us")),
            *(str(row["kernel_us"]), str(floor), f"{100 * floor / ours:.0f}", f"{row['stock_us'] / ours:.0f}"),
            f"{row['rel']:.5f}",
        )
    console.print(table)
    if arguments.json is not None:
        document = dict(meta=about() | dict(ceilings=ceilings), rows=rows)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(not row["rel"] < 0.002 for row in rows))


def stock_kernel() -> Callable[..., Any] | None:
    """SGLang's `extend_attention_fwd`, or None with a word about it if this interpreter has no SGLang."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError:
        try:
            from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
        except ImportError as error:
            print(f"bench: SGLang cannot be imported ({error}); only our kernel is timed", file=sys.stderr)
            return None
    return extend_attention_fwd


def measure_ceilings() -> dict[str, float]:
    """What this GPU does on the two things the kernel is made of: TB/s of a copy (read and written), bf16 TFLOP/s."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    matrix = torch.randn(8192, 8192, device="cuda").bfloat16()
    product_ms = do_bench(lambda: matrix @ matrix, return_mode="median")
    return dict(copy_tb_s=round(2 * 2**31 / copy_ms / 1e9, 2), product_tflops=round(2 * 8192**3 / product_ms / 1e9))


def inputs(bs: int, q_len: int, heads: int, prefix: int) -> dict[str, torch.Tensor]:
    """N(0, 1) inputs of one verify call, by the names of `VerifyKernel.launch`: scattered slots, random trees."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    steps = torch.arange(bs + 1, device="cuda")
    mask = torch.ones(bs, q_len, prefix + q_len, dtype=torch.bool, device="cuda")
    drafts = torch.rand(bs, q_len, q_len, device="cuda", generator=generator) > 0.5
    mask[:, :, prefix:] = drafts.tril() | torch.eye(q_len, dtype=torch.bool, device="cuda")
    slots = bs * prefix
    return dict(
        q=normal(bs * q_len, heads, HEAD_DIM),
        k_extend=normal(bs * q_len, 1, HEAD_DIM),
        out=torch.full((bs * q_len, heads, LATENT), torch.nan, device="cuda", dtype=torch.bfloat16),
        kv_pool=normal(slots + 64, 1, HEAD_DIM),
        qo_indptr=(steps * q_len).int(),
        kv_indptr=(steps * prefix).int(),
        kv_indices=torch.randperm(slots + 64, device="cuda", generator=generator)[:slots],
        custom_mask=mask.flatten(),
        mask_indptr=steps * q_len * (prefix + q_len),
    )


def measure(
    shape: tuple[int, int, int, int], kernel: Any, stock: Callable[..., Any] | None, ceilings: dict[str, float]
) -> dict[str, Any]:
    """One row of the result, as the benchmark's JSON has it."""
    import torch
    from triton.testing import do_bench

    bs, q_len, heads, prefix = shape
    call = inputs(*shape)

    def ours() -> None:
        kernel.launch(**call, q_len=q_len, scale=SCALE)

    ours()
    rel = error_of_first_request(call, q_len, prefix)
    cold_us = do_bench(ours, warmup=50, rep=200, return_mode="median") * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            ours()
    warm_us = do_bench(graph.replay, warmup=20, rep=100, return_mode="median") * 1e3 / 10
    stock_us = float("nan")
    if stock is not None:
        run = bind_stock(stock, call, torch.empty_like(call["out"]), q_len, SCALE)
        run()
        stock_us = do_bench(run, warmup=50, rep=200, return_mode="median") * 1e3
    row_bytes = 2 * HEAD_DIM
    moved = bs * (prefix + q_len) * row_bytes + bs * q_len * heads * 2 * (HEAD_DIM + LATENT)
    operations = 2 * bs * q_len * heads * (prefix + q_len) * (HEAD_DIM + LATENT)
    floor_us = max(moved / ceilings["copy_tb_s"], operations / ceilings["product_tflops"]) / 1e6
    return dict(
        **dict(bs=bs, q_len=q_len, heads=heads, prefix=prefix, kv_dtype="bfloat16", config="portable"),
        **dict(kernel_us=round(warm_us, 1), kernel_cold_us=round(cold_us, 1), stock_us=round(stock_us, 1)),
        **dict(floor_us=round(floor_us, 2), rel=round(rel, 6), peers={}),
    )


def bind_stock(
    stock: Callable[..., Any], call: Mapping[str, Any], out: torch.Tensor, q_len: int, scale: float
) -> Callable[[], None]:
    """SGLang's kernel on the tensors of a call, by name: the order of its parameters changed between releases."""
    latent = call["k_extend"][..., :LATENT].contiguous()
    arguments: dict[str, Any] = dict(
        q_extend=call["q"],
        k_extend=call["k_extend"],
        v_extend=latent,
        o_extend=out,
        k_buffer=call["kv_pool"],
        v_buffer=call["kv_pool"][..., :LATENT],
        is_causal=True,
        max_len_extend=q_len,
        sm_scale=scale,
        **{name: call[name] for name in ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")},
    )
    if "k_scale" in inspect.signature(stock).parameters:
        arguments |= dict(k_scale=1.0, v_scale=1.0)
    return lambda: stock(**arguments)


def error_of_first_request(call: dict[str, torch.Tensor], q_len: int, prefix: int) -> float:
    """rel of the first request's output to float64."""
    import torch

    keys = torch.cat([call["kv_pool"][call["kv_indices"][:prefix]], call["k_extend"][:q_len]]).squeeze(1).double()
    visible = call["custom_mask"][: q_len * (prefix + q_len)].view(q_len, 1, prefix + q_len)
    scores = torch.einsum("qhd,kd->qhk", call["q"][:q_len].double(), keys) * SCALE
    right = torch.einsum("qhk,kd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), keys[:, :LATENT])
    return float((call["out"][:q_len].double() - right).norm() / right.norm())


def about() -> dict[str, Any]:
    import cupy
    import torch
    import triton

    return dict(
        command="python -m kdtree_patch bench",
        gpu=torch.cuda.get_device_name(),
        date=datetime.date.today().isoformat(),
        versions=dict(
            kdtree_patch=__version__,
            torch=torch.__version__,
            triton=triton.__version__,
            cupy=cupy.__version__,
            sglang=getattr(sys.modules.get("sglang"), "__version__", None),
            python=platform.python_version(),
        ),
    )
