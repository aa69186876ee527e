"""The service of the deploy tests: what SGLang's launch_server is to a deployment, on a machine without a GPU.

One process that answers HTTP, and one spawned worker a rank, each of which builds SGLang's real Triton backend on CPU
tensors and runs a verify pass for each /generate. Without the patch on PYTHONPATH it is a stock service. What it does
wrong is read from a file beside it, and done only where the release that is named there is on PYTHONPATH: the service
before is always a good one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Q_LEN, HEADS, PREFIX = 3, 2, 5
# On PYTHONPATH instead of SGLang: its signatures only. Such a service starts in a second or two.
LIGHT = "/srv/light" in os.environ.get("PYTHONPATH", "")


def faults() -> set[str]:
    """What to do wrong. A line of the file is FAULT@RELEASE: it is done where that release is on PYTHONPATH."""
    release = Path(os.environ.get("PYTHONPATH", "").split(":")[0]).name
    try:
        words = (HERE / "faults").read_text().split()
    except FileNotFoundError:
        return set()
    return {word.partition("@")[0] for word in words if word.partition("@")[2] == release}


def about_me(rank: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": os.getpid(),
        "own_sitecustomize": getattr(sys, "own_sitecustomize", 0),
        "patched": any(type(finder).__name__ == "KdtreePackageFinder" for finder in sys.meta_path),
        "wrapt": getattr(sys.modules.get("wrapt"), "__file__", None),
        "python_path": os.environ.get("PYTHONPATH", ""),
        "kdtree": {name: value for name, value in os.environ.items() if name.startswith("KDTREE_")},
    }


def pretend() -> None:
    """The lines of a verify call, from a worker that has only SGLang's signatures and makes none."""
    if any(type(finder).__name__ == "KdtreePackageFinder" for finder in sys.meta_path):
        lines = ["shapes q=(3, 2, 576) kv_buf=(9, 576) bs=1"] * (os.environ.get("KDTREE_LOG_LEVEL") == "info")
        lines += ["L0 max_abs_diff=1.0e-03 mean=1.0e-04 rel=1.0e-03"] * (os.environ.get("KDTREE_MODE") == "shadow")
        print("".join(f"[kdtree] {line}\n" for line in lines), end="", file=sys.stderr, flush=True)


def do_wrong() -> None:
    if "wrong" in faults():
        print("[kdtree] L0 max_abs_diff=1.6934e+00 mean=1.1948e-01 rel=1.0837e+00", file=sys.stderr, flush=True)


def worker(rank: int, pipe: Connection) -> None:
    if "no-installed" in faults() and rank == 1:
        pipe.send(about_me(rank))
        pipe.recv()
        return
    if "declines" in faults():
        os.environ["KDTREE_LOG_LEVEL"] = "loud"
    if LIGHT:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        TritonAttnBackend(None)
        pipe.send(about_me(rank))
        while pipe.recv():
            pretend()
            do_wrong()
            pipe.send(True)
        return
    import bed as beds
    import torch

    torch.set_num_threads(1)
    bed = beds.build(heads=HEADS, max_bs=1, q_len=Q_LEN, max_context=PREFIX + Q_LEN, dtype=torch.float16)
    pipe.send(about_me(rank))
    while pipe.recv():
        call = beds.verify_batch(bed, [PREFIX])
        out = beds.forward(bed, call)
        do_wrong()
        pipe.send(bool(out.isfinite().all()))


class Service:
    def __init__(self, workers: int, ready_after: float):
        self.started = time.monotonic()
        self.ready_after = ready_after
        self.about: list[dict[str, Any]] = []
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            context.Process(target=worker, args=(rank, theirs), daemon=True).start()
            self.pipes.append(ours)

    def is_ready(self) -> bool:
        if "never-ready" in faults() or len(self.about) < len(self.pipes):
            return False
        return time.monotonic() - self.started > self.ready_after

    def wait(self) -> None:
        self.about = [pipe.recv() for pipe in self.pipes]

    def generate(self) -> bool:
        for pipe in self.pipes:
            pipe.send(True)
        return all(pipe.recv() for pipe in self.pipes if "no-installed" not in faults())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--ready-after", type=float, default=0)
    arguments, _ = parser.parse_known_args()
    print(f"server_args=ServerArgs(tp_size={arguments.tp}, api_key={arguments.api_key!r})", flush=True)
    if "exits" in faults():
        sys.exit("the service ends at once, as it was told to")
    service = Service(arguments.tp, arguments.ready_after)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200 if service.is_ready() else 503, {})
            else:
                self.reply(200, {"main": about_me(None), "workers": service.about})

        def do_POST(self) -> None:
            if arguments.api_key and self.headers["Authorization"] != f"Bearer {arguments.api_key}":
                self.reply(401, {"error": "wrong key"})
                return
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(200, {"finite": service.generate()})

        def reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    import threading

    threading.Thread(target=service.wait, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
