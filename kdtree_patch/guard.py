"""The guard: what a bug report needs when a call differs from the stock result by more than `KDTREE_GUARD_REL` allows.

Whether a call does is decided where it is compared (`validate.py`), and acted on by the router. Here are the one line
and, with `KDTREE_GUARD_DUMP`, the file: the inputs of that very call and both results. In a replay of a CUDA graph the
inputs are gone by the time the host learns of it, so `Snapshot` has the graph itself keep them. Knows torch and the
log, and nothing of SGLang.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final

import torch

from kdtree_patch import log
from kdtree_patch.validate import Buffers

# Bounds of what is saved: files in the folder, those included that a worker was killed over, and bytes of tensors in a
# file. If the prefixes do not fit they are left out.
MAX_FILES: Final = 16
MAX_BYTES: Final = 256 << 20
# Of the buffers under CUDA graphs, which have room for the largest batch, no more than this many elements are kept.
MAX_KEPT: Final = 1 << 22

STEP_TENSORS: Final = ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")
LINE_TENSORS: Final = ("q_extend", "k_buffer", *STEP_TENSORS)

PLAIN: Final = (str, int, float, bool, NoneType)

Tensors = Mapping[str, "torch.Tensor | None"]


@dataclass(frozen=True)
class Pool:
    """A layer's KV pool, and its scales."""

    rows: torch.Tensor
    k_scale: float
    v_scale: float

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Pool:
        return cls(call["k_buffer"], call.get("k_scale", 1.0), call.get("v_scale", 1.0))


@dataclass(frozen=True)
class Call:
    """One verify call, as far as it outlives itself: what all layers of a step share, and the pools."""

    layer: int
    words: Mapping[str, str]  # its tensors for the line
    step: Tensors
    q_len: int
    elements: int  # of the output
    scale: float
    pools: dict[int, Pool] = field(default_factory=dict)
    replay: bool = False

    @classmethod
    def of(cls, call: Mapping[str, Any], layer: int, scale: float, replay: bool = False) -> Call:
        return cls(
            layer=layer,
            words={name: describe(call[name]) for name in LINE_TENSORS},
            step={name: call[name] for name in STEP_TENSORS},
            q_len=call["max_len_extend"],
            elements=call["o_extend"].numel(),
            scale=scale,
            pools={layer: Pool.of(call)},
            replay=replay,
        )

    def offsets(self, name: str) -> torch.Tensor:
        """Those of its requests: bs + 1."""
        tensor, qo_indptr = self.step[name], self.step["qo_indptr"]
        assert tensor is not None and qo_indptr is not None
        return tensor[: qo_indptr.numel()]


def describe(value: Any) -> str:
    """An argument for a log line: of a tensor its type, shape and layout, and nothing of what is in it.

    To print a tensor is to wait for the device, which a capture forbids; so of what may hold one, only what it is.
    """
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(describe, value))}]"[:80]
    if not isinstance(value, torch.Tensor):
        return str(value)[:80] if isinstance(value, (str, int, float, NoneType)) else type(value).__name__
    kind = str(value.dtype).removeprefix("torch.")
    strides = value.stride() if value.layout == torch.strided else value.layout
    return f"{kind}{tuple(value.shape)}/{strides}@{value.device}".replace(" ", "")


def message(call: Call, figures: str, limit: float, facts: Mapping[str, object], saved: Mapping[str, object]) -> str:
    """All that a bug report needs, in one line."""
    shapes = {**call.words, "q_len": call.q_len, "scale": f"{call.scale:.5f}", "replay": int(call.replay)}
    return f"layer={call.layer} {figures} limit={limit:g} {log.fields({**shapes, **facts, **saved})}"


def save(folder: Path, call: Call, tensors: Tensors, facts: Mapping[str, object]) -> dict[str, object]:
    """Writes a file that `torch.load` reads. Returns the fields of the line that say where, or why not.

    `tensors` are the layer's: q, k_extend, ours, stock. The file has them under `inputs` (the arguments of
    `VerifyKernel.launch` but for the output) and `results`, with `facts` beside. Of the pool it has the rows of the
    prefixes alone, and the indices that go with those; which slots they came from is in `slots`. What is not whole is
    named in `left_out`, and is None. Waits for the device.
    """
    inputs: dict[str, Any] = {name: tensors[name] for name in ("q", "k_extend")} | dict(call.step)
    inputs |= {"q_len": call.q_len, "scale": call.scale}
    results = {name: tensors[name] for name in ("ours", "stock")}
    bs = inputs["qo_indptr"].numel() - 1
    ends = inputs["kv_indptr"][: bs + 1].tolist()
    lengths = {"kv_indices": ends[-1]}
    if inputs["custom_mask"] is not None:
        last = call.q_len * (ends[-1] - ends[-2] + call.q_len)
        lengths["custom_mask"] = int(inputs["mask_indptr"][bs - 1]) + last
    left_out = [name for name, length in lengths.items() if length > inputs[name].numel()]
    for name, length in lengths.items():
        inputs[name] = None if name in left_out else inputs[name][:length]
    slots = inputs["kv_indices"]
    size = sum(map(_bytes, [*inputs.values(), *results.values(), slots]))
    if size > MAX_BYTES:
        return {"dump": "none", "dump_error": f"{size} bytes are more than the {MAX_BYTES} that a file may have"}
    layer = call.pools[call.layer]
    inputs |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    pool = layer.rows
    if slots is None or size + slots.numel() * pool[0].numel() * pool.element_size() > MAX_BYTES:
        left_out.append("kv_pool")
        inputs["kv_pool"] = None
    else:
        # Not every torch can take rows of fp8.
        rows = pool.view(torch.uint8)[slots.long()] if pool.itemsize == 1 else pool[slots.long()]
        inputs["kv_pool"] = rows.view(pool.dtype)
        inputs["kv_indices"] = torch.arange(slots.numel(), dtype=slots.dtype)
    facts = {**facts, "layer": call.layer, "replay": call.replay, **call.words}
    content = {
        "inputs": {name: _on_the_host(value) for name, value in inputs.items()},
        "results": {name: _on_the_host(value) for name, value in results.items()},
        "slots": _on_the_host(slots),
        "left_out": left_out,
        # torch.load makes no other types than these, not even of a str such as torch.__version__ is.
        "facts": {name: value if type(value) in PLAIN else str(value) for name, value in facts.items()},
    }
    begun = _begin(folder)
    if begun is None:
        return {"dump": "none", "dump_error": f"{folder} has {MAX_FILES} of them already"}
    try:
        with begun.open("wb") as file:
            torch.save(content, file)
        path = begun.with_suffix(".pt")
        os.replace(begun, path)
    except BaseException:
        with contextlib.suppress(OSError):
            begun.unlink()
        raise
    return {"dump": path}


def _begin(folder: Path) -> Path | None:
    """An empty file, of the first number that nobody has; None if all are taken. It is readable by nobody else: it is
    going to hold what users of the service wrote.

    Ranks trip at the same time. The .pt of a number is made by whoever has its .tmp, and that one at most has.
    """
    for number in range(MAX_FILES):
        begun = folder / f"kdtree-guard-{number}.tmp"
        try:
            os.close(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        if not begun.with_suffix(".pt").exists():
            return begun
        begun.unlink()
    return None


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _on_the_host(value: Any) -> Any:
    """A copy of what a tensor shows, and not of the whole memory that it is a view of."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


class Snapshot:
    """Keeps the inputs of the call that trips in a replay, on the device: what the layer brings within the graph, what
    the step shares after the replay and before the next batch is prepared.

    The prefixes stay in the pool, and are read when the file is written, a step or two later: a request that has ended
    by then may have lost them.
    """

    def __init__(self, buffers: Buffers, device: torch.device):
        self.of: Call | None = None  # the graph that was replayed last
        self._buffers = buffers
        self._taken = torch.zeros((), dtype=torch.bool, device=device)
        self._pending = torch.zeros((), dtype=torch.bool, device=device)
        # Shapes of the layer's tensors, by the number of elements that the output has.
        self._shapes: dict[int, dict[str, tuple[torch.Size, torch.dtype]]] = {}

    def prepare(self, step: Mapping[str, Any]) -> None:
        """Lays ready what `after_replay` needs of a batch of this size."""
        for name in STEP_TENSORS:
            if step[name] is not None:
                self._kept(name, step[name][:MAX_KEPT], capturing=False)

    def record(self, hit: torch.Tensor, layer: Mapping[str, torch.Tensor], capturing: bool) -> None:
        """The tensors of this layer are kept if `hit` is set. Raises NotPrepared under a capture."""
        self._shapes[layer["ours"].numel()] = {name: (tensor.shape, tensor.dtype) for name, tensor in layer.items()}
        for name, tensor in layer.items():
            kept = self._kept(name, tensor, capturing)
            torch.where(hit, tensor, kept, out=kept)

    def after_replay(self, tripped: torch.Tensor) -> None:
        """Before anything is prepared for another batch: keeps what the step shared, if it has just tripped."""
        if self.of is None:
            return
        torch.gt(tripped, self._taken, out=self._pending)
        for name, tensor in self.of.step.items():
            if tensor is not None:
                tensor = tensor[:MAX_KEPT]
                kept = self._kept(name, tensor, capturing=False)
                torch.where(self._pending, tensor, kept, out=kept)
        self._taken.copy_(tripped)
        self.of = None

    def taken(self, call: Call) -> tuple[Call, Tensors]:
        """The call with what was kept of it, and its layer's tensors. Of a call that has tripped."""
        step = {
            name: None if tensor is None else self._kept(name, tensor[:MAX_KEPT], capturing=False)
            for name, tensor in call.step.items()
        }
        tensors = {
            name: self._buffers.get(f"kept {name}", shape.numel(), dtype, False).view(shape)
            for name, (shape, dtype) in self._shapes[call.elements].items()
        }
        return replace(call, step=step), tensors

    def _kept(self, name: str, tensor: torch.Tensor, capturing: bool) -> torch.Tensor:
        return self._buffers.get(f"kept {name}", tensor.numel(), tensor.dtype, capturing).view(tensor.shape)
