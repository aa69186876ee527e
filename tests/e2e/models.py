"""Checkpoints of small MLA models with random weights, in the layout that SGLang and transformers read.

The architecture is DeepSeek-V2's with dense MLPs: latent 512 and rope 64, as in the models that the kernel is for, so
that attention is the real thing while everything else is small. The draft of a STANDALONE speculation is a model of
the same vocabulary. It has to be right often enough to be of use, and wrong often enough that accepted tokens leave
the first branch of the tree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LATENT, ROPE, NOPE, V_HEAD = 512, 64, 128, 128


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


def weights(shape: Shape, seed: int = 1234) -> dict[str, torch.Tensor]:
    """bf16, one value for a shape and a seed. The gains make logits that differ enough for ties to be rare."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)).to(torch.bfloat16)

    def norm(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, heads = shape.hidden, shape.heads
    state = {
        "model.embed_tokens.weight": matrix(shape.vocab, hidden, hidden**0.5),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": matrix(shape.vocab, hidden, 4.0),
    }
    for layer in range(shape.layers):
        loud = 1.0 if layer == 0 else shape.quiet
        at, attention = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        state |= {
            at + "input_layernorm.weight": norm(hidden),
            at + "post_attention_layernorm.weight": norm(hidden),
            attention + "q_proj.weight": matrix(heads * (NOPE + ROPE), hidden, 2.0),
            attention + "kv_a_proj_with_mqa.weight": matrix(LATENT + ROPE, hidden),
            attention + "kv_a_layernorm.weight": norm(LATENT),
            attention + "kv_b_proj.weight": matrix(heads * (NOPE + V_HEAD), LATENT),
            attention + "o_proj.weight": matrix(hidden, heads * V_HEAD, 3.0 * loud),
            at + "mlp.gate_proj.weight": matrix(shape.intermediate, hidden),
            at + "mlp.up_proj.weight": matrix(shape.intermediate, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, shape.intermediate, 2.0 * loud),
        }
    return state


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


def write(folder: Path, shape: Shape, state: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    contiguous = {name: weight.contiguous() for name, weight in state.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Checkpoints:
    """Folders. `target` and `noisy` (the target with 15 % noise) are for tokens, load and ranks; `deep` and `shallow`
    (its first layer) for the figures."""

    target: Path
    noisy: Path
    deep: Path
    shallow: Path


def write_all(folder: Path, heads: int, deep_layers: int) -> Checkpoints:
    small = Shape(heads=heads)
    state = weights(small)
    deep = Shape(heads=heads, layers=deep_layers, context=40960, quiet=0.1)
    deep_state = weights(deep)
    shallow = Shape(heads=heads, layers=1, context=40960)
    return Checkpoints(
        target=write(folder / "target", small, state),
        noisy=write(folder / "noisy", small, with_noise(state, 0.15)),
        deep=write(folder / "deep", deep, deep_state),
        shallow=write(folder / "shallow", shallow, first_layers(deep_state, 1)),
    )
