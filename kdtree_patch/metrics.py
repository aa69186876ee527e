"""Our figures on the service's own /metrics, if it runs with `--enable-metrics`.

SGLang's processes write theirs into files of one directory (prometheus_client's multiprocess mode), which the HTTP
process reads: whatever a worker registers appears there, with no port of its own. prometheus_client decides at its
import whether it writes such files, so it is imported here, when the first backend is constructed, long after SGLang
has named the directory; and not at all in a service without metrics. Knows prometheus_client and the log.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final

from kdtree_patch import log

DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"


def of_service(server_args: Any) -> Metrics | None:
    """None if the service has no metrics, or if they cannot be had, which is one line and no more."""
    if getattr(server_args, "enable_metrics", False) is not True:
        return None
    if not os.environ.get(DIRECTORY):
        log.get_logger().warning(
            "metrics are on, but %s is not set; ours are not exported: set it to a folder", DIRECTORY
        )
        return None
    try:
        return Metrics()
    except Exception as error:
        log.get_logger().warning(
            "metrics failed: %s: %s; ours are not exported, calls are served as before", type(error).__name__, error
        )
        return None


def safely(method: Callable[..., None]) -> Callable[..., None]:
    """A full disk under the files of metrics must not cost a verify call: they stop, with one line."""

    @functools.wraps(method)
    def call(self: Metrics, *args: Any) -> None:
        if self.off:
            return
        try:
            method(self, *args)
        except Exception as error:
            self.off = True
            log.get_logger().warning(
                "metrics failed: %s: %s; ours stop here, calls are served as before", type(error).__name__, error
            )

    return call


class Metrics:
    """The sum over all workers of calls, and the largest of each gauge."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.off = False
        self._calls = Counter(
            "kdtree:verify_calls_total",
            "Attention calls of verify layers, by who served them and why; a replay of a CUDA graph counts its layers.",
            ["route", "reason"],
        )
        self._rel = Gauge(
            "kdtree:validation_rel",
            "L2 norm of the difference to the stock result over that of the stock result, when last compared.",
            ["layer"],
            multiprocess_mode="max",
        )
        self._tripped = Gauge(
            "kdtree:guard_tripped",
            "1 if the guard of a worker has tripped; not in those that are stock because of it.",
            multiprocess_mode="max",
        )
        self._tripped.set(0)
        # labels() costs more than counting does.
        self._calls_of = functools.cache(lambda route, reason: self._calls.labels(route, reason))
        self._rel_of = functools.cache(lambda layer: self._rel.labels(layer))

    @safely
    def count(self, route: str, reason: str, calls: int) -> None:
        """`route` is kernel or stock."""
        self._calls_of(route, reason).inc(calls)

    @safely
    def compared(self, layer: int, rel: float) -> None:
        self._rel_of(layer).set(rel)

    @safely
    def tripped(self) -> None:
        self._tripped.set(1)
