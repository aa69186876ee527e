"""The kernel's configurations, their variants, and which variant a call takes. Knows of nothing else; the CUDA side is
`Geometry` in kernels/verify_attn_flash.cu and in kernels/hopper.cuh.

A call has rows = heads * q_len attention rows a request. They are cut into row blocks of one size, a multiple of 8, and
the variant is the smallest one of the configuration that holds such a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

LATENT = 512
ROPE = 64
HEAD_DIM = LATENT + ROPE
MAX_Q_LEN = 512
MAX_HEADS = 128
MAX_TILES = 2**30  # of a call: the kernel counts them in 32 bits
ELEMENTS = ("bf16", "fp16")
# KV pools of another type than the queries', as SGLang's --kv-cache-dtype names them -> `Pool` in the CUDA source.
FP8_POOLS = {"fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2"}
COMBINE_THREADS = 256
_SCHEDULE_BYTES = 24


@dataclass(frozen=True)
class Variant:
    """One pair of kernels: `rows` attention rows a block (a multiple of 8). `shared_bytes` is the dynamic shared memory
    of the main kernel, as `Geometry::kSharedBytes` lays it out.
    """

    rows: int
    suffix: str
    threads: int
    shared_bytes: int

    @property
    def row_tiles(self) -> int:
        return self.rows // 8

    @property
    def partial_bytes(self) -> int:
        """Accumulators that one block leaves when its item was cut."""
        return self.rows * LATENT * 4

    def kernel_name(self, element: str) -> str:
        return f"verify_attn_{element}_{self.suffix}{self.rows}"

    def combine_name(self, element: str) -> str:
        return f"combine_splits_{element}_{self.suffix}{self.rows}"


@dataclass(frozen=True)
class Cut:
    """How the rows of a request are cut: `row_blocks` blocks of `rows_per_block` rows, the last one perhaps shorter."""

    variant: Variant
    row_blocks: int
    rows_per_block: int


@dataclass(frozen=True)
class Configuration:
    """One way to write the kernel, with variants from small to large. `shared_limit` is what the smallest part that
    runs it allows a block; a worker is a cluster of `cluster` blocks, each on a multiprocessor of its own.
    """

    name: str
    tile_keys: int
    shared_limit: int
    variants: tuple[Variant, ...]
    cluster: int = 1

    def cut_rows(self, q_len: int, heads: int) -> Cut:
        """Cuts q_len * heads rows into as few equal blocks as the largest variant allows."""
        return _cut_rows(self, q_len, heads)

    def most_tiles(self, bs: int, q_len: int, heads: int, indices: int) -> int:
        """What the tiles of all items of a call add up to at most, whatever the lengths of its `bs` requests: all their
        prefixes lie in the `indices` entries of kv_indices.
        """
        keys = indices + bs * (q_len + self.tile_keys - 1)  # each request rounded up to whole tiles
        return keys // self.tile_keys * self.cut_rows(q_len, heads).row_blocks


@lru_cache(maxsize=4096)
def _cut_rows(configuration: Configuration, q_len: int, heads: int) -> Cut:
    rows = q_len * heads
    largest = configuration.variants[-1].rows
    row_blocks = -(-rows // largest)
    rows_per_block = (-(-rows // row_blocks) + 7) // 8 * 8
    variant = next(v for v in configuration.variants if v.rows >= rows_per_block)
    return Cut(variant, -(-rows // rows_per_block), rows_per_block)


def _portable_shared(rows: int) -> int:
    stages, keys = 2, 32
    tiles = stages * keys * HEAD_DIM * 2
    probabilities = rows * (keys * 2 + 16)
    exchange = 4 * rows * keys * 4
    row_state = 3 * rows * 4
    risen = 8
    return tiles + probabilities + exchange + row_state + risen + _SCHEDULE_BYTES


def _hopper_shared(rows: int) -> int:
    cluster, stages, keys = 2, 4, 64
    own_rows = rows // cluster
    queries = rows * HEAD_DIM // cluster * 2
    tiles = stages * keys * HEAD_DIM // cluster * 2
    probabilities = 2 * (rows * keys * 2 + rows // 8 * 32)
    partial_scores = 2 * keys * own_rows * 4
    mbarriers = 26 * 8
    factors = 2 * rows * 4
    maxima = 2 * own_rows * 4
    exchange = 2 * 2 * 4 * own_rows * 4
    notes, targets, beginning = 4 * 4, 3 * 6 * 4, 7 * 4
    hand_over = factors + maxima + exchange + notes + targets
    return queries + tiles + probabilities + partial_scores + mbarriers + hand_over + _SCHEDULE_BYTES + beginning


# portable: 101,376 bytes are what sm_86, sm_89 and sm_120 allow a block. hopper: wgmma, for compute capability 9.0.
CONFIGS = {
    "portable": Configuration(
        "portable", 32, 101_376, tuple(Variant(r, "r", 256, _portable_shared(r)) for r in (16, 32, 40))
    ),
    "hopper": Configuration(
        "hopper", 64, 232_448, tuple(Variant(r, "h", 512, _hopper_shared(r)) for r in (32, 64, 72)), cluster=2
    ),
}
