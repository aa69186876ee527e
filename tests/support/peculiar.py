"""Backends and calls that ask for what the patch does not serve, on the real SGLang; for the child of a lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from .backend import sglang_release

WINDOW = 16

# What a layer has that asks for nothing.
PLAIN_LAYER = dict(logit_cap=0.0, sliding_window_size=-1, xai_temperature_len=-1, is_cross_attention=False)


@contextmanager
def sliding_window(runner: Any) -> Iterator[None]:
    """Some layer of the model has a window; the backend then prepares its indices for it."""
    runner.sliding_window_size = WINDOW
    yield


@contextmanager
def deterministic(runner: Any) -> Iterator[None]:
    """--enable-deterministic-inference."""
    if sglang_release() < (0, 5, 20):
        runner.server_args.enable_deterministic_inference = True
        yield
    else:
        from sglang.srt.runtime_context import get_exec

        with get_exec().deterministic.override(enable_deterministic_inference=True):
            yield


@contextmanager
def context_parallel(runner: Any) -> Iterator[None]:
    """--dcp-size 2, as the first of the two ranks."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_dcp_size=2, attn_dcp_rank=0):
        yield


BACKENDS: Mapping[str, Callable[[Any], AbstractContextManager[object]]] = dict(
    plain=nullcontext, sliding_window=sliding_window, deterministic=deterministic, context_parallel=context_parallel
)


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a trial. A score_mod is a Triton function, which only SGLang's own process has."""
    if "score_mod" not in given:
        return dict(given)
    from sglang.kernels.ops.attention.score_mod import relative_bias_score_mod

    return {**given, "score_mod": relative_bias_score_mod}
