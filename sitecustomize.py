"""Python imports this file when it starts, because its folder is on PYTHONPATH. It does three things and no more:

1. takes its own folder off sys.path, so that the service sees kdtree_patch and nothing else of what lies in it;
2. waits for SGLang's Triton attention backend to be imported, and hands over to kdtree_patch.boot at that moment;
3. runs the `sitecustomize` that Python would have run without us.

Standard library only: a process that never imports the backend pays for this file and for nothing else.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

BACKEND = "sglang.srt.layers.attention.triton_backend"
PACKAGE = "kdtree_patch"
HERE = os.path.realpath(os.path.dirname(__file__))


def decline(reason: str, error: BaseException) -> None:
    """The one line of a failure, like those of kdtree_patch.log, which may be what is broken. Never raises."""
    try:
        detail = " ".join(f"{type(error).__name__}: {error}; put the folder of the patch back as it was".split())
        print(f"[kdtree] declined reason={reason} {detail}; the service runs stock", file=sys.stderr, flush=True)
    except Exception:
        pass  # no stderr to write to: nothing that should stop the service


def stand_in_front(finder: KdtreePackageFinder | KdtreeBackendFinder) -> None:
    """In sys.meta_path, unless another copy of this file, earlier on the path, already has its own there."""
    if not any(type(other).__name__ == type(finder).__name__ for other in sys.meta_path):
        sys.meta_path.insert(0, finder)


def take_our_folder_off_the_path() -> list[str] | None:
    """Returns the entries of sys.path after ours, where Python would have looked next; None if ours is not among them.

    Our folder also holds `kernels`, `tests` and `docs`. On sys.path each is an importable (namespace) package, and
    that is not harmless: transformers takes any folder named `kernels` for the package of that name and fails on its
    version. Only a folder that PYTHONPATH names is taken off: copying the files into site-packages must not take that
    away.
    """
    ours = [entry for entry in sys.path if os.path.realpath(entry) == HERE]
    if not ours:
        return None  # loaded by hand; whoever did that looks after the others
    rest = [entry for entry in sys.path[sys.path.index(ours[0]) :] if entry not in ours]
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(os.path.realpath(entry) == HERE for entry in named if entry):
        sys.path[:] = [entry for entry in sys.path if entry not in ours]
        stand_in_front(KdtreePackageFinder())
    return rest


class KdtreePackageFinder:
    """Finds kdtree_patch, whose folder is no longer on sys.path."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [HERE]) if name == PACKAGE else None


class KdtreeBackendFinder:
    """Waits until the backend is asked for, then steps aside for good."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != BACKEND:
            return None
        # This runs inside SGLang's import: whatever is wrong with our package must not become an error there.
        try:
            sys.meta_path.remove(self)
            add_what_we_brought_along()
            from kdtree_patch import boot

            boot.arm(BACKEND)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: what a module of ours imports may call sys.exit()
            decline("package_broken", error)
        # boot has put wrapt's finder in front; searching again from the top lets it see this very import.
        from importlib.util import find_spec

        return find_spec(name)


def add_what_we_brought_along() -> None:
    """A release that `make deploy` put here has wrapt and cupy in `vendor`. Last on the path: the service's own win."""
    vendor = os.path.join(HERE, "vendor")
    if os.path.isdir(vendor) and vendor not in sys.path:
        sys.path.append(vendor)


def find_the_next_sitecustomize(path: list[str]) -> ModuleSpec | None:
    """Asks the finders that Python would have asked after it had found ours.

    These are PathFinder with the entries after ours, and the finders behind it, as editable installs append them. A
    sitecustomize before ours would have been imported in our place; if there is one nevertheless, it is the one that
    imported us, and to run it here would be its second time.
    """
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None or PathFinder not in sys.meta_path:
        return spec
    for finder in sys.meta_path[sys.meta_path.index(PathFinder) + 1 :]:
        if hasattr(finder, "find_spec"):
            spec = finder.find_spec("sitecustomize", None)
            if spec is not None and os.path.realpath(spec.origin or "") != os.path.realpath(__file__):
                return spec
    return None


def run_the_next_sitecustomize(path: list[str]) -> None:
    """Runs the user's (or Debian's) sitecustomize as Python would: once, under its own name, its exceptions and all."""
    spec = find_the_next_sitecustomize(path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


# Ours first, so that an exception of theirs cannot disarm us; and closed, so that theirs runs whatever happens to us.
rest_of_the_path: list[str] | None = None
try:
    rest_of_the_path = take_our_folder_off_the_path()
    if os.environ.get("KDTREE_MODE", "").strip().lower() != "off":
        stand_in_front(KdtreeBackendFinder())
except Exception as boot_error:
    rest_of_the_path = [entry for entry in sys.path if entry != HERE]
    decline("boot_failed", boot_error)
if rest_of_the_path is not None:
    run_the_next_sitecustomize(rest_of_the_path)
