"""`python -m tests.e2e`, which is what `make e2e` runs. See docs/architecture.md, "End to end"."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kdtree_patch import exits
from kdtree_patch.arguments import output_file, plot_file, whole_number
from kdtree_patch.console import open_console
from kdtree_patch.exits import NotDone
from kdtree_patch.tiles import FP8_POOLS
from tests.e2e import gpus, load, models, plan, ranks, report, speed, tokens
from tests.e2e.record import CARRIED_THROUGH, Record
from tests.e2e.server import Fleet, ServerSpec

RUNS = ("speed", "load", "tokens")
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "cupy-cuda13x", "cupy-cuda12x", "wrapt")
# What changes a run and is no option.
VARIABLES = re.compile(r"(SGLANG|NCCL|KDTREE)_|CUDA_VISIBLE_DEVICES$")


def run_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(RUNS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma list of {', '.join(RUNS)}")
    return [name for name in RUNS if name in names]


def point(text: str) -> speed.Point:
    try:
        return speed.parse_point(text)
    except ValueError:
        words = f"{text!r} is not a prompt length up to 39000 and a batch size up to 16, as in 8192,1"
        raise argparse.ArgumentTypeError(words) from None


def servers_of_ranks() -> int:
    """All of them run at once: each is asked after all have started, and none is stopped before the end."""
    return len(plan.rank_specs(models.Checkpoints.below(Path()), 2, Path()).specs)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = exits.Parser(
        prog="python -m tests.e2e",
        description="The real SGLang server, stock and patched, on small MLA models with random weights, under tree "
        "speculation. Needs one NVIDIA GPU with 140 GB (for less, fewer --points), and SGLang where this Python finds "
        "it. Exit status: 0 every bar was kept, 1 one was missed, 2 not done: wrong usage, no GPU.",
    )

    def option(name: str, help: str, **words: Any) -> None:
        parser.add_argument(name, help=help, **words)

    def number(name: str, least: int, most: int | None, default: int | None, help: str) -> None:
        option(name, help, type=whole_number(least, most), default=default, metavar="N")

    ranks_words = (
        f"GPUs, a rank on each; with two or more, the run is `ranks`: {servers_of_ranks()} servers at once, "
        "seen to take 2.5 minutes on two H200s and 32 cores"
    )
    number("--tp", 1, 8, 1, ranks_words)
    option("--only", f"only these, of {', '.join(RUNS)}", type=run_names, default=list(RUNS), metavar="RUN,...")
    points = "of speed: only these, e.g. 8192,1"
    option("--points", points, nargs="+", type=point, default=list(speed.POINTS), metavar="PROMPT,BATCH")
    pool = "of tokens: an fp8 KV pool, %(choices)s; rel is judged and tokens are not, as stock rounds to fp8"
    option("--kv-cache-dtype", pool, choices=tuple(FP8_POOLS), metavar="TYPE")
    number("--layers", 2, 128, 24, "of speed: layers of the model (%(default)s)")
    option("--no-kernels", "of speed: do not time the kernels alone", action="store_true")
    number("--requests", 1, None, load.REQUESTS, "of load: requests (%(default)s)")
    number("--side-by-side", 4, None, None, "servers at a time (9; with --tp, all)")
    number("--start-timeout", 10, None, 280, "seconds a server may take (%(default)s)")
    option(
        "--folder",
        "where checkpoints and logs go, and stay (a temporary one, which stays if a bar is missed)",
        type=Path,
        metavar="FOLDER",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="F", help="write what is found to this file, as it is found"
    )
    parser.add_argument("--plot", type=plot_file, metavar="F", help="draw step times and throughput")
    parser.add_argument("--from", dest="source", type=Path, metavar="F", help="show this stored run; needs no GPU")
    arguments = parser.parse_args(argv)

    def refuse(names: Iterable[str], what_for: str) -> None:
        """Words that would not be heeded."""
        given = [name for name in names if getattr(arguments, name) != parser.get_default(name)]
        if given:
            words = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            parser.error(f"{words} {'is' if len(given) == 1 else 'are'} {what_for}: leave out one or the other")

    if arguments.source is not None:
        refuse(sorted(vars(arguments).keys() - {"source", "plot"}), "for a new run, and --from shows one that is there")
    if arguments.tp > 1:
        one_gpu = ("only", "points", "layers", "no_kernels", "requests", "plot")
        refuse(one_gpu, f"for one GPU, and with --tp {arguments.tp} the run is `ranks`")
        if arguments.side_by_side is not None and arguments.side_by_side < servers_of_ranks():
            parser.error(
                f"--side-by-side {arguments.side_by_side} is too few: with --tp {arguments.tp} there are "
                f"{servers_of_ranks()} servers, all at once: leave it out"
            )
    if arguments.kv_cache_dtype is not None and (arguments.tp > 1 or arguments.only != ["tokens"]):
        parser.error("--kv-cache-dtype goes with --only tokens")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    return exits.run("e2e", lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    arguments = parse(argv)
    if arguments.source is not None:
        return show(report.read_run(arguments.source), arguments.plot)
    nvml = gpus.Nvml()
    if nvml.count < arguments.tp:
        raise NotDone(
            f"--tp {arguments.tp} needs as many GPUs, and torch sees {nvml.count} here",
            "run it where it sees as many, with those in CUDA_VISIBLE_DEVICES if that is set",
        )
    # Whoever ends a run shall find what it has written, and no servers. One under nohup does not end with its terminal.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    record = Record(arguments.json, command_of(argv))
    record.document["meta"] |= {
        "gpu": nvml.name(),
        "gpus": arguments.tp,
        "versions": versions(),
        "environ": {name: os.environ[name] for name in sorted(os.environ) if VARIABLES.match(name)},
    }
    with contextlib.ExitStack() as stack:
        if arguments.folder is None:
            folder = Path(tempfile.mkdtemp(prefix="kdtree-e2e-"))
            stack.callback(leave, folder, record)
        else:
            folder = arguments.folder.absolute()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise NotDone(f"{folder} cannot be made: {error.strerror}", "name another --folder") from error
        record.below(folder, Path(os.path.expanduser("~")))
        record.save()  # instead of what another run has left there
        try:
            carry_out(arguments, record, nvml, folder)
        except KeyboardInterrupt:
            record.bar(CARRIED_THROUGH, False, "it was interrupted")
        record.end()
    status = show(record.document, arguments.plot)
    if record.unsaved is not None:
        raise record.unsaved
    return status


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def leave(folder: Path, record: Record) -> None:
    """Removes a temporary folder, but not the logs that say why a bar was missed."""
    if any(not one["ok"] for one in record.document["verdict"]):
        record.say(f"a bar was missed: the servers' logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)


def make_cold(specs: Iterable[ServerSpec]) -> None:
    """Empties the caches that an earlier run has left in the folder. Raises NotDone where that does not go."""
    for spec in specs:
        cache = spec.environ.get("KDTREE_CACHE_DIR")
        if cache is not None and Path(cache).exists():
            try:
                shutil.rmtree(cache)
            except OSError as error:
                # A link has no strerror.
                words = f"{cache} cannot be emptied: {error.strerror or error}"
                raise NotDone(words, "name another --folder") from error


def carry_out(arguments: argparse.Namespace, record: Record, nvml: gpus.Nvml, folder: Path) -> None:
    record.say("writing checkpoints")
    checkpoints = models.write_all(folder / "models", heads=8 * arguments.tp, deep_layers=arguments.layers)
    if arguments.tp > 1:
        wanted = plan.rank_specs(checkpoints, arguments.tp, folder)
        make_cold(wanted.specs)
        side_by_side = arguments.side_by_side or len(wanted.specs)
        with Fleet(folder, side_by_side, arguments.start_timeout, record.say) as fleet:
            killer = ranks.CompilerKiller(Path(wanted.killed.environ["KDTREE_CACHE_DIR"]))
            killer.start()
            fleet.want(wanted.specs)
            ranks.run(fleet, record, wanted, nvml, arguments.tp, killer)
        return
    figures, pairs, under_load = (
        plan.speed_pairs(checkpoints),
        plan.token_pairs(checkpoints, arguments.kv_cache_dtype),
        plan.load_spec(checkpoints),
    )
    specs = {
        "speed": [spec for one in figures for spec in one.specs],
        "load": [under_load],
        "tokens": [spec for one in pairs for spec in one.specs],
    }
    with Fleet(folder, arguments.side_by_side or 9, arguments.start_timeout, record.say) as fleet:
        fleet.want(spec for name in arguments.only for spec in specs[name])
        if "speed" in arguments.only:
            speed.run(fleet, record, figures, arguments.points, arguments.layers, not arguments.no_kernels)
        if "load" in arguments.only:
            load.run(fleet, record, under_load, nvml, arguments.requests)
        if "tokens" in arguments.only:
            tokens.run(fleet, record, pairs, arguments.kv_cache_dtype)


def show(document: dict[str, object], picture: Path | None) -> int:
    console = open_console()
    for table in report.tables(document):
        console.print(table)
    passed = report.passed(document)
    console.print("PASS" if passed else "FAIL")
    if picture is not None:
        exits.write(picture, lambda part: report.plot(document, part), "--plot")
    return exits.GOOD if passed else exits.FINDING


def command_of(argv: Sequence[str] | None) -> str:
    return shlex.join(["python", "-m", "tests.e2e", *(sys.argv[1:] if argv is None else argv)])


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
