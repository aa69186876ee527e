"""One backend's worth of verify calls in CUDA graphs, as SGLang makes them: persistent buffers of offsets, indices and
mask, two eager calls before each capture, metadata written anew before each replay, batches padded with requests of
prefix 1 in slot 0 and a mask that is left from before.

Runs on a GPU with real graphs and both real kernels, and on a CPU with `FakeGraph` and both kernels in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kdtree_patch.ledger import Ledger
from kdtree_patch.route import Kernel, VerifyRouter
from kdtree_patch.settings import Settings
from tests.fakes import a_batch, a_layer
from tests.support.cases import HEAD_DIM, SCALE, Case, make_case
from tests.support.graphs import Graph

POOL_SLOTS = 4096


@dataclass
class Layer:
    q: torch.Tensor
    k: torch.Tensor
    out: torch.Tensor
    pool: torch.Tensor


class Faulty:
    """A kernel that adds `amount`, a number on the device, to some rows of what it writes."""

    def __init__(self, kernel: Kernel, rows: slice):
        self.device = kernel.device
        self.pool = kernel.pool
        self.amount = torch.zeros((), dtype=torch.float16, device=kernel.device)
        self._kernel = kernel
        self._rows = rows

    def launch(self, *args: Any) -> None:
        self._kernel.launch(*args)
        args[2][self._rows].add_(self.amount)


class GraphBench:
    """`stock` and `kernel` are the two kernels; `new_graph` makes an empty graph.

    The kernel adds `wrong` to its output, from the replay number `wrong_from` on, beginning with the request
    `wrong_request`. In another `mode` than verify there is no mask.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        kernel: Kernel,
        new_graph: Callable[[], Graph],
        settings: Settings,
        *,
        max_bs: int = 4,
        q_len: int = 3,
        heads: int = 2,
        layers: int = 2,
        dtype: torch.dtype = torch.float16,
        ledger: Ledger | None = None,
        wrong: float = 0.0,
        wrong_from: int = 0,
        wrong_request: int = 0,
        mode: str = "verify",
    ):
        device = kernel.device
        self.wrong, self.wrong_from, self.replays = wrong, wrong_from, 0
        if wrong:
            kernel = self.faulty = Faulty(kernel, slice(wrong_request * q_len, None))
            self._go_wrong()
        self.mode = mode
        self.q_len, self.heads, self.device, self.new_graph = q_len, heads, device, new_graph
        self.ledger = ledger or Ledger()
        facts = {"version": "0", "gpu": "a GPU"}
        self.router = VerifyRouter(stock, kernel, settings, self.ledger, rank=2, facts=facts)
        tokens = max_bs * q_len
        zeros = dict(dtype=torch.int64, device=device)
        self.qo_indptr = torch.zeros(max_bs + 1, **zeros)
        self.kv_indptr = torch.zeros(max_bs + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(POOL_SLOTS, **zeros)
        self.mask = torch.ones(q_len * (POOL_SLOTS + max_bs * q_len), dtype=torch.uint8, device=device)
        self.mask_indptr = torch.zeros(max_bs + 1, **zeros)
        self.layers = [
            Layer(
                q=torch.ones(tokens, heads, HEAD_DIM, dtype=dtype, device=device),
                k=torch.ones(tokens, 1, HEAD_DIM, dtype=dtype, device=device),
                out=torch.full((tokens, heads, 512), torch.nan, dtype=dtype, device=device),
                pool=torch.randn(POOL_SLOTS, 1, HEAD_DIM, generator=torch.Generator().manual_seed(layer))
                .to(dtype)
                .to(device),
            )
            for layer in range(layers)
        ]
        self.v = {id(layer): layer.k[..., :512].contiguous() for layer in self.layers}
        self.graphs: dict[int, Graph] = {}

    def arguments(self, bs: int, layer: Layer) -> dict[str, Any]:
        tokens = bs * self.q_len
        return dict(
            q_extend=layer.q[:tokens],
            k_extend=layer.k[:tokens],
            v_extend=self.v[id(layer)][:tokens],
            o_extend=layer.out[:tokens],
            k_buffer=layer.pool,
            v_buffer=layer.pool[..., :512],
            qo_indptr=self.qo_indptr[: bs + 1],
            kv_indptr=self.kv_indptr[: bs + 1],
            kv_indices=self.kv_indices,
            custom_mask=self.mask if self.mode == "verify" else None,
            is_causal=True,
            mask_indptr=self.mask_indptr[: bs + 1] if self.mode == "verify" else None,
            max_len_extend=self.q_len,
            k_scale=1.0,
            v_scale=1.0,
            sm_scale=SCALE,
        )

    def forward(self, bs: int) -> None:
        """All layers of one step."""
        for number, layer in enumerate(self.layers):
            self.router.context = (a_layer(number), a_batch(seq_lens_cpu=None, seq_lens_sum=None))
            self.router.mode = self.mode
            self.router(**self.arguments(bs, layer))

    def write_metadata(self, cases: Sequence[Case] | None, bs: int) -> None:
        """Of a live batch, one case a layer, padded to `bs`; or, without, of the made-up batch of a capture."""
        prefixes = [1] * bs
        if cases is not None:
            live = cases[0]
            prefixes[: len(live.qo_indptr) - 1] = live.kv_indptr.diff().tolist()
        ends = torch.tensor([0, *prefixes]).cumsum(0)
        masks = torch.tensor([0, *(self.q_len * (prefix + self.q_len) for prefix in prefixes)]).cumsum(0)
        self.qo_indptr[: bs + 1].copy_(torch.arange(bs + 1) * self.q_len)
        self.kv_indptr[: bs + 1].copy_(ends)
        self.mask_indptr[: bs + 1].copy_(masks)
        self.kv_indices[: int(ends[-1])].zero_()
        if cases is None:
            self.mask.fill_(1)
            return
        total, tokens = int(live.kv_indptr[-1]), live.q.shape[0]
        slots = (
            torch.randperm(POOL_SLOTS - 1, generator=torch.Generator().manual_seed(total))[:total].to(self.device) + 1
        )
        self.kv_indices[:total].copy_(slots)
        if live.custom_mask is not None:
            self.mask[: len(live.custom_mask)].copy_(live.custom_mask)
        for layer, case in zip(self.layers, cases, strict=True):
            layer.pool[slots] = case.kv_pool[case.kv_indices]
            layer.q[:tokens].copy_(case.q)
            layer.k[:tokens].copy_(case.k_extend)
            self.v[id(layer)][:tokens].copy_(case.k_extend[..., :512])
            layer.out.fill_(torch.nan)

    def cases(self, prefixes: Sequence[int], seed: int = 0) -> list[Case]:
        """One for each layer: they share lengths and masks, as the layers of a step do."""
        how = dict(device=str(self.device), seed=seed + 1, mask="tree" if self.mode == "verify" else "none")
        return [make_case(list(prefixes), self.q_len, self.heads, dtype=layer.q.dtype, **how) for layer in self.layers]

    def capture(self, *sizes: int, warm_up: bool = True) -> None:
        """Largest first, as SGLang does it."""
        for bs in sizes:
            self.router.before_step()
            self.write_metadata(None, bs)
            self.router.capture_begins(bs, self.mode)
            if warm_up:
                for _ in range(2):
                    self.forward(bs)
            self.graphs[bs] = self.new_graph()
            self.graphs[bs].capture(lambda bs=bs: self.forward(bs))

    def replay(self, bs: int, cases: Sequence[Case]) -> list[torch.Tensor]:
        """The live rows of each layer's output, a copy."""
        self.router.before_step()
        self.write_metadata(cases, bs)
        self.router.replay_begins(bs, self.mode)
        self._go_wrong()
        self.replays += 1
        self.graphs[bs].replay()
        live = cases[0].q.shape[0]
        return [layer.out[:live].clone() for layer in self.layers]

    def _go_wrong(self) -> None:
        if self.wrong and self.replays == self.wrong_from:
            self.faulty.amount.fill_(self.wrong)

    def eager(self, cases: Sequence[Case]) -> list[torch.Tensor]:
        """The same layers without a graph, without padding."""
        bs = len(cases[0].qo_indptr) - 1
        self.router.before_step()
        self.write_metadata(cases, bs)
        self.forward(bs)
        return [layer.out[: cases[0].q.shape[0]].clone() for layer in self.layers]

    def settle(self) -> None:
        """Two more steps come by without a replay: what the last one has left is fetched."""
        for _ in range(2):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.router.before_step()
