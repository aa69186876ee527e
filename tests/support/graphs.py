"""CUDA graphs for tests: the real ones on a GPU, and on a CPU a stand-in that captures and replays torch operations.

`FakeGraph` is as strict as a capture is: nothing is computed while it captures, an operation that reads a value back
to the host is an error, and so is one that makes a tensor with memory of its own. What is no torch operation (the two
attention kernels) says so through `opaque`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Graph(Protocol):
    def capture(self, run: Callable[[], object]) -> None: ...

    def replay(self) -> None: ...


class CudaGraph:
    """A real one, on a stream of its own."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        gc.collect()  # what dies during a capture may free memory or events, which ends it
        with torch.cuda.graph(self._graph):
            run()

    def replay(self) -> None:
        self._graph.replay()


class BreaksCapture(Exception):
    """What a CUDA graph could not have captured."""


class FakeGraph:
    """The operations of a capture, carried out at each replay on the same memory."""

    current: ClassVar[FakeGraph | None] = None

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def capture(self, run: Callable[[], object]) -> None:
        FakeGraph.current = self
        try:
            with _Recorder(self._steps):
                run()
        finally:
            FakeGraph.current = None

    def replay(self) -> None:
        for step in self._steps:
            step()

    @property
    def operations(self) -> int:
        return len(self._steps)


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel: called at once, or under a capture at each replay."""

    def call(*args: Any, **kwargs: Any) -> Any:
        graph = FakeGraph.current
        if graph is None:
            return function(*args, **kwargs)
        graph._steps.append(lambda: function(*args, **kwargs))
        return None

    return call


class _Recorder(TorchDispatchMode):
    def __init__(self, steps: list[Callable[[], object]]):
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            argument.name
            for argument in function._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self._steps.append(lambda: function(*args, **kwargs))
            names = [argument.name for argument in function._schema.arguments]
            values = {**dict(zip(names, args, strict=False)), **kwargs}
            found = [values[name] for name in written]
            return found[0] if len(found) == 1 else tuple(found)
        if any(returned.alias_info is not None for returned in function._schema.returns):
            return function(*args, **kwargs)  # a view: no work for the device
        raise BreaksCapture(f"{function} makes a tensor, or reads one back")
