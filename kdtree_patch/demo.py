"""`python -m kdtree_patch demo`: the main job, seen from outside.

Starts a process as a service would be started, with this folder and SGLang on PYTHONPATH and validation on, watches the
lines that an operator would grep for, and judges them: is the patch installed, did the shapes line come, has every
layer been computed twice, and are the two results close enough. On a GPU if SGLang can use one here, otherwise on the
CPU: then SGLang's kernel runs in Triton's interpreter and ours is the same CUDA source compiled by g++. demo_screen.py
has the table on a terminal, demo_plot.py the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

from kdtree_patch import exits
from kdtree_patch.arguments import PLOT_FORMATS, need, output_file, plot_file, whole_number
from kdtree_patch.compile import visible_targets
from kdtree_patch.exits import NotDone
from kdtree_patch.tiles import MAX_HEADS, MAX_Q_LEN

FOLDER = Path(__file__).resolve().parents[1]

# Two results in half precision, each rounded from a sum in single precision, differ by about 2e-4 in float16 and 2e-3
# in bfloat16. A wrong answer is near 1.
LIMITS = {"float16": 1e-3, "bfloat16": 4e-3}

LAYER_LINE = re.compile(r"\[kdtree\] L(\d+) max_abs_diff=(\S+) mean=(\S+) rel=(\S+)")
# The child is given up after so long without a sign of life.
SILENCE_S = 300


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="SGLang's real Triton backend, patched, on the reference case, with every layer validated",
        description="Runs one verify pass through SGLang's real Triton backend, patched through sitecustomize, with "
        "every layer computed by both kernels. The defaults are the reference case. Of the environment's KDTREE_* "
        "variables only KDTREE_CACHE_DIR counts: the demo sets what it needs itself. On a terminal a "
        "table fills up below the lines; into a pipe go the lines alone. Exit status: 0 PASS, 1 FAIL, 2 not done.",
    )

    def number(name: str, least: int, most: int | None, default: int | None, help: str) -> None:
        parser.add_argument(name, type=whole_number(least, most), default=default, metavar="N", help=help)

    number("--prefix", 0, None, 21, "cached tokens of a request (%(default)s)")
    number("--q-len", 1, MAX_Q_LEN, 9, f"draft tokens of a request, up to {MAX_Q_LEN} (%(default)s)")
    number("--heads", 1, MAX_HEADS, 8, f"heads of this rank, up to {MAX_HEADS} (%(default)s)")
    number("--layers", 1, None, 61, "layers of the model (%(default)s)")
    number("--bs", 1, None, 1, "requests in the batch (%(default)s)")
    number("--slots", 1, None, None, "rows of the KV pool (195012 on a GPU, 1024 on a CPU, and enough in any case)")
    parser.add_argument("--dtype", choices=LIMITS, help="element type (bfloat16 on a GPU, float16 on a CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to run (a GPU if SGLang can use one)")
    parser.add_argument("--sglang", type=Path, metavar="PATH", help="the folder that holds the package sglang")
    parser.add_argument("--json", type=output_file, metavar="F", help="also write what was seen to this file")
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="F",
        help=f"also draw rel and max_abs_diff of each layer, and the tree of drafts ({', '.join(PLOT_FORMATS)})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        need("matplotlib", "for --plot")
    sglang = choose_sglang(arguments.sglang)
    case = Case(arguments, *choose_device(arguments.device, sglang))
    screen = open_screen(case)
    story = Story()
    try:
        for source, line in child_output(case, sglang):
            story.hear(source, line)
            screen.show(story, line if source == "stderr" and line.startswith("[kdtree] ") else None)
    finally:
        screen.close()
    checks = judge(case, story)
    screen.verdict(story, checks)
    if arguments.json is not None:
        document = json.dumps(as_json(case, story, checks), indent=2) + "\n"
        exits.write(arguments.json, lambda part: part.write_text(document), "--json")
    if arguments.plot is not None:
        from kdtree_patch import demo_plot

        exits.write(arguments.plot, lambda part: demo_plot.plot(case, story, part), "--plot")
        exits.complain("demo", f"{arguments.plot} is drawn")
    return exits.GOOD if all(check.passed for check in checks) else exits.FINDING


def choose_sglang(wanted: Path | None) -> Path:
    sglang = wanted or find_sglang()
    if sglang is None or not (sglang / "sglang").is_dir():
        where = f"in {sglang}" if sglang else f"for {sys.executable} or in {FOLDER / '.venv'}"
        raise NotDone(f"there is no package sglang {where}", "run `make demo`, or name one with --sglang")
    return sglang.absolute()  # the child runs in another folder


def choose_device(wanted: str | None, sglang: Path) -> tuple[str, str | None]:
    """ "cuda" or "cpu", and if a GPU is passed over, why."""
    if wanted == "cpu":
        return "cpu", None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    usable = not hidden and bool(visible_targets())
    if wanted == "cuda" and not usable:
        why = "CUDA_VISIBLE_DEVICES hides them all" if hidden else "there is none here that the kernel runs on"
        raise NotDone(f"--device cuda needs an NVIDIA GPU, and {why}", "--device cpu needs none")
    if wanted == "cuda" or (usable and (find_spec("sgl_kernel") is not None or (sglang / "sgl_kernel").is_dir())):
        return "cuda", None
    return "cpu", "SGLang needs the package sglang-kernel to use it, and that is not installed" if usable else None


def find_sglang() -> Path | None:
    """The SGLang of this interpreter; failing that, the one that `make` has unpacked."""
    spec = find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    # 0.5.12 is the version that the patch was first asked for. On a GPU it wants an older torch than .venv has.
    release = "0.5.12" if find_spec("sgl_kernel") is None else "0.5.23"
    unpacked = FOLDER / ".venv" / f"sglang-{release}"
    return unpacked if unpacked.is_dir() else None


class Case:
    """What is asked of the child, and what the shapes line must therefore say."""

    def __init__(self, arguments: argparse.Namespace, device: str, why: str | None = None) -> None:
        names = ("prefix", "q_len", "heads", "layers", "bs", "slots")
        self.options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
        dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float16")
        self.options |= dict(dtype=dtype, device=device, why=why)
        self.layers: int = arguments.layers
        bs, q_len, prefix = arguments.bs, arguments.q_len, arguments.prefix
        if device == "cpu" and dtype == "bfloat16":
            raise NotDone(
                "--dtype bfloat16 needs a GPU: on the CPU SGLang's kernel runs in Triton's interpreter, which computes "
                "bfloat16 products wrongly, so there is nothing to compare with",
                "leave out --dtype",
            )
        tokens = bs * (prefix + q_len)
        if arguments.slots is not None and arguments.slots <= tokens:
            raise NotDone(
                f"--slots must be {tokens + 1} or more: {tokens} tokens (bs * (prefix + q_len)) and the padding slot",
                "leave out --slots for enough of them",
            )
        self.shapes = (
            f"q=({bs * q_len}, {arguments.heads}, 576)",
            f"bs={bs}",
            f"q_len={q_len}",
            "Dl=512 Dr=64",
            f"kv_len_max={prefix}",
            "scale=0.14468",
            f"mask=({bs * q_len * (prefix + q_len)},)",
        )


def child_output(case: Case, sglang: Path) -> Iterator[tuple[str, str]]:
    """Runs the child and yields what comes: ("stdout", a JSON event), ("stderr", a line), at last ("exit", status)."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
    if "KDTREE_CACHE_DIR" in os.environ:
        env["KDTREE_CACHE_DIR"] = os.environ["KDTREE_CACHE_DIR"]
    env["KDTREE_VALIDATE"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), str(sglang), env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    command = [sys.executable, "-m", "kdtree_patch.demo_child", json.dumps(case.options)]
    # In an empty folder, because `python -m` puts the current one on the child's path.
    with tempfile.TemporaryDirectory(prefix="kdtree-demo-") as empty:
        child = subprocess.Popen(
            command, env=env, cwd=empty, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()

        def pump(source: str, stream: IO[str]) -> None:
            for line in stream:
                lines.put((source, line.rstrip("\n")))
            lines.put((source, None))

        assert child.stdout is not None and child.stderr is not None
        pumps = [
            threading.Thread(target=pump, args=pipe, daemon=True)
            for pipe in (("stdout", child.stdout), ("stderr", child.stderr))
        ]
        try:
            for thread in pumps:
                thread.start()
            running = len(pumps)
            while running:
                source, line = lines.get(timeout=SILENCE_S)
                if line is None:
                    running -= 1
                else:
                    yield source, line
            yield "exit", str(child.wait())
        except queue.Empty:
            yield "exit", f"nothing was heard of it for {SILENCE_S} s"
        finally:
            child.kill()
            child.wait()


@dataclass(frozen=True)
class Layer:
    """One layer line."""

    layer: int
    max_abs_diff: float
    mean: float
    rel: float


@dataclass
class Story:
    """What has been heard of the child so far."""

    machine: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    installed: str | None = None
    shapes: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    layers: dict[int, Layer] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # everything with our prefix
    other: deque[str] = field(default_factory=lambda: deque(maxlen=25))  # the end of everything else
    status: str | None = None

    def hear(self, source: str, line: str) -> None:
        if source == "exit":
            self.status = line
        elif source == "stdout":
            try:
                event = json.loads(line)
                setattr(self, event.pop("event"), event)
            except (ValueError, TypeError, KeyError, AttributeError):
                self.other.append(line)  # somebody else's sitecustomize has printed it, before the child could begin
        elif line.startswith("[kdtree] "):
            self._hear_of_ours(line)
        else:
            self.other.append(line)

    def _hear_of_ours(self, line: str) -> None:
        self.lines.append(line)
        word = line.split()[1]
        if match := LAYER_LINE.match(line):
            layer = Layer(int(match[1]), *(float(match[i]) for i in (2, 3, 4)))
            self.layers[layer.layer] = layer
        elif word == "installed":
            self.installed = line
        elif word == "shapes":
            self.shapes.append(line)
        elif word in ("declined", "WARNING", "ERROR"):
            self.declined.append(line)

    @property
    def limit(self) -> float:
        return LIMITS.get(self.machine.get("dtype", ""), min(LIMITS.values()))

    @property
    def worst(self) -> Layer | None:
        """The layer with the largest rel; a NaN is worse than any number."""
        return max(self.layers.values(), key=lambda x: (x.rel != x.rel, x.rel), default=None)


@dataclass(frozen=True)
class Check:
    """One line of the verdict. `advice` says what to look at when it has not passed."""

    name: str
    passed: bool
    seen: str
    advice: str = ""


def judge(case: Case, story: Story) -> list[Check]:
    """The verdict, in the order in which things happen, so that the first failure is the one to look at."""
    refused = f"the reason is in: {story.declined[0]}" if story.declined else ""
    loaded = story.machine.get("sitecustomize")
    theirs = loaded is not None and Path(loaded).resolve().parent != FOLDER
    checks = [
        Check(
            "the process ran to its end",
            story.status == "0" and bool(story.done),
            "yes" if story.status == "0" else f"no: exit status {story.status}",
            "the end of its output is above"
            + ("; --device cpu runs the same without the GPU" if story.machine.get("gpu") else ""),
        ),
        Check(
            "installed line",
            story.installed is not None,
            "seen" if story.installed else "missing",
            refused
            or (f"Python loaded {loaded} in place of ours: it comes first on the path" if theirs else "")
            or "no [kdtree] line says why; is stderr cut off, or wrapt broken?",
        ),
    ]
    shapes = story.shapes[0] if story.shapes else ""
    absent = [part for part in case.shapes if f" {part} " not in f"{shapes} "]
    checks += [
        Check(
            "shapes line",
            bool(shapes) and not absent,
            "missing" if not shapes else f"without {', '.join(absent)}" if absent else " ".join(case.shapes),
            "the call that was routed is not the one that was asked for"
            if shapes
            else "no call was routed; " + (refused or "is forward_extend called at all?"),
        )
    ]
    missing = [index for index in range(case.layers) if index not in story.layers]
    checks += [
        Check(
            "layer lines",
            not missing,
            f"{case.layers - len(missing)} of {case.layers}",
            f"missing: {spans(missing)}; " + (refused or "look at `routed` below: which calls went to stock, and why?"),
        )
    ]
    worst = story.worst
    checks += [
        Check(
            "worst rel",
            worst is not None and worst.rel <= story.limit,
            f"{worst.rel:.2e} in L{worst.layer}, limit {story.limit:.0e}" if worst else "no layer was compared",
            "the two kernels disagree: about 2e-3 is the rounding of bf16, about 2e-4 that of fp16; near 1 is a wrong "
            "answer, by a wrong mask, wrong columns or a wrong slot",
        ),
        Check(
            "served by our kernel",
            story.done.get("routed") == {"kernel verify": case.layers},
            ", ".join(f"{reason}: {count}" for reason, count in story.done.get("routed", {}).items()) or "none",
            refused or "every verify call must be served; the codes say why one was not",
        ),
        Check(
            "drafts in the KV pool",
            story.done.get("stored") is True,
            "every layer" if story.done.get("stored") else "not at out_cache_loc",
            "SGLang's own KV store did not happen, or something wrote over it",
        ),
    ]
    return checks


def first_advice(checks: list[Check]) -> str:
    """What to look at. Of the first failure only: the later ones mostly follow from it."""
    return next((f"{check.name}: {check.advice}" for check in checks if not check.passed), "")


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 7] as "L0-L2, L7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(f"L{number}" for number in run) for run in runs)


def as_json(case: Case, story: Story, checks: list[Check]) -> dict[str, Any]:
    return {
        "passed": all(check.passed for check in checks),
        "case": case.options,
        "worst_rel": story.worst.rel if story.worst else None,
        "limit": story.limit,
        "machine": story.machine,
        "backend": story.backend,
        "done": story.done,
        "installed": story.installed,
        "shapes": story.shapes,
        "layers": [vars(story.layers[index]) for index in sorted(story.layers)],
        "lines": story.lines,
        "checks": [vars(check) for check in checks],
    }


class Screen(Protocol):
    """Where the demo is shown."""

    def show(self, story: Story, line: str | None) -> None: ...
    def close(self) -> None: ...
    def verdict(self, story: Story, checks: list[Check]) -> None: ...


def open_screen(case: Case) -> Screen:
    """A table where somebody looks on: not in a pipe, and not in a CI that keeps what would be drawn over. Nor without
    rich, which a service's environment may not have.
    """
    seen = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
    if not seen or find_spec("rich") is None:
        return PlainScreen()
    from kdtree_patch.demo_screen import LiveScreen

    return LiveScreen(case.layers)


class PlainScreen:
    """The lines as they come, then the verdict."""

    def show(self, story: Story, line: str | None) -> None:
        if line is not None:
            print(line, flush=True)

    def close(self) -> None:
        pass

    def verdict(self, story: Story, checks: list[Check]) -> None:
        if not checks[0].passed:
            print(*story.other, sep="\n")
        print("", *headline(story), sep="\n")
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:<{width}}  {check.seen}")
        if advice := first_advice(checks):
            print(advice)
        print("PASS" if all(check.passed for check in checks) else "FAIL")


def headline(story: Story) -> list[str]:
    """What ran, and where."""
    machine, backend = story.machine, story.backend
    if not machine:
        return ["the process said nothing about itself"]
    where = machine["gpu"] or "CPU: Triton's interpreter, and our kernel compiled by g++"
    lines = [
        f"SGLang {backend.get('sglang', '?')}, {backend.get('backend', 'no backend').rpartition('.')[2]}, "
        f"{machine['dtype']}, KV pool of {backend.get('slots', '?')} slots, torch {machine['torch']}",
        f"on {where}",
    ]
    if machine["why"]:
        lines.append(f"not on the GPU: {machine['why']}")
    if story.done:
        layers, seconds = len(story.layers), story.done["seconds"]
        lines.append(f"{layers} layers by both kernels, and compared, in {seconds} s")
    return lines
