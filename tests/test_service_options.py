"""`kdtree_patch.service_options`: what the options of SGLang mean for verify calls, before a service starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdtree_patch.service_command import Command
from kdtree_patch.service_options import Model, forward_modes, fp8_pool, heads_a_rank, judge
from kdtree_patch.tiles import FP8_POOLS

GOOD = "--attention-backend triton --speculative-algorithm EAGLE3"
MLA = Model(heads=64, latent=512, rope=64, quantizes_kv=False)


def command(options: str) -> Command:
    return Command("/opt/venv/bin/python", frozenset(), ["-m", "sglang.launch_server", *options.split()])


@pytest.mark.parametrize(
    "options",
    [
        GOOD,
        "--attention-backend=triton --speculative-algo NGRAM",
        f"{GOOD} --kv-cache-dtype bfloat16 --dtype auto --speculative-num-draft-tokens 512 --dcp-size 1",
        f"{GOOD} --kv-cache-dtype auto --dtype half --tp 8 --enable-dp-attention --dp-size 8",
        f"{GOOD} --speculative-eagle-topk 8 --page-size 1",
        f"{GOOD} --speculative-eagle-topk 1 --page-size 64",
        f"{GOOD} --decode-attention-backend flashinfer",
        f"{GOOD} --prefill-attention-backend fa3 --speculative-attention-mode decode",
        f"{GOOD} --disaggregation-mode decode --speculative-draft-attention-backend fa3",
    ],
)
def test_options_with_which_verify_calls_are_served(options: str) -> None:
    assert judge(command(options), "0.5.12", MLA) == []
    verify = forward_modes(command(options), [], MLA)[0]
    assert (verify.name, verify.backend, verify.route) == ("TARGET_VERIFY", "triton", "kernel")


@pytest.mark.parametrize(
    ("options", "effect", "reason", "why"),
    [
        ("--speculative-algorithm EAGLE", "unknown", "backend", "SGLang chooses"),
        (GOOD.replace("triton", "flashmla"), "stock", "backend", "verify calls go to flashmla"),
        (f"{GOOD} --prefill-attention-backend fa3", "stock", "backend", "verify calls go to fa3"),
        (f"{GOOD} --decode-attention-backend fa3 --speculative-attention-mode decode", "stock", "backend", "to fa3"),
        ("--attention-backend triton", "stock", "no_speculation", "no --speculative-algorithm"),
        (f"{GOOD} --enable-deterministic-inference", "stock", "deterministic", "--enable-deterministic-inference"),
        (f"{GOOD} --enable-determ", "stock", "deterministic", "--enable-deterministic-inference"),
        (f"{GOOD} --disaggregation-mode prefill", "stock", "no_verify", "only prefills"),
        (f"{GOOD} --kv-cache-dtype fp4_e2m1", "stock", "kv_dtype", "fp4_e2m1"),
        (f"{GOOD} --kv-cache-dtype bf16 --dtype float16", "stock", "kv_dtype", "the same type"),
        (f"{GOOD} --dtype float32", "stock", "dtype", "--dtype float32"),
        (f"{GOOD} --speculative-num-draft-tokens 513", "stock", "q_len", "1 to 512"),
        (f"{GOOD} --speculative-num-draft-tokens ²", "stock", "q_len", "1 to 512"),
        (f"{GOOD} --decode-context-parallel-size 2", "stock", "context_parallel", "decode context parallelism"),
        (f"{GOOD} --config x.yaml", "unknown", "config", "--config"),
    ],
)
def test_option_for_which_they_are_not(options: str, effect: str, reason: str, why: str) -> None:
    (judgement,) = judge(command(options))
    assert (judgement.effect, judgement.reason) == (effect, reason) and why in judgement.why
    modes = forward_modes(command(options), [judgement])
    served = [mode.name for mode in modes if mode.route == "kernel"]
    assert served == []
    if "--speculative-algo" in options:
        assert (modes[0].route, modes[0].why) == (effect, f"{reason}: {judgement.why}")


@pytest.mark.parametrize(
    ("release", "effect"), [("0.5.9", "stock"), ("0.5.12", "stock"), ("0.5.17", "unknown"), (None, "unknown")]
)
def test_trees_over_larger_pages_are_what_sglang_itself_refuses(release: str | None, effect: str) -> None:
    options = command(f"{GOOD} --speculative-eagle-topk 4 --page-size 64")
    (judgement,) = judge(options, release)
    assert (judgement.effect, judgement.reason) == (effect, "page_size")
    assert judge(options, "0.5.23") == []


@pytest.mark.parametrize(
    ("model", "effect", "reason"),
    [
        (Model(64, None, None, False), "stock", "not_mla"),
        (Model(64, 512, 32, False), "stock", "not_mla"),
        (Model(256, 512, 64, False), "stock", "heads"),
        (Model(64, 512, 64, True), "unknown", "kv_dtype"),
    ],
)
def test_model_that_is_not_served(model: Model, effect: str, reason: str) -> None:
    (judgement,) = judge(command(GOOD), None, model)
    assert (judgement.effect, judgement.reason) == (effect, reason)
    (judgement,) = judge(command(f"{GOOD} --json-model-override-args {{}}"), None, model)
    assert judgement.effect == "unknown"
    assert judge(command(f"{GOOD} --kv-cache-dtype bf16"), None, Model(64, 512, 64, True)) == []


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ("", 64),
        ("--tp 8", 8),
        ("--tp-size 8 --dp 8 --enable-dp-attention", 64),
        ("--tp 3", None),
        ("--tp x", None),
        ("--tp ²", None),
    ],
)
def test_heads_a_rank(options: str, heads: int | None) -> None:
    assert heads_a_rank(command(options), MLA) == heads
    assert heads_a_rank(command(options), None) is None


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, MLA),
        ({"text_config": {"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}}, MLA),
        ({"num_attention_heads": 32}, Model(32, None, None, False)),
        ({"quantization_config": {"kv_cache_scheme": None}}, Model(None, None, None, False)),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, Model(None, None, None, True)),
        ({"text_config": {"quantization_config": {"kv_cache_quant_algo": "FP8"}}}, Model(None, None, None, True)),
        ({"num_attention_heads": -8}, Model(None, None, None, False)),
        ([], None),
        (None, None),
    ],
)
def test_what_a_checkpoint_says(tmp_path: Path, config: Any, model: Model | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert Model.at(str(tmp_path)) == model


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 200_000])
def test_checkpoint_that_cannot_be_read(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert Model.at(str(tmp_path)) is None


def test_checkpoint_with_its_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    found = Model.at(str(tmp_path))
    assert found is not None and found.quantizes_kv


def test_what_happens_to_each_forward_mode() -> None:
    modes = forward_modes(command(f"{GOOD} --decode-attention-backend fa3 --enable-dp-attention"), [], MLA)
    assert [(mode.name, mode.backend, mode.route) for mode in modes] == [
        ("TARGET_VERIFY", "triton", "kernel"),
        ("DRAFT_EXTEND", "triton", "stock"),
        ("EXTEND", "triton", "stock"),
        ("MIXED", "triton", "stock"),
        ("DECODE", "fa3", "stock"),
        ("IDLE", "fa3", "stock"),
    ]
    assert [mode.name for mode in forward_modes(command(""), [])] == ["EXTEND", "MIXED", "DECODE"]
    assert forward_modes(command(""), [])[0].backend == "chosen by SGLang"


def test_what_is_asked_for_beside_verify_calls() -> None:
    modes = forward_modes(command(GOOD), [], MLA, {"draft_extend", "extend"})
    assert [(mode.name, mode.route) for mode in modes] == [
        ("TARGET_VERIFY", "stock"),
        ("DRAFT_EXTEND", "unknown"),
        ("EXTEND", "unknown"),
        ("MIXED", "stock"),
        ("DECODE", "stock"),
    ]
    assert "verify is not in KDTREE_FORWARD_MODES" in modes[0].why and "up to 512 new tokens" in modes[2].why
    elsewhere = forward_modes(command(f"{GOOD} --speculative-draft-attention-backend fa3"), [], MLA, {"draft_extend"})
    assert (elsewhere[1].backend, elsewhere[1].route) == ("fa3", "stock")


@pytest.mark.parametrize("pool", FP8_POOLS)
@pytest.mark.parametrize("dtype", ["", " --dtype bfloat16", " --dtype float16"])
def test_an_fp8_pool_is_served(pool: str, dtype: str) -> None:
    options = command(f"{GOOD} --kv-cache-dtype {pool}{dtype}")
    assert judge(options) == [] and fp8_pool(options) == pool


@pytest.mark.parametrize("options", ["", "--kv-cache-dtype auto", "--kv-cache-dtype bf16", "--kv-cache-dtype fp4_e2m1"])
def test_other_pools_are_none_of_fp8(options: str) -> None:
    assert fp8_pool(command(f"{GOOD} {options}")) is None
