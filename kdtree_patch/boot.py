"""What happens when SGLang's Triton backend is imported: settings, then contract, then hook.

Called by sitecustomize.py from inside SGLang's own import, or by plugin.py before it, and by wrapt when that import is
done. An exception in any of these places would be SGLang's exception, so each ends in one line and a stock service.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from kdtree_patch import log
from kdtree_patch.settings import SettingError, Settings

if TYPE_CHECKING:
    from kdtree_patch.compile import CompileJob


# The same name is in sitecustomize.py, which must not import anything to know it.
BACKEND_MODULE = "sglang.srt.layers.attention.triton_backend"

# There are two doors. Whichever is first reads the settings, says what is wrong, and registers the hook.
_armed: set[str] = set()


def arm(backend_module: str) -> None:
    """Asks to be called back when `backend_module` has been imported, or at once if it has been. A second time changes
    nothing."""
    if backend_module in _armed:
        return
    _armed.add(backend_module)
    try:
        settings = Settings.from_environ(os.environ)
    except SettingError as error:
        log.get_logger().error("declined reason=bad_setting %s", error)
        return
    if settings.mode == "off":
        return
    log.set_level(settings.log_level)
    # wrapt is no dependency of SGLang, so its absence is a thing that happens to people, and so is one of no use.
    try:
        from wrapt import FunctionWrapper, register_post_import_hook  # noqa: F401 - the hook needs the first
    except Exception as error:
        why = f"({type(error).__name__}: {error})"
        log.stays_stock("wrapt_missing", f"{why} install wrapt into the service's environment: pip install wrapt")
        return
    register_post_import_hook(functools.partial(_on_import, settings=settings), backend_module)


def _on_import(module: ModuleType, settings: Settings) -> None:
    """The backend module is there, and nobody has used it yet.

    wrapt calls this once. After a reload of the module the new class is SGLang's own, and runs stock.
    """
    try:
        from kdtree_patch import contract

        violations = contract.check(module)
        if violations:
            sglang = contract.sglang_version()
            log.stays_stock("contract", contract.UNKNOWN_RELEASE, violations="; ".join(violations), sglang=sglang)
            return
        from kdtree_patch import hook

        hook.install(module, settings, start_compiling(settings))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # modules of ours and theirs are imported here, and one may call sys.exit()
        log.stays_stock("hook_failed", f"{type(error).__name__}: {error}")


def start_compiling(settings: Settings) -> CompileJob | None:
    """Compiles in the background while the worker loads its weights, which takes minutes; needs no CUDA context.

    Only in a spawned process. For a multimodal model the HTTP process imports the backend too, through the image
    processors, and never constructs one: it has no use for a kernel. A process that turns out to need one without this
    compiles when it constructs its backend.
    """
    if multiprocessing.parent_process() is None:
        return None
    from kdtree_patch import compile as compiling

    # Which type the KV pool has is certain only when the backend is constructed. Here the words that the service was
    # started with, which a spawned process has too, are a good guess; where they say nothing of fp8 and the pool is, it
    # is compiled then.
    pool = said_pool(sys.argv)
    targets = [compiling.with_pool(target, pool) for target in compiling.visible_targets(config=settings.config)]
    if not targets:
        return None
    job = compiling.CompileJob(targets, settings.cache_dir)
    job.start()
    return job


def said_pool(words: list[str]) -> str | None:
    """The fp8 type that `--kv-cache-dtype` has among these words, or None."""
    from kdtree_patch.tiles import FP8_POOLS

    parts = [part for word in words for part in word.split("=", 1)]
    said = [after for option, after in itertools.pairwise(parts) if option == "--kv-cache-dtype"]
    return said[-1] if said and said[-1] in FP8_POOLS else None
