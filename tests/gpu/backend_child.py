"""python -m tests.gpu.backend_child: SGLang's real, patched backend on this GPU, eager and under CUDA graphs.

Captures and replays as SGLang 0.5.12's graph runner does: sequence lengths of 1 and a full mask at capture, two warm-up
calls, then other lengths, masks and slots at each replay. Prints one line of JSON. Started by test_backend.py with this
repository first on PYTHONPATH, so that only sitecustomize installs the patch.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from kdtree_patch import demo_backend, hook
from tests.support.backend import reference
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
    """Error of each replay, and whether its bits are those of the eager call on the same input."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend, device = bed.backend, bed.device
    backend.init_cuda_graph_state(4, 4 * Q_LEN)
    errors, same = [], []
    for bs in (4, 2, 1):
        call = demo_backend.verify_batch(bed, [1] * bs)
        batch = call.forward_batch
        batch.spec_info = SimpleNamespace(
            custom_mask=torch.ones(Q_LEN * (1 + Q_LEN) * bs, dtype=torch.bool, device=device),
            draft_token_num=Q_LEN,
            topk=4,
        )
        batch.out_cache_loc = torch.zeros(bs * Q_LEN, dtype=torch.int64, device=device)
        requests = torch.zeros(bs, dtype=torch.int64, device=device)
        lengths = torch.ones(bs, dtype=torch.int64, device=device)
        backend.init_forward_metadata_capture_cuda_graph(
            bs, bs * Q_LEN, requests, lengths, None, ForwardMode.TARGET_VERIFY, batch.spec_info
        )
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                demo_backend.forward(bed, call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = demo_backend.forward(bed, call)

        for seed, prefixes in enumerate([[5, 37, 700, 2999], [3000, 1, 2, 9], [0, 64, 31, 4000]]):
            live = demo_backend.verify_batch(bed, prefixes[:bs], 10 + seed)
            expected = demo_backend.forward(bed, live).clone()
            for name in ("q", "k", "v"):
                getattr(call, name).copy_(getattr(live, name))
            batch.out_cache_loc.copy_(live.forward_batch.out_cache_loc)
            lengths = live.forward_batch.seq_lens
            backend.init_forward_metadata_replay_cuda_graph(
                bs,
                live.forward_batch.req_pool_indices,
                lengths,
                int(lengths.sum()),
                None,
                ForwardMode.TARGET_VERIFY,
                live.forward_batch.spec_info,
                lengths.cpu(),
            )
            graph.replay()
            errors.append(error(bed, live, out))
            same.append(torch.equal(out, expected))
    return dict(errors=errors, same=same)


def main() -> None:
    bed = demo_backend.build(HEADS, 4, Q_LEN, 4096, layers=LAYERS, dtype=torch.bfloat16, device="cuda")
    result = dict(eager=eager(bed), release=list(bed.release))
    if bed.release < demo_backend.HAS_TEST_KIT:
        result["graphs"] = graphs(bed)
    result["routed"] = {"/".join(key): count for key, count in hook.counts().items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
