"""The demo's service: a process of its own, patched through `sitecustomize` and in no other way.

`python -m kdtree_patch.demo_child OPTIONS`, where OPTIONS is a JSON object; started by demo.py. It builds the backend,
runs one verify pass through all layers and reports on stdout, one JSON object a line. The `[kdtree]` lines go to
stderr, as in a service.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    options = json.loads(sys.argv[1])
    report = Report()
    started = time.monotonic()
    device, dtype = options["device"], options["dtype"]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch

    report(
        "machine",
        device=device,
        why=options["why"],
        gpu=torch.cuda.get_device_name() if device == "cuda" else None,
        dtype=dtype,
        python=sys.version.split()[0],
        torch=torch.__version__,
        sitecustomize=getattr(sys.modules.get("sitecustomize"), "__file__", None),
    )

    from kdtree_patch import demo_backend

    prefix, q_len, bs, layers = options["prefix"], options["q_len"], options["bs"], options["layers"]
    bed = demo_backend.build(
        heads=options["heads"],
        max_bs=bs,
        q_len=q_len,
        max_context=prefix + q_len,
        layers=layers,
        pool_slots=pool_slots(options["slots"], bs * (prefix + q_len), layers, device),
        dtype=getattr(torch, dtype),
        device=device,
    )
    import sglang

    report(
        "backend",
        sglang=sglang.__version__,
        path=str(Path(sglang.__file__).parents[1]),
        backend=f"{type(bed.backend).__module__}.{type(bed.backend).__qualname__}",
        slots=bed.slots,
        seconds=round(time.monotonic() - started, 1),
    )

    call = demo_backend.verify_batch(bed, [prefix] * bs)
    assert call.custom_mask is not None
    tree = call.custom_mask[: q_len * (prefix + q_len)].view(q_len, prefix + q_len)[:, prefix:].int().tolist()
    report("call", tree=["".join(map(str, row)) for row in tree])  # which drafts of the first request see which
    started = time.monotonic()
    for layer in range(layers):
        demo_backend.forward(bed, call, layer)
    drafts = call.draft_slots.to(device)
    stored = all(torch.equal(buffer[drafts], call.k) for buffer in bed.pool.kv_buffer)

    # Looked up, not imported: a process in which the patch never came so far has routed nothing.
    hook = sys.modules.get("kdtree_patch.hook")
    routed = {" ".join(reason): count for reason, count in hook.counts().items()} if hook else {}
    report("done", stored=stored, routed=routed, seconds=round(time.monotonic() - started, 1))


def pool_slots(wanted: int | None, tokens: int, layers: int, device: str) -> int:
    """The KV pool's rows: the reference case's where there is memory for it, and enough of them in any case."""
    from kdtree_patch import demo_backend

    if wanted is not None:
        return wanted
    slots = 1024
    if device == "cuda":
        import torch

        fits = torch.cuda.mem_get_info()[0] // 2 // (layers * demo_backend.ROW * 2)
        slots = min(demo_backend.SLOTS, fits)
    return max(slots, tokens + 1)


class Report:
    """JSON lines on what was stdout when the process began. What else is printed there goes to stderr from then on."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._stream = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def __call__(self, event: str, **facts: Any) -> None:
        self._stream.write(json.dumps({"event": event, **facts}) + "\n")


if __name__ == "__main__":
    main()
