"""The kernel on one device: loads it, owns its workspace, packs the parameters and launches. Knows torch tensors, cupy
and the compiled binary; knows nothing of SGLang.

`VerifyKernel` is the interface. On a GPU it is a cubin in a `cupy.RawModule`; on CPU tensors it is the same source
compiled by g++, which is how the demo and the tests run without a GPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kdtree_patch import compile as compiling
from kdtree_patch import tiles

if TYPE_CHECKING:
    from kdtree_patch.compile import CompileJob

LOG2_E = 1.4426950408889634
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8_POOLS = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}

# `VerifyParams` of kernels/verify_attn_flash.cu, field by field. Strides are in bytes.
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in ("q", "k_extend", "kv_pool", "out")),
        *((name, np.uint64) for name in ("qo_indptr", "kv_indptr", "kv_indices", "mask_indptr", "custom_mask")),
        *((name, np.uint64) for name in ("partial_out", "partial_stats", "cut_items")),
        *((name, np.int64) for name in ("q_token_stride", "q_head_stride", "k_extend_stride", "kv_slot_stride")),
        *((name, np.int64) for name in ("out_token_stride", "out_head_stride")),
        *((name, np.int32) for name in ("bs", "heads", "row_blocks", "rows_per_block", "workers", "wide_indices")),
        ("scale_log2e", np.float32),
        ("fragment_warps", np.int32),
        *((name, np.float32) for name in ("prefix_scale_log2e", "v_scale", "draft_lift")),
    ],
    align=True,
)

# Writes a record of them in one go, which costs the host half of what numpy takes. Nothing is between the fields.
_FORMATS = {np.dtype(np.uint64): "Q", np.dtype(np.int64): "q", np.dtype(np.int32): "i", np.dtype(np.float32): "f"}
_PACK = struct.Struct("=" + "".join(_FORMATS[PARAMS[name]] for name in PARAMS.names or ())).pack_into

# Workers of the CPU build: enough to cut items, few enough to be quick.
HOST_WORKERS = 5


class KernelUnavailable(Exception):
    """The kernel cannot be had on this device. `reason` is a code for the log, the message says what to do."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class KernelFault(RuntimeError):
    """The CPU build of the kernel broke a rule of the machine it emulates; the message says which."""


# One kernel of a call: its name, the grid (x, y), threads a block and its dynamic shared memory in bytes.
Step = tuple[str, tuple[int, int], int, int]
# Launches the steps of a call, one after the other, on the current stream; all get the one record of parameters at this
# address.
Launcher = Callable[[Sequence[Step], int], None]


class VerifyKernel:
    """Attention of the draft tokens of a batch over their requests' prefixes, on one device.

    The workspace (two partial results a worker: 164 KB together, 22 MB on 132 multiprocessors, and in the Hopper
    configuration, where a worker is two multiprocessors, 296 KB and 20 MB) is allocated once; its size does not depend
    on the batch. Calls on one device share it, so they must be ordered on one stream, as SGLang's forward passes are.

    `pool` is the type of an fp8 KV pool, and None for one of the queries' type: a binary has one of them.
    """

    def __init__(
        self,
        device: torch.device,
        launcher: Launcher,
        workers: int,
        target: str,
        config: tiles.Configuration = tiles.CONFIGS["portable"],
        pool: torch.dtype | None = None,
    ):
        self.device = device
        self.pool = pool
        self.target = target
        self.workers = workers
        self.config = config
        self._launcher = launcher
        largest = config.variants[-1]
        self.partial_out = torch.empty(2 * workers * largest.partial_bytes, dtype=torch.uint8, device=device)
        self.partial_stats = torch.empty(2 * workers * largest.rows * 2, dtype=torch.float32, device=device)
        self.cut_items = torch.zeros(workers * 4, dtype=torch.int32, device=device)
        self._params = ctypes.create_string_buffer(PARAMS.itemsize)
        self._params_address = ctypes.addressof(self._params)
        self._workspace = (self.partial_out.data_ptr(), self.partial_stats.data_ptr(), self.cut_items.data_ptr())
        # Around what is the same for all calls, so that what is looked up by is a few numbers.
        self._plan = lru_cache(maxsize=4096)(partial(plan_call, config, workers))
        self._one_at_a_time = threading.Lock()

    @classmethod
    def load(
        cls,
        device: torch.device,
        cache_dir: Path | None = None,
        job: CompileJob | None = None,
        config: str = "auto",
        pool: torch.dtype | None = None,
    ) -> VerifyKernel:
        """Loads the kernel for a device: from the cache, from a compilation that is under way, or by compiling it now.

        `config` is a name of `tiles.CONFIGS`, of which only compute capability 9.0 has hopper, or auto: the one made
        for the device, portable on a CPU; `pool` a key of FP8_POOLS, or None. Raises KernelUnavailable. Must not be
        called under CUDA graph capture: it loads a module and allocates the workspace.
        """
        fp8 = None if pool is None else FP8_POOLS[pool]
        try:
            if device.type == "cpu":
                target = compiling.with_pool("host", fp8)
                library = compiling.cached_binary(target, cache_dir)
                chosen = tiles.CONFIGS["portable" if config == "auto" else config]
                return cls(device, host_launcher(library), HOST_WORKERS, target, chosen, pool)
            properties = torch.cuda.get_device_properties(device)
            capability = (properties.major, properties.minor)
            arch = compiling.cubin_target(capability, config)
            if arch is None:
                raise KernelUnavailable(*compiling.refusal(properties.name, capability, config))
            target = compiling.with_pool(arch, fp8)
            chosen = tiles.CONFIGS[compiling.own_config(capability) if config == "auto" else config]
            cubin = job.result(target) if job is not None else compiling.cached_binary(target, cache_dir)
            launcher = gpu_launcher(cubin, device, chosen, cache_dir)
            return cls(device, launcher, properties.multi_processor_count // chosen.cluster, target, chosen, pool)
        except compiling.CompileError as error:
            raise KernelUnavailable(error.reason, str(error)) from error

    @property
    def workspace_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.partial_out, self.partial_stats, self.cut_items))

    def launch(
        self,
        q: torch.Tensor,
        k_extend: torch.Tensor,
        out: torch.Tensor,
        kv_pool: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: torch.Tensor | None,
        mask_indptr: torch.Tensor | None,
        q_len: int,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Writes out (tokens, heads, 512) on the current stream. Does not synchronise, allocate or read a tensor on the
        host.

        q (tokens, heads, 576), k_extend (tokens, 1, 576), kv_pool (slots, 1, 576) and out are all bf16 or all fp16, but
        for an fp8 kv_pool, whose keys are multiplied by k_scale and values by v_scale (both above 0; no other pool has
        scales). Rows are 16-byte aligned, with unit stride in the last dimension. qo_indptr and kv_indptr (bs + 1),
        kv_indices and mask_indptr (bs + 1) are int32 or int64. custom_mask holds q_len * (prefix + q_len) bool or uint8
        a request, or is None: then the draft tokens are a causal chain. q_len is the longest run of draft tokens of a
        request.
        """
        heads, bs = q.shape[1], qo_indptr.shape[0] - 1
        plan = self._plan(q.dtype, q_len, heads, bs)
        size = q.element_size()
        wide = torch.int64
        record = (
            q.data_ptr(),
            k_extend.data_ptr(),
            kv_pool.data_ptr(),
            out.data_ptr(),
            qo_indptr.data_ptr(),
            kv_indptr.data_ptr(),
            kv_indices.data_ptr(),
            0 if custom_mask is None or mask_indptr is None else mask_indptr.data_ptr(),
            0 if custom_mask is None else custom_mask.data_ptr(),
            *self._workspace,
            q.stride(0) * size,
            q.stride(1) * size,
            k_extend.stride(0) * size,
            kv_pool.stride(0) * kv_pool.element_size(),
            out.stride(0) * size,
            out.stride(1) * size,
            bs,
            heads,
            plan.row_blocks,
            plan.rows_per_block,
            self.workers,
            (qo_indptr.dtype == wide)
            + 2 * (kv_indptr.dtype == wide)
            + 4 * (kv_indices.dtype == wide)
            + 8 * (mask_indptr is not None and mask_indptr.dtype == wide),
            scale * LOG2_E,
            plan.fragment_warps,
            scale * LOG2_E * k_scale,
            v_scale,
            -log2(v_scale),
        )
        # Two engines of one process may call from two threads, and there is one record.
        with self._one_at_a_time:
            _PACK(self._params, 0, *record)
            self._launcher(plan.steps, self._params_address)


class CallPlan(NamedTuple):
    """What the host decides of a call; the lengths are the device's to look at."""

    steps: tuple[Step, Step]
    row_blocks: int  # a request has at most
    rows_per_block: int
    fragment_warps: int  # of combine, that share a fragment: 1 or 8


def plan_call(
    config: tiles.Configuration, workers: int, dtype: torch.dtype, q_len: int, heads: int, bs: int
) -> CallPlan:
    """The two kernels of a call and their grids: one block a worker, then combine: 32 * row_tiles fragments an item, a
    block for each if an item is likely to be cut into many splits, else a warp. Not a bit of the result depends on it.
    """
    cut, element = config.cut_rows(q_len, heads), ELEMENTS[dtype]
    variant = cut.variant
    items = bs * cut.row_blocks
    fragment_warps = 8 if workers >= 12 * items else 1
    combine_grid = (variant.row_tiles * 4 * fragment_warps, min(items, workers))
    combine = (variant.combine_name(element), combine_grid, tiles.COMBINE_THREADS, combine_shared_bytes(workers))
    main = (variant.kernel_name(element), (workers * config.cluster, 1), variant.threads, variant.shared_bytes)
    return CallPlan((main, combine), cut.row_blocks, cut.rows_per_block, fragment_warps)


def combine_shared_bytes(workers: int) -> int:
    """Dynamic shared memory of combine: a reduction buffer, eight inverse sums and a weight for each of eight rows and
    every possible split.
    """
    return tiles.COMBINE_THREADS * 16 + 32 + workers * 32


# CUlaunchAttribute and CUlaunchConfig of cuda.h; the value of an attribute is a union of 64 bytes.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def may_overlap(capability: tuple[int, int], driver_version: int) -> bool:
    """Whether combine may be launched before the main kernel has ended (programmatic dependent launch): the kernels
    have the instructions from compute capability 9.0 on, and CUDA graphs record it from CUDA 12.3 on.
    """
    return capability >= (9, 0) and driver_version >= 12030


def gpu_launcher(
    cubin: Path, device: torch.device, config: tiles.Configuration, cache_dir: Path | None = None
) -> Launcher:
    """Loads a cubin on a device that already has its context, with the limit of shared memory of every kernel of the
    configuration raised.
    """
    cupy = compiling.import_cupy(cache_dir)
    index = device.index if device.index is not None else torch.cuda.current_device()
    functions: dict[str, ctypes.c_void_p] = {}
    with cupy.cuda.Device(index):
        module = cupy.RawModule(path=str(cubin))
        for variant in config.variants:
            for element in tiles.ELEMENTS:
                kernel = module.get_function(variant.kernel_name(element))
                kernel.max_dynamic_shared_size_bytes = variant.shared_bytes
                combine = module.get_function(variant.combine_name(element))
                functions[variant.kernel_name(element)] = ctypes.c_void_p(kernel.kernel.ptr)
                functions[variant.combine_name(element)] = ctypes.c_void_p(combine.kernel.ptr)
    arguments = (ctypes.c_void_p * 1)()  # the driver copies what it points to before the launch returns
    driver = ctypes.CDLL("libcuda.so.1")
    early = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
    overlap = may_overlap(torch.cuda.get_device_capability(index), cupy.cuda.runtime.driverGetVersion())
    config_of_launch = _LaunchConfig(grid_z=1, block_y=1, block_z=1, attributes=ctypes.pointer(early))
    launch_kernel, config_reference = driver.cuLaunchKernelEx, ctypes.byref(config_of_launch)

    def launch(steps: Sequence[Step], params: int) -> None:
        # The stream is asked for at each call: under capture it is the capturing one. cupy's own call of a kernel costs
        # about 40 us of Python, this one two.
        config_of_launch.stream = torch.cuda.current_stream(index).cuda_stream
        config_of_launch.attribute_count = 0
        arguments[0] = params
        for name, (x, y), threads, shared_bytes in steps:
            config_of_launch.grid_x = x
            config_of_launch.grid_y = y
            config_of_launch.block_x = threads
            config_of_launch.shared_bytes = shared_bytes
            status = launch_kernel(config_reference, functions[name], arguments, None)
            if status:
                raise cupy.cuda.driver.CUDADriverError(status)
            # combine is brought to the GPU while the main kernel still runs, and waits for it there.
            config_of_launch.attribute_count = overlap

    launch.module = module  # type: ignore[attr-defined]  # the functions do not keep their module alive
    return launch


def host_launcher(library: Path, seed: int = 0) -> Launcher:
    """The CPU build. `seed` shuffles the order in which blocks, warps and lanes run; 0 is the plain order."""
    host = ctypes.CDLL(str(library))
    host.kdtree_host_launch.argtypes = (
        [ctypes.c_char_p] + [ctypes.c_int] * 4 + [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_int]
    )
    if host.kdtree_host_params_size() != PARAMS.itemsize:
        raise KernelUnavailable("load_failed", f"{library} was built for other parameters than this version packs")

    def launch(steps: Sequence[Step], params: int) -> None:
        message = ctypes.create_string_buffer(1024)
        for name, (x, y), threads, shared_bytes in steps:
            failed = host.kdtree_host_launch(
                name.encode(), x, y, threads, shared_bytes, params, seed, message, len(message)
            )
            if failed:
                raise KernelFault(f"{name}: {message.value.decode()}")

    return launch
