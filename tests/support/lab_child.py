"""The child's end of a lab: `python -m support.lab_child FD`, in the environment of `child_env`."""

from __future__ import annotations

import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from kdtree_patch import hook

from . import backend, peculiar
from .lab import Outcome, Trial, answer_over


@lru_cache(maxsize=32)
def bed_for(*, around: str, **settings: Any) -> backend.Bed:
    return backend.build(**settings, around=peculiar.BACKENDS[around])


def run(trial: Trial) -> Outcome:
    bed = bed_for(**trial.backend)
    for layer in bed.layers:
        vars(layer).update({**peculiar.PLAIN_LAYER, **trial.layer})
    if not trial.prefixes:
        nothing = torch.empty(0)
        return Outcome(nothing, nothing, {}, nothing, nothing, 0, hasattr(bed.backend, hook.ROUTER), {})
    options = peculiar.options(trial.options)
    call = backend.verify_batch(bed, trial.prefixes, trial.seed, trial.mask)
    last = trial.layers - 1
    arguments = backend.reference_arguments(bed, call, last)
    pool = arguments["kv_pool"]
    arguments["kv_pool"] = pool.clone() if pool.itemsize > 1 else pool.float()  # fp8 cannot be pickled

    before = hook.counts()
    with CountStores(bed.pool) as stores:
        for layer in range(trial.layers):
            ours = backend.forward(bed, call, layer, **options)
    routed = hook.counts() - before
    pool_after = bed.pool.kv_buffer[last].clone()
    return Outcome(
        ours=ours,
        stock=backend.forward_stock(bed, call, last, **options),
        arguments=arguments,
        pool_after=pool_after,
        draft_slots=call.draft_slots,
        stores=stores.count,
        routed_backend=hasattr(bed.backend, hook.ROUTER),
        routed=dict(routed),
    )


class CountStores:
    """Counts the calls of a pool's `set_kv_buffer`."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.count = 0

    def __enter__(self) -> CountStores:
        store = self.pool.set_kv_buffer

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return store(*args, **kwargs)

        self.pool.set_kv_buffer = counted
        return self

    def __exit__(self, *_: object) -> None:
        del self.pool.set_kv_buffer


if __name__ == "__main__":
    answer_over(Connection(int(sys.argv[1])), run)
