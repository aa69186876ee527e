"""The second door: an SGLang plugin, for those who would rather `pip install` than set PYTHONPATH.

SGLang (0.5.12 and later) calls `install` early in each of its processes, unless SGLANG_PLUGINS names other plugins
only. It does what `sitecustomize.py` does when the backend is imported. Both doors at once are one install: whichever
comes second finds it done.
"""

from __future__ import annotations

from kdtree_patch import boot, log


def install() -> None:
    """The entry point `kdtree` of the group `sglang.srt.plugins`. Never raises."""
    try:
        boot.arm(boot.BACKEND_MODULE)
    except Exception as error:
        log.stays_stock("boot_failed", f"{type(error).__name__}: {error}")
