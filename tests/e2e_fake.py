"""A stand-in for `python -m sglang.launch_server`, for the tests of the driver: the same paths, the same answers, and
the `[kdtree]` lines if our folder is first on its PYTHONPATH. With DFLASH it refuses log-probabilities, as SGLang does.
What goes wrong with it, environment variables say.

    FAKE_START     die, hang: at the start
    FAKE_DIE_AT    die at the nth request
    FAKE_REFUSE    500 to every nth request
    FAKE_DIFFER    the token at which its answers differ from those of others
    FAKE_DIFFER_AT the nth request, in which alone they do
    FAKE_MARGIN    how far the best two tokens are apart, when it is asked
    FAKE_SHORT     one token less than was asked for
    FAKE_STEP_MS   what a verify step takes
    FAKE_EACH      what it writes to its log at each request, `|` for a new line
    FAKE_LINES     what it writes to its log instead of the usual lines, `|` for a new line
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PATCHED = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] == str(REPOSITORY)
ACCEPTED = 2  # tokens a step
LINES = (
    '[kdtree] installed version=0 gpu="NVIDIA H200" tp_rank=0|[kdtree] calls served=100 forward_mode=3'
    "|[kdtree] L0 max_abs_diff=1e-3 mean=1e-5 rel=2.0e-03 tp_rank=0"
)


def say(lines: str) -> None:
    print(lines.replace("|", "\n"), file=sys.stderr, flush=True)


def number(name: str, default: float = -1) -> float:
    return float(os.environ.get(name, default))


class Handler(BaseHTTPRequestHandler):
    lock = threading.Lock()
    asked = 0
    running = 0
    aborted: set[str] = set()

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, code: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/flush_cache"):
            patience = time.monotonic() + float(self.path.partition("=")[2] or 0)
            while Handler.running and time.monotonic() < patience:
                time.sleep(0.01)
            self.answer(400 if Handler.running else 200, {})
        elif self.path == "/abort_request":
            Handler.aborted.add(body["rid"])
            self.answer(200, {})
        elif self.path == "/generate":
            self.generate(body)
        else:
            self.answer(404, {})

    def generate(self, body: dict[str, Any]) -> None:
        with Handler.lock:
            Handler.asked += 1
            Handler.running += 1
            asked = Handler.asked
        try:
            if PATCHED and "FAKE_EACH" in os.environ:
                say(os.environ["FAKE_EACH"])
            if asked == number("FAKE_DIE_AT"):
                os._exit(3)
            if number("FAKE_REFUSE") > 0 and asked % number("FAKE_REFUSE") == 0:
                self.answer(500, {"error": "no"})
            elif body.get("return_logprob") and "DFLASH" in sys.argv:
                self.answer(400, {"error": {"message": "DFLASH speculative decoding does not support return_logprob"}})
            elif body.get("stream"):
                self.stream(body)
            else:
                count = body["sampling_params"]["max_new_tokens"] - int(number("FAKE_SHORT", 0))
                self.answer(200, [one(body, prompt, count, count) for prompt in body["input_ids"]])
        finally:
            with Handler.lock:
                Handler.running -= 1

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        whole = body["sampling_params"]["max_new_tokens"]
        count = 1
        while True:
            stop = any(rid in Handler.aborted for rid in body.get("rid", []))
            for index, prompt in enumerate(body["input_ids"]):
                event = one(body, prompt, count, whole) | {"index": index}
                if stop:
                    event["meta_info"]["finish_reason"] = {"type": "abort"}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            if stop or count == whole:
                self.wfile.write(b"data: [DONE]\n\n")
                return
            time.sleep(number("FAKE_STEP_MS", 2) / 1000)
            count = min(whole, count + ACCEPTED)


def one(body: dict[str, Any], prompt: list[int], count: int, whole: int) -> dict[str, Any]:
    """The answer to a prompt after `count` of `whole` tokens."""
    ids = [(sum(prompt) + 7 * at) % 500 for at in range(count)]
    here = "FAKE_DIFFER_AT" not in os.environ or Handler.asked == number("FAKE_DIFFER_AT")
    if here and 0 <= number("FAKE_DIFFER") < count:
        ids[int(number("FAKE_DIFFER"))] += 1
    steps = -(-(count - 1) // ACCEPTED)
    meta: dict[str, Any] = {"completion_tokens": count, "finish_reason": {"type": "length"} if count == whole else None}
    if steps and count == whole:  # SGLang says so in the end alone
        meta |= {"spec_verify_ct": steps, "spec_accept_length": count / steps}
    if body.get("top_logprobs_num"):
        # The prompt is the text up to the difference; this server's own next token is the best.
        best = (sum(prompt) + 7 * 0) % 500
        meta["output_top_logprobs"] = [[[-1.0, best, None], [-1.0 - number("FAKE_MARGIN", 0), best + 1, None]]]
    return {"output_ids": ids, "meta_info": meta}


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if os.environ.get("FAKE_START") == "die":
        sys.exit("the fake server has been told to die")
    if os.environ.get("FAKE_START") == "hang":
        time.sleep(600)
    if PATCHED:
        say(os.environ.get("FAKE_LINES", LINES))
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()
