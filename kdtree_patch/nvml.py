"""The GPUs of this host, by asking NVML: no CUDA call, no context. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class NvmlError(Exception):
    """NVML cannot be asked; the message says why."""


class NvmlMissing(NvmlError):
    """There is no NVML, and so no driver of NVIDIA's."""


@dataclass(frozen=True)
class Gpu:
    """What is None was not asked for, or is not answered."""

    index: int
    capability: tuple[int, int]
    name: str | None = None
    uuid: str | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    is_open: bool | None = None  # False: its compute mode keeps other processes out

    @property
    def about_capability(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def gpus(library: str = LIBRARY, details: bool = False) -> tuple[list[Gpu], str | None]:
    """The GPUs in NVML's order, and with `details` all that `Gpu` has and the version of the driver. One that does not
    answer, because it has fallen off the bus, is left out and hides none of the others. Raises NvmlError.

    CUDA_VISIBLE_DEVICES is not looked at; see `visible`.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        # dlopen begins with the name, too.
        raise NvmlMissing(f"{library} cannot be loaded: {str(error).removeprefix(f'{library}: ')}") from None
    _call(nvml, "nvmlInit_v2")
    try:
        count = ctypes.c_uint(0)
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            with contextlib.suppress(NvmlError):
                found.append(_gpu(nvml, index, details))
        return found, _text(nvml, "nvmlSystemGetDriverVersion") if details else None
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int, details: bool) -> Gpu:
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    capability = (major.value, minor.value)
    if not details:
        return Gpu(index, capability)
    free = total = is_open = None
    with contextlib.suppress(NvmlError):
        memory = _Memory()
        _call(nvml, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        free, total = int(memory.free), int(memory.total)
    with contextlib.suppress(NvmlError):
        mode = ctypes.c_int(0)
        _call(nvml, "nvmlDeviceGetComputeMode", device, ctypes.byref(mode))
        is_open = mode.value == 0
    name, uuid = _text(nvml, "nvmlDeviceGetName", device), _text(nvml, "nvmlDeviceGetUUID", device)
    return Gpu(index, capability, name, uuid, free, total, is_open)


def _call(nvml: ctypes.CDLL, name: str, *arguments: Any) -> None:
    try:
        status = getattr(nvml, name)(*arguments)
    except AttributeError:
        raise NvmlError(f"there is no {name} in it") from None
    if status != 0:
        raise NvmlError(f"{name} answers {status}")


def _text(nvml: ctypes.CDLL, name: str, *arguments: Any) -> str | None:
    buffer = ctypes.create_string_buffer(128)
    try:
        _call(nvml, name, *arguments, buffer, ctypes.c_uint(len(buffer)))
    except NvmlError:
        return None
    return buffer.value.decode(errors="replace")


def visible(found: Sequence[Gpu], devices: str | None) -> list[Gpu] | None:
    """Those of `found` that a process with this CUDA_VISIBLE_DEVICES may use; None where that cannot be told.

    CUDA stops at the first entry that names no device. Its numbers are NVML's with CUDA_DEVICE_ORDER=PCI_BUS_ID, and
    otherwise wherever all GPUs are of one kind; they are taken for that.
    """
    if devices is None:
        return list(found)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in devices.split(",")):
        if word.startswith("MIG-"):
            return None
        match = [gpu for gpu in found if _is_named(gpu, word)]
        if len(match) != 1:
            break
        chosen += match
    return chosen


def _is_named(gpu: Gpu, word: str) -> bool:
    """By its number, or by its UUID or the beginning of that."""
    return word == str(gpu.index) or (word.startswith("GPU-") and (gpu.uuid or "").startswith(word))
