"""SGLang's real Triton backend, patched through `sitecustomize`, against SGLang's own kernel and against float64.

On a CPU the stock kernels run in Triton's interpreter, and ours is the same CUDA source compiled by g++. All of it in
float16, because in bfloat16 the interpreter's own products are wrong.

Tolerances: both kernels multiply float16 with float32 sums and round the weights and the result to float16, which alone
leaves 2.3e-4 to float64. Two results that are each that far from the truth are less than 1e-3 apart; every mistake that
this file knows of puts them 0.1 or more apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.lab import Lab, Outcome, Trial
from tests.support.reference import LATENT, attention, rel

REL_TO_STOCK = 1e-3

BATCHES = [
    Trial(heads=8, q_len=9, prefixes=[21]),
    Trial(heads=8, q_len=9, prefixes=[21], mask="none"),
    Trial(heads=8, q_len=9, prefixes=[0]),
    Trial(heads=8, q_len=9, prefixes=[40, 1, 17, 0]),
    Trial(heads=8, q_len=9, prefixes=[3, 55], mask="none"),
    Trial(heads=8, q_len=17, prefixes=[33, 5]),
    Trial(heads=3, q_len=1, prefixes=[1, 64, 31], max_context=128),
    Trial(heads=3, q_len=16, prefixes=[0, 16], mask="none"),
    Trial(heads=3, q_len=5, prefixes=[129, 2, 63, 64], max_context=256),
    Trial(heads=1, q_len=17, prefixes=[7]),
    Trial(heads=1, q_len=2, prefixes=[200], max_context=256),
]


def batch_name(trial: Trial) -> str:
    return f"h{trial.heads}-q{trial.q_len}-p{'.'.join(map(str, trial.prefixes))}-{trial.mask}"


def assert_served(outcome: Outcome, calls: int = 1) -> None:
    assert outcome.routed == {("kernel", "verify"): calls}


def assert_right(outcome: Outcome) -> None:
    """Ours agrees with stock, and is no further from the truth than stock is (give or take a tenth)."""
    right = attention(**outcome.arguments)
    assert rel(outcome.ours, outcome.stock) < REL_TO_STOCK
    assert rel(outcome.ours, right) <= 1.1 * rel(outcome.stock, right)


@pytest.mark.parametrize("trial", BATCHES, ids=batch_name)
def test_batches(lab: Lab, trial: Trial) -> None:
    outcome = lab.run(trial)
    assert_served(outcome)
    assert outcome.ours.dtype == torch.float16
    assert_right(outcome)


# Stock rounds queries and weights to the pool's type before it multiplies: so far is it from the truth here.
FP8_REL = {torch.float8_e4m3fn: 0.2, torch.float8_e5m2: 0.3}


@pytest.mark.parametrize("scales", [(None, None), (0.5, 0.25)], ids=str)
@pytest.mark.parametrize("kv_dtype", FP8_REL, ids=str)
def test_fp8_pool(lab: Lab, kv_dtype: torch.dtype, scales: tuple[float | None, float | None]) -> None:
    """The prefix is scaled and the drafts are not, by stock as by us; our queries and weights stay what they are, so
    that we are as near to the truth as with a pool of float16, and all of the distance to stock is stock's own.
    """
    pool = dict(kv_dtype=kv_dtype, k_scale=scales[0], v_scale=scales[1])
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[21, 0, 5, 40], **pool))
    assert_served(outcome)
    right = attention(**outcome.arguments)
    assert outcome.pool_after.dtype == torch.uint8 and outcome.arguments["k_scale"] == (scales[0] or 1.0)
    ours, stock = rel(outcome.ours, right), rel(outcome.stock, right)
    assert ours < 2.6e-4 and ours < stock < FP8_REL[kv_dtype]
    assert rel(outcome.ours, outcome.stock) < 1.1 * stock
    others = dict(k_scale=1.0, v_scale=1.0) if scales[0] else dict(k_scale=0.5, v_scale=0.25)
    assert rel(outcome.ours, attention(**outcome.arguments | others)) > 0.1, "scales do not matter on this input"


def test_kv_store_happens_once_and_nowhere_else(lab: Lab) -> None:
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[21, 4], poison=False))
    before, after, drafts = outcome.arguments["kv_pool"], outcome.pool_after, outcome.draft_slots
    assert outcome.stores == 1
    assert torch.equal(after[drafts], outcome.arguments["k"])
    untouched = torch.ones(len(after), dtype=torch.bool)
    untouched[drafts] = False
    assert torch.equal(after[untouched], before[untouched])


def test_siblings_differ_when_they_see_each_other(lab: Lab) -> None:
    """Drafts 1 and 2 are children of draft 0. Whether 2 sees 1 must change the row of 2, and that row alone."""
    apart = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    together = apart.clone()
    together[2, 1] = True
    strangers, friends = (lab.run(Trial(heads=8, q_len=3, prefixes=[21], mask=mask)) for mask in (apart, together))
    for outcome in (strangers, friends):
        assert_served(outcome)
        assert_right(outcome)
    assert torch.equal(strangers.ours[:2], friends.ours[:2])
    assert rel(strangers.ours[2], friends.ours[2]) > 0.1


def test_a_draft_that_sees_nothing_is_zero(lab: Lab) -> None:
    """With an empty prefix and an empty mask row the stock kernel divides 0 by 0. Ours gives 0; the rest is right."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    outcome = lab.run(Trial(heads=8, q_len=4, prefixes=[0], mask=mask))
    assert_served(outcome)
    seeing = [0, 1, 3]
    assert torch.equal(outcome.ours[2], torch.zeros_like(outcome.ours[2]))
    assert rel(outcome.ours[seeing], outcome.stock[seeing]) < REL_TO_STOCK


# The mistakes that were made before us. Each test also shows that its input tells the mistake from the right result.


def test_30_column_mask_with_the_prefix_alone(lab: Lab) -> None:
    """Attention over `kv_indices` alone misses the drafts: 21 columns instead of 30, no crash, no NaN."""
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[21]))
    arguments = dict(outcome.arguments)
    assert arguments["custom_mask"].shape == (270,)
    visible = arguments["custom_mask"].view(9, 30).clone()
    visible[:, 21:] = False
    prefix_alone = attention(**{**arguments, "custom_mask": visible.flatten()})
    assert rel(outcome.ours, prefix_alone) > 0.1
    assert_right(outcome)


@pytest.mark.parametrize("prefixes", [[21], [3, 21]], ids=str)
def test_30_column_mask_with_a_stride_of_21(lab: Lab, prefixes: list[int]) -> None:
    """A mask row is as wide as its own request's prefix and drafts, not as the longest prefix of the batch.

    The mistake shows wherever the cells that it reads differ, so the drafts see nothing but themselves.
    """
    q_len, longest = 9, max(prefixes)
    outcome = lab.run(Trial(heads=8, q_len=q_len, prefixes=prefixes, mask=torch.eye(q_len, dtype=torch.bool)))
    arguments = dict(outcome.arguments)
    mask, start, wrong = arguments["custom_mask"], 0, []
    for prefix in prefixes:
        columns = prefix + q_len
        cells = start + longest * torch.arange(q_len)[:, None] + torch.arange(columns)
        wrong.append(mask[cells.clamp(max=len(mask) - 1)].flatten())
        start += q_len * columns
    wrong_stride = attention(**{**arguments, "custom_mask": torch.cat(wrong)})
    assert rel(outcome.ours, wrong_stride) > 0.1
    assert_right(outcome)


def test_mask_indptr_length_when_the_batch_shrinks_and_grows(lab: Lab) -> None:
    """`mask_indptr` is a buffer for the largest batch, of which each call uses bs + 1 entries."""
    for prefixes in ([9, 30, 2, 14], [21], [5, 0, 33], [8, 13]):
        outcome = lab.run(Trial(heads=8, q_len=9, prefixes=prefixes))
        assert_served(outcome)
        assert_right(outcome)


def test_v_is_the_first_512_columns(lab: Lab) -> None:
    """A latent row is [latent 512 | rope 64]. Values taken from its last 512 columns crash nothing."""
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[21]))
    arguments = dict(outcome.arguments)
    # The scores stay as they were when q, k and the pool are all turned by 64 columns; the values do not.
    turned = {name: arguments[name].roll(-64, dims=-1) for name in ("q", "k", "kv_pool")}
    rope_first = attention(**{**arguments, **turned, "v": turned["k"][..., :LATENT]})
    assert rel(outcome.ours, rope_first) > 0.1
    assert_right(outcome)


# What the patch does not serve. The stock kernel computes each of these, and what it computes is another result.


def assert_declined(outcome: Outcome, reason: str) -> None:
    """Its own reason, one line, and the stock kernel's result to the bit."""
    assert outcome.routed == {("stock", reason): 1}
    assert torch.equal(outcome.ours, outcome.stock)
    lines = [line for line in outcome.log if " declined " in line]
    assert [line.split()[2] for line in lines] == [f"reason={reason}"]


UNSERVED: list[tuple[str, dict[str, Any]]] = [
    ("logit_cap", dict(layer=dict(logit_cap=3.0))),
    ("sliding_window", dict(layer=dict(sliding_window_size=16), around="sliding_window")),
    ("sinks", dict(options=dict(sinks=torch.full((8,), 20.0)))),
    ("xai_temperature", dict(layer=dict(xai_temperature_len=4))),
    ("not_causal", dict(layer=dict(is_cross_attention=True), mask="none")),
    ("score_mod", dict(options=dict(score_mod="relative_bias", aux_tensors=[torch.ones(9, 8, 30)]))),
]


@pytest.mark.parametrize(("reason", "asked"), UNSERVED, ids=[reason for reason, _ in UNSERVED])
def test_what_is_not_served_has_a_reason_of_its_own(lab: Lab, release: str, reason: str, asked: dict[str, Any]) -> None:
    if (reason, release) == ("score_mod", "0.5.12"):
        pytest.skip(f"SGLang {release} has no score_mod")
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[40], **asked))
    assert_declined(outcome, reason)
    assert rel(outcome.ours, attention(**outcome.arguments)) > 0.05


def test_a_plain_layer_of_a_model_with_windows_is_served(lab: Lab) -> None:
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[40], around="sliding_window"))
    assert_served(outcome)
    assert_right(outcome)


def test_deterministic_inference_leaves_the_backend_alone(lab: Lab) -> None:
    """Another kernel of SGLang computes it, which the router would never see."""
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[40], mask="none", around="deterministic"))
    assert not outcome.routed_backend and outcome.routed == {}
    assert [line.split()[2] for line in outcome.log if " declined " in line] == ["reason=deterministic"]


def test_decode_context_parallelism_leaves_the_backend_alone(lab: Lab, release: str) -> None:
    """Each rank has a part of the prefix only, and the call asks for the log-sum-exp by which parts are merged."""
    if release == "0.5.12":
        pytest.skip(f"SGLang {release} has no decode context parallelism")
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[], around="context_parallel"))
    assert not outcome.routed_backend and outcome.routed == {}
    assert [line.split()[2] for line in outcome.log if " declined " in line] == ["reason=context_parallel"]


# Chains and pages.


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("prefixes", [[21], [200, 0, 64, 127]], ids=str)
def test_chains_on_pages_of_every_size(lab: Lab, page_size: int, prefixes: list[int]) -> None:
    """No mask, and pages whose slots follow one another: kv_indices are per token all the same."""
    outcome = lab.run(Trial(heads=8, q_len=5, prefixes=prefixes, mask="none", page_size=page_size, max_context=256))
    assert_served(outcome)
    assert_right(outcome)


@pytest.mark.parametrize("page_size", [16, 64])
def test_trees_on_larger_pages(lab: Lab, page_size: int) -> None:
    """SGLang 0.5.23 has them."""
    outcome = lab.run(Trial(heads=8, q_len=9, prefixes=[40, 130], page_size=page_size, max_context=256))
    assert_served(outcome)
    assert_right(outcome)
