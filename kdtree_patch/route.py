"""Served or declined: the router that stands in for the stock `extend_attention_fwd` of one attention backend.

A call is served when its forward mode is routed (the hook says so, by setting `context` and `mode`) and `decide` has
nothing against it. `decide` looks at shapes, dtypes, strides and plain settings, and never at the values inside a
tensor: under a CUDA graph the decision is made once, at capture, and must hold for every replay with whatever values
the tensors have then. For the same reason nothing here waits for the device, except the validation of eager calls.

Everything that is declined goes to the stock function with the arguments untouched. Each reason is counted, and
logged the first time with the fact that gave offence.

A capture is no call, but each replay of it is. So what a capture would have counted is kept for its batch size, and
counted when the hook says that a graph of that size is about to be replayed (`before_step`, `capture_begins`,
`replay_begins`). Validation and guard of replays hang on the same three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple, Protocol

import torch

from kdtree_patch import contract, log
from kdtree_patch.compare import Both, Recording, Routed
from kdtree_patch.guard import describe
from kdtree_patch.ledger import Ledger, is_fatal
from kdtree_patch.offence import ABOUT, LastDeclined
from kdtree_patch.settings import FORWARD_MODES, Settings
from kdtree_patch.tiles import CONFIGS, HEAD_DIM, LATENT, MAX_HEADS, MAX_Q_LEN, MAX_TILES, ROPE

_FLOATS: Final = frozenset(getattr(torch, name) for name in contract.FLOATS)
_INDICES: Final = frozenset(getattr(torch, name) for name in contract.INDICES)
_MASKS: Final = frozenset(getattr(torch, name) for name in contract.MASKS)
_SCALES: Final = ("k_scale", "v_scale")
_NEUTRAL: Final = tuple((row.name, row.neutral, row.reason) for row in contract.switches() if row.name not in _SCALES)
# Of the scales of an fp8 pool. Beyond them, weights that still count would vanish in fp16.
_LEAST_SCALE, _MOST_SCALE = 2.0**-14, 2.0**14
# The tensors that every layer of a step shares, and those that each layer brings.
_STEP_TENSORS: Final = itemgetter("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")
_LAYER_TENSORS: Final = itemgetter("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer")

# What counts for the lines that say now and then how many calls were routed, whoever served them.
ROUTED: Final = frozenset({*(("kernel", mode) for mode in FORWARD_MODES), ("stock", "shadow")})

# SGLang's names of the forward modes that are routed if they are asked for; verify calls have a method that tells.
MODE_OF: Final = {"DRAFT_EXTEND": "draft_extend", "DRAFT_EXTEND_V2": "draft_extend", "EXTEND": "extend"}

# From how many new tokens of a request on an extend call is left to the stock kernel. `python -m kdtree_patch bench
# --modes` finds out: on an H200 ours is 3 to 100 times as fast up to the limit of the kernel itself, which is therefore
# the rule (docs/results/h200-modes.json).
MOST_NEW_TOKENS: Final = MAX_Q_LEN


class Kernel(Protocol):
    """What the router needs of `kdtree_patch.kernel.VerifyKernel`."""

    device: torch.device
    pool: torch.dtype | None  # of the KV pool if it is an fp8 type; None: the queries' type

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
        k_scale: float,
        v_scale: float,
    ) -> None: ...


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
            *(q_len if type(q_len) is int else type(q_len), type(scale), *kinds_of_scales(call)),
            *(q.shape, q.stride(), q.dtype, q.device),
            *(k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.dtype),
            *(out.shape, out.stride(), out.dtype, out.device),
            *(pool.shape, pool.stride(), pool.dtype, pool.device),
            *(v_pool.shape, v_pool.stride(), v_pool.dtype, v_pool.data_ptr() == pool.data_ptr()),
            (q.data_ptr() | k.data_ptr() | out.data_ptr() | pool.data_ptr()) % 16,
            *[None if t is None else (t.shape, t.is_contiguous(), t.dtype, t.device) for t in flat],
        )


class Remembered(NamedTuple):
    served: LastServed
    declined: LastDeclined


class VerifyRouter:
    """Called in place of one backend's `extend_attention_fwd`, with the same arguments and the same result.

    `context` is the layer and the forward batch while a call of a routed forward mode is under way, and None otherwise;
    `mode` is that mode. SGLang runs the forward passes of a process on one thread, so plain attributes will do.
    `facts` are for the line of a guard that has tripped.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        kernel: Kernel,
        settings: Settings,
        ledger: Ledger,
        rank: int | None = None,
        facts: Mapping[str, object] | None = None,
    ):
        self.context: tuple[Any, Any] | None = None
        self.mode = "verify"
        self.stock = stock
        self.kernel = kernel
        self.ledger = ledger
        self._shadow = settings.mode == "shadow"
        self._on_gpu = kernel.device.type == "cuda"
        self._verify = "verify" if "verify" in settings.forward_modes else None
        self._other_modes = {name: mode for name, mode in MODE_OF.items() if mode in settings.forward_modes}
        # Binding by name through the stock function's own signature is what makes all three releases look alike. What
        # the signature cannot change between calls is worked out here, once.
        self._names = tuple(inspect.signature(stock).parameters)
        self._name_set = frozenset(self._names)
        # Of verify calls, and of those of the other modes (ragged), which are decided otherwise.
        self._remembered = tuple(Remembered(LastServed(), LastDeclined(self._names)) for _ in range(2))
        self._recordings: dict[tuple[str, int], Recording] = {}  # by forward mode and batch size, padding included
        self._both: Both | None = None
        if settings.compares:
            parts = (kernel.device, self._launch, self._stock_with)
            # An inference tensor could only be written to from within inference mode, and captures may be outside.
            with torch.inference_mode(False):
                self._both = Both(settings, ledger, *parts, facts or {}, rank)

    def mode_of(self, forward_mode: Any) -> str | None:
        """The routed mode of a batch, from SGLang's name for it; None if its calls are not routed."""
        if forward_mode.is_target_verify():
            return self._verify
        return self._other_modes.get(forward_mode.name) if self._other_modes else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if context is None:
            self._count_declined("forward_mode", {})
            return self.stock(*args, **kwargs)
        ragged = self.mode != "verify"
        served, declined = self._remembered[ragged]
        # Asked first, and of the arguments as they come: a service whose calls are all declined must not feel it.
        known_reason = self.ledger.disabled or declined.again(args, kwargs)
        if known_reason is not None:
            if self._capturing():
                self._recording(self._by_name(args, kwargs)).counts["stock", known_reason] += 1
            else:
                self.ledger.count("stock", known_reason)
            return self.stock(*args, **kwargs)
        call = self._by_name(args, kwargs)
        # Too many, one given twice, an unknown one: the stock function has the right words for it.
        if len(call) != len(args) + len(kwargs) or not kwargs.keys() <= self._name_set:
            return self.stock(*args, **kwargs)
        known = False
        try:
            reason = switched_on(call)
            if reason is None:
                known = served.resembles(call)
                reason = None if known else decide(call, self.kernel.device, self.kernel.pool, ragged)
                if not known and reason is None:
                    served.remember(call)
        except Exception:
            # One missing, or of a kind that the table does not foresee; the stock function may know what to do with it.
            reason = "unexpected_arguments"
        recording = self._recording(call) if self._capturing() else None
        if reason is not None:
            names = offending(reason, call, self.kernel.device)
            declined.remember(reason, names, args, kwargs)
            self._count_declined(reason, {name: call[name] for name in names if name in call}, context[0], recording)
            return self.stock(*args, **kwargs)
        if not known:
            self.ledger.harmlessly("the shapes line", lambda: self._say_new_shape(call, context[1]))
        routed = Routed(call, args, kwargs, context[0].layer_id, scale_of(call), self.mode)
        route, why, result = self._serve(routed, recording)
        if recording is None:
            self.ledger.count_routed(route, why)
        else:
            recording.counts[route, why] += 1
        return result

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _serve(self, routed: Routed, recording: Recording | None) -> tuple[str, str, Any]:
        """Returns the route and the reason that the call counts for, and what the stock function has returned."""
        both = self._both
        if both is not None:
            if recording is not None:
                return both.record(routed, recording)
            if both.due(routed):
                return both.serve(routed)
        ours = not self._shadow and self.ledger.disabled is None
        if ours and self._launch(routed.values, routed.values["o_extend"], routed.scale):
            return "kernel", routed.mode, None
        # In shadow mode, or because the kernel has just been turned off: the stock kernel writes all of the output.
        return "stock", self.ledger.disabled or "shadow", self.stock(*routed.args, **routed.kwargs)

    def _launch(self, call: Mapping[str, Any], out: torch.Tensor, scale: float) -> bool:
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
                scale,
                call.get("k_scale", 1.0),
                call.get("v_scale", 1.0),
            )
        except Exception as error:
            if is_fatal(error):
                raise
            # Graphs that do not compare have no switch.
            self.ledger.disable("launch_failed", f"{type(error).__name__}: {error}", graphs=self._both is not None)
            return False
        return True

    def _stock_with(self, args: tuple[Any, ...], kwargs: dict[str, Any], **other: torch.Tensor) -> Any:
        """The stock function with other tensors in place of some of its arguments."""
        if not other:
            return self.stock(*args, **kwargs)
        positional = [other.get(name, value) for name, value in zip(self._names, args, strict=False)]
        named = {name: value for name, value in other.items() if name not in self._names[: len(args)]}
        return self.stock(*positional, **{**kwargs, **named})

    # ------------------------------------------------------------------------------------------- captures and replays

    def before_step(self) -> None:
        """A batch is about to be prepared, for whatever kind of forward pass."""
        if self._both is not None and not self._capturing():
            self._both.before_step()

    def capture_begins(self, bs: int, mode: str = "verify") -> None:
        """A batch of `bs` requests is about to be captured, perhaps not for the first time."""
        self._recordings.pop((mode, bs), None)
        if self._both is not None:
            self._both.capture_begins()

    def replay_begins(self, bs: int, mode: str = "verify") -> None:
        """A graph of a batch of `bs` requests is about to be replayed; its metadata is in place."""
        recording = self._recordings.get((mode, bs))
        if recording is None:
            return
        if self._capturing():
            if self.ledger.first("metadata graph"):
                words = (
                    "the metadata of CUDA graphs is replayed from a graph; replays are neither counted nor logged: "
                    "unset SGLANG_ENABLE_METADATA_GLUE_GRAPH if they should be"
                )
                log.get_logger().warning(words)
            if self._both is not None:
                self._both.preparation_is_captured()
            return
        off = None
        if self._both is not None:
            self._both.replay_begins(recording)
            off = self._both.off_in_graphs
        for (route, reason), calls in recording.counts.items():
            if route == "kernel" and off is not None:
                route, reason = "stock", off
            if (route, reason) in ROUTED:
                self.ledger.count_routed(route, reason, calls)
            else:
                self.ledger.count(route, reason, calls)

    def _recording(self, call: Mapping[str, Any]) -> Recording:
        offsets = call.get("qo_indptr")
        bs = offsets.shape[0] - 1 if isinstance(offsets, torch.Tensor) and offsets.dim() == 1 else -1
        return self._recordings.setdefault((self.mode, bs), Recording())

    # --------------------------------------------------------------------------------------------------------- lines

    def _count_declined(
        self, reason: str, about: Mapping[str, Any], layer: Any = None, recording: Recording | None = None
    ) -> None:
        if recording is None:
            self.ledger.count("stock", reason)
        else:
            recording.counts["stock", reason] += 1
        if self.ledger.first(("declined", reason)):
            layer_id = getattr(layer, "layer_id", None)
            facts = {name: describe(value) for name, value in about.items()}
            log.declined(reason, "such calls run stock", scope="call", layer=layer_id, **facts)

    def _say_new_shape(self, call: dict[str, Any], batch: Any) -> None:
        """The shapes line, once for each new shape. The mask's length does not count: it changes with every step.

        In the other modes every step has a shape of its own: they have one line each, which names them.
        """
        q, mask, q_len = call["q_extend"], call["custom_mask"], call["max_len_extend"]
        slots, bs = call["k_buffer"].shape[0], call["qo_indptr"].shape[0] - 1
        verify = self.mode == "verify"
        if not self.ledger.first((q.shape, slots, bs, q_len, mask is None) if verify else (self.mode, slots)):
            return
        log.get_logger().info(
            "shapes q=%s kv_buf=%s bs=%d q_len=%d Dl=%d Dr=%d kv_len_max=%s scale=%.5f mask=%s%s%s",
            *(tuple(q.shape), (slots, HEAD_DIM), bs, q_len, LATENT, ROPE),
            # Where the new tokens are counted in, the host's lengths are not those of the prefixes.
            longest_prefix(batch if verify else None, call["kv_indptr"], bs, self._capturing()),
            scale_of(call),
            None if mask is None else tuple(mask.shape),
            "" if self.kernel.pool is None else f" kv_dtype={str(self.kernel.pool).removeprefix('torch.')}",
            "" if verify else f" mode={self.mode}",
        )

    def _capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()


def offending(reason: str, call: Mapping[str, Any], device: torch.device) -> Sequence[str]:
    """The arguments from which a reason follows, whatever the others are; all of them where that is not known."""
    if reason in ("not_mla", "layout"):
        return ill_shaped(call) or ill_laid(call)
    if reason == "device":
        return [name for name in ABOUT[reason] if call[name] is not None and call[name].device != device][:1]
    if reason in ABOUT:
        return ABOUT[reason]
    return [name for name, neutral, other in _NEUTRAL if other == reason and _is_on(call, name, neutral)] or list(call)


def switched_on(call: Mapping[str, Any]) -> str | None:
    """The reason code of the first parameter that asks for something the kernel does not do, or None."""
    for name, neutral, reason in _NEUTRAL:
        if _is_on(call, name, neutral):
            return reason
    return None


def _is_on(call: Mapping[str, Any], name: str, neutral: object) -> bool:
    value = call.get(name, neutral)
    return value is not neutral and not contract.is_neutral(value, neutral)


def decide(
    call: Mapping[str, Any], device: torch.device, fp8: torch.dtype | None = None, ragged: bool = False
) -> str | None:
    """The reason code to decline a call whose switches are all off, or None to serve it on `device`, with a kernel for
    a pool of the type `fp8`, or of the queries' type.

    All requests of a verify call have as many draft tokens, and then `tokens == bs * q_len` says so. Those of an extend
    call (`ragged`) have different numbers, which only the device knows. The kernel reads them there, and asks for
    what the stock kernel asks for too: no request has more than q_len, and all of them lie within the tokens of q.
    What lies beyond them, padding, neither kernel writes.

    What a service is most likely to have wrong for good comes first: a pool of another type costs each of its calls as
    little as can be.
    """
    q, k, v, out, pool, v_pool = _LAYER_TENSORS(call)
    offsets, kv_offsets, indices, mask, mask_offsets = _STEP_TENSORS(call)
    # Element types of what is multiplied.
    dtype = q.dtype
    if dtype not in _FLOATS or not dtype == k.dtype == v.dtype == out.dtype:
        return "dtype"
    if not (fp8 or dtype) == pool.dtype == v_pool.dtype:
        return "kv_dtype"
    if not set(kinds_of_scales(call)) <= ({"usable", "neutral"} if fp8 else {"neutral"}):
        return "kv_scale"
    if q.shape[0] == 0 or offsets.shape[0] < 2:
        return "empty_batch"
    # Shapes: those of MLA with absorbed weights. One KV head, the latent and then the rope part; V is the latent part.
    if ill_shaped(call):
        return "not_mla"
    tokens, heads = q.shape[:2]
    if not 1 <= heads <= MAX_HEADS:
        return "heads"
    q_len, bs = call["max_len_extend"], offsets.shape[0] - 1
    if type(q_len) is not int:
        return "max_len_unknown"
    if not 1 <= q_len <= (MOST_NEW_TOKENS if ragged else MAX_Q_LEN) or (tokens != bs * q_len and not ragged):
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
    if ill_laid(call):
        return "layout"
    if any(config.most_tiles(bs, q_len, heads, indices.shape[0]) >= MAX_TILES for config in CONFIGS.values()):
        return "too_many_tiles"
    if any(tensor.device != device for tensor in (q, k, pool, out, *flat, *([] if mask is None else [mask]))):
        return "device"
    return None


def ill_shaped(call: Mapping[str, Any]) -> Sequence[str]:
    """The first argument, or two, whose shape is not that of MLA. Nothing if all are well."""
    tokens, heads = call["q_extend"].shape[:2]
    expected = {
        "q_extend": (tokens, heads, HEAD_DIM),
        "k_extend": (tokens, 1, HEAD_DIM),
        "v_extend": (tokens, 1, LATENT),
        "o_extend": (tokens, heads, LATENT),
    }
    for name, shape in expected.items():
        if call[name].shape != shape:
            return "q_extend", name
    for name, width in (("k_buffer", HEAD_DIM), ("v_buffer", LATENT)):
        if call[name].shape[1:] != (1, width):
            return (name,)
    return ()


def ill_laid(call: Mapping[str, Any]) -> Sequence[str]:
    """The first argument, or two, whose memory is not as the kernel's 16-byte copies and its plain index arithmetic
    take for granted. Nothing if all are well.
    """
    for name in ("q_extend", "k_extend", "k_buffer", "o_extend"):
        if not _aligned(call[name]):
            return (name,)
    pool, v_pool = call["k_buffer"], call["v_buffer"]
    if v_pool.data_ptr() != pool.data_ptr() or v_pool.stride() != pool.stride() or v_pool.shape[0] != pool.shape[0]:
        return "k_buffer", "v_buffer"
    masked = call["custom_mask"] is not None
    for name in ("qo_indptr", "kv_indptr", "kv_indices", *(("custom_mask", "mask_indptr") if masked else ())):
        if call[name].dim() != 1 or not call[name].is_contiguous():
            return (name,)
    bs = call["qo_indptr"].shape[0] - 1
    if call["kv_indptr"].shape[0] <= bs:
        return "qo_indptr", "kv_indptr"
    if masked and call["mask_indptr"].shape[0] < bs:
        return "custom_mask", "qo_indptr", "mask_indptr"
    return ()


def _aligned(tensor: torch.Tensor) -> bool:
    """Rows that each begin at a multiple of 16 bytes and have no gaps."""
    *outer, last = tensor.stride()
    elements = 16 // tensor.element_size()
    return last == 1 and tensor.data_ptr() % 16 == 0 and not any(stride % elements for stride in outer)


def kinds_of_scales(call: Mapping[str, Any]) -> list[str]:
    """Of k_scale and v_scale, which 0.5.9 does not have: neutral, usable with an fp8 pool, or neither. A tensor is
    neither, since nobody may read it here; SGLang passes numbers.
    """
    kinds = []
    for name in _SCALES:
        value = call.get(name, 1.0)
        if type(value) not in (float, int):
            kinds.append("unknown")
        else:
            kinds.append("neutral" if value == 1 else "usable" if _LEAST_SCALE <= value <= _MOST_SCALE else "unknown")
    return kinds


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
