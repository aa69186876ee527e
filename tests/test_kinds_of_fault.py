"""Kinds of fault that others have met in systems with this job: for each kind the tests that would notice it here.

`KINDS` names them all, with the public report, and says where each is tested; the tests that had no better home are in
this file, each named after its kind. Every test that is named has been seen red on a build that has the fault: `red`
says how it was broken, or which mutant of tests/test_kernel_mutants.py is that build and is run with the others. What
only a GPU shows is in tests/gpu/test_kinds_of_fault.py.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kdtree_patch import boot, contract, hook, tiles
from kdtree_patch.compile import cached_binary
from kdtree_patch.kernel import PARAMS, VerifyKernel
from kdtree_patch.ledger import Ledger
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from tests.fakes import Stock, a_batch, a_layer, arguments
from tests.support.cases import (
    LIMIT,
    Case,
    host_kernel,
    make_case,
    on_pages,
    reference,
    with_far_rows,
    with_garbage_padding,
    with_pool,
)
from tests.support.env import REPO
from tests.support.named_tests import functions, missing
from tests.support.reference import rel
from tests.test_hook import Service, forward, fresh_process, lines, served_by_us
from tests.test_kernel_mutants import HOPPER_MUTANTS, MUTANTS

__all__ = ["fresh_process"]  # a fixture that every test here uses

HERE = "test_kinds_of_fault.py"


@dataclass(frozen=True)
class Kind:
    """`tests`: file below tests/, `::`, name. `red`: how a build that has the fault was made."""

    name: str
    report: str
    tests: tuple[str, ...]
    red: str


KINDS = [
    Kind(
        "index times stride overflows 32 bits",
        "sglang 9344, 20389; flashinfer 3136",
        (
            "test_kernel.py::test_slots_beyond_32_bits_of_elements",
            f"{HERE}::test_no_offset_overflows_32_bits",
            "gpu/test_kernel.py::test_slots_beyond_32_bits_of_elements",
            "gpu/test_kinds_of_fault.py::test_no_offset_overflows_32_bits",
        ),
        "offsets of slots, of rows of q, k_extend and out, and of the mask in 32 bits: in each configuration",
    ),
    Kind(
        "graph padding rows",
        "sglang 1782, 10892, 25512",
        (
            f"{HERE}::test_graph_padding_rows_with_a_garbage_mask",
            "test_kernel.py::test_graph_padding_rows_change_no_bit",
            "test_graphs.py::test_padding_does_not_trip",
            "test_graph_backend.py::test_live_rows_are_right_in_padded_replays_of_changing_size",
            "gpu/test_kernel.py::test_graph_padding_rows_change_no_bit",
            "gpu/test_kinds_of_fault.py::test_graph_padding_rows_with_a_garbage_mask",
        ),
        "mask_indptr read one request further on",
    ),
    Kind(
        "mask buffer short near the longest context",
        "sglang 29450",
        (f"{HERE}::test_of_the_mask_only_its_draft_columns_are_read",),
        "mutants mask_column; the byte 9,000 columns before the right one read",
    ),
    Kind(
        "eager batch above the captured maximum",
        "sglang 33127",
        (
            "test_graphs.py::test_an_eager_batch_above_the_largest_graph",
            "test_kernel.py::test_one_kernel_for_calls_of_all_shapes",
            f"{HERE}::test_an_eager_batch_of_48_after_one_of_8",
            "gpu/test_graphs.py::test_an_eager_batch_above_the_largest_graph",
        ),
        "a workspace for one worker",
    ),
    Kind(
        "idle batch under DP attention",
        "sglang 33892, 28616",
        (f"{HERE}::test_an_idle_batch_launches_nothing", "test_route.py::test_each_reason"),
        "empty_batch taken out of decide, and the lower bound of q_len",
    ),
    Kind(
        "metadata of another mode absent",
        "sglang 4100",
        (f"{HERE}::test_metadata_of_another_mode_is_not_asked_for",),
        "extend_seq_lens read in around_forward_extend",
    ),
    Kind(
        "sliding-window layers need an offset into the mask",
        "sglang 9279",
        (f"{HERE}::test_a_sliding_window_layer_is_declined", "test_route.py::test_each_reason"),
        "the row of sliding_window_size in the contract made neutral to anything",
    ),
    Kind(
        "fp8 scales dropped or shifted",
        "sglang 18882; vllm 42580",
        (f"{HERE}::test_fp8_scales_are_the_stock_rules",),
        "the router passes 1.0 for both scales; mutants scaled_drafts and others of host-fp8_e4m3",
    ),
    Kind(
        "shared memory above 101,376 bytes",
        "sglang 14311; ktransformers 1570",
        (
            "test_kernel.py::test_every_variant_fits_the_shared_memory",
            "test_nvrtc.py::test_shared_memory_fits_the_smallest_parts",
            "test_compile.py::test_command_finds_too_much_shared_memory",
        ),
        "a third stage in tiles._portable_shared",
    ),
    Kind(
        "topk above 1 with larger pages",
        "sglang server_args",
        (f"{HERE}::test_pages_of_64", "test_route.py::test_what_does_not_matter"),
        "page_size made a switch of the contract; indices of pages",
    ),
    Kind(
        "a row that sees nothing, an empty prefix, extreme scores",
        "flashinfer 4401, 3251",
        (
            "test_kernel.py::test_a_row_that_sees_nothing_is_zero",
            "test_kernel.py::test_extreme_scores",
            "test_kernel.py::test_fuzz_against_float64",
            "test_real_backend.py::test_a_draft_that_sees_nothing_is_zero",
            "gpu/test_kernel.py::test_a_row_that_sees_nothing_is_zero",
            "gpu/test_kinds_of_fault.py::test_extreme_scores",
        ),
        "mutants stale_maximum, stale_rescale; the division by a sum of 0 left as it is",
    ),
    Kind(
        "silent fallback to a slow path",
        "flashinfer 3400",
        ("test_route.py::test_each_reason", "test_route.py::test_the_same_offence_is_not_decided_twice"),
        "the count of a remembered reason left out",
    ),
    Kind(
        "Python float passed as double",
        "cupy 8485",
        (
            f"{HERE}::test_the_scale_is_packed_as_a_float32",
            "test_kernel.py::test_params_are_packed_as_the_kernel_reads_them",
        ),
        "scale_log2e of PARAMS made float64",
    ),
    Kind(
        "contexts on GPU 0 from every rank",
        "cupy 9094",
        (
            "test_compile.py::test_import_is_light_and_touches_no_gpu",
            "test_contract.py::test_the_inner_module_is_not_imported",
            "test_boot.py::test_the_backend_is_wrapped_in_silence",
            "test_boot.py::test_only_a_worker_with_gpus_compiles_ahead",
            "gpu/test_kinds_of_fault.py::test_no_context_on_gpu_0_from_rank_1",
        ),
        "torch.cuda.current_device() asked in boot",
    ),
    Kind(
        "unwritable HOME, cache of mixed owners",
        "cupy in sandboxed services",
        (
            "test_cache.py::test_unwritable_home",
            "test_cache.py::test_foreign_file_is_not_loaded",
            "test_cache.py::test_foreign_directory_is_refused",
            "test_compile.py::test_cupy_imports_where_home_cannot_be_written",
            "test_compile.py::test_everything_unwritable_is_cache_unwritable",
        ),
        "the owner not compared in PrivateDirectory._read",
    ),
    Kind(
        "headers missing or from another toolkit",
        "cupy 8466, 9853",
        (
            "test_nvrtc.py::test_source_includes_nothing_that_nvrtc_would_have_to_find",
            "test_compile.py::test_old_toolkit_in_the_environment_does_not_matter",
            "test_compile.py::test_nvrtc_library_missing",
            "test_compile.py::test_old_nvrtc_is_said_and_nothing_else_is_compiled",
        ),
        "cuda_bf16.h included in the source",
    ),
    Kind(
        "eight ranks compile at once on a cold cache",
        "DeepGEMM 301; cupy 9463",
        (
            "test_cache.py::test_eight_cold_processes_compile_once",
            "test_compile.py::test_eight_workers_with_a_job_each_compile_once",
        ),
        "no lock in cache.fetch",
    ),
    Kind(
        "a hook exception breaks the import",
        "wrapt",
        ("test_boot.py::test_our_own_package_broken", f"{HERE}::test_a_hook_that_raises_breaks_no_import"),
        "no except in boot._on_import",
    ),
    Kind(
        "the user's sitecustomize shadowed or run twice",
        "ddtrace 458; otel 1580",
        (
            "test_boot.py::test_theirs_runs_once_under_its_own_name",
            "test_boot.py::test_ours_twice",
            "test_boot.py::test_theirs_from_a_finder_of_its_own",
        ),
        "run_the_next_sitecustomize not called; called twice",
    ),
    Kind(
        "a broken or heavy boot in unrelated processes",
        "ddtrace 5771",
        (
            "test_boot.py::test_an_unrelated_process_is_left_alone",
            "test_boot.py::test_an_unrelated_process_starts_as_fast_as_before",
            "test_boot.py::test_an_unrelated_process_needs_no_memory_to_speak_of",
        ),
        "torch imported in sitecustomize.py; five megabytes made there",
    ),
    Kind(
        "signature drift",
        "sglang 0.5.9, 0.5.12, 0.5.23",
        (
            "test_contract.py::test_known_releases_pass",
            "test_contract.py::test_drift_is_declined_by_name",
            "test_route.py::test_arguments_are_bound_by_name_whatever_the_signature",
            "test_boot.py::test_an_unknown_sglang",
        ),
        "_unknown of the contract made to find nothing",
    ),
    Kind(
        "near-tie tokens differ with other numerics",
        "not a fault: judged by rel, and where there is no tie",
        (
            "test_e2e_runs.py::test_a_tie_of_stocks_own_is_no_difference",
            "test_e2e_runs.py::test_other_tokens_miss_it_and_say_where",
        ),
        "TIE made infinite",
    ),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_has_its_tests(kind: Kind) -> None:
    assert kind.tests and missing(kind.tests) == []
    if kind.red.startswith("mutants "):
        names = kind.red.removeprefix("mutants ").partition(";")[0].split(", ")
        assert set(names) <= {mutant.name for mutant in [*MUTANTS, *HOPPER_MUTANTS]}


def test_the_kinds_are_twenty_two() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) == 22


def test_every_test_of_this_file_is_named_for_a_kind() -> None:
    named = {name.partition("::")[2] for kind in KINDS for name in kind.tests if name.startswith(HERE)}
    ours = {name for name in functions(Path(__file__)) if name.startswith("test_")}
    about_the_table = {
        "test_every_kind_has_its_tests",
        "test_the_kinds_are_twenty_two",
        "test_every_test_of_this_file_is_named_for_a_kind",
    }
    assert named == ours - about_the_table


@pytest.fixture(scope="module")
def library() -> Path:
    return cached_binary("host")


@pytest.fixture(params=tiles.CONFIGS)
def kernel(library: Path, request: pytest.FixtureRequest) -> VerifyKernel:
    return host_kernel(library, config=request.param)


# Offsets.


@pytest.mark.parametrize("what", ["q", "k_extend", "out", "custom_mask"])
def test_no_offset_overflows_32_bits(kernel: VerifyKernel, what: str) -> None:
    """Each tensor but the pool, which has a test of its own, with its last row beyond 2^31 bytes."""
    case = make_case([40], 5, 8)
    assert rel(with_far_rows(case, what).launch(kernel), reference(case)) < LIMIT[torch.float16]


# Graph padding.


@pytest.mark.parametrize("sees", ["anything", "nothing"])
def test_graph_padding_rows_with_a_garbage_mask(kernel: VerifyKernel, sees: str) -> None:
    """Three requests replayed in a graph for four: the fourth has prefix 1, slot 0, and a mask that is left over."""
    case = make_case([70, 0, 33], 9, 8)
    expected = case.launch(kernel)
    out = with_garbage_padding(case, sees == "anything").launch(kernel)
    assert torch.equal(out[: len(expected)], expected)
    assert torch.isfinite(out).all()


# The mask.


@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_of_the_mask_only_its_draft_columns_are_read(library: Path, config: str) -> None:
    """At a context that fills several pages of memory for each mask row, those that hold nothing but prefix columns and
    the one behind the mask cannot be read: a process that reads there is killed.
    """
    done = subprocess.run([sys.executable, "-m", "tests.test_kinds_of_fault", str(library), config], cwd=REPO)
    assert done.returncode == 0


def with_a_mask_that_can_hardly_be_read(library: str, config: str) -> None:
    """In a process of its own."""
    page, q_len, prefix = 4096, 3, 3 * 4096
    case = make_case([prefix], q_len, 1)
    right = reference(case)
    assert case.custom_mask is not None
    size = len(case.custom_mask)
    pages = -(-size // page) + 1
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.mmap(None, pages * page, 3, 0x22, -1, 0)  # readable and writable, private and anonymous
    first = (pages - 1) * page - size  # so that the last readable page ends where the mask does
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * (pages * page)).from_address(start))
    case.custom_mask = torch.from_numpy(memory[first : first + size]).copy_(case.custom_mask)
    drafts = [first + row * (prefix + q_len) + prefix + column for row in range(q_len) for column in range(q_len)]
    shut = [number for number in range(pages) if not any(at // page == number for at in drafts)]
    assert shut[-1] == pages - 1 and len(shut) > 2 * q_len
    for number in shut:
        assert libc.mprotect(start + number * page, page, 0) == 0
    out = case.launch(host_kernel(Path(library), config=config))
    assert rel(out, right) < LIMIT[torch.float16]


# Batches.


def test_an_eager_batch_of_48_after_one_of_8(kernel: VerifyKernel) -> None:
    """The workspace does not know of batch sizes; what the smaller ones have left in it is not taken for anything."""
    held = kernel.workspace_bytes
    for bs in (8, 48, 8):
        case = make_case([33, 5] * (bs // 2), 2, 3, seed=bs)
        assert rel(case.launch(kernel), reference(case)) < LIMIT[torch.float16]
    assert kernel.workspace_bytes == held


def test_an_idle_batch_launches_nothing() -> None:
    """DP attention gives a rank that has no request a batch of none: the stock path, whatever that does with it."""
    service = Service()
    backend = service.start()
    empty = no_requests(backend.case)
    passed: list[Any] = []
    getattr(backend, hook.ROUTER).stock = lambda *args, **kwargs: passed.append(args[0].shape)
    backend.case = empty
    out = forward(backend, a_batch(seq_lens_cpu=torch.zeros(0, dtype=torch.int64), seq_lens_sum=0, batch_size=0))
    assert out.shape == (0, 2, 512) and passed == [(0, 2, 576)]
    assert service.kernel.calls == []


def no_requests(case: Case) -> Case:
    assert case.custom_mask is not None and case.mask_indptr is not None
    return replace(
        case,
        **{name: getattr(case, name)[:0] for name in ("q", "k_extend", "out", "kv_indices", "custom_mask")},
        **{name: getattr(case, name)[:1] for name in ("qo_indptr", "kv_indptr", "mask_indptr")},
    )


class OnlyWhatVerifyHas:
    """A forward batch of TARGET_VERIFY: what belongs to other modes is None, as in SGLang, or raises if asked for."""

    def __init__(self, absent: str):
        self._absent = absent
        plain = a_batch(batch_size=2)
        self.forward_mode, self.batch_size = plain.forward_mode, plain.batch_size
        self.seq_lens_cpu, self.seq_lens_sum = plain.seq_lens_cpu, plain.seq_lens_sum

    def __getattr__(self, name: str) -> None:
        if self._absent == "raises" or not name.startswith("extend_"):
            raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize("absent", ["is None", "raises"])
def test_metadata_of_another_mode_is_not_asked_for(absent: str) -> None:
    backend = Service().start()
    batch = OnlyWhatVerifyHas(absent)
    backend.init_forward_metadata(batch)
    assert served_by_us(backend, forward(backend, batch))


# Declined.


def test_a_sliding_window_layer_is_declined(capsys: pytest.CaptureFixture[str]) -> None:
    """Between layers that have none, and are served."""
    service = Service()
    backend = service.start()
    plain = backend.extend_attention_fwd

    def windowed(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "sliding_window_size": 128, "window_kv_offsets": torch.zeros(2)})

    served = []
    for layer in range(6):
        backend.extend_attention_fwd = windowed if layer % 2 else plain
        served.append(served_by_us(backend, forward(backend, layer=a_layer(layer))))
    assert served == [True, False] * 3
    (line,) = [line for line in lines(capsys) if "declined" in line]
    assert "reason=sliding_window scope=call layer=1 sliding_window_size=128" in line


@pytest.mark.parametrize("config", tiles.CONFIGS)
def test_fp8_scales_are_the_stock_rules(config: str) -> None:
    """The prefix is scaled, keys by k_scale and values by v_scale, and the drafts, which are not quantised, are not."""
    pool = torch.float8_e4m3fn
    case = with_pool(make_case([21, 4, 0], 3, 2, seed=5), pool, k_scale=0.5, v_scale=0.25)
    kernel = host_kernel(cached_binary("host-fp8_e4m3"), config=config, pool=pool)
    router = VerifyRouter(Stock().function, kernel, Settings(), Ledger())
    router.context = (a_layer(), a_batch())
    for scales in ((0.5, 0.25), (3.0, 0.7)):  # each layer has its own
        case.out.fill_(torch.nan)
        case.k_scale, case.v_scale = scales
        router(**arguments(case))
        assert rel(case.out, by_the_stock_rule(case, *scales)) < LIMIT[torch.float16]
    assert router.ledger.counts == {("kernel", "verify"): 2}


def by_the_stock_rule(case: Case, k_scale: float, v_scale: float) -> torch.Tensor:
    """Request by request, in float64: scaled keys and values of the prefix, then the drafts as they are."""
    out = torch.empty(case.out.shape, dtype=torch.float64)
    assert case.custom_mask is not None and case.mask_indptr is not None
    offsets, kv_offsets, mask_offsets = (t.tolist() for t in (case.qo_indptr, case.kv_indptr, case.mask_indptr))
    for b in range(len(offsets) - 1):
        rows = slice(offsets[b], offsets[b + 1])
        prefix = case.kv_pool[case.kv_indices[kv_offsets[b] : kv_offsets[b + 1]], 0].double()
        drafts = case.k_extend[rows, 0].double()
        keys = torch.cat([prefix * k_scale, drafts])
        values = torch.cat([prefix[:, :512] * v_scale, drafts[:, :512]])
        visible = case.custom_mask[mask_offsets[b] : mask_offsets[b + 1]].view(case.q_len, len(keys)).bool()
        scores = torch.einsum("thd,kd->htk", case.q[rows].double(), keys) * case.scale
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out[rows] = torch.einsum("htk,kd->thd", weights, values)
    return out


# Pages.


@pytest.mark.parametrize("mask", ["none", "tree"])
def test_pages_of_64(kernel: VerifyKernel, mask: str) -> None:
    """Slots come in runs of 64 that begin at a multiple of 64, the last run of a request not full; indices are still
    one a token. SGLang allows it for chains; a tree is no different.
    """
    plain = make_case([150, 64, 3], 4, 3, mask=mask)
    case = on_pages(plain, 64)
    router = VerifyRouter(Stock().function, kernel, Settings(), Ledger())
    router.context = (a_layer(), a_batch())
    router(**arguments(case, page_size=64))
    assert router.ledger.counts == {("kernel", "verify"): 1}
    assert torch.equal(case.out, plain.launch(kernel))


# Packing.


def test_the_scale_is_packed_as_a_float32() -> None:
    """0.14468 is no float32: what the kernel finds in the record is the nearest one, in four bytes."""
    found: list[bytes] = []

    def launch(steps: Sequence[Any], address: int) -> None:
        found.append(ctypes.string_at(address, PARAMS.itemsize))

    kernel = VerifyKernel(torch.device("cpu"), launch, 2, "host")
    make_case([21], 9, 8, scale=0.14468).launch(kernel)
    assert PARAMS.fields is not None
    at = PARAMS.fields["scale_log2e"][1]
    assert found[0][at : at + 4] == np.float32(0.14468 * math.log2(math.e)).tobytes()
    fragment_warps = PARAMS.fields["fragment_warps"][1]
    assert fragment_warps == at + 4 and int.from_bytes(found[0][fragment_warps : at + 8], "little") in (1, 8)


# Imports.


@pytest.mark.parametrize("error", [RuntimeError("in the hook"), SystemExit(3)], ids=["exception", "exit"])
@pytest.mark.parametrize("where", ["check", "install", "start_compiling"])
def test_a_hook_that_raises_breaks_no_import(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """wrapt calls the hook from inside SGLang's import: what it raises would be that import's error."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(contract, "check", lambda module: [])
    monkeypatch.setattr({"check": contract, "install": hook, "start_compiling": boot}[where], where, fail)
    boot._on_import(SimpleNamespace(TritonAttnBackend=object), Settings())  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[kdtree] declined reason=hook_failed {type(error).__name__}: {error}")


if __name__ == "__main__":
    with_a_mask_that_can_hardly_be_read(*sys.argv[1:])
