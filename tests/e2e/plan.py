"""The servers of a run: which there are, and the options that they are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.e2e.models import DFLASH_BLOCK, Checkpoints
from tests.e2e.server import ServerSpec

TREE = dict(steps=3, topk=4, draft_tokens=16)
CHAIN = dict(steps=3, topk=1, draft_tokens=4)

# What all have. A tokenizer would say nothing about attention, nor would sampling.
COMMON = (
    *("--attention-backend", "triton"),
    "--skip-tokenizer-init",
    *("--grammar-backend", "none"),
    *("--sampling-backend", "pytorch"),
    *("--random-seed", "1"),
    # The pool has the size that --max-total-tokens says. SGLang makes it smaller if this share of the memory that was
    # free at the start, less what others have taken since, is not enough for it.
    *("--mem-fraction-static", "0.95"),
    # Those that wait for their turn leave the processor to the one that is measured.
    "--sleep-on-idle",
)
NOT_BY_DEFAULT = ("--disable-radix-cache", "--disable-piecewise-cuda-graph")
SMALL = (
    *("--max-total-tokens", "16384"),
    *("--max-running-requests", "8"),
    *("--context-length", "4096"),
)
# Prompts that lie in the prefix cache are not computed again for each batch size, and those that do not are not cut
# into chunks, which SGLang's absorbed prefill is slow with.
DEEP = (
    *("--max-total-tokens", "600000"),
    *("--max-running-requests", "16"),
    *("--context-length", "40000"),
    *("--chunked-prefill-size", "-1"),
    *("--max-prefill-tokens", "40960"),
    "--disable-piecewise-cuda-graph",
)
LOAD = (
    *("--max-total-tokens", "131072"),
    *("--max-running-requests", "16"),
    *("--context-length", "4096"),
    # Not all sizes, so that most batches are padded.
    *("--cuda-graph-bs", "1", "2", "4", "8", "12", "16"),
    "--disable-piecewise-cuda-graph",
)

REL_LIMIT = 5e-3
# With an fp8 pool stock itself rounds queries and weights to fp8: then its tokens are not ours, and rel says why.
FP8_REL_LIMIT = 0.3
GUARD = {"KDTREE_GUARD_REL": "0.05"}
VALIDATE = {"KDTREE_VALIDATE": "1"}
DOORS = {True: "patched", False: "stock"}


def speculation(draft: Path, steps: int, topk: int, draft_tokens: int) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
    )


def dflash(draft: Path) -> tuple[str, ...]:
    """Of steps and topk SGLang makes 1 each; the draft tokens are the block."""
    return (
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-dflash-block-size", str(DFLASH_BLOCK)),
    )


def graphs(mode: str, *sizes: int) -> tuple[str, ...]:
    return ("--disable-cuda-graph",) if mode == "eager" else ("--cuda-graph-bs", *map(str, sizes))


@dataclass(frozen=True)
class Pair:
    """A stock server and a patched one that differ in nothing else. `margins`: a stock server of the same target that
    is asked for log-probabilities, where those two have none."""

    name: str
    stock: ServerSpec
    patched: ServerSpec
    margins: ServerSpec | None = None

    @property
    def specs(self) -> tuple[ServerSpec, ...]:
        both = self.stock, self.patched
        return both if self.margins is None else (*both, self.margins)


def pair(name: str, options: tuple[str, ...], environ: Mapping[str, str] = {}) -> Pair:
    """`environ` is the patched one's."""
    stock = ServerSpec(f"{name}-stock", False, options)
    return Pair(name, stock, ServerSpec(f"{name}-patched", True, options, dict(environ)))


def token_pairs(models: Checkpoints, pool: str | None = None) -> list[Pair]:
    """Draft and target: the same model, or one that is often wrong. Eager and with graphs; a chain, whose calls have
    no mask; SGLang's default options, with radix cache and piecewise graphs; and DFLASH, whose target verifies a chain
    with a mask, and whose draft has verify calls of its own. `pool`: the type of an fp8 KV pool."""
    kv = () if pool is None else ("--kv-cache-dtype", pool)
    target = (*_target(models.target), *kv)
    drafts = {"same": models.target, "noisy": models.noisy}
    pairs = []
    for variant, draft in drafts.items():
        for mode in ("graph", "eager"):
            options = (*target, *SMALL, *NOT_BY_DEFAULT, *graphs(mode, 1, 2, 4))
            # In eager mode validation changes nothing of what is served.
            environ = VALIDATE if (variant, mode) == ("same", "eager") else {}
            pairs.append(pair(f"{variant}-{mode}", (*options, *speculation(draft, **TREE)), environ))
    default = (*target, *SMALL, *graphs("graph", 1, 2, 4), *speculation(models.noisy, **TREE))
    chain = (*target, *SMALL, *NOT_BY_DEFAULT, *graphs("graph", 1, 2, 4))
    pairs.append(pair("default-graph", default))
    pairs.append(pair("chain-graph", (*chain, *speculation(models.noisy, **CHAIN))))
    # Next to no draft is accepted, so tokens speak for the first row of a chain alone: for the others validation does.
    block = pair("dflash-graph", (*chain, *dflash(models.dflash)), VALIDATE)
    margins = (*target, *SMALL, *NOT_BY_DEFAULT, *graphs("eager"))
    pairs.append(replace(block, margins=ServerSpec("dflash-graph-margins", False, margins)))
    return pairs


def speed_pairs(models: Checkpoints) -> list[Pair]:
    options = (*_target(models.deep), *DEEP, *speculation(models.shallow, **TREE))
    return [pair(f"speed-{mode}", (*options, *graphs(mode, 1, 4, 16))) for mode in ("graph", "eager")]


def load_spec(models: Checkpoints) -> ServerSpec:
    options = (*_target(models.target), *LOAD, *speculation(models.noisy, **TREE))
    return ServerSpec("load-patched", True, options, {**VALIDATE, **GUARD})


@dataclass(frozen=True)
class Ranks:
    """Two ranks: pairs, each of whose patched servers starts with an empty cache of its own, and half of which
    validate; one whose guard is made to trip on rank 1; one whose compiler is killed."""

    pairs: list[Pair]
    trip: ServerSpec
    killed: ServerSpec

    @property
    def specs(self) -> list[ServerSpec]:
        # Those that are compared with each other start next to each other.
        return [spec for one in self.pairs for spec in one.specs] + [self.trip, self.killed]


def rank_specs(models: Checkpoints, tp: int, folder: Path) -> Ranks:
    def cold(name: str) -> dict[str, str]:
        return {"KDTREE_CACHE_DIR": str(folder / f"cache-{name}")}

    def options(draft: Path, mode: str) -> tuple[str, ...]:
        common = (*_target(models.target), *SMALL, *NOT_BY_DEFAULT, *graphs(mode, 1, 2, 4))
        return (*common, "--tp", str(tp), *speculation(draft, **TREE))

    pairs = [
        pair(f"{variant}-{mode}", options(draft, mode), {**environ, **cold(f"{variant}-{mode}")})
        for variant, draft, environ in (("same", models.target, VALIDATE), ("noisy", models.noisy, {}))
        for mode in ("graph", "eager")
    ]
    trip = ServerSpec(
        "trip-patched",
        True,
        options(models.noisy, "graph"),
        {**VALIDATE, **GUARD, **cold("trip")},
        behind=Path(__file__).with_name("trip"),
    )
    killed = ServerSpec("killed-patched", True, options(models.noisy, "graph"), {**VALIDATE, **cold("killed")})
    return Ranks(pairs, trip, killed)


def _target(model: Path) -> tuple[str, ...]:
    return ("--model-path", str(model), *COMMON)
