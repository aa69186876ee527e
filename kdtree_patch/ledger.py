"""What one process has served, declined and given up, and what it has said about it: shared by the routers of its
backends. Knows the log and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from kdtree_patch import log

# The reason codes of a guard that has tripped, and of one that has in another worker.
GUARD: Final = "guard"
GUARD_ELSEWHERE: Final = "guard_elsewhere"

# CUDA errors after which the context is lost: every later call fails as well, so going on with the stock kernel would
# only hide where it happened. 214 and 220 are uncorrectable errors of ECC and NVLink, 226 is a contained fault of the
# hardware, the 700s are faults and aborts inside a kernel, 721 tensor memory that a kernel has not given back.
FATAL_STATUS: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})


def is_fatal(error: Exception) -> bool:
    """True for a CUDA error that has taken the context with it; cupy has it as `status`, torch as `error_code`."""
    return any(getattr(error, name, None) in FATAL_STATUS for name in ("status", "error_code"))


class Meters(Protocol):
    """What the ledger and the router need of `kdtree_patch.metrics.Metrics`."""

    def count(self, route: str, reason: str, calls: int) -> None: ...

    def compared(self, mode: str, layer: int, rel: float) -> None: ...

    def tripped(self) -> None: ...


class Ledger:
    """What one process has served and declined, and what it has already said. Shared by the routers of its backends."""

    def __init__(self, meters: Meters | None = None) -> None:
        # (route, reason) to number of calls: ("kernel", "verify"), ("stock", "shadow"), ("stock", "dtype"), ...
        self.counts: Counter[tuple[str, str]] = Counter()
        self.disabled: str | None = None  # a reason code, once the kernel is off for the life of the process
        self.meters = meters
        self._said: set[object] = set()
        self._routed = 0
        self._report_at = 10

    def count(self, route: str, reason: str, calls: int = 1) -> None:
        self.counts[route, reason] += calls
        if self.meters is not None:
            self.meters.count(route, reason, calls)

    def count_routed(self, route: str, reason: str, calls: int = 1) -> None:
        """Counts calls that were not declined, whoever served them. The 10th, the 100th and so on are said."""
        self.count(route, reason, calls)
        self._routed += calls
        if self._routed >= self._report_at:
            while self._routed >= self._report_at:
                self._report_at *= 10
            served = sum(calls for (route, _), calls in self.counts.items() if route == "kernel")
            declined = {reason: calls for (route, reason), calls in self.counts.items() if route == "stock"}
            log.get_logger().info("calls %s", log.fields({"served": served, **declined}))

    def first(self, what: object) -> bool:
        """True the first time it is asked about `what`."""
        if what in self._said:
            return False
        self._said.add(what)
        return True

    def disable(self, reason: str, message: str, graphs: bool = True) -> None:
        """Turns the kernel off for the life of the process, with one ERROR line. A guard that has tripped here is said
        after any other reason as well: in a graph it may have done so before, and the host learns of it later.

        `graphs` says whether CUDA graphs that are captured already go stock, too.
        """
        if self.disabled is None or (reason == GUARD and self.disabled != GUARD):
            self.disabled = reason
            self.first(("declined", reason))  # the calls that are declined from now on are counted; this line says why
            form = (
                "disabled reason=%s %s; verify calls run stock from here on"
                if graphs
                else "disabled reason=%s %s; eager verify calls run stock from here on, CUDA graphs go on with what "
                "they have captured until a restart"
            )
            log.get_logger().error(form, reason, log.advised(reason, message))
            if reason == GUARD and self.meters is not None:
                self.meters.tripped()

    def harmlessly(self, what: str, do: Callable[[], object]) -> bool:
        """What goes wrong beside a call (validation needs memory, for one) is a line, and no reason to lose the call.

        Returns whether it went well. An error that has taken the context with it is raised.
        """
        try:
            do()
        except Exception as error:
            if is_fatal(error):
                raise
            if self.first(("failed", what)):
                words = "%s failed: %s: %s; the call's own result is whole: report it, unless it is memory"
                log.get_logger().warning(words, what, type(error).__name__, error)
            return False
        return True
