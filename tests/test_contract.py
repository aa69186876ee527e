"""The contract on the signatures of three real releases, and on what a future release or a fork might make of them."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kdtree_patch import contract
from tests import stand_in
from tests.stand_in import BACKEND, BATCH, LAYER, NEW, OLD, Drift

RELEASES = ("0.5.9", "0.5.12", "0.5.23")
INNER_FILE = {"0.5.9": OLD, "0.5.12": OLD, "0.5.23": NEW}

Load = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports the backend module of a stand-in: the names of a release, changed by `drifts`."""

    def load(version: str, *drifts: Drift) -> ModuleType:
        stand_in.forget_sglang()
        monkeypatch.syspath_prepend(stand_in.write(tmp_path, version, *drifts))
        return importlib.import_module("sglang.srt.layers.attention.triton_backend")

    yield load
    stand_in.forget_sglang()


@pytest.mark.parametrize("version", RELEASES)
def test_known_releases_pass(load: Load, version: str) -> None:
    assert contract.check(load(version)) == []


@pytest.mark.parametrize("version", RELEASES)
def test_the_inner_module_is_not_imported(load: Load, version: str) -> None:
    """0.5.23's would create a CUDA context."""
    boom = Drift(
        INNER_FILE[version], "def extend_attention_fwd", "raise RuntimeError('imported')\ndef extend_attention_fwd"
    )
    assert contract.check(load(version, boom)) == []


FORWARD_0523 = "score_mod=None, aux_tensors=None)"
DRIFTS = [
    # Names that went away or were renamed.
    (Drift(BACKEND, "class TritonAttnBackend", "class TritonBackend"), ["TritonAttnBackend: missing class"]),
    (
        Drift(BACKEND, "def forward_extend", "def forward_prefill"),
        ["TritonAttnBackend.forward_extend: missing method"],
    ),
    (
        Drift(BACKEND, "def __init__(self, model_runner", "def __init__(self, runner"),
        ["TritonAttnBackend.__init__(model_runner): missing"],
    ),
    (
        Drift(
            BACKEND,
            "layer, forward_batch, save_kv_cache=True, sinks=None, score_mod",
            "layer, batch, save_kv_cache=True, sinks=None, score_mod",
        ),
        [
            "TritonAttnBackend.forward_extend(forward_batch): missing",
            "TritonAttnBackend.forward_extend(batch): unknown",
        ],
    ),
    (
        Drift(BATCH, "class ForwardMode", "class Mode"),
        [f"ForwardMode: missing class in {contract.HOMES['ForwardMode']}"],
    ),
    (Drift(BATCH, "def is_target_verify", "def is_verify"), ["ForwardMode.is_target_verify: missing"]),
    (Drift(BATCH, "    forward_mode: 'object'\n", "    mode: 'object'\n"), ["ForwardBatch.forward_mode: missing"]),
    (Drift(LAYER, "layer_id", "index"), ["RadixAttention.layer_id: missing"]),
    (
        Drift(NEW, "extend_attention_fwd", "extend_attention"),
        [f"extend_attention_fwd: missing function in {contract.INNER_HOMES[1]}"],
    ),
    (Drift(NEW, "kv_indptr, ", ""), ["extend_attention_fwd(kv_indptr): missing"]),
    (
        Drift(NEW, "k_buffer, v_buffer", "kv_buffer"),
        [
            "extend_attention_fwd(k_buffer): missing",
            "extend_attention_fwd(v_buffer): missing",
            "extend_attention_fwd(kv_buffer): unknown",
        ],
    ),
    (
        Drift(BACKEND, "def init_forward_metadata_out_graph", "def init_metadata_out_graph"),
        [
            "TritonAttnBackend: missing methods init_forward_metadata_capture_cuda_graph and "
            "init_forward_metadata_replay_cuda_graph or init_forward_metadata_out_graph"
        ],
    ),
    (
        Drift(BACKEND, "in_capture=False", "capturing=False"),
        ["TritonAttnBackend.init_forward_metadata_out_graph(in_capture): missing"],
    ),
    (
        Drift(BATCH, "    batch_size: 'object'\n", "    size: 'object'\n"),
        ["ForwardBatch.batch_size: missing"],
    ),
    # Names that came.
    (
        Drift(BACKEND, FORWARD_0523, "score_mod=None, aux_tensors=None, tree=None)"),
        ["TritonAttnBackend.forward_extend(tree): unknown"],
    ),
    (
        Drift(BACKEND, FORWARD_0523, "score_mod=None, aux_tensors=None, **extra)"),
        ["TritonAttnBackend.forward_extend(**extra): unknown"],
    ),
    (
        Drift(NEW, "identity_kv_indices=False", "identity_kv_indices=False, q_descale=None"),
        ["extend_attention_fwd(q_descale): unknown"],
    ),
    (
        Drift(NEW, "identity_kv_indices=False", "identity_kv_indices=False, *, out_scale=1.0, **extra"),
        ["extend_attention_fwd(out_scale): unknown", "extend_attention_fwd(**extra): unknown"],
    ),
    (Drift(NEW, "(q_extend,", "(*args, q_extend,"), ["extend_attention_fwd(*args): unknown"]),
    # Names that kept their place and changed what their absence means.
    (Drift(NEW, "logit_cap=0.0", "logit_cap=30.0"), ["extend_attention_fwd(logit_cap=30.0): the default was 0.0"]),
    (
        Drift(NEW, "skip_prefix=False", "skip_prefix=None"),
        ["extend_attention_fwd(skip_prefix=None): the default was False"],
    ),
    (
        Drift(NEW, "window_kv_offsets=None", "window_kv_offsets=0"),
        ["extend_attention_fwd(window_kv_offsets=0): the default was None"],
    ),
    (Drift(NEW, "sinks=None", "sinks=NO_SINKS"), ["extend_attention_fwd(sinks='NO_SINKS'): the default was None"]),
]


@pytest.mark.parametrize(("drift", "violations"), DRIFTS, ids=[violations[0] for _, violations in DRIFTS])
def test_drift_is_declined_by_name(load: Load, drift: Drift, violations: list[str]) -> None:
    assert sorted(contract.check(load("0.5.23", drift))) == sorted(violations)


def test_an_inner_module_that_moved_again_is_named(load: Load, tmp_path: Path) -> None:
    module = load("0.5.23")
    (tmp_path / NEW).rename(tmp_path / "sglang" / "elsewhere.py")
    importlib.invalidate_caches()
    assert contract.check(module) == [f"extend_attention_fwd: no source in {' or '.join(contract.INNER_HOMES)}"]


def test_all_violations_are_named_at_once(load: Load) -> None:
    drifts = Drift(BATCH, "def is_target_verify", "def is_verify"), Drift(NEW, "kv_indptr, ", "")
    assert contract.check(load("0.5.23", *drifts)) == [
        "ForwardMode.is_target_verify: missing",
        "extend_attention_fwd(kv_indptr): missing",
    ]


def test_other_peoples_wrappers_are_looked_through(load: Load) -> None:
    module = load("0.5.23")
    stock = module.TritonAttnBackend.forward_extend

    @functools.wraps(stock)
    def polite(*args: object, **kwargs: object) -> object:
        return stock(*args, **kwargs)

    def opaque(self: object, *args: object, **kwargs: object) -> object:
        return stock(self, *args, **kwargs)

    module.TritonAttnBackend.forward_extend = polite
    assert contract.check(module) == []
    module.TritonAttnBackend.forward_extend = opaque
    assert "TritonAttnBackend.forward_extend(*args): unknown" in contract.check(module)


def inner_of(version: str) -> Callable[..., None]:
    """The inner function of a release, signature only, as the instance holds it."""
    scope: dict[str, Callable[..., None]] = {}
    exec(stand_in.files_of(version)[INNER_FILE[version]], scope)
    return torch.compiler.disable(scope["extend_attention_fwd"])


def an_instance(version: str, **changes: object) -> SimpleNamespace:
    attributes = dict(extend_attention_fwd=inner_of(version), num_draft_tokens=9, req_to_token=torch.zeros(2, 2))
    return SimpleNamespace(**{name: value for name, value in (attributes | changes).items() if value is not ...})


@pytest.mark.parametrize("version", RELEASES)
def test_instances_of_known_releases_pass(version: str) -> None:
    assert contract.check_instance(an_instance(version)) == []


@pytest.mark.parametrize("name", ["extend_attention_fwd", "num_draft_tokens", "req_to_token"])
def test_a_missing_attribute_is_named(name: str) -> None:
    instance = an_instance("0.5.23", **{name: ...})
    assert contract.check_instance(instance) == [f"TritonAttnBackend instance: missing attribute {name}"]


def test_a_replaced_inner_function_is_checked_again() -> None:
    """The source may say one thing, and what somebody put on the instance another."""

    def theirs(q_extend: object, *args: object) -> None: ...

    found = contract.check_instance(an_instance("0.5.23", extend_attention_fwd=theirs))
    assert "extend_attention_fwd(*args): unknown" in found and "extend_attention_fwd(kv_indptr): missing" in found


@pytest.mark.parametrize(
    ("value", "neutral", "expected"),
    [
        (0.0, 0.0, True),
        (0, 0.0, True),
        (1, 1.0, True),
        (None, None, True),
        (False, False, True),
        (30.0, 0.0, False),
        (False, 0.0, False),  # a flag is no number, although False == 0
        (0, False, False),
        (1, True, False),
        (torch.tensor(1.0), 1.0, False),  # never read to find out
        (torch.zeros(8), None, False),
        ("", None, False),
    ],
)
def test_is_neutral(value: object, neutral: object, expected: bool) -> None:
    assert contract.is_neutral(value, neutral) is expected


def test_source_and_signature_say_the_same() -> None:
    text = "def f(a, /, b, c=1, *rest, d, e=-1.5, g=NAME, **more): pass"
    scope: dict[str, object] = {"NAME": "NAME"}
    exec(text, scope)
    assert contract.source_parameters(text, "f") == contract._live_parameters(scope["f"])  # type: ignore[arg-type]
    assert contract.source_parameters(text, "g") is None


def test_the_table_is_fit_to_be_read() -> None:
    seen = set()
    for row in contract.TABLE:
        assert row.why and (row.where, row.name) not in seen
        assert (row.neutral is contract.ANY) == (row.reason == ""), row
        seen.add((row.where, row.name))


def test_every_parameter_of_the_known_releases_is_in_the_table() -> None:
    """The other way round too: a row for a parameter that no release has is a row about nothing."""
    parameters = set().union(*(inspect.signature(inner_of(version)).parameters for version in RELEASES))
    assert {row.name for row in contract.rows(contract.INNER)} == parameters


def test_every_row_of_a_class_that_is_missing_is_violated():
    outcomes = contract.outcomes(ModuleType("empty"))
    assert [row for row, _ in outcomes] == list(contract.TABLE)
    for row, outcome in outcomes:
        if row.where in (contract.BACKEND, contract.INIT, contract.FORWARD):
            assert outcome == (contract.VIOLATED if row.required else contract.ABSENT)
        if row.where in (contract.INSTANCE, contract.DATA):
            assert outcome == contract.LATER
