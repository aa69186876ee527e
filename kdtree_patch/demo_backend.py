"""SGLang's own Triton attention backend, built without a model and without a server.

Everything that computes is SGLang's: `TritonAttnBackend`, `MLATokenToKVPool`, `ReqToTokenPool`, `RadixAttention`
and the metadata the backend derives from a batch. Only the model runner is a stand-in, because the backend reads no
more from it than a dozen settings. Whichever release is on the path is used: the tests run 0.5.12 and 0.5.23, and it is
known to work with 0.5.11, 0.5.13 to 0.5.15, 0.5.21 and 0.5.22.
On a machine without a GPU Triton's interpreter runs the stock kernels (`TRITON_INTERPRET=1` before SGLang is imported).

    bed = build(heads=8, max_bs=1, q_len=9, max_context=64)
    call = verify_batch(bed, prefixes=[21])
    out = forward(bed, call)                    # (tokens, heads, 512), through forward_extend, KV store included

The demo runs this module, and so do the tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

LATENT = 512
ROPE = 64
ROW = LATENT + ROPE

# The reference case, read off a real service: its scale, and the rows of its KV pool.
SCALE = 0.14468
SLOTS = 195_012

# From here on the backend expects more around it than plain attributes, and the release's test kit provides that.
HAS_TEST_KIT = (0, 5, 20)
HAS_FORWARD_CONTEXT = (0, 5, 13)


@dataclass
class Bed:
    """One attention backend with its pools and layers, as one tensor-parallel worker of a service holds them."""

    backend: Any
    layers: list[Any]  # RadixAttention, one for each layer of the model
    pool: Any  # MLATokenToKVPool: pool.kv_buffer[layer] is (slots, 1, 576)
    requests: Any  # ReqToTokenPool: requests.req_to_token[request, position] is a slot
    runner: Any
    heads: int
    q_len: int
    max_context: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV pool
    device: str
    poison: bool
    release: tuple[int, ...]
    page_size: int

    @property
    def slots(self) -> int:
        """Rows of the KV pool, the padding page 0 included."""
        return int(self.pool.kv_buffer[0].shape[0])

    def rows(self, layer: int) -> torch.Tensor:
        """(slots, 1, 576), the pool of a layer. SGLang keeps fp8 as bytes."""
        return self.pool.kv_buffer[layer].view(self.kv_dtype)


@dataclass
class Call:
    """One verify batch: what the model hands to every attention layer."""

    q: torch.Tensor  # (tokens, heads, 576)
    k: torch.Tensor  # (tokens, 1, 576)
    v: torch.Tensor  # (tokens, 1, 512), the latent columns of k
    forward_batch: Any
    prefixes: list[int]
    prefix_slots: list[torch.Tensor]  # for each request, the slots of its prefix in order
    draft_slots: torch.Tensor  # (tokens,), where the backend stores k
    custom_mask: torch.Tensor | None  # bool, the requests' q_len x (prefix + q_len) blocks one after the other


def build(
    heads: int,
    max_bs: int,
    q_len: int,
    max_context: int,
    layers: int = 1,
    pool_slots: int | None = None,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    scale: float = SCALE,
    seed: int = 0,
    poison: bool = False,
    page_size: int = 1,
    around: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    kv_dtype: torch.dtype | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Bed:
    """Builds a backend for up to `max_bs` requests of `max_context` tokens, drafts included. The scales are those of
    every layer, for a pool of another type than `dtype`.

    The KV pool is filled with random normals. With `poison` it is filled with NaN instead, and `verify_batch` writes
    numbers only into the slots that a call may read, so that one stray read shows in the result. Of a pool with larger
    pages each request has whole ones, each page's slots one after the other. `around(runner)` is entered while the
    backend is constructed.
    """
    if pool_slots is None:
        pool_slots = (max_bs * -(-max_context // page_size) + 1) * page_size
    release = sglang_release()
    make_runner = _runner_from_the_test_kit if release >= HAS_TEST_KIT else _runner_of_attributes
    runner = make_runner(
        heads=heads,
        max_bs=max_bs,
        q_len=q_len,
        max_context=max_context,
        dtype=dtype,
        device=device,
        layers=layers,
        pool_slots=pool_slots,
        page_size=page_size,
        kv_dtype=kv_dtype or dtype,
    )

    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.radix_attention import RadixAttention

    with around(runner):
        backend = triton_backend.TritonAttnBackend(runner)
    pool = runner.token_to_kv_pool
    generator = torch.Generator(device).manual_seed(seed)
    for buffer in pool.kv_buffer:
        if poison:
            poison_pool(buffer)
        else:
            numbers = torch.empty(buffer.shape, dtype=dtype, device=device).normal_(generator=generator)
            buffer.copy_(as_stored(numbers, kv_dtype))
    attention = [
        RadixAttention(heads, ROW, scale, num_kv_heads=1, layer_id=index, v_head_dim=LATENT) for index in range(layers)
    ]
    if k_scale is not None and v_scale is not None:
        for layer in attention:  # as a checkpoint with scales leaves them
            layer.k_scale, layer.v_scale = torch.tensor(k_scale, device=device), torch.tensor(v_scale, device=device)
            layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    return Bed(
        backend=backend,
        layers=attention,
        pool=pool,
        requests=runner.req_to_token_pool,
        runner=runner,
        heads=heads,
        q_len=q_len,
        max_context=max_context,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        device=device,
        poison=poison,
        release=release,
        page_size=page_size,
    )


def verify_batch(bed: Bed, prefixes: Sequence[int], seed: int = 0, mask: str | torch.Tensor = "tree") -> Call:
    """Makes a TARGET_VERIFY batch of random drafts and lets the backend prepare its metadata for it.

    The pages of a request are scattered over the whole pool. `mask` is "tree" (a random tree for each request, parents
    before their children), "none" (a chain: no mask at all), a (q_len, q_len) tensor that says which drafts see which
    in every request, or a flat tensor that is the custom mask itself.
    """
    prefixes = list(prefixes)
    bs, q_len = len(prefixes), bed.q_len
    longest = max(prefixes, default=0) + q_len
    if longest > bed.max_context:
        raise ValueError(f"a request of {longest} tokens does not fit max_context={bed.max_context}")
    generator = torch.Generator().manual_seed(seed)

    # Page 0 is where padded requests write, so no real request is ever given it.
    size = bed.page_size
    pages = [-(-(prefix + q_len) // size) for prefix in prefixes]
    if sum(pages) > bed.slots // size - 1:
        raise ValueError(f"{sum(pages)} pages of {size} tokens do not fit a pool of {bed.slots} slots")
    own = (torch.randperm(bed.slots // size - 1, generator=generator)[: sum(pages)] + 1).split(pages)
    slots = [
        (some[:, None] * size + torch.arange(size)).flatten()[: prefix + q_len]
        for some, prefix in zip(own, prefixes, strict=True)
    ]
    prefix_slots = [s[:p] for s, p in zip(slots, prefixes, strict=True)]
    draft_slots = torch.cat([s[p:] for s, p in zip(slots, prefixes, strict=True)])

    if bed.poison:
        readable = torch.cat(prefix_slots).to(bed.device)
        for buffer in bed.pool.kv_buffer:
            poison_pool(buffer)
            buffer[readable] = as_stored(_normal((len(readable), 1, ROW), generator, bed), bed.kv_dtype)

    custom_mask = _custom_mask(mask, prefixes, q_len, random.Random(seed))
    if custom_mask is not None:
        custom_mask = custom_mask.to(bed.device)
    k = _normal((bs * q_len, 1, ROW), generator, bed)
    call = Call(
        q=_normal((bs * q_len, bed.heads, ROW), generator, bed),
        k=k,
        v=k[..., :LATENT].contiguous(),
        forward_batch=None,
        prefixes=prefixes,
        prefix_slots=prefix_slots,
        draft_slots=draft_slots,
        custom_mask=custom_mask,
    )
    make_batch = _batch_from_the_test_kit if bed.release >= HAS_TEST_KIT else _batch_of_attributes
    call.forward_batch = make_batch(bed, call, slots)
    prepare(bed, call)
    return call


def prepare(bed: Bed, call: Call) -> None:
    """Lets the backend derive its metadata from the batch, as the model runner does before each forward pass."""
    with torch.no_grad(), _forward_context(bed):
        bed.backend.init_forward_metadata(call.forward_batch)


def forward(bed: Bed, call: Call, layer: int = 0, **options: Any) -> torch.Tensor:
    """One attention layer of the verify pass, entered where the model enters it: `RadixAttention.forward`. `options`
    go to `forward_extend`.
    """
    with torch.no_grad(), _forward_context(bed):
        out = bed.layers[layer](call.q, call.k, call.v, call.forward_batch, **options)
    return out.view(call.q.shape[0], bed.heads, LATENT)


@contextmanager
def stock_attention(bed: Bed) -> Iterator[None]:
    """Within it, the backend uses SGLang's own kernel, whatever has been put in its place."""
    if bed.release >= HAS_TEST_KIT:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    else:
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
    current = bed.backend.extend_attention_fwd
    bed.backend.extend_attention_fwd = extend_attention_fwd
    try:
        yield
    finally:
        bed.backend.extend_attention_fwd = current


def tree(q_len: int, rng: random.Random, reach: int = 4) -> torch.Tensor:
    """A random tree of drafts as a (q_len, q_len) mask: a draft sees itself and its ancestors, and draft 0 is the root.

    A parent is at most `reach` places before its child. Parents come before their children, as in every real tree:
    the stock kernel relies on it.
    """
    visible = torch.eye(q_len, dtype=torch.bool)
    for draft in range(1, q_len):
        visible[draft] |= visible[rng.randrange(max(0, draft - reach), draft)]
    return visible


def sglang_release() -> tuple[int, ...]:
    """The first three numbers of SGLang's version: (0, 5, 12)."""
    import sglang

    numbers = "".join(c if c.isdigit() else " " for c in sglang.__version__).split()
    return tuple(int(n) for n in numbers[:3])


def _normal(shape: tuple[int, ...], generator: torch.Generator, bed: Bed) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device=bed.device, dtype=bed.dtype)


def as_stored(numbers: torch.Tensor, kv_dtype: torch.dtype | None) -> torch.Tensor:
    """Numbers as a pool of that type keeps them: fp8 as bytes."""
    return numbers if kv_dtype is None or kv_dtype.itemsize > 1 else numbers.to(kv_dtype).view(torch.uint8)


def poison_pool(buffer: torch.Tensor) -> None:
    """NaN everywhere; 0x7f is one of both fp8 types."""
    buffer.fill_(torch.nan if buffer.is_floating_point() else 0x7F)


def _custom_mask(mask: str | torch.Tensor, prefixes: list[int], q_len: int, rng: random.Random) -> torch.Tensor | None:
    if isinstance(mask, torch.Tensor) and mask.dim() == 1:
        return mask
    if isinstance(mask, str) and mask == "none":
        return None
    blocks = []
    for prefix in prefixes:
        drafts = tree(q_len, rng) if isinstance(mask, str) else mask.bool().cpu()
        blocks.append(torch.cat([torch.ones(q_len, prefix, dtype=torch.bool), drafts], dim=1).flatten())
    return torch.cat(blocks)


def _kv_pool(slots: int, layers: int, dtype: torch.dtype, device: str, page_size: int) -> Any:
    """SGLang's own MLA pool; it adds the padding page 0 to the size it is given."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=slots - page_size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
    )


# SGLang 0.5.12: the backend and the batch are content with plain attributes.


def _runner_of_attributes(
    *,
    heads: int,
    max_bs: int,
    q_len: int,
    max_context: int,
    dtype: torch.dtype,
    device: str,
    layers: int,
    pool_slots: int,
    page_size: int,
    kv_dtype: torch.dtype,
) -> Any:
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    # The tensor-parallel groups exist only in a running service.
    triton_backend.get_attention_tp_size = lambda: 1
    triton_backend.get_parallel = lambda: SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0)
    requests = ReqToTokenPool(size=max_bs, max_context_len=max_context, device=device, enable_memory_saver=False)
    pool = _kv_pool(pool_slots, layers, kv_dtype, device, page_size)
    server_args = SimpleNamespace(
        speculative_num_draft_tokens=q_len,
        speculative_num_steps=3,
        speculative_eagle_topk=4,
        triton_attention_num_kv_splits=8,
        triton_attention_split_tile_size=None,
        enable_deterministic_inference=False,
        disable_cuda_graph=False,
        chunked_prefill_size=8192,
    )
    model_config = SimpleNamespace(
        attention_arch=AttentionArch.MLA,
        num_attention_heads=heads,
        get_num_kv_heads=lambda tp_size: heads,
        v_head_dim=128,
        swa_v_head_dim=128,
        context_len=max_context,
        is_encoder_decoder=False,
    )
    return SimpleNamespace(
        req_to_token_pool=requests,
        kv_cache_dtype=kv_dtype,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page_size),
        sliding_window_size=None,
        server_args=server_args,
        model_config=model_config,
        device=device,
        gpu_id=0,
        hybrid_gdn_config=None,
        kimi_linear_config=None,
        linear_attn_model_spec=None,
    )


def _batch_of_attributes(bed: Bed, call: Call, slots: Sequence[torch.Tensor]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table = bed.requests.req_to_token
    for request, request_slots in enumerate(slots, start=1):  # row 0 belongs to padded requests
        table[request, : len(request_slots)] = request_slots.to(table)
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(call.prefixes),
        seq_lens=torch.tensor(call.prefixes, dtype=torch.int64, device=bed.device),
        seq_lens_cpu=torch.tensor(call.prefixes, dtype=torch.int64),
        seq_lens_sum=sum(call.prefixes),
        req_pool_indices=torch.arange(1, len(call.prefixes) + 1, device=bed.device),
        out_cache_loc=call.draft_slots.to(bed.device),
        spec_info=SimpleNamespace(custom_mask=call.custom_mask, draft_token_num=bed.q_len, topk=4),
        token_to_kv_pool=bed.pool,
        attn_backend=bed.backend,
        **dict.fromkeys(("extend_seq_lens", "extend_seq_lens_cpu", "extend_prefix_lens", "extend_start_loc")),
    )


# SGLang 0.5.23: the release's own test kit builds what the backend has come to expect around it.


def _kit_case(heads: int, q_len: int, prefixes: Sequence[int], page_size: int) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit

    return kit.MLAAttentionCase(
        name="kdtree",
        backend="triton",
        forward_mode=ForwardMode.TARGET_VERIFY,
        num_heads=heads,
        page_size=page_size,
        prefix_lens=tuple(prefixes),
        extend_lens=(q_len,) * len(prefixes),
    )


def _runner_from_the_test_kit(
    *,
    heads: int,
    max_bs: int,
    q_len: int,
    max_context: int,
    dtype: torch.dtype,
    device: str,
    layers: int,
    pool_slots: int,
    page_size: int,
    kv_dtype: torch.dtype,
) -> Any:
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as _  # noqa: F401  says: one rank
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit

    case = _kit_case(heads, q_len, [0] * max_bs, page_size)
    model_config = kit.TinyMLAModelConfig(
        num_heads=heads, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, hidden_size=64, context_len=max_context
    )
    runner = kit.MockMLAModelRunner(
        case=case,
        model_config=model_config,
        dtype=dtype,
        device=device,
        max_context_len=max_context,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
    )
    # The kit's own pool has one layer and a size of its choosing.
    runner.token_to_kv_pool = _kv_pool(pool_slots, layers, kv_dtype, device, page_size)
    runner.kv_cache_dtype = kv_dtype
    runner.init_kv_index_translator()
    return runner


def _batch_from_the_test_kit(bed: Bed, call: Call, slots: Sequence[torch.Tensor]) -> Any:
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit
    from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verify

    case = _kit_case(bed.heads, bed.q_len, call.prefixes, bed.page_size)
    batch = kit._make_forward_batch(
        case,
        bed.runner,
        max_context_len=bed.max_context,
        device=bed.device,
        loc_fn=lambda request, position: int(slots[request][position]),
    )
    verify._prepare_target_verify_batch(batch, case, bed.device)
    # The kit draws trees of three drafts only, so the input is made for a chain and the mask put in afterwards.
    batch.spec_info = verify._make_spec_verify_input(case, batch, topk=1, device=bed.device, spec_kind="dflash")
    batch.spec_info.custom_mask = call.custom_mask
    return batch


def _forward_context(bed: Bed) -> Any:
    if bed.release < HAS_FORWARD_CONTEXT:
        return nullcontext()
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    return forward_context(ForwardContext(attn_backend=bed.backend))
