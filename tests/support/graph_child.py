"""python -m support.graph_child: the real, patched backend under what stands for CUDA graphs on a CPU.

SGLang's own methods prepare captures and replays; our router captures into a `FakeGraph`, one a layer, in which both
attention kernels are opaque. Prints one line of JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from kdtree_patch import demo_backend, hook
from kdtree_patch.route import VerifyRouter

from .backend import reference
from .graph_metadata import prepare_capture, prepare_replay
from .graphs import FakeGraph, opaque
from .reference import rel

HEADS, Q_LEN, LAYERS, MAX_BS = 3, 5, 2, 3
STEPS = [[9, 30, 2], [17], [4, 40], [21], [33, 7, 12]]


class Captured:
    """One batch size: its call, a graph and an output for each layer."""

    def __init__(self, bed: demo_backend.Bed, bs: int):
        self.bed = bed
        self.call = prepare_capture(bed, bs)
        for _ in range(2):
            for layer in range(LAYERS):
                demo_backend.forward(bed, self.call, layer)
        self.graphs = [FakeGraph() for _ in range(LAYERS)]
        routed, self.outs = bed.backend.extend_attention_fwd, []
        for layer, graph in enumerate(self.graphs):

            def capture(*args: Any, graph: FakeGraph = graph, **kwargs: Any) -> None:
                graph.capture(lambda: routed(*args, **kwargs))

            bed.backend.extend_attention_fwd = capture
            self.outs.append(demo_backend.forward(bed, self.call, layer))
        bed.backend.extend_attention_fwd = routed

    def replay(self, prefixes: list[int], seed: int) -> list[float]:
        """Error of each layer's live rows to float64. NaN is everywhere that the graph has no business."""
        live = demo_backend.verify_batch(self.bed, prefixes, seed)
        prepare_replay(self.bed, self.call, live)
        for out, graph in zip(self.outs, self.graphs, strict=True):
            out.fill_(torch.nan)
            graph.replay()
        rows = len(prefixes) * Q_LEN
        return [rel(out[:rows], reference(self.bed, live, layer)) for layer, out in enumerate(self.outs)]


def main() -> None:
    bed = demo_backend.build(HEADS, MAX_BS, Q_LEN, 64, layers=LAYERS)
    bed.backend.init_cuda_graph_state(MAX_BS, MAX_BS * Q_LEN)
    router = getattr(bed.backend, hook.ROUTER)
    VerifyRouter._capturing = lambda self: FakeGraph.current is not None  # type: ignore[method-assign]
    stock_calls: list[int] = []
    stock = router.stock

    def counted(*args: Any, **kwargs: Any) -> Any:
        stock_calls.append(int(args[6][-1]))  # qo_indptr: how many tokens it is asked for
        return stock(*args, **kwargs)

    router.stock = opaque(counted)
    router.kernel.launch = opaque(router.kernel.launch)
    graphs = {bs: Captured(bed, bs) for bs in (3, 1)}
    before = hook.counts()
    stock_calls.clear()
    errors = []
    for seed, prefixes in enumerate(STEPS):
        graph = graphs[1 if len(prefixes) == 1 else 3]
        errors.append(graph.replay(prefixes, seed))
    # Eager metadata once more, twice: what the last replay has left is fetched.
    for _ in range(2):
        demo_backend.verify_batch(bed, [1])
    counted_calls = {"/".join(key): count for key, count in (hook.counts() - before).items()}
    print(json.dumps(dict(errors=errors, counted=counted_calls, stock_calls=stock_calls)))


if __name__ == "__main__":
    main()
