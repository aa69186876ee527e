"""`bench --predict`: a paper model of the portable configuration on GPUs that have not been measured. Needs no GPU.

What one call asks of a GPU is counted, as the kernel's schedule deals it out to that many multiprocessors:

    tiles    of the busiest worker; each costs tile_keys * rows_per_block * 2176 operations, padding included
    memory   bytes from DRAM: each key, query and output row once. Further row blocks read the same keys again: from L2
             if the keys that are being read at one time fit into it, else each pass over them counts
    cut      whether any item is shared by several workers, so that combine has something to merge

and turned into a time:

    us = start + cut * combine + max(tiles * operations / (tensor * rate), bytes / (memory * bandwidth))

`rate` is one multiprocessor's share of the bf16 rate with float32 accumulators, `bandwidth` that of DRAM, both public
figures. The four constants come from a run of the benchmark on one GPU (docs/results/h200.json unless another is
named), and from nowhere else. `memory` is the part of its public bandwidth that a large copy reached there. The other
three are fitted to the cold times of its rows of the portable configuration, least squares of the relative error, all
of which are taken to be bound by their tiles: `start` is what a call costs before its tiles count, `combine` the second
kernel, `tensor` the part of the mma.sync rate, as measured in the same run, that the busiest worker achieves. How far
the model is off on those very rows is printed with every prediction.

What it does not know: what it costs to convert the keys of an fp8 pool, of which it halves the bytes alone; the rate of
the L2 (not published for these parts; the rate that the prediction would need is in the JSON); clocks under load; and
that what is not tensor work in a tile does not slow down with the tensor cores. Where they are slower for each
multiprocessor than the reference's, on the GeForce parts above all, the prediction is rather too high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kdtree_patch.bench_shapes import (
    POOL_ELEMENT_BYTES,
    Shape,
    floor_us,
    moved_bytes,
    operations,
    shape_of,
)
from kdtree_patch.exits import NotDone
from kdtree_patch.tiles import CONFIGS, HEAD_DIM, LATENT

CONFIG = "portable"
PORTABLE = CONFIGS[CONFIG]
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """Public figures. `bf16_tflops` is the dense tensor rate with float32 accumulators, which on GeForce parts is half
    of the one with float16 accumulators.
    """

    name: str
    multiprocessors: int
    bandwidth_tb_s: float
    bf16_tflops: float
    l2_mib: int
    source: str


GPUS = (
    Gpu(
        *("RTX PRO 6000", 188, 1.792, 503.8, 128),
        "NVIDIA RTX PRO 6000 Blackwell data sheet; rate: RTX Blackwell PRO architecture white paper, as "
        "hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris lists it",
    ),
    Gpu(
        *("RTX 5090", 170, 1.792, 209.5, 96),
        "NVIDIA RTX Blackwell architecture white paper; rate confirmed to 94 % by an attention kernel in "
        "gau-nernst.github.io/fa-5090",
    ),
    Gpu(
        *("RTX 4090", 128, 1.008, 165.2, 72),
        "NVIDIA Ada architecture white paper, as "
        "hmc-tech.com/gpus/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-blackwell lists it",
    ),
    Gpu(
        *("A100 80 GB", 108, 2.039, 312.0, 40),
        "NVIDIA A100 data sheet and Ampere architecture white paper, as "
        "glennklockwood.com/garden/processors/A100 lists them",
    ),
)
# GPUs whose runs can be the reference, by the name that CUDA gives them. Their rate is measured, not looked up.
REFERENCES = {"NVIDIA H200": Gpu("H200", 132, 4.8, 989.0, 50, "NVIDIA H200 data sheet")}


@dataclass(frozen=True)
class Counts:
    """What one call asks of a GPU."""

    tiles: int  # of the busiest worker
    tile_operations: int  # of one tile, padding included
    cut: bool
    memory_bytes: int
    l2_bytes: int  # every copy of a key, and partial results written and read back


@dataclass(frozen=True)
class Model:
    start_us: float
    combine_us: float
    tensor_fraction: float
    memory_fraction: float

    def us(self, counts: Counts, gpu: Gpu, tflops: float | None = None) -> tuple[float, str]:
        """The predicted time and what bounds it, `tensor` or `memory`. `tflops` replaces the public rate."""
        tensor = tile_us(counts, gpu, tflops) / self.tensor_fraction
        memory = counts.memory_bytes / (self.memory_fraction * gpu.bandwidth_tb_s) / 1e6
        fixed = self.start_us + (self.combine_us if counts.cut else 0.0)
        return fixed + max(tensor, memory), "tensor" if tensor >= memory else "memory"


def tile_us(counts: Counts, gpu: Gpu, tflops: float | None = None) -> float:
    """What the busiest worker's tiles take at the full rate of its multiprocessor."""
    rate = (gpu.bf16_tflops if tflops is None else tflops) / gpu.multiprocessors
    return counts.tiles * counts.tile_operations / rate / 1e6


def count(shape: Shape, gpu: Gpu, kv_dtype: str = "bfloat16") -> Counts:
    """Of a call whose requests all have the same prefix."""
    cut = PORTABLE.cut_rows(shape.q_len, shape.heads)
    workers = gpu.multiprocessors
    item_tiles = -(-(shape.prefix + shape.q_len) // PORTABLE.tile_keys)
    most, partials = deal(shape.bs, cut.row_blocks, item_tiles, workers, shape.prefix < PORTABLE.tile_keys)
    key_bytes = HEAD_DIM * POOL_ELEMENT_BYTES[kv_dtype]
    copied = shape.tokens * key_bytes
    # A worker that goes through several items reads the keys of one request once for each of its row blocks among them.
    passes = min(cut.row_blocks, max(1.0, most / item_tiles))
    requests_at_a_time = min(float(shape.bs), max(1.0, workers * passes / cut.row_blocks))
    if requests_at_a_time * copied / shape.bs <= gpu.l2_mib * MIB:
        passes = 1.0
    rows = cut.variant.rows
    return Counts(
        tiles=most,
        tile_operations=PORTABLE.tile_keys * cut.rows_per_block * 2 * (HEAD_DIM + LATENT),
        cut=partials > 0,
        memory_bytes=moved_bytes(shape, kv_dtype) + round((passes - 1) * copied),
        l2_bytes=cut.row_blocks * copied + 2 * partials * rows * (LATENT * 4 + 8),
    )


def deal(bs: int, row_blocks: int, item_tiles: int, workers: int, short: bool) -> tuple[int, int]:
    """The tiles of the busiest worker and the number of partial results: `make_schedule` of
    kernels/verify_attn_flash.cu, for requests that are all alike.
    """
    if short:  # not on a line: dealt out whole
        return -(-bs * row_blocks // workers) * item_tiles, 0
    # A line for each row block, if that leaves few workers idle, and for each request, if there are workers for all.
    each = workers // row_blocks
    if each * row_blocks * 8 < workers * 7:
        lines, items, each = 1, bs * row_blocks, workers
    elif bs <= each:
        lines, items, each = row_blocks * bs, 1, each // bs
    else:
        lines, items = row_blocks, bs
    line = items * item_tiles
    of_line = min(each, line)
    # The first workers take one tile more than the others.
    share, longer = divmod(line, of_line)
    starts = [w * share + min(w, longer) for w in range(of_line)] + [line]
    pieces = pairwise(sorted({*starts, *range(0, line + 1, item_tiles)}))
    return share + (longer > 0), lines * sum(end - start < item_tiles for start, end in pieces)


def fit(run: Mapping[str, Any]) -> tuple[Model, Gpu, float]:
    """The model of a run, the GPU it was made on and the mma.sync rate that was measured there, TFLOP/s."""
    import numpy as np

    meta = run["meta"]
    gpu = REFERENCES.get(meta["gpu"])
    if gpu is None:
        raise NotDone(f"the run is of a {meta['gpu']}", f"predictions can start from one of {', '.join(REFERENCES)}")
    rate = meta["ceilings"].get("mma_sync_tflops")
    if rate is None:
        raise NotDone(
            "the run has no mma_sync_tflops among its ceilings, and so no fraction that the kernel achieves",
            "it was made by an earlier version; make it again with `bench --json F`",
        )
    rows = portable_rows(run)
    counts = [count(shape_of(row), gpu) for row in rows]
    # Columns: start, combine, 1 / tensor fraction. Each row divided by its time, so that the relative error is least.
    terms = np.array([[1.0, float(c.cut), tile_us(c, gpu, rate)] for c in counts]).reshape(-1, 3)
    times = np.array([row["kernel_cold_us"] for row in rows])
    solution, _, rank, _ = np.linalg.lstsq(terms / times[:, None], np.ones(len(rows)), rcond=None)
    if rank < 3 or solution[2] <= 0:
        raise NotDone(
            f"the run's {len(rows)} rows of the configuration {CONFIG} do not determine the model",
            "it needs short and long prefixes, and one that is not cut: make the run without --shapes",
        )
    start, combine, slowness = map(float, solution)
    model = Model(start, combine, 1 / slowness, meta["ceilings"]["copy_tb_s"] / gpu.bandwidth_tb_s)
    return model, gpu, rate


def portable_rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in run["rows"] if row["config"] == CONFIG and row["kv_dtype"] == "bfloat16"]


def predict(run: Mapping[str, Any], shapes: Sequence[Shape], kv_dtype: str = "bfloat16") -> dict[str, Any]:
    """The document that `--predict --json` writes, but for where the run came from."""
    model, reference, rate = fit(run)
    check = []
    for row in portable_rows(run):
        us, _ = model.us(count(shape_of(row), reference), reference, rate)
        measured = row["kernel_cold_us"]
        off = dict(measured_us=measured, predicted_us=round(us, 1), off_percent=round(100 * (us / measured - 1), 1))
        check.append(shape_of(row)._asdict() | off)
    rows = [predicted_row(model, gpu, shape, kv_dtype) for gpu in GPUS for shape in shapes]
    constants = {name: round(value, 4) for name, value in vars(model).items()}
    return dict(model=constants, gpus=[vars(gpu) for gpu in GPUS], check=check, rows=rows)


def predicted_row(model: Model, gpu: Gpu, shape: Shape, kv_dtype: str) -> dict[str, Any]:
    counts = count(shape, gpu, kv_dtype)
    us, bound = model.us(counts, gpu)
    floor = floor_us(shape, gpu.bandwidth_tb_s * model.memory_fraction, gpu.bf16_tflops, kv_dtype)
    return dict(
        **dict(gpu=gpu.name, **shape._asdict(), kv_dtype=kv_dtype, config=CONFIG),
        **dict(predicted_us=round(us, 1), floor_us=round(floor, 2), bound=bound),
        **dict(operations=operations(shape), tiles=counts.tiles, tile_operations=counts.tile_operations),
        **dict(
            memory_bytes=counts.memory_bytes, l2_bytes=counts.l2_bytes, l2_tb_s=round(counts.l2_bytes / us / 1e6, 2)
        ),
    )
