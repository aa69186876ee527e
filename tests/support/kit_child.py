"""Runs cases of SGLang 0.5.23's own attention test kit: `python -m support.kit_child CASES`, CASES being a JSON list.

Prints one JSON object on its last line: what the router did with the calls of each case. A case that the kit finds
wrong raises, as in SGLang's own tests.
"""

from __future__ import annotations

import json
import sys
import unittest

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase, run_mla_attention_case
from sglang.test.kits.attention_unittest.runner_modes.speculative_target_verify_runner import run_mla_eagle_verify_case

from kdtree_patch import hook


def main() -> None:
    # The kit seeds the GPUs as well, of which there may be none.
    torch.cuda.manual_seed_all = lambda seed: None
    routed = {}
    for case in json.loads(sys.argv[1]):
        before = hook.counts()
        run_extend(**case) if "mode" in case else run(**case)
        routed[case["name"]] = {" ".join(reason): count for reason, count in (hook.counts() - before).items()}
    print(json.dumps(routed))


def run(
    name: str, prefixes: list[int], q_len: int, heads: int = 4, page_size: int = 1, topk: int = 1, kind: str = "eagle"
) -> None:
    case = MLAAttentionCase(
        name=name,
        backend="triton",
        forward_mode=ForwardMode.TARGET_VERIFY,
        num_heads=heads,
        page_size=page_size,
        prefix_lens=tuple(prefixes),
        extend_lens=(q_len,) * len(prefixes),
    )
    run_mla_eagle_verify_case(
        unittest.TestCase(),
        case,
        topk=topk,
        spec_kind=kind,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.float16,
        device="cpu",
    )


def run_extend(name: str, mode: str, prefixes: list[int], new: list[int], heads: int = 4, page_size: int = 1) -> None:
    """A batch whose requests have `new` tokens each."""
    case = MLAAttentionCase(
        name=name,
        backend="triton",
        forward_mode=ForwardMode[mode],
        num_heads=heads,
        page_size=page_size,
        prefix_lens=tuple(prefixes),
        extend_lens=tuple(new),
    )
    shape = dict(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.float16, device="cpu")
    run_mla_attention_case(unittest.TestCase(), case, **shape)


if __name__ == "__main__":
    main()
