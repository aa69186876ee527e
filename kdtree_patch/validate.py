"""Double-compute: compares what the kernel wrote with what the stock kernel wrote, and says so in one line a layer.

The figures answer two questions. `max_abs_diff` and `mean` (of the absolute difference) show whether the outputs look
alike; `rel`, the L2 norm of the difference over that of the stock result, is the one to judge by: about 2e-3 is the
rounding of bf16, about 2e-4 that of fp16, near 1 is a wrong answer. Knows torch and the log, and nothing of SGLang.

`measure` leaves the figures of one call on the device. In eager mode they are read at once. Under a CUDA graph nobody
can read them at the time, so `Comparison` records what is to happen at each replay: the figures are added to the sums
of their layer, a call over the guard's limit sets a flag, and the flag chooses between the two results. The host
fetches the sums between replays, without waiting for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kdtree_patch import log

# Outputs are compared this many elements at a time, in double precision: with it, scratch memory has a bound (32 MB).
CHUNK = 1 << 20
# Layers that are told apart. Sums for each lie ready before anything is captured.
LAYERS = 512

# The figures of a call, and their sums for a layer: float64. SIZE is the number of elements of the output, ELEMENTS
# how many of them were looked at.
TOP, GAP, GAP_SQUARE, STOCK_SQUARE, NOT_FINITE, STOCK_NOT_FINITE, CALLS, ELEMENTS, SIZE = range(9)
FIGURES = 9


@dataclass(frozen=True)
class Difference:
    """How far two outputs are apart. An element that is not finite is counted, and is in no other figure."""

    max_abs_diff: float
    mean: float
    rel: float
    nan: int  # not finite in the kernel's output where it is in the stock output: a fault
    stock_nan: int  # not finite in the stock output: 0 / 0 for a draft token that sees nothing, where ours is 0
    calls: int | None = None  # how many calls the figures cover, where that is more than one call of its own

    @classmethod
    def of(cls, figures: list[float], calls: int | None = None) -> Difference:
        """From the figures of a call, or from the sums of several."""
        counted = figures[ELEMENTS] - figures[NOT_FINITE]
        gap, stock = figures[GAP_SQUARE], figures[STOCK_SQUARE]
        return cls(
            max_abs_diff=figures[TOP],
            mean=figures[GAP] / counted if counted else 0.0,
            # A stock result of zeros makes the ratio 0 / 0: equal outputs are 0 apart, else they are infinitely far.
            rel=math.sqrt(gap / stock) if stock else (math.inf if gap else 0.0),
            nan=int(figures[NOT_FINITE] - figures[STOCK_NOT_FINITE]),
            stock_nan=int(figures[STOCK_NOT_FINITE]),
            calls=calls,
        )

    def figures(self) -> str:
        words = f"max_abs_diff={self.max_abs_diff:.4e} mean={self.mean:.4e} rel={self.rel:.4e}"
        more = log.fields({"nan": self.nan or None, "stock_nan": self.stock_nan or None, "calls": self.calls})
        return f"{words} {more}" if more else words

    def line(self, layer: object, rank: int | None, mode: str = "verify") -> str:
        """The layer line, which operators grep for: fields may follow, none may go. `mode` is the forward mode: a draft
        model has a layer 0, too.
        """
        words = f"L{layer} {self.figures()}"
        if rank is not None:
            words += f" tp_rank={rank}"
        return words if mode == "verify" else f"{words} mode={mode}"

    def exceeds(self, limit: float) -> bool:
        """What the guard trips on. `Comparison.judge` says the same on the device."""
        return self.rel > limit or self.nan > 0


def scratch_elements(out: torch.Tensor) -> int:
    """How many float64 `measure` needs for outputs like this one."""
    return 4 * _chunk(out) * (out.numel() // out.shape[0]) + FIGURES


def _chunk(out: torch.Tensor) -> int:
    """Tokens that are compared at a time."""
    return min(out.shape[0], max(1, CHUNK * out.shape[0] // out.numel()))


def measure(
    ours: torch.Tensor,
    stock: torch.Tensor,
    figures: torch.Tensor,
    scratch: torch.Tensor,
    padding: torch.Tensor | None = None,
) -> None:
    """Writes the figures (float64) of one call, all but the last three, without waiting for the device.

    Both outputs are (tokens, ...), of one shape and one element type; those that are not contiguous are copied.
    `padding` (tokens, bool) says which tokens not to look at. Nothing else is allocated but what a reduction takes
    inside torch, under a capture from the graph's own memory. A dozen small kernels for each CHUNK of elements.
    """
    tokens, chunk = ours.shape[0], _chunk(ours)
    ours, stock = ours.reshape(tokens, -1), stock.reshape(tokens, -1)
    width = ours.shape[1]
    for start in range(0, tokens, chunk):
        some = slice(start, min(start + chunk, tokens))
        into = figures if start == 0 else scratch[-FIGURES:]
        size = (some.stop - start) * width
        pair, marks = scratch[: 2 * size].view(2, size), scratch[2 * size : 4 * size].view(2, size)
        rows = pair.view(2, -1, width)
        rows[0].copy_(ours[some])
        rows[1].copy_(stock[some])
        # The difference, and the stock result. The first is finite where both outputs are: doubles do not overflow.
        pair[0].sub_(pair[1])
        if padding is not None:
            rows.masked_fill_(padding[some].view(1, -1, 1), 0.0)
        # x - x is 0, or NaN where x is not finite; so the sums count what is not.
        torch.sub(pair, pair, out=marks).ne_(0)
        torch.sum(marks, dim=1, out=into[NOT_FINITE : STOCK_NOT_FINITE + 1])
        pair.nan_to_num_(0.0, 0.0, 0.0)
        torch.linalg.vector_norm(pair, 2, dim=1, out=into[GAP_SQUARE : STOCK_SQUARE + 1]).square_()
        torch.linalg.vector_norm(pair[0], 1, out=into[GAP])
        torch.linalg.vector_norm(pair[0], math.inf, out=into[TOP])
        if start:
            torch.maximum(figures[TOP], into[TOP], out=figures[TOP])
            figures[GAP:CALLS].add_(into[GAP:CALLS])


def difference(
    ours: torch.Tensor, stock: torch.Tensor, scratch: torch.Tensor, padding: torch.Tensor | None = None
) -> Difference:
    """Of two outputs of one shape, without the tokens that `padding` (tokens, bool) names; waits for the device."""
    figures = torch.zeros(FIGURES, dtype=torch.float64, device=ours.device)
    measure(ours, stock, figures, scratch, padding)
    values = figures.tolist()
    looked_at = ours.shape[0] - (0 if padding is None else int(padding.sum()))
    values[ELEMENTS] = ours.numel() // ours.shape[0] * looked_at
    return Difference.of(values)


class Steps:
    """Tells which eager calls to validate: all layers of every Nth verify step.

    A step begins with the lowest layer that this backend has routed, since layers run in order. Nothing else tells: the
    router sees calls, not steps.
    """

    def __init__(self, every: int):
        self._every = every
        self._step = -1
        self._lowest: int | None = None

    def due(self, layer: int) -> bool:
        """Called once for each call, in order."""
        if self._lowest is None or layer <= self._lowest:
            self._lowest = layer
            self._step += 1
        return self._step % self._every == 0


class NotPrepared(Exception):
    """A capture needs more than the eager calls before it have laid ready."""


class Buffers:
    """Named scratch memory of one backend that only ever grows, and never while a CUDA graph is captured.

    A graph keeps the addresses that it was captured with. So a buffer that has been handed out under a capture is kept
    when a larger one takes its place.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._captured: set[str] = set()
        self._kept: list[torch.Tensor] = []

    def get(
        self, name: str, elements: int, dtype: torch.dtype, capturing: bool, room_for: torch.dtype | None = None
    ) -> torch.Tensor:
        """`elements` of `dtype` whose contents are left from before. Raises NotPrepared.

        With `room_for` there is room for as many of that type, so that a later call may ask for the other one.
        """
        size, room = elements * dtype.itemsize, elements * (room_for or dtype).itemsize
        # Wherever this is called from: an inference tensor could not be written to from elsewhere, and a tensor that is
        # given another type in inference mode is one.
        with torch.inference_mode(False):
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() < room:
                if capturing:
                    raise NotPrepared(f"no eager call has laid ready {name} of {room} bytes")
                if buffer is not None and name in self._captured:
                    self._kept.append(buffer)
                    self._captured.discard(name)
                # Zeros, because offsets of a batch are kept here too. A power of two, so that little is kept in vain.
                buffer = torch.zeros(1 << (room - 1).bit_length(), dtype=torch.uint8, device=self._device)
                self._buffers[name] = buffer
            if capturing:
                self._captured.add(name)
            return buffer[:size].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in [*self._buffers.values(), *self._kept])


@dataclass(frozen=True)
class Compared:
    """What the host learns of a layer's calls in replays: `size` is how many elements they wrote together."""

    layer: int
    found: Difference
    size: int


class Comparison:
    """The figures of one backend's layers on its device: written while a graph replays, fetched by the host later.

    `due` says on the device whether the step at hand is to be compared, `tripped` whether the kernel is off; both are
    read by captured graphs. `limit` is the guard's, or None. All of it is allocated here, before any capture.
    """

    def __init__(self, device: torch.device, limit: float | None):
        self.device = device
        self.limit = limit

        def doubles(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.due = torch.zeros((), dtype=torch.bool, device=device)
        self.tripped = torch.zeros((), dtype=torch.bool, device=device)
        self.hit = torch.zeros((), dtype=torch.bool, device=device)  # the call at hand is the one that trips
        # First the sums of each layer since they were last fetched, then the figures of the one call that tripped.
        self._sums = doubles(2, LAYERS, FIGURES)
        self._figures = doubles(FIGURES)
        self._figures[CALLS] = 1.0
        self._sizes = doubles(2)  # ELEMENTS and SIZE of the step at hand
        self._weighted = doubles(FIGURES)
        self._weight = doubles()
        self._hit_weight = doubles()
        self._over = doubles(2)
        self._is_over = torch.zeros(2, dtype=torch.bool, device=device)
        self._coefficients = torch.tensor([(limit or 0.0) ** 2, 1.0], dtype=torch.float64, device=device)
        on_gpu = device.type == "cuda"
        self._fetched = torch.zeros(2, LAYERS, FIGURES, dtype=torch.float64, pin_memory=on_gpu)
        self._event: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None
        self._under_way = False
        self._due: bool | None = None  # what `due` holds; None: nobody knows

    def set_due(self, due: bool) -> None:
        """For the replays to come, in the order of the current stream."""
        if due is not self._due:
            self._due = None
            self.due.fill_(due)
            self._due = due

    def trip(self) -> None:
        """Turns the kernel off in graphs that are captured already, in the order of the current stream."""
        self.tripped.fill_(True)

    def set_padding(self, kv_indptr: torch.Tensor, lengths: torch.Tensor, padding: torch.Tensor, size: int) -> None:
        """For the calls to come: which of their tokens are padding, of `size` elements of output in all. `lengths` is
        scratch memory, one for each request.

        SGLang pads with requests of prefix 1, whose mask is whatever was there before. On such a mask the two kernels
        may differ, and rightly so. A request that does have a prefix of 1 is not compared either.
        """
        requests, tokens = lengths.numel(), padding.numel()
        torch.sub(kv_indptr[1:], kv_indptr[:-1], out=lengths)
        of_each = padding.view(requests, -1)
        torch.le(lengths.view(-1, 1).expand_as(of_each), 1, out=of_each)
        looked_at, all_of_them = self._sizes[0], self._sizes[1]
        torch.sum(padding, dim=0, dtype=torch.float64, out=looked_at)
        looked_at.sub_(tokens).mul_(-size / tokens)
        all_of_them.fill_(float(size))

    def record(
        self, layer: int, ours: torch.Tensor, stock: torch.Tensor, scratch: torch.Tensor, padding: torch.Tensor
    ) -> None:
        """Adds the call at hand to the sums of its layer, if it is due and the kernel is not off."""
        measure(ours, stock, self._figures, scratch, padding)
        self._figures[ELEMENTS:].copy_(self._sizes)
        sums = self._sums[0, layer]
        torch.gt(self.due, self.tripped, out=self._weight)
        torch.mul(self._figures, self._weight, out=self._weighted)
        torch.maximum(sums[TOP], self._weighted[TOP], out=sums[TOP])
        sums[GAP:].add_(self._weighted[GAP:])
        if self.limit is not None:
            self._judge(layer)

    def _judge(self, layer: int) -> None:
        """Trips if the squared difference is over limit^2 times the squared stock result, or if a NaN is ours alone.

        A call that does not count has figures of 0, and 0 is not over.
        """
        weighted = self._weighted
        torch.addcmul(weighted[2:5:2], weighted[3:6:2], self._coefficients, value=-1, out=self._over)
        torch.gt(self._over, 0, out=self._is_over)
        torch.any(self._is_over, dim=0, out=self.hit)
        self._hit_weight.copy_(self.hit)
        self._sums[1, layer].addcmul_(weighted, self._hit_weight)
        self.tripped.logical_or_(self.hit)

    def fetch(self) -> bool:
        """Asks for a copy of the sums, and begins new ones, in the order of the current stream. Does not wait. False if
        there is a copy under way already: what has come since then is in none.
        """
        if self._under_way:
            return False
        self._fetched.copy_(self._sums, non_blocking=True)
        self._sums[0].zero_()
        if self._event is not None:
            self._event.record()
        self._under_way = True
        return True

    def fetched(self) -> tuple[list[Compared], Compared | None]:
        """What `fetch` has brought: the layers that were compared, and the call that tripped. Empty while it is under
        way."""
        if not self._under_way or (self._event is not None and not self._event.query()):
            return [], None
        self._under_way = False
        sums, tripped = (list(self._compared(part)) for part in self._fetched)
        return sums, (tripped[0] if tripped else None)

    @staticmethod
    def _compared(figures: torch.Tensor) -> Iterator[Compared]:
        for layer in figures[:, CALLS].nonzero().flatten().tolist():
            values = figures[layer].tolist()
            yield Compared(layer, Difference.of(values, int(values[CALLS])), int(values[SIZE]))
