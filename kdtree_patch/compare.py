"""Both kernels for one call: validation and guard, of eager calls and of those in CUDA graphs.

Hangs off the router of one backend, which has already decided that the call is served. In eager mode both results are
there when the call returns: their figures are read, said, and acted on at once. A captured call computes nothing, so
the graph is given both kernels, the comparison, and the choice between the two results by a flag on the device
(`validate.Comparison`): a replay that trips the guard serves the stock result from that very layer on, with no help of
the host. The host comes by once a step, in `before_step`, and reads what an earlier step has left. There it also finds
that the guard of another rank has tripped (`notice.py`): then this one goes stock as well, as for any other reason.

Between compared steps the stock kernel in a graph is given offsets that say "no requests", so it has nothing to do:
`KDTREE_VALIDATE_EVERY` means the same in a graph as without. The graph itself writes them, from the flags and the
batch that it finds: so it takes no stock result that has not been computed, whether or not the host has prepared the
replay. All that the host writes are the two flags. Knows torch, and nothing of SGLang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kdtree_patch import guard, log
from kdtree_patch.ledger import GUARD, GUARD_ELSEWHERE, Ledger, is_fatal
from kdtree_patch.notice import Notice
from kdtree_patch.settings import Settings
from kdtree_patch.tiles import LATENT
from kdtree_patch.validate import (
    LAYERS,
    Buffers,
    Comparison,
    Difference,
    NotPrepared,
    Steps,
    difference,
    scratch_elements,
)

# The route and the reason that a call counts for, and what the stock function has returned.
Served = tuple[str, str, Any]


@dataclass(frozen=True)
class Work:
    """Memory that a graph writes at its beginning, for all of its layers."""

    # Offsets for the stock kernel: those of the batch, or zeros where it is to have nothing to do.
    gates: dict[str, torch.Tensor]
    padding: torch.Tensor  # (tokens), which of them are


@dataclass
class Recording:
    """What was recorded while one batch size was captured. A second capture of it begins a new one."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    call: guard.Call | None = None  # what its lines say
    work: Work | None = None


@dataclass(frozen=True)
class Routed:
    """A call that is to be served: its arguments by name and as they came, its layer, its scale."""

    values: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layer: int
    scale: float
    mode: str = "verify"


class Both:
    """Computes both results of the calls of one backend. `launch` runs our kernel into an output, or says that it is
    off; `stock` runs the stock function, with other tensors in place of some arguments.

    Its memory: 74 KB of sums; scratch memory of the size of an output, and up to 32 MB more, once for all layers and
    batch sizes.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        device: torch.device,
        launch: Callable[[Mapping[str, Any], torch.Tensor, float], bool],
        stock: Callable[..., Any],
        facts: Mapping[str, object],
        rank: int | None,
    ):
        self._ledger = ledger
        self._launch = launch
        self._stock = stock
        self._facts = {**facts, "tp_rank": rank}
        self._rank = rank
        self._shadow = settings.mode == "shadow"
        self._validate = settings.validate
        self._every = settings.validate_every
        self._limit = settings.guard_rel
        self._dump = settings.guard_dump
        self._steps = Steps(settings.validate_every)
        self._buffers = Buffers(device)
        self._comparison = Comparison(device, settings.guard_rel)
        self._snapshot = guard.Snapshot(self._buffers, device) if settings.guard_dump else None
        self._notice = Notice() if settings.guard_rel is not None else None
        self._open = torch.zeros((), dtype=torch.int64, device=device)
        self._graph_calls: dict[int, guard.Call] = {}  # by the number of elements of the output
        self._warming_up = False
        self._replays = 0
        self._unfetched = False
        self._told = False  # the graphs know that the kernel is off
        self._recorded_mode = "verify"  # of the calls in this backend's graphs

    # ----------------------------------------------------------------------------------------------------------- eager

    def due(self, routed: Routed) -> bool:
        """Asked of every eager call, in order: is it one of a step that is compared?

        Those that SGLang makes of a batch size before it captures it are not: their masks are made up, and no tree's.
        They are a rehearsal: all that the capture will use is allocated, compiled and loaded by them.
        """
        if self._warming_up:
            self._ledger.harmlessly("validation", lambda: self._check_v(routed))
            self._ledger.harmlessly("preparing validation", lambda: self._compute(routed, None))
            return False
        return self._steps.due(routed.layer)

    def serve(self, routed: Routed) -> Served:
        """An eager call. The result that is not served goes to scratch memory: one alone writes the real output."""
        served, result = routed.values["o_extend"], None
        self._ledger.harmlessly("validation", lambda: self._check_v(routed))
        ours = not self._shadow and self._ledger.disabled is None and self._launch(routed.values, served, routed.scale)
        if not ours:
            result = self._stock(routed.args, routed.kwargs)

        def compare() -> None:
            nonlocal ours
            other = self._second_output(served, capturing=False)
            if ours:
                self._stock(routed.args, routed.kwargs, o_extend=other)
            elif not self._launch(routed.values, other, routed.scale):
                return
            pair = (served, other) if ours else (other, served)
            found = difference(*pair, self._scratch(served, capturing=False), _beyond(routed))
            self._say(routed.layer, found, routed.mode)
            if self._limit is not None and found.exceeds(self._limit):
                about = guard.Call.of(routed.values, routed.layer, routed.scale)
                self._trip(about, found, lambda: (about, _layer(routed.values, *pair)))
                if ours:
                    served.copy_(other)
                    ours = False

        if self._ledger.disabled is None and not self._ledger.harmlessly("validation", compare):
            self._cannot_look(f"a call of layer {routed.layer} could not be compared")
            if ours and self._limit is not None:
                ours, result = False, self._stock(routed.args, routed.kwargs)
        return ("kernel", routed.mode, None) if ours else ("stock", self._ledger.disabled or "shadow", result)

    def _check_v(self, routed: Routed) -> None:
        """The kernel takes V from the latent part of K. If a model passes another V, its results would be wrong."""
        v, latent = routed.values["v_extend"], routed.values["k_extend"][..., :LATENT]
        # Bit for bit: a NaN is as good as any other value here.
        if not torch.equal(v.view(torch.int16), latent.view(torch.int16)):
            self._ledger.disable("v_not_latent", f"layer {routed.layer}: v_extend is not the latent part of k_extend")

    # --------------------------------------------------------------------------------------------------------- capture

    def capture_begins(self) -> None:
        """The eager calls until the next step prepare a capture."""
        self._warming_up = True
        if not self._ledger.harmlessly("preparing a capture", lambda: self._comparison.set_due(False)):
            self._cannot_look("a capture could not be prepared")

    def record(self, routed: Routed, recording: Recording) -> Served:
        """A call under a capture: records both kernels, the comparison, and the choice of the result."""
        shadow, result = self._shadow, None
        if shadow:
            result = self._stock(routed.args, routed.kwargs)
        elif not self._launch(routed.values, routed.values["o_extend"], routed.scale):
            return "stock", self._ledger.disabled or "shadow", self._stock(routed.args, routed.kwargs)
        try:
            self._compute(routed, recording)
        except Exception as error:
            if is_fatal(error):
                raise
            if self._ledger.first("uncompared graph"):
                words = (
                    "validation of a CUDA graph failed: %s: %s; this graph runs stock: report it, unless it is memory"
                )
                log.get_logger().warning(words, type(error).__name__, error)
            return "stock", "validation_failed", result if shadow else self._stock(routed.args, routed.kwargs)
        if shadow:
            return "stock", self._ledger.disabled or "shadow", result
        return "kernel", routed.mode, None

    def _compute(self, routed: Routed, recording: Recording | None) -> None:
        """Everything that a graph has beside the result that is served at first. Raises NotPrepared under a capture.

        Without a recording it is the rehearsal. No step is due then, so it changes nothing but scratch memory.
        """
        values, layer, out = routed.values, routed.layer, routed.values["o_extend"]
        capturing = recording is not None
        if not 0 <= layer < LAYERS:
            raise NotPrepared(f"layer {layer}, where {LAYERS} are told apart")
        if out.shape[0] != (values["qo_indptr"].numel() - 1) * values["max_len_extend"]:
            raise NotPrepared("a captured batch whose requests have different numbers of tokens")
        other, scratch = self._second_output(out, capturing), self._scratch(out, capturing)
        if recording is None:
            work = self._begin(guard.Call.of(values, layer, routed.scale), capturing=False)
        else:
            work = self._begun(routed, recording)
        if self._snapshot is not None and not capturing:
            self._snapshot.prepare(values)
        if self._shadow:
            if not self._launch(values, other, routed.scale):
                return
            ours, stock = other, out
        else:
            self._stock(routed.args, routed.kwargs, o_extend=other, **work.gates)
            ours, stock = out, other
        self._comparison.record(layer, ours, stock, scratch, work.padding)
        if self._snapshot is not None:
            self._snapshot.record(self._comparison.hit, _layer(values, ours, stock), capturing)
        if not self._shadow:
            torch.where(self._comparison.tripped, stock, ours, out=ours)

    def _begun(self, routed: Routed, recording: Recording) -> Work:
        """The work of a graph, which begins with the first layer that is recorded."""
        if recording.work is None or recording.call is None or routed.layer == recording.call.layer:
            # What outlives the capture: no tensor of the layer's, as they are the graph's own memory.
            recording.call = guard.Call.of(routed.values, routed.layer, routed.scale, replay=True)
            self._graph_calls[recording.call.elements] = recording.call
            recording.work = self._begin(recording.call, capturing=True)
        recording.call.pools[routed.layer] = guard.Pool.of(routed.values)
        self._recorded_mode = routed.mode
        return recording.work

    def _begin(self, call: guard.Call, capturing: bool) -> Work:
        """What a graph does first: finds out which tokens of its batch are padding, and lets the stock kernel have the
        requests, or none.
        """
        offsets = {name: call.offsets(name) for name in ("qo_indptr", "kv_indptr")}
        requests = offsets["qo_indptr"].numel() - 1
        gates = {
            # Room for 64 bits each: eager batches and captured ones differ in the type.
            name: self._buffers.get(name, requests + 1, tensor.dtype, capturing, room_for=torch.int64)
            for name, tensor in offsets.items()
        }
        padding = self._buffers.get("padding", requests * call.q_len, torch.bool, capturing)
        lengths = self._buffers.get("lengths", requests, torch.int64, capturing)
        self._comparison.set_padding(offsets["kv_indptr"], lengths, padding, call.elements)
        torch.logical_or(self._comparison.due, self._comparison.tripped, out=self._open)
        for name, gate in gates.items():
            torch.mul(offsets[name], self._open, out=gate)
        return Work(gates, padding)

    # --------------------------------------------------------------------------------------------------------- replays

    def before_step(self) -> None:
        """A batch is about to be prepared: what the last replay has left behind is still there."""
        self._warming_up = False
        if not self._ledger.harmlessly("fetching what validation has found", self._fetch):
            self._cannot_look("what validation has found could not be fetched")
        if not self._told:
            if not self._ledger.harmlessly("looking whether another rank's guard has tripped", self._heed):
                self._cannot_look("nobody knows whether another rank's guard has tripped")
            # Here and not before a replay alone: with a metadata graph the host does not come by there.
            self._tell_graphs()

    def _heed(self) -> None:
        """Goes stock if another worker's guard has tripped."""
        if self._notice is not None and self._ledger.disabled is None:
            posted = self._notice.look()
            if posted is not None:
                own = log.fields({"tp_rank": self._rank})
                words = f"{own} {posted} the guard of another worker of this service has tripped"
                self._ledger.disable(GUARD_ELSEWHERE, words)

    def _tell_graphs(self) -> None:
        """That the kernel is off, if it is; in the order of the current stream. It is tried until it succeeds."""
        if self._ledger.disabled is None or self._told:
            return
        try:
            self._comparison.trip()
            self._told = True
        except Exception as error:
            if is_fatal(error):
                raise
            if self._ledger.first("graphs that cannot be told"):
                log.get_logger().error(
                    "CUDA graphs could not be told that the kernel is off: %s: %s; they go on with it until a later "
                    "step can tell them: report it, unless it is memory",
                    type(error).__name__,
                    error,
                )

    @property
    def off_in_graphs(self) -> str | None:
        """The code for which captured graphs serve the stock result, or None while they serve the kernel's."""
        return self._ledger.disabled if self._told else None

    def _fetch(self) -> None:
        layers, tripped = self._comparison.fetched()
        # Whatever else has turned the kernel off meanwhile. Of which batch size, its number of elements tells.
        if tripped is not None and self._ledger.disabled != GUARD:
            about = replace(self._graph_calls[tripped.size], layer=tripped.layer)
            snapshot = self._snapshot
            self._trip(about, tripped.found, None if snapshot is None else lambda: snapshot.taken(about))
        for one in layers:
            self._say(one.layer, one.found, self._recorded_mode)
        if self._unfetched and self._comparison.fetch():
            self._unfetched = False
        if self._snapshot is not None:
            self._snapshot.after_replay(self._comparison.tripped)

    def replay_begins(self, recording: Recording) -> None:
        """Its metadata is in place. All of this is ordered on the current stream, like the metadata."""
        if not self._ledger.harmlessly("preparing a replay", lambda: self._prepare_replay(recording)):
            self._cannot_look("a replay could not be prepared")
        self._tell_graphs()

    def _prepare_replay(self, recording: Recording) -> None:
        if self._snapshot is not None:
            self._snapshot.of = recording.call
        due = self._ledger.disabled is None and self._replays % self._every == 0
        self._replays += 1
        self._unfetched |= due
        self._comparison.set_due(due)

    def preparation_is_captured(self) -> None:
        """The preparation itself is replayed from a graph, as it is now: nobody comes by to say which step is due."""
        why = "the guard cannot look at replays whose metadata is replayed from a graph"
        self._cannot_look(f"{why}: unset SGLANG_ENABLE_METADATA_GLUE_GRAPH")

    # -------------------------------------------------------------------------------------------------- what they share

    def _cannot_look(self, why: str) -> None:
        """A guard that cannot look is none."""
        if self._limit is not None:
            self._ledger.disable("guard_failed", why)

    def _say(self, layer: int, found: Difference, mode: str) -> None:
        if self._validate:
            log.get_logger().info("%s", found.line(layer, self._rank, mode))
        if self._ledger.meters is not None:
            self._ledger.meters.compared(mode, layer, found.rel)

    def _trip(
        self, about: guard.Call, found: Difference, kept: Callable[[], tuple[guard.Call, guard.Tensors]] | None
    ) -> None:
        """Turns the kernel off, with the one line; `kept` finds what the file is to have, where there is one."""
        if self._notice is not None:  # before the file, which may take a while
            self._notice.post(log.fields({"of": self._rank, "of_layer": about.layer}))
        saved: dict[str, object] = {}
        if self._dump is not None and kept is not None:
            details = {**self._facts, "figures": found.figures(), "limit": self._limit}
            try:
                saved = guard.save(self._dump, *kept(), details)
            except Exception as error:
                if is_fatal(error):
                    raise
                saved = {"dump": "none", "dump_error": f"{type(error).__name__}: {error}"}
        self._ledger.disable(GUARD, guard.message(about, found.figures(), self._limit or 0.0, self._facts, saved))

    def _second_output(self, out: torch.Tensor, capturing: bool) -> torch.Tensor:
        return self._buffers.get("second output", out.numel(), out.dtype, capturing).view(out.shape)

    def _scratch(self, out: torch.Tensor, capturing: bool) -> torch.Tensor:
        return self._buffers.get("scratch", scratch_elements(out), torch.float64, capturing)


def _beyond(routed: Routed) -> torch.Tensor | None:
    """Which tokens of an eager call belong to no request (tokens, bool): padding, which neither kernel writes."""
    if routed.mode == "verify":
        return None
    q, offsets = routed.values["q_extend"], routed.values["qo_indptr"]
    return torch.arange(q.shape[0], device=q.device) >= offsets[-1]


def _layer(values: Mapping[str, Any], ours: torch.Tensor, stock: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a layer brings and leaves, under the names that the guard's file has for it."""
    return {"q": values["q_extend"], "k_extend": values["k_extend"], "ours": ours, "stock": stock}
