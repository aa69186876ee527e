"""A small run of the benchmark, and `bench` called as from a shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdtree_patch import __main__ as command_line
from kdtree_patch import bench_measure

# Words of the command line to exit status, standard output and standard error.
Command = Callable[..., tuple[int, str, str]]

RUN: dict[str, Any] = {
    "meta": {
        "command": "python -m kdtree_patch bench",
        "gpu": "NVIDIA H200",
        "date": "2026-01-02",
        "versions": {"torch": "2.11.0"},
        "ceilings": {"copy_tb_s": 4.0, "product_tflops": 700, "mma_sync_tflops": 600},
    },
    "rows": [
        {
            **{"bs": bs, "q_len": 9, "heads": 8, "prefix": prefix, "kv_dtype": "bfloat16", "config": "portable"},
            **{"kernel_us": cold - 5, "kernel_cold_us": cold, "stock_us": stock, "floor_us": floor, "rel": 0.0017},
            **{"peers": {"fa2": 45.6} if prefix == 16384 else {}},
        }
        for bs, prefix, cold, stock, floor in (
            (1, 4096, 25.0, 664.0, 1.25),
            (1, 16384, 35.0, 2602.0, 4.5),
            (16, 4096, 80.0, 640.0, 20.0),
        )
    ],
}


def stored(folder: Path, run: Any = RUN) -> Path:
    """A run, or something else, in a file."""
    path = folder / "run.json"
    path.write_text(json.dumps(run))
    return path


def bench_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kdtree_patch", "bench", *map(str, words)])
        try:
            status = command_line.main()
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return run


def run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing in which each call runs once, and takes 12.345 us."""

    def once(run: Callable[[], Any]) -> float:
        run()
        return 12.345

    monkeypatch.setattr(bench_measure, "cold_us", once)
    monkeypatch.setattr(bench_measure, "warm_us", once)
