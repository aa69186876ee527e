"""Stand-ins for kernels/ that compile in a moment, and a g++ that counts how often it was asked to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.env import REPO

HOST_SOURCE = 'extern "C" int answer() { return 42; }\n'
CUDA_SOURCE = 'extern "C" __global__ void answer(int* out) { *out = 42; }\n'
# Keeps 160 values alive across a barrier with 64 registers to hold them in.
SPILLING_SOURCE = """
extern "C" __global__ void __launch_bounds__(1024) crowded(float* data) {
  float value[160];
#pragma unroll
  for (int i = 0; i < 160; i++) value[i] = data[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 160; i++) data[threadIdx.x + 1024 * i] = value[i] * value[(i * 7 + 3) % 160];
}
"""


def kernels_folder(parent: Path, source: str) -> Path:
    """A folder laid out like kernels/."""
    folder = parent / "kernels"
    (folder / "host").mkdir(parents=True)
    (folder / "verify_attn_flash.cu").write_text(source)
    (folder / "host" / "launch.cpp").write_text('#include "../verify_attn_flash.cu"\n')
    return folder


class CountingCompiler:
    """A script for CXX. It writes its process id for each compilation, waits `seconds`, and calls g++."""

    def __init__(self, folder: Path, seconds: float = 0.0):
        self.path = folder / f"counting-g++-{seconds}"
        self._log = folder / "compilations"
        gxx = shutil.which("g++")
        assert gxx is not None, "these tests need g++"
        self.path.write_text(
            f'#!/bin/sh\ncase " $* " in *" -o "*) echo $$ >> {self._log}; sleep {seconds} ;; esac\nexec {gxx} "$@"\n'
        )
        self.path.chmod(0o755)

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    @property
    def count(self) -> int:
        return len(self.pids)


def python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """An interpreter that runs `code` with the repository on its path."""
    prologue = f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
    command = [sys.executable, "-c", prologue + code, *map(str, arguments)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**streams, **options})  # type: ignore[call-overload]
