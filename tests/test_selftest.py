"""The self-test: passes a right kernel, finds wrong ones, and keeps a worker of a wrong one stock."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdtree_patch import hook, log, selftest
from kdtree_patch.kernel import FP8_POOLS, VerifyKernel
from kdtree_patch.reference import attention
from kdtree_patch.settings import Settings
from tests.fakes import FakeKernel, Stock
from tests.support.env import REPO


def test_a_right_kernel_passes() -> None:
    results = list(selftest.run(FakeKernel()))
    assert len(results) == 2 * len(selftest.CASES) and all(one.good for one in results)


@pytest.mark.parametrize("pool", [None, *FP8_POOLS])
def test_the_real_kernel_passes_on_the_cpu(pool: torch.dtype | None) -> None:
    results = list(selftest.run(VerifyKernel.load(torch.device("cpu"), pool=pool)))
    assert [one.name for one in results if not one.good] == []
    assert all((f"pool={str(pool).removeprefix('torch.')}" in one.name) == (pool is not None) for one in results)


@pytest.mark.parametrize("lost", ["k_scale", "v_scale"])
def test_a_lost_scale_is_noticed(lost: str) -> None:
    class Loses(FakeKernel):
        def launch(self, *arguments: Any) -> None:
            scales = dict(zip(("k_scale", "v_scale"), arguments[11:], strict=True))
            super().launch(*arguments[:11], **{**scales, lost: 1.0})

    assert not any(one.good for one in selftest.run(Loses(pool=torch.float8_e4m3fn)))


def test_what_it_costs_beside_the_kernel_is_a_fraction_of_half_a_second() -> None:
    """In processor time on one thread, which is what an idle machine takes at most."""

    class Instant:
        device = torch.device("cpu")
        pool = None

        def launch(self, *arguments: Any) -> None:
            pass

    seconds, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            start = time.process_time()
            assert all(math.isnan(one.rel) and not one.good for one in selftest.run(Instant()))
            seconds.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(seconds) < 0.25, seconds


# The mistakes that were made before us, and their like: what each changes in the arguments of the right kernel.


def all_of_a_kind(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(call: dict[str, Any]) -> None:
        if call[name] is not None:
            call[name] = change(call[name])

    return apply


def without_drafts(call: dict[str, Any]) -> None:
    """Case 1: only what kv_indices names, and a mask that is as wide."""
    call["k_extend"] = torch.zeros_like(call["k_extend"])


def rope_first(call: dict[str, Any]) -> None:
    for name in ("q", "k_extend", "kv_pool"):
        call[name] = call[name].roll(-64, dims=-1)


def one_slot_off(call: dict[str, Any]) -> None:
    call["kv_indices"] = call["kv_indices"].roll(1) if call["kv_indices"].numel() < 2 else call["kv_indices"].flip(0)
    call["kv_indices"] = (call["kv_indices"] + 1) % call["kv_pool"].shape[0]


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no drafts": without_drafts,
    "rope first": rope_first,
    "one slot off": one_slot_off,
    "no mask": all_of_a_kind("custom_mask", torch.ones_like),
    "scale": all_of_a_kind("scale", lambda scale: scale * 1.1),
}


class Faulty(FakeKernel):
    def __init__(self, fault: Callable[[dict[str, Any]], None]):
        super().__init__()
        self.fault = fault

    def launch(self, q: Any, k_extend: Any, out: Any, *rest: Any) -> None:
        names = ("kv_pool", "qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr", "q_len", "scale")
        names += ("k_scale", "v_scale")
        call = dict(q=q, k_extend=k_extend, **dict(zip(names, rest, strict=True)))
        self.fault(call)
        del call["q_len"]
        k = call.pop("k_extend")
        out.copy_(attention(k=k, v=k[..., :512], **call))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_kernel_is_found(fault: Callable[[dict[str, Any]], None]) -> None:
    wrong = [one for one in selftest.run(Faulty(fault)) if not one.good]
    assert len(wrong) >= 4


# In a worker.


def load(monkeypatch: pytest.MonkeyPatch, kernel: Any, **settings: Any) -> Any:
    monkeypatch.setattr("kdtree_patch.kernel.VerifyKernel.load", lambda *args: kernel)
    return hook.load_kernel(torch.device("cuda:0"), Settings(**settings), None)


def test_a_kernel_that_passes_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    assert load(monkeypatch, kernel) is kernel


def test_a_kernel_that_is_wrong_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hook.Declined, match=r"8 cases are wrong, the worst .* rel=.*, allowed ") as declined:
        load(monkeypatch, FakeKernel(mark=1.0))
    assert declined.value.reason == "selftest_failed"
    with pytest.raises(hook.Declined, match="rel=nan"):
        load(monkeypatch, FakeKernel(mark=math.nan))


def test_a_worker_whose_kernel_is_wrong_runs_stock_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kdtree_patch.kernel.VerifyKernel.load", lambda *args: FakeKernel(mark=1.0))
    worker = hook.Worker(Settings(), None, lambda device, *rest: hook.load_kernel(torch.device("cuda:0"), *rest))
    stock = Stock().function
    backends = [
        SimpleNamespace(
            extend_attention_fwd=stock,
            num_draft_tokens=3,
            req_to_token=torch.zeros(1),
            use_mla=True,
            skip_prefill=False,
        )
        for _ in range(2)
    ]
    for backend in backends:
        worker.attach(backend, SimpleNamespace(tp_rank=0))
        assert backend.extend_attention_fwd is stock
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[kdtree] ERROR declined reason=selftest_failed 8 cases are wrong, the worst ")
    assert line.endswith("; the service runs stock")


def test_a_kernel_that_cannot_be_launched_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hook.Declined, match="RuntimeError: too many resources") as declined:
        load(monkeypatch, FakeKernel(error=RuntimeError("too many resources")))
    assert declined.value.reason == "selftest_failed"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        MemoryError("Out of memory allocating 2,097,152 bytes"),
    ],
)
def test_a_device_that_is_full_is_no_fault_of_the_kernel(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hook.Declined) as declined:
        load(monkeypatch, FakeKernel(error=error))
    assert (declined.value.reason, declined.value.alarming) == ("out_of_memory", False)
    said = log.advised(declined.value.reason, str(declined.value))
    assert str(error) in said and "--mem-fraction-static" in said and "report" not in said


def test_a_fault_that_took_the_context_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("an illegal memory access")
    error.status = 700  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load(monkeypatch, FakeKernel(error=error))


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(mark=1.0)
    assert load(monkeypatch, kernel, selftest=False) is kernel and kernel.calls == []


# On the command line.


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
    return subprocess.run(
        [sys.executable, "-m", "kdtree_patch", "selftest", *arguments],
        cwd=REPO,
        env=env | {"CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_on_the_cpu() -> None:
    done = command("--device", "cpu", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["good"], found["target"], found["error"]) == (0, True, "host", "")
    assert len(found["results"]) == 8 and {"case", "rel", "limit", "good"} == set(found["results"][0])


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "words"),
    [
        ((), {}, 2, "selftest: torch sees no NVIDIA GPU here; nothing has been done: run it where there is one"),
        (("--device", "gpu"), {}, 2, "'gpu' is not cuda, cuda:N or cpu"),
        (("--device", "cpu"), {"KDTREE_MODE": "onn"}, 2, "selftest: KDTREE_MODE='onn' is not understood"),
        (("--device", "cpu"), {"CXX": "no-such-compiler"}, 1, "no-such-compiler"),
        (("--cpu",), {}, 2, "unrecognized arguments: --cpu"),
    ],
)
def test_what_it_says_when_it_cannot(
    arguments: tuple[str, ...], variables: dict[str, str], status: int, words: str, tmp_path: Path
) -> None:
    done = command(*arguments, KDTREE_CACHE_DIR=str(tmp_path / "cache"), **variables)
    assert done.returncode == status and words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
