"""What `doctor` asks, of the interpreter that runs it, of NVML, of SGLang and of the service's command line.

Safe beside a running service: nothing is written, no CUDA context is created, and what imports SGLang, cupy or wrapt
is a process of its own, with the GPUs hidden. Only `try_out` compiles and uses a GPU. What a question finds is a
`Fact`; one that has an effect on what the service will do says which.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdtree_patch import __version__, boot, cache, nvml, service_options, tiles
from kdtree_patch import compile as compiling
from kdtree_patch.exits import printable
from kdtree_patch.service_command import Command, Refused, is_file, python_path_problem, read_head, unwrap
from kdtree_patch.service_options import Mode, Model
from kdtree_patch.settings import FP8_STOCK_REL, VARIABLES, SettingError, Settings

# What a fact means for verify calls. All that is neither is plain or, with `ok`, as it should be.
OK, STOCK, PART, UNKNOWN = "ok", "stock", "part", "unknown"

HERE = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 13))
CHILD_SECONDS = 300
SELFTEST_BYTES = 2 << 30


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    effect: str = ""


@dataclass
class Findings:
    """Facts by group, in the order in which they were asked for, and what will happen to each forward mode."""

    groups: dict[str, list[Fact]] = field(default_factory=dict)
    conditions: list[str] = field(default_factory=list)  # on which a good verdict holds, and which only a start settles
    modes: list[Mode] = field(default_factory=list)
    contract: list[dict[str, str]] = field(default_factory=list)

    def add(self, group: str, name: str, value: object, effect: str = "") -> None:
        self.groups.setdefault(group, []).append(Fact(name, printable(" ".join(str(value).split())), effect))

    def with_effect(self, effect: str) -> list[Fact]:
        return [fact for facts in self.groups.values() for fact in facts if fact.effect == effect]


def ask(words: list[str], environ: Mapping[str, str], compiles: bool = False) -> Findings:
    """Everything, in the order of a start. `words` is the service's command line, or empty; `environ` what it will be
    started with; `compiles`: fill the cache and run the self-test, too.
    """
    found = Findings()
    command = _command(found, words, environ)
    environ = _as_started(command, environ)
    _interpreter(found, command)
    by_plugin = _doors(found, command, environ)
    pool = service_options.fp8_pool(command) if command else None
    settings = _settings(found, environ, pool)
    gpus, targets = _gpus(found, settings, environ, pool)
    order = _order(targets, settings)
    with tempfile.TemporaryDirectory() as scratch:
        # SGLang 0.5.23 makes a directory in the cache of its user as it is imported.
        sglang = _Child("answer_sglang", HOME=scratch, XDG_CACHE_HOME=scratch)
        with sglang, _Child("answer_packages", order) as packages:
            _packages(found, packages.answer(), targets)
            release = _sglang(found, sglang.answer(), by_plugin)
    if compiles:
        try_out(found, gpus, targets, settings, pool)
    _options(found, command, release, settings)
    _ranks(found, command, gpus)
    return found


# ---------------------------------------------------------------------------------------------------- the command line


def _command(found: Findings, words: list[str], environ: Mapping[str, str]) -> Command | None:
    group = "command line"
    if not words:
        found.add(group, "service", "not given: put it after -- to learn what its options mean")
        found.conditions.append("verify calls go to the triton backend (its command line was not given)")
        return None
    if words[0].startswith("-"):
        return Command(sys.executable, frozenset(), words)
    try:
        command = unwrap(words, environ, read_head, is_file)
    except Refused as refused:
        found.add(group, "service", refused, UNKNOWN)
        return None
    through = f", through {' '.join(command.wrappers)}" if command.wrappers else ""
    found.add(group, "interpreter", f"{command.interpreter}{through}")
    return command


def _as_started(command: Command | None, environ: Mapping[str, str]) -> dict[str, str]:
    """With what the command line itself sets and removes."""
    changed = dict(environ) | (command.overrides if command else {})
    gone = [name for name, value in (command.overrides if command else {}).items() if not value]
    return {name: value for name, value in changed.items() if name not in gone}


def _ranks(found: Findings, command: Command | None, gpus: list[nvml.Gpu]) -> None:
    """Whether there are as many GPUs as the service takes. Where there is none at all, that has been said."""
    if command is None or not gpus:
        return
    try:
        needed = service_options.gpus_needed(command)
    except Refused as refused:
        found.add("command line", "ranks", f"{refused}: SGLang will hardly start", UNKNOWN)
        return
    if needed > len(gpus):
        why = f"the service takes {needed} GPUs of this host and sees {len(gpus)}: SGLang will hardly start"
        found.add("command line", "ranks", why, UNKNOWN)


def _options(found: Findings, command: Command | None, release: str | None, settings: Settings | None) -> None:
    if command is None:
        return
    path = command.option("--model-path", "--model")
    model = Model.at(path) if path else None
    group = "command line"
    if path:
        about = "no config.json there that can be read: whether it has MLA, and how many heads, is unknown here"
        if model is not None:
            heads = service_options.heads_a_rank(command, model)
            about = f"latent {model.latent}, rope {model.rope}, {model.heads} heads, {heads or 'unknown'} a rank"
        found.add(group, "model", f"{path}: {about}")
    if model is None:
        found.conditions.append(f"the model has MLA with {tiles.LATENT} and {tiles.ROPE} (its config.json is not here)")
    judgements = service_options.judge(command, release, model)
    for judgement in judgements:
        found.add(group, judgement.reason, judgement.why, STOCK if judgement.effect == STOCK else UNKNOWN)
    if not judgements:
        found.add(group, "options", "verify calls go to triton, and nothing in the options is against them", OK)
    modes = service_options.forward_modes(command, judgements, model, (settings or Settings()).forward_modes)
    found.modes = [replace(mode, backend=printable(mode.backend), why=printable(mode.why)) for mode in modes]


# ------------------------------------------------------------------------------------------------------ the interpreter


def _interpreter(found: Findings, command: Command | None) -> None:
    group = "interpreter"
    version = f"{platform.python_implementation()} {platform.python_version()}"
    known = sys.implementation.name == "cpython" and SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]
    about = "" if known else ": the patch is tested with CPython 3.10 to 3.13"
    found.add(group, "Python", f"{version}, {sys.executable}{about}", OK if known else UNKNOWN)
    flags = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment and not sys.flags.isolated,
        "-s": sys.flags.no_user_site and not sys.flags.isolated,
        "-S": sys.flags.no_site,
        "-P (safe path)": getattr(sys.flags, "safe_path", False) and not sys.flags.isolated,
    }
    found.add(group, "flags", ", ".join(name for name, is_set in flags.items() if is_set) or "none that matter")
    found.add(group, "user", f"uid {os.geteuid()}; the service must run as the same one for what is said of the cache")
    if command is not None and not _same_interpreter(command.interpreter, sys.executable):
        why = f"the service is started with {command.interpreter}, of which this one cannot speak: run doctor with it"
        if read_head(command.interpreter):  # pyenv's, for one
            why = f"{command.interpreter}, a script that chooses the interpreter when it starts"
            why = f"the service is started with {why}: behind --, write {sys.executable}, if that is the one"
        found.add(group, "service", why, UNKNOWN)


def _same_interpreter(one: str, other: str) -> bool:
    """A virtual environment is known by where its interpreter lies, and not by what that links to."""
    return os.path.dirname(os.path.abspath(one)) == os.path.dirname(os.path.abspath(other)) and os.path.realpath(
        one
    ) == os.path.realpath(other)


# ----------------------------------------------------------------------------------------------- the ways into a worker


def _doors(found: Findings, command: Command | None, environ: Mapping[str, str]) -> bool:
    """Our sitecustomize, which has run in this very process if it will run in the service, and SGLang's plugins. True
    if it comes down to the plugins.
    """
    group = "sitecustomize"
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    for number, entry in enumerate(entries, 1):
        found.add(group, f"PYTHONPATH {number}", f"{entry}{_about_entry(entry)}")
    if not entries:
        found.add(group, "PYTHONPATH", "not set")
    ours, ran = _ours_in_this_process(), _ran()
    for number, file in enumerate(ran, 1):
        found.add(group, f"runs {number}", f"{file}{' (ours)' if file == ours else ''}")
    if not ran:
        found.add(group, "runs", "none")
    problem = _door_problem(ours, ran, entries)
    if command is not None:
        problem = python_path_problem(command) or problem
        if command.overrides.get("PYTHONPATH", os.environ.get("PYTHONPATH")) != os.environ.get("PYTHONPATH"):
            why = "the command line sets PYTHONPATH itself: run doctor with that one"
            found.add(group, "the service's", why, UNKNOWN)
    plugin = _plugin(environ)
    if plugin:
        found.add(group, "plugin", plugin)
    if problem is None:
        found.add(group, "the patch", f"kdtree_patch {__version__}, through sitecustomize of {HERE}", OK)
    elif plugin and not plugin.startswith("not loaded"):
        why = "" if INSTALLED else f" ({problem})"
        found.add(group, "the patch", f"kdtree_patch {__version__}, through SGLang's plugins alone{why}", OK)
        return True
    elif plugin:
        either = "" if INSTALLED else f"; or {problem}"
        found.add(group, "the patch", f"{plugin}: add kdtree to SGLANG_PLUGINS, or unset it{either}", STOCK)
    else:
        found.add(group, "the patch", problem, STOCK)
    return False


def _about_entry(entry: str) -> str:
    if not os.path.isdir(entry):
        return " (is no folder)" if not os.path.isfile(entry) else ""
    has = "the patch" if _has_the_patch(entry) else ""
    other = os.path.isfile(os.path.join(entry, "sitecustomize.py"))
    about = has or ("a sitecustomize of somebody else" if other else "")
    relative = "" if os.path.isabs(entry) else "relative, so another folder wherever the service starts"
    said = "; ".join(text for text in (about, relative) if text)
    return f" ({said})" if said else ""


def _has_the_patch(folder: str | Path) -> bool:
    """With its sitecustomize: a package that pip has installed has none, and the kernels within."""
    package = Path(folder, "kdtree_patch")
    return (package / "boot.py").is_file() and not (package / "kernels").is_dir()


INSTALLED = not _has_the_patch(HERE)


def _ours_in_this_process() -> str | None:
    """The file that put our finders where they are. In sys.modules it has made way for the next one."""
    for finder in sys.meta_path:
        if type(finder).__name__ in ("KdtreePackageFinder", "KdtreeBackendFinder"):
            return str(type(finder).find_spec.__globals__.get("__file__"))
    return None


def _ran() -> list[str]:
    last = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    return list(dict.fromkeys(file for file in (_ours_in_this_process(), last) if file))


def _door_problem(ours: str | None, ran: list[str], entries: list[str]) -> str | None:
    """Why our sitecustomize does not run, or None."""
    own = Command(sys.executable, frozenset(_flag_letters()), [])
    if problem := python_path_problem(own):
        return problem
    if ours is not None:
        return None
    if INSTALLED:
        return f"the package in {HERE} has no entry point for SGLang's plugins: install it with pip, once more"
    here = [entry for entry in entries if _has_the_patch(entry)]
    if here and ran:
        return f"{ran[0]} is found first, and Python imports one alone: put {here[0]} before it in PYTHONPATH"
    if here:
        return f"PYTHONPATH has {here[0]}, and its sitecustomize has not run: look at what Python said when it started"
    if any(os.path.isfile(os.path.join(entry, "boot.py")) for entry in entries):
        return f"PYTHONPATH names the package: name the folder above it, {HERE}"
    return f"PYTHONPATH does not name the folder of the patch: put {HERE} first"


def _flag_letters() -> list[str]:
    flags = {"I": sys.flags.isolated, "E": sys.flags.ignore_environment, "S": sys.flags.no_site}
    letters = [letter for letter, is_set in flags.items() if is_set]
    return [letter for letter in letters if letter != "E" or "I" not in letters]


def _plugin(environ: Mapping[str, str]) -> str | None:
    """SGLang's plugins are the second door, for an installed package."""
    points = [point for point in importlib.metadata.entry_points(group="sglang.srt.plugins") if point.name == "kdtree"]
    if not points:
        return None
    allowed = environ.get("SGLANG_PLUGINS")
    if allowed and "kdtree" not in [name.strip() for name in allowed.split(",")]:
        return f"not loaded: SGLANG_PLUGINS={allowed} leaves kdtree out"
    return "kdtree is installed; SGLang 0.5.12 and later load it"


# ------------------------------------------------------------------------------------------------------------- settings


def _settings(found: Findings, environ: Mapping[str, str], pool: str | None) -> Settings | None:
    group = "settings"
    settings = None
    try:
        settings = Settings.from_environ(environ)
    except SettingError as error:
        found.add(group, "bad_setting", error, STOCK)
    for name in VARIABLES:
        given = environ.get(name, "").strip()
        if given:
            found.add(group, name, f"{given} (environment)")
        elif settings is not None:
            value = getattr(settings, name.removeprefix("KDTREE_").lower())
            shadow = name == "KDTREE_VALIDATE" and settings.mode == "shadow"
            found.add(group, name, f"{_as_written(value)} ({'by KDTREE_MODE=shadow' if shadow else 'default'})")
    if settings is not None and settings.cache_dir is None:
        with contextlib.suppress(OSError):
            found.add(group, "cache", cache.default_directory())
    if settings is not None and pool is not None and (settings.guard_rel or math.inf) < FP8_STOCK_REL:
        why = (
            f"KDTREE_GUARD_REL={settings.guard_rel:g} will trip: with an fp8 KV pool the stock kernel itself is up to "
        )
        found.add(group, "guard", f"{why}{FP8_STOCK_REL:g} off: set it higher", PART if settings.mode == "on" else "")
    if settings is not None and settings.mode == "off":
        found.add(group, "mode", "KDTREE_MODE=off", STOCK)
    return settings


def _as_written(value: object) -> str:
    """A default in the words of the environment."""
    if isinstance(value, frozenset):
        return ",".join(sorted(value))
    return "unset" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


# ----------------------------------------------------------------------------------------------------------------- GPUs


def _gpus(
    found: Findings, settings: Settings | None, environ: Mapping[str, str], pool: str | None
) -> tuple[list[nvml.Gpu], dict[int, str]]:
    """Those that the service may use, and the target of each by its number. `pool`: the type of an fp8 KV pool."""
    group = "GPUs"
    config = settings.config if settings else "auto"
    try:
        all_of_them, driver = nvml.gpus(details=True)
    except nvml.NvmlMissing as error:
        found.add(group, "NVML", f"{error}: without an NVIDIA driver there is no kernel", STOCK)
        return [], {}
    except nvml.NvmlError as error:
        found.add(group, "NVML", f"{error}: what GPUs there are is unknown", UNKNOWN)
        return [], {}
    found.add(group, "driver", driver or "unknown")
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    usable = nvml.visible(all_of_them, devices)
    if devices is not None:
        found.add(group, "CUDA_VISIBLE_DEVICES", devices or "empty")
    if usable is None:
        found.add(group, "visible", "which GPU a MIG device belongs to is unknown here", UNKNOWN)
        usable = all_of_them
    targets: dict[int, str] = {}
    refused: list[str] = []
    for gpu in all_of_them:
        name = gpu.name or "a GPU"
        free = "unknown" if gpu.free_bytes is None else f"{gpu.free_bytes / (1 << 30):.1f} GiB"
        about = f"{name}, compute capability {gpu.about_capability}, {free} free"
        if gpu not in usable:
            found.add(group, f"GPU {gpu.index}", f"{about}; hidden from the service")
            continue
        target = compiling.cubin_target(gpu.capability, config)
        if target is None:
            refused.append(compiling.refusal(name, gpu.capability, config)[1])
            found.add(group, f"GPU {gpu.index}", f"{about}; stock: {refused[-1]}")
        else:
            targets[gpu.index] = target = compiling.with_pool(target, pool)
            chosen = compiling.own_config(gpu.capability) if config == "auto" else config
            rows = ", ".join(str(variant.rows) for variant in tiles.CONFIGS[chosen].variants)
            found.add(group, f"GPU {gpu.index}", f"{about}; {chosen} ({target}), row blocks of {rows}")
    for why in dict.fromkeys(refused):
        found.add(group, "refused", why, PART if targets else STOCK)
    if not usable:
        found.add(group, "none", "the service sees no GPU that NVML knows", STOCK)
    return usable, targets


# -------------------------------------------------------------------------------------------- packages and the compiler


def _order(targets: Mapping[int, str], settings: Settings | None) -> dict[str, Any]:
    cache_dir = settings.cache_dir if settings else None
    return {"targets": sorted(set(targets.values())), "cache_dir": None if cache_dir is None else str(cache_dir)}


def _packages(found: Findings, answer: dict[str, Any], targets: Mapping[int, str]) -> None:
    group = "packages"
    if "error" in answer:
        which = "import wrapt and cupy with this interpreter to see which of them it is"
        found.add(group, "packages", f"{answer['error']}; what there is, is unknown: {which}", UNKNOWN)
        return
    for name in ("torch", "numpy", "wrapt", "cupy", "NVRTC"):
        one = answer.get(name)
        if one is None:
            continue
        if "error" in one:
            found.add(group, name, one["error"], STOCK)
        else:
            cuda = f", CUDA {one['cuda']}" if one.get("cuda") else ""
            found.add(group, name, f"{one['version']}{cuda}, {one['file']}")
    if answer["torch"].get("version") and not answer["torch"]["cuda"]:
        found.add(
            group, "torch's CUDA", f"torch {answer['torch']['version']} has no CUDA: nothing runs on a GPU", STOCK
        )
    group = "kernel"
    for target in sorted(set(targets.values())):
        one = answer["cubins"].get(target)
        if one is None:
            found.add(group, target, "whether it is cached is unknown without the compiler")
        elif "reason" in one:
            every = set(targets.values()) <= {name for name, other in answer["cubins"].items() if "reason" in other}
            found.add(group, target, f"{one['reason']}: {one['message']}", STOCK if every else PART)
        else:
            found.add(
                group, target, f"cached, {one['path']}" if one["path"] else "not cached: compiled at the next start"
            )


def answer_packages(order: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own. wrapt and cupy are imported as a worker imports them: installed is not enough."""
    answer: dict[str, Any] = {"torch": torch_facts(), "cubins": {}}
    try:
        answer["numpy"] = {"version": importlib.metadata.version("numpy"), "file": _place("numpy")}
    except importlib.metadata.PackageNotFoundError:
        answer["numpy"] = {"error": "numpy is missing: the kernel's launch needs it, install it"}
    try:
        import wrapt
        from wrapt import FunctionWrapper, register_post_import_hook  # noqa: F401 - as in boot.py

        answer["wrapt"] = {"version": getattr(wrapt, "__version__", "unknown"), "file": str(wrapt.__file__)}
    except Exception as error:
        why = f"wrapt_missing ({type(error).__name__}: {error}): install it into the service's environment"
        answer["wrapt"] = {"error": f"{why}: pip install wrapt"}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CUPY_CACHE_DIR"] = scratch  # nothing of ours or theirs is to be made by asking
        cache_dir = None if order["cache_dir"] is None else Path(order["cache_dir"])
        try:
            cupy = compiling.import_cupy(cache_dir)
            answer["cupy"] = {"version": cupy.__version__, "file": str(cupy.__file__)}
            version = compiling.nvrtc_version(cache_dir)
            answer["NVRTC"] = {"version": f"{version[0]}.{version[1]}", "file": _mapped("libnvrtc.so")}
        except compiling.CompileError as error:
            answer["NVRTC" if "cupy" in answer else "cupy"] = {"error": f"{error.reason}: {error}"}
            return answer
        for target in order["targets"]:
            try:
                path = compiling.cached(target, cache_dir)
                answer["cubins"][target] = {"path": None if path is None else str(path)}
            except compiling.CompileError as error:
                answer["cubins"][target] = {"reason": error.reason, "message": str(error)}
    return answer


def torch_facts() -> dict[str, Any]:
    """From torch's version file: its import takes seconds and may wake the GPUs. `error` if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {"error": "torch is missing: this is not the service's interpreter, or not its environment"}
    file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return {"error": f"{file.parent} is no whole torch, it has no version.py: install torch again, or take it away"}
    values = runpy.run_path(str(file))
    return {"version": str(values.get("__version__")), "cuda": values.get("cuda"), "file": spec.origin}


def _place(name: str) -> str:
    spec = importlib.util.find_spec(name)
    return str(spec.origin) if spec else "unknown"


def _mapped(name: str) -> str:
    """Where a library that this process has loaded lies."""
    with open("/proc/self/maps") as maps:
        return next((line.split()[-1] for line in maps if f"/{name}" in line), "unknown")


# --------------------------------------------------------------------------------------------------------------- SGLang


def _sglang(found: Findings, answer: dict[str, Any], by_plugin: bool) -> str | None:
    """Its version."""
    group = "SGLang"
    if "error" in answer:
        # Some releases may ask the GPU something while they are imported.
        missing = "ModuleNotFoundError: No module named 'sglang'" in answer["error"]
        hint = ": this is not the service's interpreter, or not its environment" if missing else ""
        found.add(group, "import", answer["error"] + hint, STOCK if missing else UNKNOWN)
        return None
    found.add(group, "version", f"{answer['version']}, {answer['file']}")
    if by_plugin and not answer["plugins"]:
        why = "this release has none, and the patch would come in through them alone: put a checkout on PYTHONPATH"
        found.add(group, "plugins", why, STOCK)
    found.contract = answer["rows"]
    counted = {kind: sum(row["outcome"] == kind for row in answer["rows"]) for kind in ("there", "absent", "violated")}
    for violation in answer["violations"]:
        found.add(group, "contract", violation, STOCK)
    if not answer["violations"]:
        rows = f"{counted['there']} rows are there, {counted['absent']} may be absent and are"
        found.add(group, "contract", f"passes: {rows}, the others are checked at work", OK)
    return str(answer["version"])


def answer_sglang(order: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, whose GPUs are hidden. The import is the one that a worker makes, and no more."""
    from kdtree_patch import contract

    module = importlib.import_module(boot.BACKEND_MODULE)
    rows = [
        {"where": row.where, "name": row.name, "outcome": outcome, "why": row.why}
        for row, outcome in contract.outcomes(module)
    ]
    return {
        "version": contract.sglang_version(),
        "file": str(getattr(sys.modules.get("sglang"), "__file__", "unknown")),
        "violations": contract.check(module),
        "rows": rows,
        "plugins": importlib.util.find_spec("sglang.srt.plugins") is not None,
    }


# ------------------------------------------------------------------------------------------------------ with --compile


def try_out(
    found: Findings,
    gpus: list[nvml.Gpu],
    targets: Mapping[int, str],
    settings: Settings | None,
    pool: str | None = None,
) -> None:
    """What a worker does at its start: compiles what is not cached, and runs the self-test where there is room."""
    group = "kernel"
    if settings is None or not targets:
        return
    wanted = sorted(set(targets.values()))
    job = compiling.CompileJob(wanted, settings.cache_dir).start()
    failed = 0
    for target in wanted:
        try:
            found.add(group, f"{target} compiled", job.result(target), OK)
        except compiling.CompileError as error:
            failed += 1
            found.add(group, f"{target} compiled", f"{error.reason}: {error}", STOCK if failed == len(wanted) else PART)
    roomy = [gpu for gpu in gpus if gpu.index in targets and gpu.is_open and (gpu.free_bytes or 0) >= SELFTEST_BYTES]
    if not roomy:
        found.add(group, "self-test", f"left out: no GPU has {SELFTEST_BYTES >> 30} GiB free and lets it in")
        return
    gpu = max(roomy, key=lambda one: one.free_bytes or 0)
    order = _order(targets, settings) | {"config": settings.config, "pool": pool}
    with _Child("answer_selftest", order, CUDA_VISIBLE_DEVICES=gpu.uuid or str(gpu.index)) as child:
        answer = child.answer()
    problem = answer.get("error", "")
    if "good" not in answer or "OutOfMemory" in problem:
        found.add(group, "self-test", problem, UNKNOWN)  # none of it would be so in the service
    elif answer["good"]:
        found.add(group, "self-test", f"passed, on GPU {gpu.index}", OK)
    else:
        wrong = ", ".join(one["case"] for one in answer["results"] if not one["good"])
        found.add(group, "self-test", f"selftest_failed: {wrong or problem}, on GPU {gpu.index}", STOCK)


def answer_selftest(order: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, which sees one GPU."""
    from kdtree_patch import selftest_command

    cache_dir = None if order["cache_dir"] is None else Path(order["cache_dir"])
    return selftest_command.examine("cuda", Settings(cache_dir=cache_dir, config=order["config"]), order["pool"])


# ------------------------------------------------------------------------------------------------- a process of its own

# As in compile.py: sys.path is this process's, so that it finds the same packages; our folder only for its import.
_CHILD = (
    "import json, sys; order = json.loads(sys.argv[1]); "
    "sys.path[:] = [order['root'], *order['path']]; "
    "from kdtree_patch import doctor_questions; del sys.path[0]; doctor_questions.serve(order)"
)


class _Child:
    """One question to a process of its own: whatever it imports may print, hang, crash or call sys.exit()."""

    def __init__(self, question: str, order: dict[str, Any] | None = None, **variables: str):
        vendor = HERE / "vendor"  # where sitecustomize.py puts it when the backend is imported
        # Our own folder, should doctor run in it, has a `kernels` that transformers takes for a package. That of an
        # installed package has everything else, too.
        path = [entry for entry in compiling.absolute_path() if INSTALLED or os.path.realpath(entry) != str(HERE)]
        path += [str(vendor)] if vendor.is_dir() else []
        words = json.dumps({"root": str(HERE), "path": path, "question": question, **(order or {})})
        environment = compiling.child_environment() | variables  # hides the GPUs
        self._process: subprocess.Popen[str] | None = None
        self._refused = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, *compiling.interpreter_flags(), "-c", _CHILD, words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:  # a limit of processes, of memory, of the length of words
            self._refused = str(error.strerror)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def answer(self) -> dict[str, Any]:
        """What it said; `error` if it could not."""
        if self._process is None:
            return {"error": f"no process could be started ({self._refused})"}
        try:
            output, error = self._process.communicate(timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer after {CHILD_SECONDS} s"}
        with contextlib.suppress(ValueError):
            answer: dict[str, Any] = json.loads(output)
            return answer
        last = (error.strip().splitlines() or ["nothing said"])[-1]
        return {"error": f"ended with status {self._process.returncode}: {last}"}


def serve(order: dict[str, Any]) -> None:
    """The other process: one answer on standard output, and nothing else there."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = globals()[order["question"]](order)
    except BaseException as error:  # SGLang's import may end in anything, sys.exit() included
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    with os.fdopen(answers, "w") as file:
        json.dump(answer, file)
    # What the imports have left running is none of our business.
    os._exit(0)
