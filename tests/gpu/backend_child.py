"""python -m tests.gpu.backend_child: SGLang's real, patched backend on this GPU, eager and under CUDA graphs.

Captures and replays as SGLang's graph runners do: sequence lengths of 1 and a full mask at capture, two warm-up calls,
then other lengths, masks and slots at each replay. Prints one line of JSON. Started by test_backend.py with this
repository first on PYTHONPATH, so that only sitecustomize installs the patch.
"""

from __future__ import annotations

import json

import torch

from kdtree_patch import demo_backend, hook
from tests.support.backend import reference
from tests.support.graph_metadata import prepare_capture, prepare_replay
from tests.support.reference import rel

HEADS, Q_LEN, LAYERS = 8, 9, 2


def error(bed: demo_backend.Bed, call: demo_backend.Call, out: torch.Tensor, layer: int = 0) -> float:
    return rel(out, reference(bed, call, layer))


def eager(bed: demo_backend.Bed) -> list[float]:
    errors = []
    for seed, prefixes in enumerate([[21], [0], [37, 1, 700, 2999], [64, 128, 4000]]):
        for mask in ("tree", "none"):
            call = demo_backend.verify_batch(bed, prefixes, seed, mask)
            errors += [error(bed, call, demo_backend.forward(bed, call, layer), layer) for layer in range(LAYERS)]
    return errors


def graphs(bed: demo_backend.Bed) -> dict[str, list]:
    """Error of the live rows of each replay, and whether its bits are those of the eager call on the same input.

    Each batch size is captured, replayed with full and with padded batches, and captured and replayed once more.
    """
    bed.backend.init_cuda_graph_state(4, 4 * Q_LEN)
    errors, same = [], []
    for bs in (4, 2, 1, 4):
        call = prepare_capture(bed, bs)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward_all(bed, call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = forward_all(bed, call)

        for seed, prefixes in enumerate([[5, 37, 700, 2999], [3000, 1, 2], [0, 64, 31, 4000], [9, 8]]):
            live = demo_backend.verify_batch(bed, prefixes[:bs], 10 + seed)
            expected = [out.clone() for out in forward_all(bed, live)]
            prepare_replay(bed, call, live)
            graph.replay()
            rows = len(live.prefixes) * Q_LEN
            for layer, out in enumerate(outs):
                errors.append(error(bed, live, out[:rows], layer))
                same.append(torch.equal(out[:rows], expected[layer]))
    return dict(errors=errors, same=same)


def forward_all(bed: demo_backend.Bed, call: demo_backend.Call) -> list[torch.Tensor]:
    return [demo_backend.forward(bed, call, layer) for layer in range(LAYERS)]


def main() -> None:
    bed = demo_backend.build(HEADS, 4, Q_LEN, 4096, layers=LAYERS, dtype=torch.bfloat16, device="cuda")
    result = dict(eager=eager(bed), release=list(bed.release))
    before = hook.counts()
    result["graphs"] = graphs(bed)
    # The last replay is fetched when the next steps come by.
    for _ in range(2):
        torch.cuda.synchronize()
        demo_backend.verify_batch(bed, [1])
    result["graph_calls"] = sum((hook.counts() - before).values())
    result["routed"] = {"/".join(key): count for key, count in hook.counts().items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
