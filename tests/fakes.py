"""The two kernels of a routed call, as plain torch: SGLang's inner function with its real signature, and ours.

Both are right, to float64, unless told otherwise, and both keep what they were called with. `FakeKernel.mark` is added
to what ours writes, so that a test can tell whose result it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kdtree_patch.tiles import CONFIGS
from tests.support.cases import Case, make_case
from tests.support.reference import attention

# The inner function's parameters, release by release.
COMMON = (
    "q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, "
    "is_causal, mask_indptr, max_len_extend"
)
TAIL = (
    "sm_scale=None, logit_cap=0.0, skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None, "
    "window_kv_offsets=None, xai_temperature_len=-1"
)
SIGNATURES = {
    "0.5.9": f"{COMMON}, {TAIL}",
    "0.5.12": f"{COMMON}, k_scale, v_scale, {TAIL}",
    "0.5.23": (
        f"{COMMON}, k_scale, v_scale, {TAIL}, lse_extend=None, skip_prefix=False, skip_extend=False, page_size=1, "
        "score_mod=None, aux_tensors=None, extend_seq_lens_cpu=None, identity_kv_indices=False"
    ),
}


class Stock:
    """`function` is the inner function of a release; this object is what it has done."""

    def __init__(self, version: str = "0.5.23", answer: Any = None):
        self.calls: list[dict[str, Any]] = []
        self.answer = answer
        scope: dict[str, Callable[..., Any]] = {"run": self._run}
        exec(f"def extend_attention_fwd({SIGNATURES[version]}):\n    return run(dict(locals()))", scope)
        self.function = scope["extend_attention_fwd"]

    def _run(self, call: dict[str, Any]) -> Any:
        self.calls.append(call)
        q, scale = call["q_extend"], call["sm_scale"]
        call["o_extend"].copy_(
            attention(
                q,
                call["k_extend"],
                call["v_extend"],
                call["k_buffer"],
                call["qo_indptr"],
                call["kv_indptr"],
                call["kv_indices"],
                call["custom_mask"],
                call["mask_indptr"],
                scale or q.shape[-1] ** -0.5,
                call.get("k_scale", 1.0),
                call.get("v_scale", 1.0),
            )
        )
        return self.answer


class FakeKernel:
    """`kdtree_patch.route.Kernel` in torch."""

    def __init__(
        self,
        mark: float = 0.0,
        error: Exception | None = None,
        device: str = "cpu",
        pool: torch.dtype | None = None,
    ):
        self.device = torch.device(device)
        self.pool = pool
        self.target = "host"
        self.config = CONFIGS["portable"]
        self.mark = mark
        self.error = error
        self.calls: list[dict[str, Any]] = []

    def launch(
        self, q: Any, k_extend: Any, out: Any, kv_pool: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any,
        custom_mask: Any, mask_indptr: Any, q_len: int, scale: float, k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        if self.error is not None:
            raise self.error
        v = k_extend[..., :512]
        right = attention(
            q, k_extend, v, kv_pool, qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr, scale, k_scale, v_scale
        )  # fmt: skip
        out.copy_(right + self.mark)


def a_case(**changes: Any) -> Case:
    """Two requests, one of them without a prefix, two heads, three drafts."""
    return make_case(**{"prefixes": [4, 0], "q_len": 3, "heads": 2, "seed": 5, **changes})


def arguments(case: Case, **changes: Any) -> dict[str, Any]:
    """The inner call's arguments by name, as forward_extend of the newest release passes them."""
    return {
        "q_extend": case.q,
        "k_extend": case.k_extend,
        "v_extend": case.k_extend[..., :512].contiguous(),
        "o_extend": case.out,
        "k_buffer": case.kv_pool,
        "v_buffer": case.kv_pool[..., :512],
        "qo_indptr": case.qo_indptr,
        "kv_indptr": case.kv_indptr,
        "kv_indices": case.kv_indices,
        "custom_mask": case.custom_mask,
        "is_causal": True,
        "mask_indptr": case.mask_indptr,
        "max_len_extend": case.q_len,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        "sm_scale": case.scale,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "sinks": None,
        "window_kv_offsets": None,
        "xai_temperature_len": -1,
        "page_size": 1,
        "score_mod": None,
        "aux_tensors": None,
        "extend_seq_lens_cpu": None,
        **changes,
    }


def a_batch(verify: bool = True, mode_name: str = "EXTEND", **fields: Any) -> SimpleNamespace:
    """A forward batch: its mode, and what the shapes line reads."""
    mode = SimpleNamespace(is_target_verify=lambda: verify, name="TARGET_VERIFY" if verify else mode_name)
    return SimpleNamespace(**{"forward_mode": mode, "seq_lens_cpu": torch.tensor([4, 0]), "seq_lens_sum": 4, **fields})


def a_layer(layer_id: int = 0) -> SimpleNamespace:
    return SimpleNamespace(layer_id=layer_id)
