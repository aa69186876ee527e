"""What the options of SGLang's server mean for the patch: which attention backend verify calls go to, and which calls
are served, or declined and why. From the words alone; what only SGLang, the model or the GPU can tell is unknown here.

Knows the names and defaults of SGLang's options (0.5.9 to 0.5.23) and the limits of the kernel, and asks nobody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kdtree_patch.service_command import Command, Refused
from kdtree_patch.tiles import FP8_POOLS, LATENT, MAX_HEADS, MAX_Q_LEN, ROPE

ATTENTION = ("--attention-backend",)
PREFILL = ("--prefill-attention-backend",)
DECODE = ("--decode-attention-backend",)
SPECULATIVE = ("--speculative-algorithm",)
KV_POOL = ("--kv-cache-dtype",)
TENSOR_PARALLEL = ("--tensor-parallel-size", "--tp-size")
DATA_PARALLEL = ("--data-parallel-size", "--dp-size")

STOCK = "stock"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """What one option means for verify calls: `stock`, with the reason code that the log will have, or `unknown`."""

    effect: str
    reason: str
    why: str


@dataclass(frozen=True)
class Mode:
    """What happens to the calls of one of SGLang's forward modes: `route` is kernel, stock or unknown."""

    name: str
    backend: str
    route: str
    why: str


@dataclass(frozen=True)
class Model:
    """What a checkpoint's config.json says. None is what it does not say."""

    heads: int | None
    latent: int | None
    rope: int | None
    quantizes_kv: bool

    @classmethod
    def at(cls, folder: str) -> Model | None:
        """None where there is no such file, a name on a hub for one, or none that can be read."""
        try:
            config = json.loads((Path(folder) / "config.json").read_bytes())
            beside = Path(folder) / "hf_quant_config.json"
            quantization = json.dumps([config.get("quantization_config"), beside.exists() and beside.read_text()])
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        text = config.get("text_config") or config  # multimodal models keep it one level down
        if text is not config and isinstance(text, dict) and text.get("quantization_config"):
            quantization += json.dumps(text["quantization_config"])

        def number(name: str) -> int | None:
            value = text.get(name) if isinstance(text, dict) else None
            return value if type(value) is int and value > 0 else None

        quantizes = re.search(r'kv_cache_(scheme|quant_algo)\\?":(?! *null)', quantization) is not None
        return cls(
            number("num_attention_heads"), number("kv_lora_rank"), number("qk_rope_head_dim"), quantizes_kv=quantizes
        )


def verify_backend(command: Command) -> str | None:
    """The attention backend that SGLang gives verify calls to; None where SGLang chooses it.

    Prefill and decode may have one each. Verify calls then go to that of prefill unless --speculative-attention-mode
    says decode.
    """
    mode = command.option("--speculative-attention-mode") or "prefill"
    own = command.option(*(DECODE if mode == "decode" else PREFILL))
    return own or command.option(*ATTENTION)


def fp8_pool(command: Command) -> str | None:
    """The fp8 type that the options give the KV pool, a name of `tiles.FP8_POOLS`; None where they give it another one,
    or leave it to the checkpoint.
    """
    pool = command.option(*KV_POOL)
    return pool if pool in FP8_POOLS else None


def judge(command: Command, sglang: str | None = None, model: Model | None = None) -> list[Judgement]:
    """Everything in the options for which verify calls are not served, or of which that cannot be told; empty if they
    are served. `sglang`: its version.
    """
    if command.option("--config") is not None:
        return [
            Judgement(UNKNOWN, "config", "--config reads options from a file, which is not looked at"),
            *_of(command),
        ]
    return [*_of(command), *_of_release(command, sglang), *_of_model(command, model)]


def _of(command: Command) -> Iterator[Judgement]:
    backend = verify_backend(command)
    if backend is None and command.option("--config") is None:
        why = "the service is not started with --attention-backend triton: SGLang chooses, by model and GPU"
        yield Judgement(UNKNOWN, "backend", why)
    elif backend not in (None, "triton"):
        names = [(name, value) for (name,) in (ATTENTION, PREFILL, DECODE) if (value := command.option(name))]
        said = ", ".join(f"{name} {value}" for name, value in names)
        serves = f"the patch serves triton and no other, and verify calls go to {backend}"
        yield Judgement(STOCK, "backend", f"the service is started with {said}: {serves}")
    if command.option(*SPECULATIVE) is None and command.option("--config") is None:
        why = "the service has no --speculative-algorithm: without draft tokens there is nothing to serve"
        yield Judgement(STOCK, "no_speculation", why)
    if command.has("--enable-deterministic-inference"):
        why = "the service is started with --enable-deterministic-inference, with which the patch does not serve"
        yield Judgement(STOCK, "deterministic", why)
    if command.option("--disaggregation-mode") == "prefill":
        yield Judgement(
            STOCK, "no_verify", "--disaggregation-mode prefill: a server that only prefills verifies nothing"
        )
    yield from _of_types(command)
    drafts = command.option("--speculative-num-draft-tokens")
    if drafts is not None and not (re.fullmatch("[0-9]{1,9}", drafts) and 1 <= int(drafts) <= MAX_Q_LEN):
        why = f"--speculative-num-draft-tokens {drafts}: 1 to {MAX_Q_LEN} are served"
        yield Judgement(STOCK, "q_len", why)
    dcp = command.option("--decode-context-parallel-size", "--dcp-size") or "1"
    if dcp != "1":
        why = f"--dcp-size {dcp}: with decode context parallelism a rank has only a part of each prefix"
        yield Judgement(STOCK, "context_parallel", why)


def _of_types(command: Command) -> Iterator[Judgement]:
    dtype, pool = command.option("--dtype") or "auto", command.option(*KV_POOL) or "auto"
    if dtype in ("float", "float32"):
        yield Judgement(STOCK, "dtype", f"--dtype {dtype}: bf16 and fp16 are served")
    elif pool in ("bf16", "bfloat16") and dtype in ("half", "float16"):
        yield Judgement(STOCK, "kv_dtype", f"--kv-cache-dtype {pool} with --dtype {dtype}: both must be the same type")
    if pool not in ("auto", "bf16", "bfloat16", *FP8_POOLS):
        why = f"--kv-cache-dtype {pool}: a pool of the model's own type is served, bf16 or fp16, or one of fp8"
        yield Judgement(STOCK, "kv_dtype", why)


def _of_release(command: Command, sglang: str | None) -> Iterator[Judgement]:
    """SGLang's own rule for trees over larger pages. Up to 0.5.12 it refuses them for triton, in 0.5.23 it does not."""
    topk, page = command.option("--speculative-eagle-topk") or "1", command.option("--page-size") or "1"
    if topk == "1" or page == "1":
        return
    release = tuple(int(part) for part in re.findall(r"\d+", sglang or "")[:3])
    if release < (0, 5, 23):
        certain = bool(release) and release <= (0, 5, 12)
        does = f"SGLang {sglang} refuses to start" if certain else "some releases of SGLang refuse to start"
        why = f"--speculative-eagle-topk {topk} with --page-size {page}: {does} with that on triton"
        yield Judgement(STOCK if certain else UNKNOWN, "page_size", why)


def _of_model(command: Command, model: Model | None) -> Iterator[Judgement]:
    if model is None:
        return
    if command.option("--json-model-override-args") is not None:
        yield Judgement(UNKNOWN, "model", "--json-model-override-args changes the model's config")
        return
    if (model.latent, model.rope) != (LATENT, ROPE):
        shape = "no latent attention" if model.latent is None else f"latent {model.latent} and rope {model.rope}"
        yield Judgement(STOCK, "not_mla", f"the model has {shape}: MLA with {LATENT} and {ROPE} is served")
    if model.quantizes_kv and (command.option(*KV_POOL) or "auto") == "auto":
        why = "the checkpoint says how to quantize the KV cache, and --kv-cache-dtype auto may follow it: fp8 is served"
        yield Judgement(UNKNOWN, "kv_dtype", why)
    heads = heads_a_rank(command, model)
    if heads is not None and heads > MAX_HEADS:
        yield Judgement(STOCK, "heads", f"{heads} heads a rank: 1 to {MAX_HEADS} are served")


def heads_a_rank(command: Command, model: Model | None) -> int | None:
    """Tensor-parallel ranks share the heads; with data-parallel attention those of one group do."""
    try:
        ranks = command.number(*TENSOR_PARALLEL)
        if command.has("--enable-dp-attention"):
            ranks = max(1, ranks // command.number(*DATA_PARALLEL))
    except Refused:
        return None
    if model is None or model.heads is None or (command.option("--attention-context-parallel-size") or "1") != "1":
        return None
    return model.heads // ranks if model.heads % ranks == 0 else None


def gpus_needed(command: Command) -> int:
    """How many GPUs of one host the service takes: a rank has one. Raises Refused for a number that is none."""
    ranks = command.number(*TENSOR_PARALLEL) * command.number("--pipeline-parallel-size", "--pp-size")
    if not command.has("--enable-dp-attention"):  # with it, groups of the same ranks
        ranks *= command.number(*DATA_PARALLEL)
    return -(-ranks // command.number("--nnodes"))


def forward_modes(
    command: Command,
    judgements: list[Judgement],
    model: Model | None = None,
    routed: Collection[str] = ("verify",),
) -> list[Mode]:
    """What happens to the calls of each forward mode, if nothing but the options stands in the way. `routed` is what
    KDTREE_FORWARD_MODES names.
    """

    def extends(names: str, mode: str, backend: str) -> Mode:
        if mode not in routed:
            return Mode(names, backend, STOCK, f"forward_mode: {mode} is not in KDTREE_FORWARD_MODES")
        # What stands against verify calls does not always stand against these.
        why = f"up to {MAX_Q_LEN} new tokens of a request, if what the attention is given is latent"
        return Mode(names, backend, UNKNOWN if backend in ("triton", unset) else STOCK, why)

    unset = "chosen by SGLang"
    prefill = command.option(*PREFILL) or command.option(*ATTENTION) or unset
    decode = command.option(*DECODE) or command.option(*ATTENTION) or unset
    verify = verify_backend(command) or unset
    modes = []
    if command.option(*SPECULATIVE) is not None:
        worst = next((one for one in judgements if one.effect == STOCK), None) or next(iter(judgements), None)
        if "verify" not in routed:
            modes.append(Mode("TARGET_VERIFY", verify, STOCK, "forward_mode: verify is not in KDTREE_FORWARD_MODES"))
        elif worst is None:
            drafts, heads = command.option("--speculative-num-draft-tokens"), heads_a_rank(command, model)
            why = f"q_len {drafts or 'as SGLang chooses'}, heads a rank {'unknown' if heads is None else heads}"
            modes.append(Mode("TARGET_VERIFY", verify, "kernel", why))
        else:
            modes.append(Mode("TARGET_VERIFY", verify, worst.effect, f"{worst.reason}: {worst.why}"))
        draft = command.option("--speculative-draft-attention-backend") or verify
        modes.append(extends("DRAFT_EXTEND", "draft_extend", draft))
    modes.append(extends("EXTEND", "extend", prefill))
    modes.append(Mode("MIXED", prefill, STOCK, "forward_mode: never routed"))
    modes.append(Mode("DECODE", decode, STOCK, "another kernel of SGLang, which the patch does not touch"))
    if command.has("--enable-dp-attention"):
        modes.append(Mode("IDLE", decode, STOCK, "empty_batch: a rank without requests launches nothing"))
    return modes
