"""Little kernels for the device primitives of kernels/host, compiled and run in four builds.

Plain; with AddressSanitizer and UBSan; with every load and store shown to the race detector; and with ucontext in place
of the hand-written stack switch.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.support.env import REPO

DATA = REPO / "tests" / "data"
FLAGS = [
    "-std=c++17",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fPIC",
    "-DKDTREE_HOST",
    f"-I{REPO / 'kernels'}",
    f"-I{DATA}",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Werror",
]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BUILDS = {
    "plain": (["-O2"], []),
    "sanitized": (["-O1", "-g", *SANITIZE], SANITIZE),
    "races": (["-O2", "-fsanitize=thread"], []),  # without the library of that name
    "ucontext": (["-O2", "-DKDTREE_HOST_UCONTEXT"], []),
}


@dataclass
class Outcome:
    error: str  # empty if nothing was wrong
    out: np.ndarray

    def words(self, dtype: type = np.int32) -> np.ndarray:
        return self.out.view(dtype)


class Program:
    """One build of the little kernels."""

    def __init__(self, build: str, source: Path, folder: Path):
        self.build = build
        self.folder = folder
        self.path = folder / build
        compile_flags, link_flags = BUILDS[build]
        flags = [*FLAGS, source_flag(source)]
        run(["g++", *flags, *compile_flags, "-c", REPO / "kernels/host/launch.cpp", "-o", f"{self.path}.o"])
        run(["g++", *flags, *link_flags, DATA / "host_program.cpp", f"{self.path}.o", "-o", self.path])

    def start(
        self, kernel: str, given: np.ndarray, out_bytes: int, *arguments: int, **shape: int
    ) -> subprocess.CompletedProcess[str]:
        shape = {"grid_x": 1, "grid_y": 1, "block": 32, "shared": 0, "seed": 0, "seeds": 1} | shape
        np.ascontiguousarray(given).tofile(self.folder / "in")
        words = [kernel, *shape.values(), self.folder / "in", self.folder / "out", out_bytes, *arguments]
        return subprocess.run([self.path, *map(str, words)], capture_output=True, text=True, timeout=120)

    def launch(self, kernel: str, given: np.ndarray, out_bytes: int, *arguments: int, **shape: int) -> list[Outcome]:
        """What each seed made of it."""
        done = self.start(kernel, given, out_bytes, *arguments, **shape)
        assert done.returncode == 0 and not done.stderr, done.stderr
        out = np.fromfile(self.folder / "out", np.uint8).reshape(shape.get("seeds", 1), out_bytes)
        return [Outcome(error, row) for error, row in zip(done.stdout.splitlines(), out, strict=True)]

    def result(self, kernel: str, given: np.ndarray, out_bytes: int, *arguments: int, **shape: int) -> Outcome:
        (outcome,) = self.launch(kernel, given, out_bytes, *arguments, **shape)
        assert not outcome.error
        return outcome

    def error(self, kernel: str, *arguments: int, **shape: int) -> str:
        (outcome,) = self.launch(kernel, np.zeros(4096, np.uint8), 4096, *arguments, **shape)
        return outcome.error


def source_flag(source: Path) -> str:
    return f'-DKDTREE_HOST_SOURCE="{source}"'


def run(command: list[str | Path]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def bits(x: np.ndarray, element: str) -> np.ndarray:
    """float32 to the bits of the element type, as torch and numpy round."""
    if element == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)


def floats(x: np.ndarray, element: str) -> np.ndarray:
    return x.view(np.float16).astype(np.float32) if element == "fp16" else (x.astype(np.uint32) << 16).view(np.float32)


def judge(program: Program, outcomes: list[Outcome], expected: np.ndarray, right: bool) -> None:
    """A right kernel is right for every seed, a wrong one wrong for most: for all, where the race detector sees all."""
    wrong = [bool(o.error) or not np.array_equal(o.words(np.float32), expected) for o in outcomes]
    if right:
        assert not any(wrong), [o.error for o in outcomes]
    elif program.build == "races":
        assert all(o.error and "race at offset" in o.error for o in outcomes), [o.error for o in outcomes]
    else:
        assert sum(wrong) >= 0.6 * len(wrong), wrong
