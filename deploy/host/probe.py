"""Asks the service's own interpreter what it is and what it has. Runs in it, as the service's user, in its environment.

`probe` is for before anything is on the host: the contract is that of the zip. `doctor` is for a release that has been
put in place: everything is then the release's own, found the way a worker will find it. When the package has a `doctor`
command of its own, that takes this one's place.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

BACKEND = "sglang.srt.layers.attention.triton_backend"
# Free memory that a GPU must have for a self-test beside the service.
SELFTEST_BYTES = 2 << 30


def probe(hide_gpus: bool) -> dict[str, Any]:
    """What this interpreter is. It imports SGLang's backend, better with the GPUs hidden: the service is using them."""
    from kdtree_patch.doctor_questions import torch_facts

    torch = torch_facts()
    major, minor = sys.version_info[:2]
    threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    facts: dict[str, Any] = {
        "implementation": sys.implementation.name,
        "version": platform.python_version(),
        "tag": f"cp{major}{minor}{threads}",
        "abi": sysconfig.get_config_var("SOABI"),
        "machine": platform.machine(),
        "libc": list(platform.libc_ver()),
        "python_path": os.environ.get("PYTHONPATH", ""),
        "kdtree": {name: value for name, value in os.environ.items() if name.startswith("KDTREE_")},
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "torch": torch.get("version"),
        "cuda": torch.get("cuda"),
        "numpy": _version("numpy"),
        "sglang": None,
        "have": {name: _version(*names) for name, names in _BUNDLED.items()},
    }
    facts.update(_contract(hide_gpus))
    return facts


_BUNDLED = {"wrapt": ("wrapt",), "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")}


def _version(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _contract(hide_gpus: bool) -> dict[str, Any]:
    """The violations, or why they could not be found out."""
    if hide_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        from kdtree_patch import contract

        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(BACKEND)
        return {"sglang": contract.sglang_version(), "violations": contract.check(module)}
    except BaseException as error:  # SGLang's import may end in anything, sys.exit() included
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return {"sglang": _version("sglang"), "violations": None, "import_error": detail}


def doctor(
    release: Path,
    gpus: list[dict[str, Any]],
    variables: dict[str, str],
    check_contract: bool,
    pool: str | None = None,
) -> dict[str, Any]:
    """Findings about a release, as a worker would meet it; an empty list means that it may be switched to.

    `gpus` are those of gpus.py, `variables` what a drop-in has set here, `pool` is the fp8 type that the service's
    options give its KV pool. A preflight has just checked the contract of a
    release that is being deployed; that of an older one is checked here.
    """
    findings: list[str] = []
    done: list[str] = []
    if not any(type(finder).__name__ == "KdtreePackageFinder" for finder in sys.meta_path):
        loaded = getattr(sys.modules.get("sitecustomize"), "__file__", "none")
        findings.append(
            f"the sitecustomize of {release} was not loaded: PYTHONPATH is {_python_path()}, and {loaded} was"
        )
        return {"findings": findings, "done": done}
    for name, value in variables.items():
        has = os.environ.get(name)
        if has != value:
            findings.append(f"{name} is {has} and not {value}: an EnvironmentFile= of the unit sets it")
    roomy = _with_room(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if roomy is not None:
        # Before CUDA is initialised, which the compiler does too: from here on this GPU is all there is.
        os.environ["CUDA_VISIBLE_DEVICES"] = roomy["uuid"]
    sys.path.append(str(release / "vendor"))  # where sitecustomize.py puts it when the backend is imported
    try:
        done += _import_what_a_worker_needs(release)
        done += _compile(gpus, pool)
        done += _self_test(release, roomy, findings, pool)
        if check_contract:
            facts = _contract(hide_gpus=True)
            findings += facts["violations"] or ([facts["import_error"]] if "import_error" in facts else [])
            done.append(f"contract checked against SGLang {facts['sglang']}")
    except BaseException as error:
        findings.append(" ".join(f"{type(error).__name__}: {error}".split())[:1000])
    return {"findings": findings, "done": done}


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "not set")


def _import_what_a_worker_needs(release: Path) -> list[str]:
    import kdtree_patch
    from kdtree_patch import compile as compiling
    from kdtree_patch.settings import Settings

    found = Path(kdtree_patch.__file__ or "").resolve().parent.parent
    if found != release.resolve():
        raise RuntimeError(f"kdtree_patch was found in {found}, not in {release}")
    settings = Settings.from_environ(os.environ)
    import wrapt

    cupy = compiling.import_cupy(settings.cache_dir)
    return [
        f"wrapt {getattr(wrapt, '__version__', '')} from {wrapt.__file__}",
        f"cupy {cupy.__version__} from {cupy.__file__}",
    ]


def _command(*words: str) -> tuple[int, str]:
    """`python -m kdtree_patch ...` in this process. Returns its exit status and what it printed."""
    from kdtree_patch import __main__ as command_line

    before, sys.argv = sys.argv, ["kdtree_patch", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            try:
                status = command_line.run_command()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 2
    finally:
        sys.argv = before
    return status, output.getvalue()


def _with_room(gpus: list[dict[str, Any]], visible: str | None) -> dict[str, Any] | None:
    """The GPU with the most free memory, if that is enough for a self-test beside the service: one of those that the
    service may use (CUDA_VISIBLE_DEVICES, whose numbers are taken for nvidia-smi's), and that lets another process in.
    """
    chosen = gpus
    if visible is not None:
        chosen = []
        for word in visible.split(","):
            word = word.strip()
            named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu["uuid"].startswith(word)]
            chosen += named or (gpus[int(word) : int(word) + 1] if word.isdigit() else [])
    free = [gpu for gpu in chosen if gpu["compute_mode"] == "Default" and gpu["free_bytes"] >= SELFTEST_BYTES]
    return max(free, key=lambda gpu: int(gpu["free_bytes"]), default=None)


def _compile(gpus: list[dict[str, Any]], pool: str | None) -> list[str]:
    """What a worker does before it loads the kernel, for every kind of GPU here; what is cached already stays."""
    from kdtree_patch import compile as compiling
    from kdtree_patch.settings import Settings

    settings = Settings.from_environ(os.environ)
    cache_dir = settings.cache_dir
    found = (compiling.cubin_target(tuple(gpu["capability"]), settings.config) for gpu in gpus)
    targets = list(dict.fromkeys(target for target in found if target))
    if pool is not None and hasattr(compiling, "with_pool"):  # a release before that leaves such a pool to stock
        targets = [compiling.with_pool(target, pool) for target in targets]
    paths = [compiling.cached_binary(target, cache_dir) for target in targets]
    for path in paths:
        if path.parent != cache_dir:
            raise RuntimeError(f"the kernel went into {path.parent}, because {cache_dir} cannot be used")
    return [f"kernel for {target}: {path}" for target, path in zip(targets, paths, strict=True)]


def _self_test(release: Path, gpu: dict[str, Any] | None, findings: list[str], pool: str | None = None) -> list[str]:
    if not (release / "kdtree_patch" / "selftest.py").exists():
        return ["self-test left out: this release has none"]
    if gpu is None:
        return [f"self-test left out: no GPU of the service has {SELFTEST_BYTES >> 30} GiB free and lets it in"]
    import torch

    if not torch.cuda.is_available():
        # The service has found its GPUs in this environment, or it would not be running; here torch may be denied them.
        return ["warning: self-test left out: nvidia-smi lists a GPU, and the torch of this interpreter sees none"]
    from kdtree_patch import compile as compiling

    of_pool = ("--kv-cache-dtype", pool) if pool is not None and hasattr(compiling, "with_pool") else ()
    status, output = _command("selftest", *of_pool)
    if status != 0:
        findings.append(f"self-test on {gpu['name']} ended with status {status}: {' '.join(output.split())[-500:]}")
    return [f"self-test passed on {gpu['name']}, {gpu['uuid']}"] if status == 0 else []
