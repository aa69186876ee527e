"""Makes the guard of rank 1 trip, and of no other rank: its limit becomes one that rounding alone is above.

Lies behind ours on a server's PYTHONPATH, so that it also shows that ours runs the next sitecustomize. The patch has
no way of its own to be told this, and needs none.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import wrapt


@wrapt.when_imported("kdtree_patch.route")
def narrow_the_limit(route: ModuleType) -> None:
    def around_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def init(
            stock: Any, kernel: Any, settings: Any, ledger: Any, rank: int | None = None, facts: Any = None
        ) -> Any:
            if rank == 1:
                settings = dataclasses.replace(settings, guard_rel=1e-9)
            return wrapped(stock, kernel, settings, ledger, rank, facts)

        return init(*args, **kwargs)

    route.VerifyRouter.__init__ = wrapt.FunctionWrapper(route.VerifyRouter.__init__, around_init)
