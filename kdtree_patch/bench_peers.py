"""The peers of the benchmark: the nearest kernels of other libraries on the same call, where they are installed.

They do less: plain causal attention, because neither takes a tree mask, and FlashMLA wants pages of 64 tokens where
SGLang's tree verification has pages of one. They are a bar for the speed, and no substitute. A maker gets the call (see
`bench_measure.inputs`), its shape and the scale, does what a framework does once a step, and returns the call to time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from kdtree_patch.bench_shapes import Shape
from kdtree_patch.tiles import HEAD_DIM, LATENT, ROPE

Maker = Callable[[Mapping[str, Any], Shape, float], Callable[[], Any]]

FLASHINFER_WORKSPACE = 256 << 20
FLASHMLA_PAGE = 64


def flashinfer_mla(backend: str) -> Maker:
    """FlashInfer's paged MLA kernel, `fa2` for all GPUs or `fa3` for Hopper, on the same scattered slots."""

    def make(call: Mapping[str, Any], shape: Shape, scale: float) -> Callable[[], Any]:
        import torch
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        bs, q_len, heads, prefix = shape
        pool = call["kv_pool"]
        # FlashInfer finds the draft tokens in the pool, as SGLang's FlashInfer backend leaves them there: behind ours.
        cache = torch.cat([pool, call["k_extend"]])
        drafts = torch.arange(pool.shape[0], cache.shape[0], device=pool.device)
        slots = torch.cat([call["kv_indices"].view(bs, prefix), drafts.view(bs, q_len)], dim=1)
        length = prefix + q_len
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=pool.device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        wrapper.plan(
            qo_indptr=call["qo_indptr"],
            kv_indptr=(torch.arange(bs + 1, device=pool.device) * length).int(),
            kv_indices=slots.flatten().int(),
            kv_len_arr=torch.full((bs,), length, dtype=torch.int32, device=pool.device),
            num_heads=heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=1,
            causal=True,
            sm_scale=scale,
            q_data_type=pool.dtype,
            kv_data_type=pool.dtype,
        )
        latent, rope = (part.contiguous() for part in call["q"].split([LATENT, ROPE], dim=-1))
        return lambda: wrapper.run(latent, rope, cache[..., :LATENT], cache[..., LATENT:])

    return make


def flash_mla(call: Mapping[str, Any], shape: Shape, scale: float) -> Callable[[], Any]:
    """FlashMLA's dense decoding kernel for Hopper, on pages of 64 tokens scattered in a cache of their own."""
    import torch
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    bs, q_len, heads, prefix = shape
    q = call["q"].view(bs, q_len, heads, HEAD_DIM)
    generator = torch.Generator(q.device).manual_seed(0)
    pages = -(-(prefix + q_len) // FLASHMLA_PAGE)
    size = (bs * pages, FLASHMLA_PAGE, 1, HEAD_DIM)
    cache = torch.randn(size, device=q.device, generator=generator, dtype=torch.float32).to(q.dtype)
    table = torch.randperm(bs * pages, device=q.device, generator=generator).int().view(bs, pages)
    lengths = torch.full((bs,), prefix + q_len, dtype=torch.int32, device=q.device)
    schedule, splits = get_mla_metadata()
    options = dict(softmax_scale=scale, causal=True, use_legacy=True)
    return lambda: flash_mla_with_kvcache(q, cache, table, lengths, LATENT, schedule, splits, **options)


PEERS: dict[str, Maker] = {
    "fa2": flashinfer_mla("fa2"),
    "fa3": flashinfer_mla("fa3"),
    "flashmla": flash_mla,
}
MODULES = {"fa2": "flashinfer", "fa3": "flashinfer", "flashmla": "flash_mla"}


def installed_peers() -> list[str]:
    """Names of PEERS whose library this interpreter could import; nothing is imported."""
    return [name for name, module in MODULES.items() if find_spec(module) is not None]
