"""What is asked of a server, over HTTP. Every refusal and every silence is a `ServiceError` that says which."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

Answer = dict[str, Any]


class ServiceError(Exception):
    """A server, or the way to it, has failed."""


@dataclass(frozen=True)
class Chunk:
    """One event of a stream: when it came (time.monotonic), of which request of the batch, and its answer so far."""

    at: float
    index: int
    answer: Answer

    @property
    def tokens(self) -> int:
        return int(self.answer["meta_info"]["completion_tokens"])

    @property
    def verify_steps(self) -> int:
        return int(self.answer["meta_info"].get("spec_verify_ct") or 0)


class Client:
    def __init__(self, port: int):
        self.base = f"http://127.0.0.1:{port}"
        # It is on this machine, whatever proxy the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _open(self, path: str, body: Answer | None, timeout: float) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"})
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with closing(error):
                words = error.read(500).decode(errors="replace")
            raise ServiceError(f"{path} answers {error.code}: {words}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(f"{path}: {type(error).__name__}: {error}") from error
        return response

    def _read(self, path: str, body: Answer | None, timeout: float) -> bytes:
        with closing(self._open(path, body, timeout)) as response:
            try:
                return response.read()
            except (OSError, http.client.HTTPException) as error:
                raise ServiceError(f"{path}: {type(error).__name__}: {error}") from error

    def healthy(self, timeout: float = 20.0) -> bool:
        try:
            self._read("/health", None, timeout)
        except ServiceError:
            return False
        return True

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, timeout: float = 120.0, **more: Any
    ) -> list[Answer]:
        """Greedy; all prompts in one request. Raises ServiceError, also for an answer that is not one for each."""
        body = order(prompts, new_tokens, **more)
        try:
            answers = json.loads(self._read("/generate", body, timeout))
        except ValueError as error:
            raise ServiceError(f"/generate: the answer is no JSON ({error})") from error
        if not isinstance(answers, list) or len(answers) != len(prompts):
            raise ServiceError(f"/generate: {len(prompts)} answers were expected, not {str(answers)[:300]}")
        return answers

    def stream(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, timeout: float = 120.0, **more: Any
    ) -> Iterator[Chunk]:
        """As `generate`, event by event. Closing the iterator closes the connection. Raises ServiceError."""
        response = self._open("/generate", order(prompts, new_tokens, stream=True, **more), timeout)
        with closing(response):
            try:
                for line in response:
                    now, text = time.monotonic(), line.strip()
                    if not text.startswith(b"data:"):
                        continue
                    text = text.removeprefix(b"data:").strip()
                    if text == b"[DONE]":
                        return
                    answer = json.loads(text)
                    if "error" in answer:
                        raise ServiceError(f"/generate: {answer['error']}")
                    yield Chunk(now, answer.get("index", 0), answer)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServiceError(f"/generate: {type(error).__name__}: {error}") from error
            raise ServiceError("/generate: the stream ended before it was done")

    def flush(self, wait: float = 30.0) -> None:
        """Empties the prefix cache, once the server has nothing to do. Raises ServiceError."""
        self._read(f"/flush_cache?timeout={wait:g}", {}, wait + 20)

    def abort(self, rid: str) -> None:
        self._read("/abort_request", {"rid": rid}, 30.0)


def order(prompts: Sequence[Sequence[int]], new_tokens: int, **more: Any) -> Answer:
    """The body of a greedy request that runs to its last token."""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": parameters, **more}
