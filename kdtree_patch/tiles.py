"""The kernel's variants and which one a call takes. Knows of nothing else; the CUDA side is `Geometry` in
kernels/verify_attn_flash.cu.

A call has rows = heads * q_len attention rows a request. They are cut into row blocks of one size, a multiple of 8, and
the variant is the smallest one that holds such a block. All variants fit the 101,376 bytes of shared memory that sm_86,
sm_89 and sm_120 allow a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

LATENT = 512
ROPE = 64
HEAD_DIM = LATENT + ROPE
THREADS = 256
TILE_KEYS = 32
STAGES = 2
SHARED_LIMIT = 101_376
MAX_Q_LEN = 256
MAX_HEADS = 128


@dataclass(frozen=True)
class Variant:
    """One pair of kernels: `rows` attention rows a block (a multiple of 8)."""

    rows: int

    @property
    def row_tiles(self) -> int:
        return self.rows // 8

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the main kernel, as `Geometry::kSharedBytes` lays it out."""
        tiles = STAGES * TILE_KEYS * HEAD_DIM * 2
        probabilities = TILE_KEYS * (self.row_tiles | 1) * 16
        exchange = self.row_tiles * THREADS * 16
        row_state = 3 * self.rows * 4
        return tiles + probabilities + exchange + row_state + 64

    @property
    def partial_bytes(self) -> int:
        """Accumulators that one block leaves when its item was cut."""
        return self.rows * LATENT * 4

    @property
    def combine_chunks(self) -> int:
        """Chunks of 64 positions that combine deals out for one item."""
        return self.row_tiles * 16

    def kernel_name(self, element: str) -> str:
        return f"verify_attn_{element}_r{self.rows}"

    def combine_name(self, element: str) -> str:
        return f"combine_splits_{element}_r{self.rows}"


VARIANTS = (Variant(16), Variant(32), Variant(40))
ELEMENTS = ("bf16", "fp16")


@dataclass(frozen=True)
class Cut:
    """How the rows of a request are cut: `row_blocks` blocks of `rows_per_block` rows, the last one perhaps shorter."""

    variant: Variant
    row_blocks: int
    rows_per_block: int


@lru_cache(maxsize=4096)
def cut_rows(q_len: int, heads: int) -> Cut:
    """Cuts q_len * heads rows into as few equal blocks as the largest variant allows."""
    rows = q_len * heads
    largest = VARIANTS[-1].rows
    row_blocks = -(-rows // largest)
    rows_per_block = (-(-rows // row_blocks) + 7) // 8 * 8
    variant = next(v for v in VARIANTS if v.rows >= rows_per_block)
    return Cut(variant, -(-rows // rows_per_block), rows_per_block)
