"""A child process with one SGLang release and the patch in it, for tests to send verify batches to.

Importing SGLang takes seconds, so one child serves many tests:

    with Lab("0.5.12", directory) as lab:
        outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[21]))
        assert rel(outcome.ours, outcome.stock) < 1e-3
"""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .env import child_env

# Generous: a first call may have to wait until the kernel has been compiled for the CPU.
TIMEOUT_S = 300


@dataclass
class Trial:
    """One verify batch and the backend that it goes to. `mask` is what `verify_batch` takes.

    `around` names what `peculiar.py` makes of the backend, `layer` are attributes that its layers have, `options`
    arguments that `forward_extend` gets: for calls that are not to be served. Without a request the backend is
    made, and no more.
    """

    heads: int
    q_len: int
    prefixes: Sequence[int]
    mask: str | torch.Tensor = "tree"
    seed: int = 0
    layers: int = 1
    max_bs: int = 4
    max_context: int = 64
    pool_slots: int | None = None
    poison: bool = True
    page_size: int = 1
    around: str = "plain"
    layer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_dtype: torch.dtype | None = None
    k_scale: float | None = None
    v_scale: float | None = None

    @property
    def backend(self) -> dict[str, Any]:
        """The arguments of `build`: trials that agree in them go to one and the same backend."""
        names = ("heads", "q_len", "layers", "max_bs", "max_context", "pool_slots", "poison", "page_size", "around")
        pool = ("kv_dtype", "k_scale", "v_scale")
        return {name: getattr(self, name) for name in (*names, *pool)}


@dataclass
class Outcome:
    """What came of a trial; the tensors are those of the last layer."""

    ours: torch.Tensor  # (tokens, heads, 512), through the patched backend
    stock: torch.Tensor  # the same through SGLang's own kernel
    arguments: dict[str, Any]  # of reference.attention, with the pool as it was before the call
    pool_after: torch.Tensor
    draft_slots: torch.Tensor
    stores: int  # calls of the pool's set_kv_buffer while `ours` was computed
    routed_backend: bool  # the backend has a router
    routed: dict[tuple[str, str], int]  # what the router did with them: ("kernel" or "stock", reason) to calls
    log: list[str] = field(default_factory=list)  # the [kdtree] lines written meanwhile


class Lab:
    """The parent's end. Use it as a context manager, or call `close`."""

    def __init__(self, release: str, directory: Path, variables: Mapping[str, str] | None = None) -> None:
        self.release = release
        self.log_file = directory / f"lab-{release}.log"
        self._log_end = 0
        self._connection, child_end = multiprocessing.Pipe()
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.lab_child", str(child_end.fileno())],
                env=child_env(release, variables),
                cwd=directory,
                pass_fds=[child_end.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        child_end.close()

    def run(self, trial: Trial) -> Outcome:
        """Sends one batch through the backend. An exception in the child is raised here, with what it printed."""
        send(self._connection, vars(trial))  # as a dictionary: this module goes by another name in the child
        outcome = Outcome(**self._receive())
        outcome.log = self.new_log_lines()
        return outcome

    def new_log_lines(self) -> list[str]:
        """The [kdtree] lines that have come since this was last asked."""
        with self.log_file.open(errors="replace") as log:
            log.seek(self._log_end)
            lines = log.read().splitlines()
            self._log_end = log.tell()
        return [line for line in lines if line.startswith("[kdtree] ")]

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        try:
            if not self._connection.poll(TIMEOUT_S):
                self._process.kill()
                raise TimeoutError(f"no answer within {TIMEOUT_S} s\n{self._tail()}")
            answer = receive(self._connection)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the child with SGLang {self.release} has died\n{self._tail()}") from error
        if isinstance(answer, str):
            raise RuntimeError(f"in the child with SGLang {self.release}:\n{answer}\n{self._tail()}")
        return answer

    def _tail(self) -> str:
        return "".join(self.log_file.read_text(errors="replace").splitlines(keepends=True)[-30:])


# `Connection.send` would let torch pass its tensors on through shared memory, which the two processes do not share.
def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def answer_over(connection: Connection, run: Callable[[Trial], Outcome]) -> None:
    """The child's loop: a trial comes in, an outcome or the text of an exception goes out, until the parent closes."""
    while True:
        try:
            trial = Trial(**receive(connection))
        except EOFError:
            return
        try:
            send(connection, vars(run(trial)))
        except Exception:
            send(connection, traceback.format_exc())
