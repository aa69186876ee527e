"""What the benchmark measures, and the least that each shape costs: bytes to move, operations to do. Imports nothing
but what Python brings along.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from kdtree_patch.tiles import HEAD_DIM, LATENT, MAX_HEADS, MAX_Q_LEN

# Bytes of one element of a KV pool. The draft tokens' own keys, the queries and the output stay at two.
# The element type of the pool for --kv-cache-dtype, as torch and the rows of a run name it.
KV_DTYPES = {None: "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
POOL_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class Shape(NamedTuple):
    """One verify call whose requests all have the same prefix."""

    bs: int
    q_len: int
    heads: int  # of this rank
    prefix: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @property
    def tokens(self) -> int:
        """Keys of the whole batch: every one of them is read at least once."""
        return self.bs * (self.prefix + self.q_len)


SHAPES = tuple(
    Shape(*shape)
    for shape in (
        (1, 9, 8, 21),
        (1, 9, 8, 1024),
        (1, 9, 8, 4096),
        (1, 9, 8, 16384),
        (1, 9, 8, 65536),
        (1, 9, 8, 131072),
        (16, 9, 8, 4096),
        (16, 9, 8, 16384),
        (64, 9, 8, 4096),
        (1, 64, 8, 16384),
        (16, 9, 16, 8192),
        (16, 9, 128, 4096),
    )
)
# Those that are also measured with the portable configuration where another one is the GPU's own.
PORTABLE_SHAPES = SHAPES[1:-1]

# Lines for the plot, at the reference case's q_len and heads, as far as a KV pool of a million tokens goes.
SWEEP = tuple(
    Shape(bs, 9, 8, prefix)
    for bs in (1, 4, 16, 64)
    for prefix in (256, 1024, 4096, 16384, 65536, 131072)
    if bs * prefix <= 2**20
)


# --modes: what lies beside trees at the reference case's q_len.


class Trial(NamedTuple):
    """A shape, and how its call is made: with a tree mask or as a chain, on pages of `page_size` tokens."""

    kind: str
    shape: Shape
    tree: bool = False
    page_size: int = 1


# Of the trials.
KINDS = ("chains", "trees", "extends")
_Q_LENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

_CHAIN_SHAPES = ((1, 4, 8, 4096), (1, 9, 8, 16384), (16, 4, 8, 16384), (16, 9, 16, 8192), (64, 9, 8, 4096))
_TREE_SHAPES = ((1, 257, 8, 4096), (1, 257, 16, 16384), (1, 257, 128, 4096), (4, 257, 128, 4096), (16, 257, 8, 8192))
_EXTEND_PREFIXES = {8: (1024, 4096, 16384, 65536), 128: (1024, 16384)}  # by heads

TRIALS: tuple[Trial, ...] = (
    *(
        Trial("chains", Shape(*shape), tree, page_size)
        for shape in _CHAIN_SHAPES
        for tree, page_size in ((True, 1), (False, 1), (False, 64))
    ),
    *(Trial("trees", Shape(*shape), tree=True) for shape in _TREE_SHAPES),
    *(
        Trial("extends", Shape(bs, q_len, heads, prefix))
        for heads, prefixes in _EXTEND_PREFIXES.items()
        for bs in (1, 4)
        for prefix in prefixes
        for q_len in _Q_LENS
    ),
)


def parse_shape(text: str) -> Shape:
    """A type for argparse: `bs,q_len,heads,prefix`."""
    most = {"q_len": MAX_Q_LEN, "heads": MAX_HEADS}
    try:
        shape = Shape(*(int(word) for word in text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not bs,q_len,heads,prefix: four whole numbers with commas, for example 1,9,8,4096"
        ) from None
    for name, number in shape._asdict().items():
        least = 0 if name == "prefix" else 1
        if number < least or number > most.get(name, number):
            allowed = f"from {least} to {most[name]}" if name in most else f"{least} or more"
            raise argparse.ArgumentTypeError(f"{text!r}: {name} is {number}, and must be {allowed}")
    return shape


def moved_bytes(shape: Shape, kv_dtype: str = "bfloat16") -> int:
    """Bytes that any kernel must move: each cached key once as the pool has it, each draft key, query and output row
    once with two bytes an element.
    """
    cached = shape.bs * shape.prefix * HEAD_DIM * POOL_ELEMENT_BYTES[kv_dtype]
    drafts = shape.bs * shape.q_len * HEAD_DIM * 2
    rows = shape.bs * shape.q_len * shape.heads
    return cached + drafts + rows * (HEAD_DIM + LATENT) * 2


def operations(shape: Shape) -> int:
    """Floating-point operations of the two products, without any padding."""
    return shape.tokens * shape.q_len * shape.heads * 2 * (HEAD_DIM + LATENT)


def floor_us(shape: Shape, tb_s: float, tflops: float, kv_dtype: str = "bfloat16") -> float:
    """The least time: the larger of the bytes over a bandwidth and the operations over a rate."""
    return max(moved_bytes(shape, kv_dtype) / tb_s, operations(shape) / tflops) / 1e6


def shape_of(row: Mapping[str, int]) -> Shape:
    """The shape of a row of the benchmark's JSON."""
    return Shape(row["bs"], row["q_len"], row["heads"], row["prefix"])
