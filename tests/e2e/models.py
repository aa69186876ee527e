"""Checkpoints of small MLA models with random weights, in the layout that SGLang and transformers read.

The architecture is DeepSeek-V2's with dense MLPs: latent 512 and rope 64, as in the models that the kernel is for, so
that attention is the real thing while everything else is small. The draft of a STANDALONE speculation is a model of
the same vocabulary. It has to be right often enough to be of use, and wrong often enough that accepted tokens leave
the first branch of the tree. That of a DFLASH speculation is another kind of model, which reads the target's hidden
states and drafts a block at once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LATENT, ROPE, NOPE, V_HEAD = 512, 64, 128, 128

# Of the DFlash draft: the tokens that it drafts from one, that one included, and its attention's sizes, not MLA's.
DFLASH_BLOCK = 16
DFLASH_HEADS, DFLASH_KV_HEADS, DFLASH_HEAD = 8, 2, 64


@dataclass(frozen=True)
class Shape:
    """What differs between our checkpoints. `quiet` is the gain of the layers after the first on what the model says:
    with a small one a draft that has the first layer alone is often right."""

    heads: int = 8
    layers: int = 2
    hidden: int = 512
    vocab: int = 512
    intermediate: int = 1024
    context: int = 8192
    quiet: float = 1.0

    def config(self) -> dict[str, Any]:
        """config.json. No layer is sparse; what the experts' numbers are does not matter, but they must be there."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "kv_lora_rank": LATENT,
            "q_lora_rank": None,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE,
            "v_head_dim": V_HEAD,
            "max_position_embeddings": self.context,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "use_cache": True,
            "first_k_dense_replace": self.layers,
            "moe_layer_freq": 1,
            "moe_intermediate_size": 256,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }


def dflash_config(target: Shape) -> dict[str, Any]:
    """config.json of a DFlash draft of one layer, which reads what the target's first layer leaves. Its attention is
    Qwen3's. SGLang takes the mask token from here, as our servers have no tokenizer that knew it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab,
        "hidden_size": target.hidden,
        "intermediate_size": target.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": DFLASH_HEADS,
        "num_key_value_heads": DFLASH_KV_HEADS,
        "head_dim": DFLASH_HEAD,
        "max_position_embeddings": target.context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": DFLASH_BLOCK,
        "num_target_layers": target.layers,
        # No prompt has token 0. The states of a target's last layer SGLang cannot capture.
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
    }


def _matrix(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    """bf16. What it makes of values of about 1 is about `gain`."""
    import torch

    return (torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)).to(torch.bfloat16)


def _norm(size: int) -> torch.Tensor:
    import torch

    return torch.ones(size, dtype=torch.bfloat16)


def weights(shape: Shape, seed: int = 1234) -> dict[str, torch.Tensor]:
    """bf16, one value for a shape and a seed. The gains make logits that differ enough for ties to be rare."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    matrix = functools.partial(_matrix, generator)
    hidden, heads = shape.hidden, shape.heads
    state = {
        "model.embed_tokens.weight": matrix(shape.vocab, hidden, hidden**0.5),
        "model.norm.weight": _norm(hidden),
        "lm_head.weight": matrix(shape.vocab, hidden, 4.0),
    }
    for layer in range(shape.layers):
        loud = 1.0 if layer == 0 else shape.quiet
        at, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        state |= {
            at + "input_layernorm.weight": _norm(hidden),
            at + "post_attention_layernorm.weight": _norm(hidden),
            attention + "q_proj.weight": matrix(heads * (NOPE + ROPE), hidden, 2.0),
            attention + "kv_a_proj_with_mqa.weight": matrix(LATENT + ROPE, hidden),
            attention + "kv_a_layernorm.weight": _norm(LATENT),
            attention + "kv_b_proj.weight": matrix(heads * (NOPE + V_HEAD), LATENT),
            attention + "o_proj.weight": matrix(hidden, heads * V_HEAD, 3.0 * loud),
            at + "mlp.gate_proj.weight": matrix(shape.intermediate, hidden),
            at + "mlp.up_proj.weight": matrix(shape.intermediate, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, shape.intermediate, 2.0 * loud),
        }
    return state


def dflash_weights(target: Shape, seed: int = 9012) -> dict[str, torch.Tensor]:
    """bf16, one value for a shape and a seed. Embedding and head are the target's, and not here. Nothing has taught it
    the target: next to no draft of it is accepted."""
    import torch

    matrix, hidden = functools.partial(_matrix, torch.Generator().manual_seed(seed)), target.hidden
    heads, kv_heads = DFLASH_HEADS * DFLASH_HEAD, DFLASH_KV_HEADS * DFLASH_HEAD
    return {
        "fc.weight": matrix(hidden, hidden),
        "hidden_norm.weight": _norm(hidden),
        "norm.weight": _norm(hidden),
        "layers.0.input_layernorm.weight": _norm(hidden),
        "layers.0.post_attention_layernorm.weight": _norm(hidden),
        "layers.0.self_attn.q_proj.weight": matrix(heads, hidden),
        "layers.0.self_attn.k_proj.weight": matrix(kv_heads, hidden),
        "layers.0.self_attn.v_proj.weight": matrix(kv_heads, hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads),
        "layers.0.self_attn.q_norm.weight": _norm(DFLASH_HEAD),
        "layers.0.self_attn.k_norm.weight": _norm(DFLASH_HEAD),
        "layers.0.mlp.gate_proj.weight": matrix(target.intermediate, hidden),
        "layers.0.mlp.up_proj.weight": matrix(target.intermediate, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, target.intermediate),
    }


def with_noise(state: dict[str, torch.Tensor], share: float, seed: int = 5678) -> dict[str, torch.Tensor]:
    """Each matrix with noise of `share` of its standard deviation; the norms as they are."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, weight in state.items():
        wide = weight.float()
        noise = (
            torch.randn(weight.shape, generator=generator) * (share * float(wide.std())) if weight.dim() > 1 else 0.0
        )
        noisy[name] = (wide + noise).to(weight.dtype)
    return noisy


def first_layers(state: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The weights of a model that has no more layers than these."""

    def kept(name: str) -> bool:
        return not name.startswith("model.layers.") or int(name.split(".")[2]) < layers

    return {name: weight for name, weight in state.items() if kept(name)}


def write(folder: Path, config: Mapping[str, Any], state: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    contiguous = {name: weight.contiguous() for name, weight in state.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Checkpoints:
    """Folders. `target` and `noisy` (the target with 15 % noise) are for tokens, load and ranks, `dflash` (a DFlash
    draft of the target) for tokens; `deep` and `shallow` (its first layer) for the figures."""

    target: Path
    noisy: Path
    dflash: Path
    deep: Path
    shallow: Path

    @classmethod
    def below(cls, folder: Path) -> Checkpoints:
        """Where they are, written or not."""
        return cls(*(folder / field.name for field in fields(cls)))


def write_all(folder: Path, heads: int, deep_layers: int) -> Checkpoints:
    small = Shape(heads=heads)
    state = weights(small)
    deep = Shape(heads=heads, layers=deep_layers, context=40960, quiet=0.1)
    deep_state = weights(deep)
    shallow = Shape(heads=heads, layers=1, context=40960)
    checkpoints = Checkpoints.below(folder)
    write(checkpoints.target, small.config(), state)
    write(checkpoints.noisy, small.config(), with_noise(state, 0.15))
    write(checkpoints.dflash, dflash_config(small), dflash_weights(small))
    write(checkpoints.deep, deep.config(), deep_state)
    write(checkpoints.shallow, shallow.config(), first_layers(deep_state, 1))
    return checkpoints
