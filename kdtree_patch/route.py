"""Served or declined: the router that stands in for the stock `extend_attention_fwd` of one attention backend.

A call is served when it is a verify call (the hook says so, by setting `context`) and `decide` has nothing against
it. `decide` looks at shapes, dtypes, strides and plain settings, and never at the values inside a tensor: under a
CUDA graph the decision is made once, at capture, and must hold for every replay with whatever values the tensors have
then. For the same reason nothing here waits for the device, except in validation, which stays out of captures.

Everything that is declined goes to the stock function with the arguments untouched. Each reason is counted, and
logged the first time with the fact that gave offence.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from types import NoneType
from typing import Any, Final, Protocol

import torch

from kdtree_patch import contract, log
from kdtree_patch.settings import Settings
from kdtree_patch.tiles import HEAD_DIM, LATENT, MAX_HEADS, MAX_Q_LEN, ROPE
from kdtree_patch.validate import Steps, difference

_FLOATS: Final = frozenset(getattr(torch, name) for name in contract.FLOATS)
_INDICES: Final = frozenset(getattr(torch, name) for name in contract.INDICES)
_MASKS: Final = frozenset(getattr(torch, name) for name in contract.MASKS)
_NEUTRAL: Final = tuple((row.name, row.neutral, row.reason) for row in contract.switches())
# The tensors that every layer of a step shares, and those that each layer brings.
_STEP_TENSORS: Final = itemgetter("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")
_LAYER_TENSORS: Final = itemgetter("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer")

# The arguments that each reason is about, for its line.
_ABOUT: Final[dict[str, tuple[str, ...]]] = {
    "empty_batch": ("q_extend", "qo_indptr"),
    "not_mla": ("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer"),
    "heads": ("q_extend",),
    "max_len_unknown": ("max_len_extend",),
    "q_len": ("q_extend", "qo_indptr", "max_len_extend"),
    "dtype": ("q_extend", "k_extend", "v_extend", "o_extend"),
    "kv_dtype": ("q_extend", "k_buffer", "v_buffer"),
    "mask_dtype": ("custom_mask",),
    "index_dtype": ("qo_indptr", "kv_indptr", "kv_indices", "mask_indptr"),
    "scale": ("sm_scale",),
    **{reason: tuple(name for name, _, other in _NEUTRAL if other == reason) for _, _, reason in _NEUTRAL},
}

# CUDA errors after which the context is lost: every later call fails as well, so going on with the stock kernel would
# only hide where it happened. 214 and 220 are uncorrectable errors of ECC and NVLink, 226 is a contained fault of the
# hardware, the 700s are faults and aborts inside a kernel, 721 tensor memory that a kernel has not given back.
FATAL_STATUS: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})


class Kernel(Protocol):
    """What the router needs of `kdtree_patch.kernel.VerifyKernel`."""

    device: torch.device

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
    ) -> None: ...


class Ledger:
    """What one process has served and declined, and what it has already said. Shared by the routers of its backends."""

    def __init__(self) -> None:
        # (route, reason) to number of calls: ("kernel", "verify"), ("stock", "shadow"), ("stock", "dtype"), ...
        self.counts: Counter[tuple[str, str]] = Counter()
        self.disabled: str | None = None  # a reason code, once the kernel is off for the life of the process
        self._said: set[object] = set()
        self._routed = 0
        self._report_at = 10

    def count_routed(self, route: str, reason: str) -> None:
        """Counts a call that was not declined, whoever served it. The 10th, the 100th and so on are said."""
        self.counts[route, reason] += 1
        self._routed += 1
        if self._routed == self._report_at:
            self._report_at *= 10
            declined = {reason: calls for (route, reason), calls in self.counts.items() if route == "stock"}
            log.get_logger().info("calls %s", log.fields({"served": self.counts["kernel", "verify"], **declined}))

    def first(self, what: object) -> bool:
        """True the first time it is asked about `what`."""
        if what in self._said:
            return False
        self._said.add(what)
        return True

    def disable(self, reason: str, message: str) -> None:
        """Turns the kernel off for the life of the process, with one ERROR line."""
        if self.disabled is None:
            self.disabled = reason
            self.first(("declined", reason))  # the calls that are declined from now on are counted; this line says why
            log.get_logger().error("disabled reason=%s %s; verify calls run stock from here on", reason, message)


class LastServed:
    """The last call that `decide` let through, so that a call which looks the same need not be decided anew.

    A model calls once for each layer, and little changes from one layer to the next: deciding takes twice as long as
    comparing. Everything that `decide` looks at is compared. That a tensor is the same object would not do: it can be
    resized, or given another storage, in place.
    """

    def __init__(self) -> None:
        self._look: object = None

    def resembles(self, call: Mapping[str, Any]) -> bool:
        return self._look is not None and self._look == self._look_of(call)

    def remember(self, call: Mapping[str, Any]) -> None:
        self._look = self._look_of(call)

    @staticmethod
    def _look_of(call: Mapping[str, Any]) -> object:
        q, k, v, out, pool, v_pool = _LAYER_TENSORS(call)
        offsets, kv_offsets, indices, mask, mask_offsets = _STEP_TENSORS(call)
        q_len, scale = call["max_len_extend"], call.get("sm_scale")
        # Without a mask its offsets are not looked at, here as there.
        flat = (offsets, kv_offsets, indices) if mask is None else (offsets, kv_offsets, indices, mask, mask_offsets)
        return (
            # A tensor here would be compared element by element, so only its type is.
            *(q_len if type(q_len) is int else type(q_len), type(scale)),
            *(q.shape, q.stride(), q.dtype, q.device),
            *(k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.dtype),
            *(out.shape, out.stride(), out.dtype, out.device),
            *(pool.shape, pool.stride(), pool.dtype, pool.device),
            *(v_pool.shape, v_pool.stride(), v_pool.dtype, v_pool.data_ptr() == pool.data_ptr()),
            (q.data_ptr() | k.data_ptr() | out.data_ptr() | pool.data_ptr()) % 16,
            *[None if t is None else (t.shape, t.is_contiguous(), t.dtype, t.device) for t in flat],
        )


class VerifyRouter:
    """Called in place of one backend's `extend_attention_fwd`, with the same arguments and the same result.

    `context` is the layer and the forward batch while a verify call is under way, and None otherwise. SGLang runs the
    forward passes of a process on one thread, so a plain attribute will do.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        kernel: Kernel,
        settings: Settings,
        ledger: Ledger,
        rank: int | None = None,
    ):
        self.context: tuple[Any, Any] | None = None
        self.stock = stock
        self.kernel = kernel
        self.ledger = ledger
        self._shadow = settings.mode == "shadow"
        self._steps = Steps(settings.validate_every) if settings.validate else None
        self._verify = "verify" in settings.forward_modes
        self._rank = rank
        # Binding by name through the stock function's own signature is what makes all three releases look alike. What
        # the signature cannot change between calls is worked out here, once.
        self._names = tuple(inspect.signature(stock).parameters)
        self._name_set = frozenset(self._names)
        self._output_position = self._names.index("o_extend")
        self._last = LastServed()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if context is None or not self._verify:
            self._count_declined("forward_mode", {})
            return self.stock(*args, **kwargs)
        call = dict(zip(self._names, args, strict=False))
        call.update(kwargs)
        # Too many, one given twice, an unknown one: the stock function has the right words for it.
        if len(call) != len(args) + len(kwargs) or not kwargs.keys() <= self._name_set:
            return self.stock(*args, **kwargs)
        known = False
        try:
            reason = self.ledger.disabled or switched_on(call)
            if reason is None:
                known = self._last.resembles(call)
                reason = None if known else decide(call, self.kernel.device)
                if not known and reason is None:
                    self._last.remember(call)
        except Exception:
            # One missing, or of a kind that the table does not foresee; the stock function may know what to do with it.
            reason = "unexpected_arguments"
        if reason is not None:
            self._count_declined(reason, call, context[0])
            return self.stock(*args, **kwargs)
        if not known:
            self._harmlessly("the shapes line", lambda: self._say_new_shape(call, context[1]))
        return self._serve(call, args, kwargs, context[0])

    def _serve(self, call: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], layer: Any) -> Any:
        if self._steps is not None and self._validates(layer.layer_id):
            return self._serve_validated(call, args, kwargs, layer.layer_id)
        if not self._shadow and self._launch(call, call["o_extend"]):
            self.ledger.count_routed("kernel", "verify")
            return None
        # In shadow mode, or because the launch has just failed: the stock kernel writes all of the output.
        self.ledger.count_routed("stock", self.ledger.disabled or "shadow")
        return self.stock(*args, **kwargs)

    def _launch(self, call: dict[str, Any], out: torch.Tensor) -> bool:
        """Runs the kernel into `out`. False if it could not be launched: then it is off from here on."""
        mask = call["custom_mask"]
        try:
            self.kernel.launch(
                call["q_extend"],
                call["k_extend"],
                out,
                call["k_buffer"],
                call["qo_indptr"],
                call["kv_indptr"],
                call["kv_indices"],
                mask,
                None if mask is None else call["mask_indptr"],
                call["max_len_extend"],
                scale_of(call),
            )
        except Exception as error:
            if is_fatal(error):
                raise
            self.ledger.disable("launch_failed", f"{type(error).__name__}: {error}")
            return False
        return True

    # ---------------------------------------------------------------------------------------------------- validation

    def _validates(self, layer_id: int) -> bool:
        assert self._steps is not None
        if self._capturing():
            if self.ledger.first("validation skipped"):
                log.get_logger().info("validation is skipped while a CUDA graph is captured, and in its replays")
            return False
        return self._steps.due(layer_id)

    def _serve_validated(
        self, call: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], layer_id: int
    ) -> Any:
        """Computes both. The one that is not served goes to a scratch tensor: one alone writes the real output."""
        served, result = call["o_extend"], None
        self._harmlessly("validation", lambda: self._check_v(call, layer_id))
        ours = not self._shadow and self.ledger.disabled is None and self._launch(call, served)
        if ours:
            self.ledger.count_routed("kernel", "verify")
        else:
            self.ledger.count_routed("stock", self.ledger.disabled or "shadow")
            result = self.stock(*args, **kwargs)

        def compare() -> None:
            scratch = torch.empty_like(served)
            if ours:
                self._stock_into(scratch, args, kwargs)
            elif not self._launch(call, scratch):
                return
            found = difference(served, scratch) if ours else difference(scratch, served)
            log.get_logger().info("%s", found.line(layer_id, self._rank))

        if self.ledger.disabled is None:
            self._harmlessly("validation", compare)
        return result

    def _check_v(self, call: dict[str, Any], layer_id: int) -> None:
        """The kernel takes V from the latent part of K. If a model passes another V, its results would be wrong."""
        v, latent = call["v_extend"], call["k_extend"][..., :LATENT]
        # Bit for bit: a NaN is as good as any other value here.
        if not torch.equal(v.view(torch.int16), latent.view(torch.int16)):
            self.ledger.disable("v_not_latent", f"layer {layer_id}: v_extend is not the latent part of k_extend")

    def _harmlessly(self, what: str, do: Callable[[], None]) -> None:
        """What goes wrong beside the call (validation needs memory, for one) is a line, and no reason to lose it."""
        try:
            do()
        except Exception as error:
            if is_fatal(error):
                raise
            if self.ledger.first(("failed", what)):
                log.get_logger().warning("%s failed: %s: %s", what, type(error).__name__, error)

    def _stock_into(self, out: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = self._output_position
        if at < len(args):
            self.stock(*args[:at], out, *args[at + 1 :], **kwargs)
        else:
            self.stock(*args, **{**kwargs, "o_extend": out})

    # --------------------------------------------------------------------------------------------------------- lines

    def _count_declined(self, reason: str, call: Mapping[str, Any], layer: Any = None) -> None:
        self.ledger.counts["stock", reason] += 1
        if self.ledger.first(("declined", reason)):
            layer_id = getattr(layer, "layer_id", None)
            about = {name: describe(call[name]) for name in _ABOUT.get(reason, call) if name in call}
            log.declined(reason, "such calls run stock", scope="call", layer=layer_id, **about)

    def _say_new_shape(self, call: dict[str, Any], batch: Any) -> None:
        """The shapes line, once for each new shape. The mask's length does not count: it changes with every step."""
        q, mask, q_len = call["q_extend"], call["custom_mask"], call["max_len_extend"]
        slots, bs = call["k_buffer"].shape[0], call["qo_indptr"].shape[0] - 1
        if not self.ledger.first((q.shape, slots, bs, q_len, mask is None)):
            return
        log.get_logger().info(
            "shapes q=%s kv_buf=%s bs=%d q_len=%d Dl=%d Dr=%d kv_len_max=%s scale=%.5f mask=%s",
            *(tuple(q.shape), (slots, HEAD_DIM), bs, q_len, LATENT, ROPE),
            longest_prefix(batch, call["kv_indptr"], bs, self._capturing()),
            scale_of(call),
            None if mask is None else tuple(mask.shape),
        )

    def _capturing(self) -> bool:
        return self.kernel.device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def switched_on(call: Mapping[str, Any]) -> str | None:
    """The reason code of the first parameter that asks for something the kernel does not do, or None."""
    for name, neutral, reason in _NEUTRAL:
        value = call.get(name, neutral)
        if value is not neutral and not contract.is_neutral(value, neutral):
            return reason
    return None


def decide(call: Mapping[str, Any], device: torch.device) -> str | None:
    """The reason code to decline a verify call whose switches are all off, or None to serve it on `device`.

    What a service is most likely to have wrong for good comes first: an fp8 pool costs each of its calls as little as
    can be.
    """
    q, k, v, out, pool, v_pool = _LAYER_TENSORS(call)
    offsets, kv_offsets, indices, mask, mask_offsets = _STEP_TENSORS(call)
    # Element types of what is multiplied.
    dtype = q.dtype
    if dtype not in _FLOATS or not dtype == k.dtype == v.dtype == out.dtype:
        return "dtype"
    if not dtype == pool.dtype == v_pool.dtype:
        return "kv_dtype"
    if q.shape[0] == 0 or offsets.shape[0] < 2:
        return "empty_batch"
    # Shapes: those of MLA with absorbed weights. One KV head, the latent and then the rope part; V is the latent part.
    tokens, heads = q.shape[:2]
    if (
        q.shape != (tokens, heads, HEAD_DIM)
        or k.shape != (tokens, 1, HEAD_DIM)
        or v.shape != (tokens, 1, LATENT)
        or out.shape != (tokens, heads, LATENT)
        or pool.shape[1:] != (1, HEAD_DIM)
        or v_pool.shape[1:] != (1, LATENT)
    ):
        return "not_mla"
    if not 1 <= heads <= MAX_HEADS:
        return "heads"
    q_len, bs = call["max_len_extend"], offsets.shape[0] - 1
    if type(q_len) is not int:
        return "max_len_unknown"
    if not 1 <= q_len <= MAX_Q_LEN or tokens != bs * q_len:
        return "q_len"
    # Element types of what is looked up, and of the scale.
    flat = [offsets, kv_offsets, indices]
    if mask is not None:
        if mask.dtype not in _MASKS:
            return "mask_dtype"
        flat.append(mask_offsets)
    if any(tensor is None or tensor.dtype not in _INDICES for tensor in flat):
        return "index_dtype"
    if type(call.get("sm_scale", 0.0)) not in (int, float, NoneType):
        return "scale"
    # Memory: what the kernel's 16-byte copies and its plain index arithmetic take for granted.
    if mask is not None:
        flat.append(mask)
    if (
        any(tensor.dim() != 1 or not tensor.is_contiguous() for tensor in flat)
        or kv_offsets.shape[0] <= bs
        or (mask is not None and mask_offsets.shape[0] < bs)
        or not (_aligned(q) and _aligned(k) and _aligned(pool) and _aligned(out))
        or v_pool.data_ptr() != pool.data_ptr()
        or v_pool.stride() != pool.stride()
        or v_pool.shape[0] != pool.shape[0]
    ):
        return "layout"
    if any(tensor.device != device for tensor in (q, k, pool, out, *flat)):
        return "device"
    return None


def _aligned(tensor: torch.Tensor) -> bool:
    """Rows of two-byte elements that each begin at a multiple of 16 bytes and have no gaps."""
    *outer, last = tensor.stride()
    return last == 1 and tensor.data_ptr() % 16 == 0 and not any(stride % 8 for stride in outer)


def is_fatal(error: Exception) -> bool:
    """True for a CUDA error that has taken the context with it; cupy has it as `status`, torch as `error_code`."""
    return any(getattr(error, name, None) in FATAL_STATUS for name in ("status", "error_code"))


def scale_of(call: Mapping[str, Any]) -> float:
    """As the stock function has it: None and 0 mean the default."""
    return float(call.get("sm_scale") or HEAD_DIM**-0.5)


def longest_prefix(batch: Any, kv_indptr: torch.Tensor, bs: int, capturing: bool) -> int | str:
    """kv_len_max of the shapes line, from the host's copy of the lengths where there is one; `?` if it is not known."""
    try:
        lengths = getattr(batch, "seq_lens_cpu", None)
        if lengths is not None and len(lengths) and getattr(lengths, "is_cpu", True):
            return int(max(lengths))
        total = getattr(batch, "seq_lens_sum", None)
        if bs == 1 and isinstance(total, int):
            return total
        # Once for each new shape, so this may wait for the device, but not in a capture.
        return "?" if capturing else int(kv_indptr[: bs + 1].diff().max())
    except (TypeError, ValueError):
        return "?"  # lengths of a kind that the table does not foresee


def describe(value: Any) -> str:
    """An argument for a log line: of a tensor its type, shape and layout, and nothing of what is in it."""
    if not isinstance(value, torch.Tensor):
        return str(value)[:80]
    kind = str(value.dtype).removeprefix("torch.")
    strides = value.stride() if value.layout == torch.strided else value.layout
    return f"{kind}{tuple(value.shape)}/{strides}@{value.device}".replace(" ", "")
