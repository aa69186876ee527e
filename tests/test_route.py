"""The router: what it serves, what it declines and why, and what it leaves behind when the kernel fails.

The kernel and the stock function are torch (tests/fakes.py). Each reason code has a call that differs from a served one
in one thing.
"""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdtree_patch import contract, log
from kdtree_patch.ledger import FATAL_STATUS, Ledger
from kdtree_patch.route import MOST_NEW_TOKENS, VerifyRouter, decide, longest_prefix, switched_on
from kdtree_patch.settings import Settings
from kdtree_patch.tiles import MAX_TILES
from tests.fakes import SIGNATURES, FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support.cases import Case, reference, with_drafts
from tests.support.reference import rel

pytestmark = pytest.mark.usefixtures("all_lines")

MARK = 100.0  # what our fake kernel adds, so that its output cannot be taken for stock's


class Bench:
    """A router with its two kernels, in the context of a verify call of layer 0."""

    def __init__(
        self, settings: Settings | None = None, kernel: FakeKernel | None = None, version: str = "0.5.23", **stock: Any
    ):
        self.stock = Stock(version, **stock)
        self.kernel = kernel or FakeKernel(mark=MARK)
        self.ledger = Ledger()
        self.router = VerifyRouter(self.stock.function, self.kernel, settings or Settings(), self.ledger)
        self.router.context = (a_layer(), a_batch())

    def run(self, arguments: dict[str, Any], layer: int = 0, **how: Any) -> Any:
        """Runs the inner call through the router, with the parameters of the stock function's release."""
        names = list(inspect.signature(self.stock.function).parameters)
        known = {name: value for name, value in arguments.items() if name in names}
        self.router.context = (a_layer(layer), a_batch())
        self.router.mode = how.get("mode", "verify")
        positional = [known.pop(name) for name in names[: how.get("positional", 16)] if name in known]
        return self.router(*positional, **known)

    @property
    def served(self) -> str:
        return f"kernel {len(self.kernel.calls)}, stock {len(self.stock.calls)}"


# Served.


@pytest.mark.parametrize("version", SIGNATURES)
@pytest.mark.parametrize("positional", [0, 4, 13, 16])
def test_arguments_are_bound_by_name_whatever_the_signature(version: str, positional: int) -> None:
    case, bench = a_case(), Bench(version=version, kernel=FakeKernel())
    assert bench.run(arguments(case), positional=positional) is None
    assert bench.served == "kernel 1, stock 0"
    assert rel(case.out, reference(case)) < 1e-3
    got = bench.kernel.calls[0]
    assert (got["q_len"], got["scale"]) == (case.q_len, case.scale)
    for name in ("q", "k_extend", "out", "kv_pool", "qo_indptr", "kv_indptr", "kv_indices", "custom_mask"):
        assert got[name] is getattr(case, name), name


@pytest.mark.parametrize(
    "changes",
    [
        dict(dtype=torch.bfloat16),
        dict(mask="none"),
        dict(mask_dtype=torch.uint8),
        dict(qo_dtype=torch.int64, kv_indptr_dtype=torch.int64, kv_indices_dtype=torch.int32),
        dict(mask_indptr_dtype=torch.int32),
        dict(slack=17),
        dict(prefixes=[0]),
        dict(prefixes=[1] * 5, q_len=1),
        dict(prefixes=[2], q_len=512, heads=1),
        dict(prefixes=[2], q_len=1, heads=128),
    ],
    ids=str,
)
def test_what_is_served(changes: dict[str, Any]) -> None:
    case, bench = a_case(**changes), Bench(kernel=FakeKernel())
    bench.run(arguments(case))
    assert bench.served == "kernel 1, stock 0"
    assert bench.ledger.counts == {("kernel", "verify"): 1}
    assert rel(case.out, reference(case)) < 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        dict(page_size=64),
        dict(extend_seq_lens_cpu=[3, 3]),
        dict(logit_cap=0),
        dict(skip_prefix_custom_mask=True, identity_kv_indices=False, lse_extend=None, skip_prefix=False),
    ],
    ids=str,
)
def test_what_does_not_matter(changes: dict[str, Any]) -> None:
    bench = Bench()
    bench.run(arguments(a_case(), **changes))
    assert bench.served == "kernel 1, stock 0"


@pytest.mark.parametrize("scale", [None, 0.0])
def test_no_scale_means_the_stock_default(scale: float | None) -> None:
    bench = Bench()
    bench.run(arguments(a_case(), sm_scale=scale))
    assert bench.kernel.calls[0]["scale"] == 576**-0.5


def test_a_chain_needs_no_mask_offsets_and_does_not_pass_any() -> None:
    bench = Bench()
    bench.run(arguments(a_case(mask="none"), mask_indptr=torch.tensor([0.5])))
    assert bench.served == "kernel 1, stock 0"
    assert bench.kernel.calls[0]["mask_indptr"] is None


@pytest.mark.parametrize("pool", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("version", SIGNATURES)
def test_an_fp8_pool_with_the_scales_of_its_layer(
    version: str, pool: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.5.9 has no scales: they are 1 there. Each layer has its own."""
    scales = (1.0, 1.0) if version == "0.5.9" else (0.5, 0.25)
    case, bench = (
        a_case(pool=pool, k_scale=scales[0], v_scale=scales[1]),
        Bench(version=version, kernel=FakeKernel(pool=pool)),
    )
    bench.run(arguments(case))
    assert rel(case.out, reference(case)) < 1e-3
    case.k_scale, case.v_scale = (1.0, 1.0) if version == "0.5.9" else (2, 0.125)
    bench.run(arguments(case), layer=1)
    assert rel(case.out, reference(case)) < 1e-3
    assert bench.served == "kernel 2, stock 0"
    lines = [line for line in capsys.readouterr().err.splitlines() if " shapes " in line]
    assert len(lines) == 1 and lines[0].endswith(f" kv_dtype={str(pool).removeprefix('torch.')}")


# Other forward modes.


def an_extend(lengths: list[int], **changes: Any) -> Case:
    """A batch whose requests have different numbers of new tokens."""
    return with_drafts(a_case(prefixes=[4] * len(lengths), q_len=max(lengths), mask="none", **changes), lengths)


@pytest.mark.parametrize("mode", ["draft_extend", "extend"])
@pytest.mark.parametrize("lengths", [[3, 1, 2], [1, 3], [2, 2], [5], [0, 3]], ids=str)
def test_extends_of_different_lengths_are_served(mode: str, lengths: list[int]) -> None:
    case, bench = an_extend(lengths), Bench(kernel=FakeKernel())
    bench.run(arguments(case), mode=mode)
    assert bench.ledger.counts == {("kernel", mode): 1}
    assert bench.kernel.calls[0]["q_len"] == max(lengths) and bench.kernel.calls[0]["custom_mask"] is None
    assert rel(case.out, reference(case)) < 1e-3


@pytest.mark.parametrize(("q_len", "reason"), [(0, "q_len"), (MOST_NEW_TOKENS, None), (MOST_NEW_TOKENS + 1, "q_len")])
def test_from_how_many_new_tokens_on_an_extend_is_stocks(q_len: int, reason: str | None) -> None:
    case = an_extend([3, 1])
    assert decide(arguments(case, max_len_extend=q_len), torch.device("cpu"), ragged=True) == reason


def test_what_an_extend_is_served_with_opens_no_door_for_a_verify_call() -> None:
    """The same tensors: of a verify call they are one whose requests do not have as many drafts each."""
    case, bench = an_extend([3, 1]), Bench(kernel=FakeKernel())
    for mode in ("extend", "verify", "extend"):
        bench.run(arguments(case), mode=mode)
    assert bench.ledger.counts == {("kernel", "extend"): 2, ("stock", "q_len"): 1}


def test_the_non_absorbed_attention_of_a_prefill_stays_stock() -> None:
    """Keys of 192 and values of 128 for each head, and a pool that has latent rows all the same."""
    case, bench = an_extend([3, 1]), Bench()
    q, v = torch.zeros(4, 2, 192, dtype=torch.float16), torch.zeros(4, 2, 128, dtype=torch.float16)
    bench.router.stock = lambda *args, **kwargs: None
    bench.run(arguments(case, q_extend=q, k_extend=q.clone(), v_extend=v, o_extend=v.clone()), mode="extend")
    assert bench.ledger.counts == {("stock", "not_mla"): 1}


def test_an_extend_says_its_shapes_once_and_its_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """Every step has another shape, and seq_lens_cpu counts the new tokens in."""
    bench = Bench()
    for lengths in ([3, 1], [2, 2], [5, 4]):
        bench.run(arguments(an_extend(lengths)), mode="extend")
    (line,) = shapes(capsys)
    assert line.endswith(" bs=2 q_len=3 Dl=512 Dr=64 kv_len_max=4 scale=0.14468 mask=None mode=extend")


def test_the_calls_line_counts_all_modes(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    for mode in ("verify", "extend") * 5:
        bench.run(arguments(a_case(mask="none")), mode=mode)
    assert "[kdtree] calls served=10" in capsys.readouterr().err


# Declined.


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor at an address that is no multiple of 16."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def with_gaps(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The same tensor with its rows `width` elements apart."""
    wide = torch.zeros(*tensor.shape[:-1], width, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


CASE = a_case()
ARGUMENTS = arguments(CASE)
FP8_CASE = a_case(pool=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.25)
FP8_ARGUMENTS = arguments(FP8_CASE)
POOL = CASE.kv_pool
HEADS_129 = torch.zeros(6, 129, 576, dtype=torch.float16)

# A verify call of a DFLASH draft, whose block sees all of itself: 8 heads and 2 KV heads of 64, no mask. A backend is
# handed q without a dimension for heads, and hands it on with one.
DRAFT_Q, DRAFT_KV = torch.zeros(6, 8 * 64, dtype=torch.float16), torch.zeros(6, 2, 64, dtype=torch.float16)
DFLASH_DRAFT: dict[str, Any] = dict(
    q_extend=DRAFT_Q,
    k_extend=DRAFT_KV,
    v_extend=DRAFT_KV.clone(),
    o_extend=DRAFT_Q.clone(),
    k_buffer=torch.zeros(len(POOL), 2, 64, dtype=torch.float16),
    v_buffer=torch.zeros(len(POOL), 2, 64, dtype=torch.float16),
    custom_mask=None,
    mask_indptr=None,
)
BY_HEAD = {name: DFLASH_DRAFT[name].view(6, 8, 64) for name in ("q_extend", "o_extend")}

DECLINED: list[tuple[str, dict[str, Any]]] = [
    ("not_causal", {**DFLASH_DRAFT, "is_causal": False}),
    ("not_mla", DFLASH_DRAFT),
    ("not_mla", {**DFLASH_DRAFT, **BY_HEAD}),
    ("not_causal", dict(is_causal=False)),
    ("kv_scale", dict(k_scale=0.5)),
    ("kv_scale", dict(v_scale=torch.tensor(1.0))),
    ("logit_cap", dict(logit_cap=30.0)),
    ("prefix_mask", dict(skip_prefix_custom_mask=False)),
    ("sliding_window", dict(sliding_window_size=128)),
    ("sliding_window", dict(window_kv_offsets=torch.zeros(2))),
    ("sinks", dict(sinks=torch.zeros(2))),
    ("xai_temperature", dict(xai_temperature_len=1024)),
    ("lse", dict(lse_extend=torch.zeros(6, 2))),
    ("skip_part", dict(skip_prefix=True)),
    ("skip_part", dict(skip_extend=True)),
    ("score_mod", dict(score_mod=abs)),
    ("score_mod", dict(aux_tensors=[torch.zeros(1)])),
    ("identity_indices", dict(identity_kv_indices=True)),
    ("dtype", dict(q_extend=CASE.q.float())),
    ("dtype", dict(o_extend=CASE.out.bfloat16())),
    ("dtype", dict(k_extend=CASE.k_extend.bfloat16())),
    ("dtype", {name: ARGUMENTS[name].float() for name in ("q_extend", "k_extend", "v_extend", "o_extend")}),
    ("kv_dtype", dict(k_buffer=fp8(POOL), v_buffer=fp8(POOL)[..., :512])),
    ("kv_dtype", dict(k_buffer=POOL.bfloat16(), v_buffer=POOL.bfloat16()[..., :512])),
    ("empty_batch", dict(q_extend=CASE.q[:0], k_extend=CASE.k_extend[:0], v_extend=CASE.k_extend[:0, :, :512])),
    ("empty_batch", dict(qo_indptr=torch.zeros(1, dtype=torch.int32))),
    ("not_mla", dict(q_extend=CASE.q[..., :64])),
    ("not_mla", dict(k_extend=CASE.k_extend[:5])),
    ("not_mla", dict(k_extend=CASE.k_extend.expand(6, 2, 576))),
    ("not_mla", dict(v_extend=CASE.k_extend)),
    ("not_mla", dict(o_extend=CASE.q)),
    ("not_mla", dict(k_buffer=POOL.expand(-1, 2, 576))),
    ("not_mla", dict(v_buffer=POOL)),
    ("not_mla", dict(q_extend=CASE.q[0])),
    ("heads", dict(q_extend=HEADS_129, o_extend=HEADS_129[..., :512])),
    ("max_len_unknown", dict(max_len_extend=torch.tensor(3))),
    ("max_len_unknown", dict(max_len_extend=None)),
    ("q_len", dict(max_len_extend=2)),
    ("q_len", dict(max_len_extend=0)),
    ("q_len", dict(qo_indptr=torch.tensor([0, 3, 5, 6]))),
    ("mask_dtype", dict(custom_mask=CASE.custom_mask.int())),
    ("index_dtype", dict(qo_indptr=CASE.qo_indptr.float())),
    ("index_dtype", dict(kv_indptr=CASE.kv_indptr.short())),
    ("index_dtype", dict(kv_indices=CASE.kv_indices.short())),
    ("index_dtype", dict(mask_indptr=CASE.mask_indptr.float())),
    ("index_dtype", dict(mask_indptr=None)),
    ("scale", dict(sm_scale=torch.tensor(0.1))),
    ("layout", dict(q_extend=misaligned(CASE.q))),
    ("layout", dict(k_extend=misaligned(CASE.k_extend))),
    ("layout", dict(o_extend=misaligned(CASE.out))),
    ("layout", dict(q_extend=with_gaps(CASE.q, 580))),
    ("layout", dict(q_extend=CASE.q.repeat(1, 1, 2)[..., ::2])),
    ("layout", dict(k_buffer=misaligned(POOL))),
    ("layout", dict(v_buffer=POOL[..., :512].clone())),  # not a view of the pool's rows
    ("layout", dict(v_buffer=POOL[..., 64:])),  # the same rows, rope first
    ("layout", dict(v_buffer=POOL[:-1, :, :512])),
    ("layout", dict(v_buffer=POOL.flatten()[: len(POOL) * 512].view(-1, 1, 512))),  # begins there, other rows
    ("layout", dict(kv_indptr=CASE.kv_indptr[:-1])),
    ("layout", dict(mask_indptr=CASE.mask_indptr[:1])),
    ("layout", dict(custom_mask=CASE.custom_mask.view(1, -1))),
    ("layout", dict(custom_mask=CASE.custom_mask.repeat_interleave(2)[::2])),
    ("layout", dict(kv_indices=CASE.kv_indices.repeat_interleave(2)[::2])),
    ("too_many_tiles", dict(kv_indices=torch.empty(2**35, dtype=torch.int32, device="meta"))),
    ("device", dict(kv_indices=CASE.kv_indices.to("meta"))),
    ("device", {name: ARGUMENTS[name].to("meta") for name in ("q_extend", "k_extend", "o_extend")}),
    ("unexpected_arguments", dict(kv_indices=[1, 2, 3])),
    ("unexpected_arguments", dict(k_buffer=None)),
]


# The same with a kernel for a pool of e4m3.
FP8_DECLINED: list[tuple[str, dict[str, Any]]] = [
    *(("kv_scale", dict(k_scale=scale)) for scale in (0.0, -1.0, math.nan, math.inf, 2.0**-15, 2.0**15, None, "1")),
    *(("kv_scale", dict(v_scale=scale)) for scale in (0.0, 2.0**15, torch.tensor(0.5), True)),
    ("kv_dtype", dict(k_buffer=POOL, v_buffer=POOL[..., :512])),
    ("kv_dtype", {name: FP8_ARGUMENTS[name].view(torch.float8_e5m2) for name in ("k_buffer", "v_buffer")}),
    ("kv_dtype", {name: FP8_ARGUMENTS[name].view(torch.uint8) for name in ("k_buffer", "v_buffer")}),
    ("dtype", {name: fp8(FP8_ARGUMENTS[name]) for name in ("q_extend", "k_extend", "v_extend", "o_extend")}),
    ("layout", dict(k_buffer=misaligned(FP8_CASE.kv_pool))),
    (
        "layout",
        {name: with_gaps(FP8_CASE.kv_pool, 584)[..., :last] for name, last in (("k_buffer", 576), ("v_buffer", 512))},
    ),
]


@pytest.mark.parametrize(("reason", "changes"), FP8_DECLINED, ids=[f"{r}-{c}"[:60] for r, c in FP8_DECLINED])
def test_each_reason_of_an_fp8_pool(reason: str, changes: dict[str, Any]) -> None:
    """Also after a call that was served."""
    bench = Bench(kernel=FakeKernel(pool=torch.float8_e4m3fn))
    bench.router.stock = lambda *args, **kwargs: None
    for _ in range(2):
        bench.run({**FP8_ARGUMENTS, **changes})
        bench.run(FP8_ARGUMENTS)
    assert bench.ledger.counts == {("stock", reason): 2, ("kernel", "verify"): 2}


def why_not(call: dict[str, Any], device: str = "cpu") -> str | None:
    return switched_on(call) or decide(call, torch.device(device))


@pytest.mark.parametrize(("reason", "changes"), DECLINED, ids=[f"{r}-{'-'.join(c)}"[:60] for r, c in DECLINED])
def test_each_reason(reason: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Declined for that reason, counted, said once with the offending fact, and passed on with nothing changed."""
    passed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    bench = Bench()
    bench.router.stock = lambda *args, **kwargs: passed.append((args, kwargs)) or "stock's answer"
    changed = {**ARGUMENTS, **changes}
    for _ in range(2):
        assert bench.run(changed, positional=13) == "stock's answer"
    assert bench.ledger.counts == {("stock", reason): 2}
    assert bench.kernel.calls == []
    args, kwargs = passed[-1]
    assert all(value is changed[name] for name, value in zip(bench.router._names, args, strict=False))
    assert len(args) == 13 and all(value is changed[name] for name, value in kwargs.items())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[kdtree] declined reason={reason} scope=call layer=0 ")
    assert any(f"{name}=" in line for name in changes), line


def test_what_is_served_has_nothing_against_it() -> None:
    """The calls above differ from this one in one thing; if this one were declined they would prove nothing."""
    assert why_not(ARGUMENTS) is None


def test_every_reason_of_the_contract_has_a_test() -> None:
    assert {row.reason for row in contract.switches()} <= {reason for reason, _ in DECLINED}


@pytest.mark.parametrize(("fewer", "reason"), [(0, "too_many_tiles"), (1, "device")])
def test_tiles_are_counted_in_32_bits(fewer: int, reason: str) -> None:
    """The smallest room for indices that is too much, in the configuration that has the smaller tiles and row blocks:
    24 rows are one row block, and each of two requests may have a tile that is not full.
    """
    indices = 32 * MAX_TILES - 2 * (3 + 31) - fewer
    changed = dict(kv_indices=torch.empty(indices, dtype=torch.int32, device="meta"))
    assert why_not({**ARGUMENTS, **changed}) == reason


def test_another_device_than_the_kernels() -> None:
    assert why_not(ARGUMENTS, "cuda:1") == "device"


def test_a_call_that_is_no_verify_call(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(answer="stock's answer")
    bench.router.context = None
    for _ in range(3):
        assert bench.router(**ARGUMENTS) == "stock's answer"
    assert bench.ledger.counts == {("stock", "forward_mode"): 3}
    assert capsys.readouterr().err == "[kdtree] declined reason=forward_mode scope=call such calls run stock\n"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (tuple(ARGUMENTS.values())[:5], {}),
        ((CASE.q,), ARGUMENTS),
        (tuple(range(40)), {}),
        ((), {**ARGUMENTS, "unknown": 1}),
    ],
    ids=["none", "too few", "one twice", "too many", "unknown"],
)
def test_a_wrong_call_gets_the_stock_functions_words(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bench = Bench()
    with pytest.raises(TypeError, match=r"extend_attention_fwd\(\)"):
        bench.router(*args, **kwargs)
    assert bench.kernel.calls == []


class NoValues(torch.Tensor):
    """A tensor that must not be looked into."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in (
            "item",
            "tolist",
            "__bool__",
            "__int__",
            "__float__",
            "cpu",
            "numpy",
            "max",
            "equal",
            "eq",
        ):
            raise AssertionError(f"{func.__name__} reads values")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("reason", sorted({reason for reason, _ in DECLINED} - {"unexpected_arguments"}))
def test_no_decision_reads_a_value(reason: str) -> None:
    changes = next(changes for other, changes in DECLINED if other == reason)
    opaque = {
        name: value.as_subclass(NoValues) if isinstance(value, torch.Tensor) else value
        for name, value in {**ARGUMENTS, **changes}.items()
    }
    assert why_not(opaque) == reason


@pytest.mark.parametrize(("reason", "changes"), DECLINED, ids=[f"{r}-{'-'.join(c)}" for r, c in DECLINED])
def test_no_line_prints_what_is_in_a_tensor(
    reason: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the device, and fail under a capture."""

    def read(tensor: torch.Tensor, **options: Any) -> str:
        raise AssertionError("reads values")

    monkeypatch.setattr(torch.Tensor, "__repr__", read)
    bench = Bench()
    bench.router.stock = lambda *args, **kwargs: None
    bench.run({**ARGUMENTS, **changes})
    assert bench.ledger.counts == {("stock", reason): 1}


# The memory of the last served call.


def change_one(changes: dict[str, Any]) -> tuple[Bench, str | None]:
    """Serves a call, then one that differs in `changes`: what the router does with the second."""
    bench = Bench()
    bench.run(ARGUMENTS)
    bench.router.stock = lambda *args, **kwargs: None
    bench.run({**ARGUMENTS, **changes})
    reasons = [reason for route, reason in bench.ledger.counts if route == "stock"]
    return bench, reasons[0] if reasons else None


@pytest.mark.parametrize(("reason", "changes"), DECLINED, ids=[f"{r}-{'-'.join(c)}" for r, c in DECLINED])
def test_a_served_call_opens_no_door_for_the_next_one(reason: str, changes: dict[str, Any]) -> None:
    assert change_one(changes)[1] == reason


def test_the_layers_of_a_step_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str | None] = []
    monkeypatch.setattr("kdtree_patch.route.decide", lambda *args: decided.append(decide(*args)))
    bench = Bench()
    for layer in range(5):
        fresh = {name: ARGUMENTS[name].clone() for name in ("q_extend", "k_extend", "v_extend", "o_extend")}
        bench.run({**ARGUMENTS, **fresh, "v_buffer": POOL[..., :512]}, layer=layer)
    assert decided == [None] and len(bench.kernel.calls) == 5
    # The next step has longer prefixes.
    bench.run({**ARGUMENTS, "kv_indices": torch.zeros(9, dtype=torch.int64)})
    assert decided == [None, None]


# The memory of the last declined call.

REMEMBERED = [(reason, changes) for reason, changes in DECLINED if reason != "unexpected_arguments"]
remembered = pytest.mark.parametrize(
    ("reason", "changes"), REMEMBERED, ids=[f"{r}-{'-'.join(c)}" for r, c in REMEMBERED]
)


@remembered
@pytest.mark.parametrize("positional", [0, 13, 16])
def test_the_same_offence_is_not_decided_twice(
    reason: str, changes: dict[str, Any], positional: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tensors of the next layer, which are others of the same kind."""
    asked: list[object] = []
    monkeypatch.setattr("kdtree_patch.route.switched_on", lambda call: asked.append(call) or switched_on(call))
    bench = Bench()
    bench.router.stock = lambda *args, **kwargs: None
    for _ in range(3):
        bench.run({**ARGUMENTS, **changes}, positional=positional)
    assert bench.ledger.counts == {("stock", reason): 3}
    assert len(asked) == 1


@pytest.mark.parametrize(("reason", "changes"), DECLINED, ids=[f"{r}-{'-'.join(c)}" for r, c in DECLINED])
def test_a_declined_call_shuts_no_door_for_the_next_one(reason: str, changes: dict[str, Any]) -> None:
    bench, case = Bench(kernel=FakeKernel()), a_case()
    stock, bench.router.stock = bench.router.stock, lambda *args, **kwargs: None
    bench.run({**ARGUMENTS, **changes})
    bench.router.stock = stock
    bench.run(arguments(case))
    assert bench.served == "kernel 1, stock 0"
    assert rel(case.out, reference(case)) < 1e-3


@remembered
def test_another_offence_has_its_own_reason(reason: str, changes: dict[str, Any]) -> None:
    other = dict(kv_indices=CASE.kv_indices.short()) if reason != "index_dtype" else dict(sinks=torch.zeros(2))
    bench = Bench()
    bench.router.stock = lambda *args, **kwargs: None
    for changed in (changes, other, changes):
        bench.run({**ARGUMENTS, **changed})
    (name,) = {"index_dtype", "sinks"} & {name for _, name in bench.ledger.counts} - {reason}
    assert bench.ledger.counts == {("stock", reason): 2, ("stock", name): 1}


def test_an_offence_that_was_mended_in_place_is_none_any_more() -> None:
    """The same objects, which have been given another storage or another type."""
    for name, spoil in (("kv_indptr", other_type), ("kv_indices", strided), ("custom_mask", lambda t: t.unsqueeze_(0))):
        bench, call = Bench(kernel=FakeKernel()), arguments(a_case())
        good = call[name].clone()
        spoil(call[name])
        bench.router.stock = lambda *args, **kwargs: None
        bench.run(call)
        assert bench.served == "kernel 0, stock 0"
        call[name].data = good
        bench.run(call)
        assert bench.served == "kernel 1, stock 0", name


def test_a_length_that_is_a_tensor_now_is_not_compared_with_the_one_before() -> None:
    """That would read it, and wait for the device."""
    bench = Bench()
    bench.router.stock = lambda *args, **kwargs: None
    bench.run({**ARGUMENTS, "max_len_extend": 2})
    bench.run({**ARGUMENTS, "max_len_extend": torch.tensor(2).as_subclass(NoValues)})
    assert bench.ledger.counts == {("stock", "q_len"): 1, ("stock", "max_len_unknown"): 1}


def test_the_same_offence_in_a_capture_counts_for_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.router.stock = lambda *args, **kwargs: None
    call = {**ARGUMENTS, "k_buffer": fp8(POOL), "v_buffer": fp8(POOL)[..., :512]}
    bench.run(call)
    monkeypatch.setattr(VerifyRouter, "_capturing", lambda self: True)
    bench.router.capture_begins(2)
    for layer in range(3):
        bench.run(call, layer=layer)
    monkeypatch.setattr(VerifyRouter, "_capturing", lambda self: False)
    assert bench.ledger.counts == {("stock", "kv_dtype"): 1}
    bench.router.replay_begins(2)
    assert bench.ledger.counts == {("stock", "kv_dtype"): 4}


def strided(tensor: torch.Tensor) -> None:
    """Every second element of a storage twice as long, in the same tensor."""
    tensor.set_(torch.zeros(2 * len(tensor), dtype=tensor.dtype).untyped_storage(), 0, tensor.shape, (2,))  # type: ignore[call-overload]


def other_type(tensor: torch.Tensor) -> None:
    tensor.data = tensor.short()


# What a step's tensors may become between two calls that have the same objects, or what is left of them.
AFTERWARDS: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("indices gone", "index_dtype", lambda call: call.update(kv_indices=None)),
    ("mask offsets gone", "index_dtype", lambda call: call.update(mask_indptr=None)),
    ("mask strided", "layout", lambda call: strided(call["custom_mask"])),
    ("indices strided", "layout", lambda call: strided(call["kv_indices"])),
    ("offsets cut", "layout", lambda call: call["kv_indptr"].resize_(1)),
    ("mask offsets cut", "layout", lambda call: call["mask_indptr"].resize_(1)),
    ("another batch", "q_len", lambda call: call["qo_indptr"].resize_(2)),
    ("mask in two dimensions", "layout", lambda call: call["custom_mask"].unsqueeze_(0)),
    ("offsets of another type", "index_dtype", lambda call: other_type(call["kv_indptr"])),
]


@pytest.mark.parametrize(("reason", "change"), [row[1:] for row in AFTERWARDS], ids=[row[0] for row in AFTERWARDS])
def test_what_has_changed_since_is_seen(reason: str, change: Callable[[dict[str, Any]], object]) -> None:
    bench, call = Bench(), arguments(a_case())
    bench.kernel.launch = lambda *args: None  # type: ignore[method-assign]
    bench.router.stock = lambda *args, **kwargs: None
    bench.run(call)
    assert bench.ledger.counts == {("kernel", "verify"): 1}
    change(call)
    bench.run(call)
    assert bench.ledger.counts == {("kernel", "verify"): 1, ("stock", reason): 1}
    assert why_not(call) == reason  # and so it is the first time


def test_a_chain_after_a_tree_and_a_tree_after_a_chain() -> None:
    bench = Bench()
    for mask in ("random", "none", "random"):
        bench.run(arguments(a_case(mask=mask)))
        assert (bench.kernel.calls[-1]["custom_mask"] is None) == (mask == "none")
    assert bench.served == "kernel 3, stock 0"


def test_the_router_keeps_no_tensor_alive() -> None:
    bench = Bench()
    bench.kernel.launch = lambda *args: None  # type: ignore[method-assign]
    case = a_case()
    kept = {name: weakref.ref(value) for name, value in arguments(case).items() if isinstance(value, torch.Tensor)}
    bench.run(arguments(case))
    bench.router.stock = lambda *args, **kwargs: None
    bench.run(arguments(case, sinks=case.q))
    del case
    gc.collect()
    assert [name for name, tensor in kept.items() if tensor() is not None] == []


# When the kernel fails.


class FakeCudaError(RuntimeError):
    def __init__(self, status: int, name: str = "status"):
        super().__init__(f"CUDA error {status}")
        setattr(self, name, status)


@pytest.mark.parametrize("error", [RuntimeError("no"), FakeCudaError(1), FakeCudaError(2), MemoryError("none left")])
def test_a_failed_launch_turns_the_kernel_off(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """One ERROR line; this call and all later ones run stock, which writes all of the output."""
    case, bench = a_case(), Bench(kernel=FakeKernel(error=error))
    case.out.fill_(torch.nan)
    for layer in range(3):
        bench.run(arguments(case), layer=layer)
    assert bench.served == "kernel 1, stock 3"
    assert bench.ledger.disabled == "launch_failed"
    assert bench.ledger.counts == {("stock", "launch_failed"): 3}
    assert rel(case.out, reference(case)) < 1e-3
    errors = [line for line in capsys.readouterr().err.splitlines() if "shapes" not in line]
    assert len(errors) == 1
    assert errors[0].startswith("[kdtree] ERROR disabled reason=launch_failed ") and str(error) in errors[0]


def test_the_errors_that_leave_no_context() -> None:
    """Those of cuda.h: ECC, NVLink, contained; then the faults of a kernel, up to the tensor memory leak."""
    assert sorted(FATAL_STATUS) == [214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721]


@pytest.mark.parametrize("status", sorted(FATAL_STATUS))
@pytest.mark.parametrize("name", ["status", "error_code"])
def test_an_error_that_took_the_context_is_not_swallowed(status: int, name: str) -> None:
    bench = Bench(kernel=FakeKernel(error=FakeCudaError(status, name)))
    with pytest.raises(FakeCudaError):
        bench.run(ARGUMENTS)
    assert bench.served == "kernel 1, stock 0"
    assert bench.ledger.disabled is None


def test_an_interrupt_is_not_swallowed() -> None:
    bench = Bench(kernel=FakeKernel(error=KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        bench.run(ARGUMENTS)


def test_one_ledger_for_all_backends_of_a_process() -> None:
    first, second = Bench(kernel=FakeKernel(error=RuntimeError("no"))), Bench()
    second.router.ledger = first.ledger
    first.run(ARGUMENTS)
    second.run(ARGUMENTS)
    assert second.served == "kernel 0, stock 1"


# The shapes line.


def shapes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "shapes" in line]


def test_the_shapes_line_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    """The reference case. Its pool has 195,012 slots, so it is a tensor without memory here."""
    case = a_case(prefixes=[21], q_len=9, heads=8)
    bench = Bench()
    bench.kernel.launch = lambda *args: None  # type: ignore[method-assign]
    pool = torch.as_strided(torch.empty(1024, dtype=torch.float16), (195_012, 1, 576), (0, 576, 1))
    layer, batch = a_layer(), a_batch(seq_lens_cpu=torch.tensor([21]))
    bench.router.context = (layer, batch)
    bench.router(**arguments(case, k_buffer=pool, v_buffer=pool[..., :512]))
    assert capsys.readouterr().err == (
        "[kdtree] shapes q=(9, 8, 576) kv_buf=(195012, 576) bs=1 q_len=9 Dl=512 Dr=64 kv_len_max=21 scale=0.14468 "
        "mask=(270,)\n"
    )


def test_once_for_each_new_shape(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench()
    for changes in (
        dict(),
        dict(prefixes=[2, 9]),  # another mask, which does not count
        dict(),
        dict(prefixes=[2, 9, 0]),
        dict(q_len=2),
        dict(heads=1),
        dict(mask="none"),
        dict(slots=40),
        dict(),
    ):
        slots = changes.pop("slots", 20)
        bench.run(arguments(a_case(**changes, extra_slots=slots - sum(changes.get("prefixes", [4, 0])))))
    lines = shapes(capsys)
    assert len(lines) == len(set(lines)) == 6
    assert lines[0].endswith("mask=(30,)") and lines[4].endswith("mask=None")


def test_shadow_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    Bench(Settings(mode="shadow", validate=True)).run(ARGUMENTS)
    assert len(shapes(capsys)) == 1


def test_a_line_is_no_reason_to_lose_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths of a shape that nobody foresaw: served the first time as the second, and said once."""
    bench = Bench()
    for _ in range(2):
        bench.router.context = (a_layer(), a_batch(seq_lens_cpu=torch.zeros(2, 2)))
        assert bench.router(**ARGUMENTS) is None
    assert bench.ledger.counts == {("kernel", "verify"): 2}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[kdtree] WARNING the shapes line failed: RuntimeError: ")


def test_an_error_that_took_the_context_is_not_swallowed_by_the_shapes_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*args: Any) -> Any:
        raise FakeCudaError(700)

    monkeypatch.setattr("kdtree_patch.route.longest_prefix", fault)
    with pytest.raises(FakeCudaError):
        Bench().run(ARGUMENTS)


@pytest.mark.parametrize(
    ("batch", "bs", "capturing", "expected"),
    [
        (dict(seq_lens_cpu=torch.tensor([3, 21, 7])), 3, False, 21),
        (dict(seq_lens_cpu=[3, 21, 7]), 3, True, 21),
        (dict(seq_lens_cpu=torch.tensor([3]).to("meta"), seq_lens_sum=5), 1, True, 5),
        (dict(seq_lens_cpu=None, seq_lens_sum=21), 1, True, 21),
        (dict(seq_lens_cpu=None, seq_lens_sum=21), 2, True, "?"),
        (dict(seq_lens_cpu=None, seq_lens_sum=None), 1, True, "?"),
        (dict(seq_lens_cpu=torch.tensor([])), 2, True, "?"),
        (dict(), 2, False, 6),
        (dict(seq_lens_cpu=None, seq_lens_sum=None), 1, False, 4),
        (dict(seq_lens_cpu="odd"), 1, False, "?"),
    ],
)
def test_longest_prefix(batch: dict[str, Any], bs: int, capturing: bool, expected: int | str) -> None:
    """Never from the device in a capture: there the index tensor is one that has no values."""
    kv_indptr = torch.tensor([0, 4, 10, 10, 99], device="meta" if capturing else "cpu")
    assert longest_prefix(SimpleNamespace(**batch), kv_indptr, bs, capturing) == expected


# What a declined call costs is measured here so that nobody adds to it unawares.


def cost(function: Callable[[], object], repeat: int = 300) -> float:
    """Microseconds, the best of many: a busy machine makes single runs slow, not fast."""
    import timeit

    return min(timeit.repeat(function, number=20, repeat=repeat)) / 20 * 1e6


def test_what_a_call_costs() -> None:
    """A call that is no verify call adds under 2 us, and to recognise a served one is far cheaper than to decide."""
    bench = Bench()
    bench.kernel.launch = lambda *args: None  # type: ignore[method-assign]
    bench.router.stock = stock = lambda *args, **kwargs: None
    values = tuple(ARGUMENTS.values())[:16]
    rest = dict(list(ARGUMENTS.items())[16:])
    context, bench.router.context = bench.router.context, None
    log.set_level("error")
    bare = cost(lambda: stock(*values, **rest))
    assert cost(lambda: bench.router(*values, **rest)) - bare < 2
    bench.router.context = context
    bench.router(*values, **rest)
    served, _ = bench.router._remembered[False]
    assert served.resembles(ARGUMENTS)
    cpu = torch.device("cpu")
    assert cost(lambda: served.resembles(ARGUMENTS)) < 0.8 * cost(lambda: decide(ARGUMENTS, cpu))


@pytest.mark.parametrize("reason", sorted({reason for reason, _ in REMEMBERED} | {"launch_failed"}))
def test_what_a_declined_call_costs(reason: str) -> None:
    """Under 2 us on a machine on which one Python function that passes these 25 arguments on adds 0.2 us, measured in
    that unit. To decide the call anew is 15 to 40 of them.
    """
    log.set_level("error")
    bench = Bench()
    bench.router.stock = stock = lambda *args, **kwargs: None
    bench.ledger.disabled = reason if reason == "launch_failed" else None
    changed = {**ARGUMENTS, **next((changes for other, changes in DECLINED if other == reason), {})}
    values, rest = tuple(changed.values())[:16], dict(list(changed.items())[16:])
    bench.router(*values, **rest)
    assert bench.ledger.counts == {("stock", reason): 1}

    def passed_on(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    bare = cost(lambda: stock(*values, **rest))
    unit = cost(lambda: passed_on(*values, **rest)) - bare
    added = cost(lambda: bench.router(*values, **rest)) - bare
    print(f"{reason}: {added:.2f} us, {added / unit:.1f} times {unit:.2f} us")
    assert added < 10 * unit


def test_says_now_and_then_how_many_calls_were_served(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    ledger.counts["stock", "forward_mode"] = 12
    for _ in range(500):
        ledger.count_routed("kernel", "verify")
    lines = [line for line in capsys.readouterr().err.splitlines() if "calls" in line]
    assert lines == ["[kdtree] calls served=10 forward_mode=12", "[kdtree] calls served=100 forward_mode=12"]


@pytest.mark.parametrize("validate_every", [1, 1000])
def test_shadow_says_it_of_the_calls_that_it_compares(validate_every: int, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(Settings(mode="shadow", validate=True, validate_every=validate_every))
    for _ in range(12):
        bench.run(ARGUMENTS)
    lines = [line for line in capsys.readouterr().err.splitlines() if "calls" in line]
    assert lines == ["[kdtree] calls served=0 shadow=10"]
