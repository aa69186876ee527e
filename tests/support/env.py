"""The environment of a child process that imports a given SGLang release, with or without the patch.

Two releases cannot live in one process, and a patch that is installed by `sitecustomize` needs an interpreter of its
own anyway: whatever touches SGLang runs in a child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

# Each release is unpacked into a directory of its own beside one set of dependencies.
RELEASES = ("0.5.12", "0.5.23")


def sglang_dir(release: str) -> Path:
    """Where `make setup` unpacks a release: `.venv/sglang-0.5.12`."""
    directory = REPO / ".venv" / f"sglang-{release}"
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is missing: run `make setup`")
    return directory


def child_env(
    release: str | None = None, variables: Mapping[str, str] | None = None, *, patched: bool = True
) -> dict[str, str]:
    """The environment for a child process.

    PYTHONPATH is the repository, then the SGLang release, then the folder of the tests, so that a child finds the test
    support as `support` (our `sitecustomize` takes the repository itself off the path). With `patched=False` an empty
    `sitecustomize` stands first and ours is never run. No KDTREE_* variable is inherited; `variables` are set last.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHONPATH"))}
    entries = [REPO if patched else REPO / "tests" / "support" / "unpatched"]
    if release is not None:
        entries.append(sglang_dir(release))
    entries.append(REPO / "tests")
    if not patched:
        entries.append(REPO)
    env["PYTHONPATH"] = os.pathsep.join(map(str, entries))
    env["PYTHONUNBUFFERED"] = "1"
    env["TRITON_INTERPRET"] = "1"
    env["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["HF_HUB_OFFLINE"] = "1"
    env.update(variables or {})
    return env
