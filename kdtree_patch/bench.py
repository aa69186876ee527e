"""`python -m kdtree_patch bench`: the kernel, SGLang's own and the peers on one GPU, in one run, beside what the
hardware allows; and what can be said of it without a GPU.

The floor of a shape is the larger of two times: the bytes it must move over the bandwidth of a large copy, and its
floating-point operations over the rate of mma.sync on registers, both measured in the same run (`bench_shapes`,
`bench_measure`). `--predict` is a paper model for other GPUs (`bench_predict`), `--host` the host's share of a call
(`bench_host`), `--from` reads a stored run again (`bench_report`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdtree_patch import exits
from kdtree_patch.arguments import PLOT_FORMATS, need, output_file, plot_file
from kdtree_patch.bench_shapes import KINDS, KV_DTYPES, PORTABLE_SHAPES, SHAPES, SWEEP, TRIALS, Shape, parse_shape
from kdtree_patch.exits import NotDone

CONFIGS = ("portable", "hopper")
REFERENCE_RUN = Path(__file__).resolve().parents[1] / "docs" / "results" / "h200.json"

Step = Callable[[str], None]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the kernel, SGLang's own and its peers on this GPU; predict other GPUs",
        description="Times one layer of verify attention in bf16 with a tree mask and scattered slots: our kernel, "
        "SGLang's, and FlashInfer's and FlashMLA's where they are installed, in one run, ours checked against float64. "
        "Needs an NVIDIA GPU, and SGLang where Python finds it; --predict, --host and --from need neither. "
        "Exit status: 0 good, 1 a result was wrong, 2 not done: wrong usage, no GPU.",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--predict",
        action="store_true",
        help="a paper model of the portable configuration on other GPUs, from a run on an H200; needs no GPU",
    )
    mode.add_argument(
        "--host",
        action="store_true",
        help="only the host's time for a routed call and a stock call; a GPU if there is one",
    )
    mode.add_argument(
        "--modes",
        nargs="*",
        choices=KINDS,
        metavar="KIND",
        help="instead of the table: chains beside trees, the largest trees, and extends of 1 to 512 tokens, "
        f"or only some of {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="F",
        help="show this stored run instead of measuring; with --predict, start from it (docs/results/h200.json)",
    )
    parser.add_argument(
        "--config",
        choices=CONFIGS,
        help="force this tile configuration. Default: the one made for this GPU; portable beside it for most shapes",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=tuple(name for name in KV_DTYPES if name),
        metavar="TYPE",
        help="with an fp8 KV pool: %(choices)s, scales of 1, and no peers. Default: a bf16 pool",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        metavar="SHAPE",
        help="only these shapes: batch size, q_len, heads and prefix, e.g. 1,9,8,4096",
    )
    what.add_argument(
        "--sweep", action="store_true", help="also batch sizes 1 to 64 by prefixes 256 to 131072, for the plot"
    )
    parser.add_argument("--json", type=output_file, metavar="F", help="also write the figures to this file")
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="F",
        help=f"also draw speed-up and percent of floor over the prefix length ({', '.join(PLOT_FORMATS)})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    if arguments.predict:
        return predict(arguments)
    if arguments.host:
        return host(arguments)
    if arguments.modes is not None:
        return modes(arguments)
    if arguments.source is not None:
        return show(arguments)
    return measure(arguments)


def check(arguments: argparse.Namespace) -> None:
    """What argparse cannot: combinations that mean nothing, and packages that are missing. Before anything has run."""

    def refuse(mode: str, **given: Any) -> None:
        for option, value in given.items():
            if value:
                raise NotDone(f"{mode} and --{option} do not go together", "leave one of them out")

    if arguments.predict:
        refuse("--predict", plot=arguments.plot)
        if arguments.config not in (None, "portable"):
            raise NotDone(
                f"--predict knows the portable configuration alone, not {arguments.config}", "leave out --config"
            )
    elif arguments.host:
        options = dict(shapes=arguments.shapes, sweep=arguments.sweep, plot=arguments.plot)
        pool = {"kv-cache-dtype": arguments.kv_cache_dtype}
        refuse("--host", **{"from": arguments.source}, **options, **pool)
    elif arguments.modes is not None:
        options = dict(shapes=arguments.shapes, sweep=arguments.sweep, plot=arguments.plot)
        pool = {"kv-cache-dtype": arguments.kv_cache_dtype}
        refuse("--modes", **{"from": arguments.source}, **options, **pool)
    elif arguments.source is not None:
        options = dict(shapes=arguments.shapes, sweep=arguments.sweep, config=arguments.config, json=arguments.json)
        pool = {"kv-cache-dtype": arguments.kv_cache_dtype}
        refuse("--from without --predict", **options, **pool)
    need("rich")
    if arguments.plot is not None:
        need("matplotlib", "for --plot")
    if not arguments.predict and arguments.source is None:
        need("torch", "to measure", "run it with the service's interpreter")


def command_of(arguments: argparse.Namespace) -> str:
    """The command that makes the same figures again: without the files it writes, which are this machine's affair."""
    words = ["python", "-m", "kdtree_patch", "bench"]
    words += [f"--{name}" for name in ("predict", "host", "sweep") if getattr(arguments, name)]
    if arguments.modes is not None:
        words += ["--modes", *arguments.modes]
    if arguments.config is not None:
        words += ["--config", arguments.config]
    if arguments.kv_cache_dtype is not None:
        words += ["--kv-cache-dtype", arguments.kv_cache_dtype]
    if arguments.shapes:
        words += ["--shapes", *map(str, arguments.shapes)]
    return shlex.join(words)


def write_json(path: Path | None, document: Any) -> None:
    if path is not None:
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        exits.write(path, lambda part: part.write_text(text), "--json")


# ---------------------------------------------------------------------------------------------------------- with a GPU


def need_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise NotDone(
            "torch sees no NVIDIA GPU here, and there is nothing to time without one",
            "run it where there is one; --predict, --host and --from need none",
        )


def modes(arguments: argparse.Namespace) -> int:
    need_a_gpu()
    from kdtree_patch import bench_measure as measuring
    from kdtree_patch import bench_modes

    trials = [trial for trial in TRIALS if trial.kind in (arguments.modes or KINDS)]
    kernel = measuring.load_kernel(arguments.config or "auto")
    stock = measuring.stock_kernel()
    with progress(len(trials)) as step:
        rows = bench_modes.measure(trials, kernel, stock, step, say)
    write_json(arguments.json, dict(meta=measuring.about(command_of(arguments)), modes=rows))
    return present_modes(rows)


def present_modes(rows: Sequence[Mapping[str, Any]]) -> int:
    from kdtree_patch import bench_modes, bench_report
    from kdtree_patch.console import open_console

    console = open_console()
    for table in bench_modes.tables(rows):
        console.print(table)
    for line in bench_modes.verdicts(rows):
        console.print(line, markup=False)
    wrong = [row for row in rows if bench_report.wrong(row)]
    for row in wrong:
        say(
            f"WRONG: {row['kind']} {bench_report.shape_of(row)}: rel {row['rel']} is not below {bench_report.REL_LIMIT}"
        )
    return int(bool(wrong))


def measure(arguments: argparse.Namespace) -> int:
    need_a_gpu()
    import torch

    from kdtree_patch import bench_host as host
    from kdtree_patch import bench_measure as measuring

    pool = arguments.kv_cache_dtype
    kernel = measuring.load_kernel(arguments.config or "auto", pool)
    own = kernel.config.name
    wanted = {
        shape: [kernel] for shape in dict.fromkeys(arguments.shapes or (*SHAPES, *(SWEEP if arguments.sweep else ())))
    }
    if arguments.config is None and not arguments.shapes and own != "portable":
        portable = measuring.load_kernel("portable", pool)
        for shape in PORTABLE_SHAPES:
            wanted[shape] = [kernel, portable]
    stock = measuring.stock_kernel()
    rows: list[dict[str, Any]] = []
    with progress(len(wanted) + 2) as step:
        step("ceilings")
        ceilings = measuring.measure_ceilings()
        step("host time")
        # The host's share does not depend on the pool, and its inputs are bf16.
        host_time = host.measure_host(measuring.load_kernel(own) if pool else kernel, stock)
        rivals = measuring.Rivals(stock, say)
        for shape, kernels in wanted.items():
            step(f"bs {shape.bs}, q_len {shape.q_len}, {shape.heads} heads, prefix {shape.prefix:,}")
            try:
                rows += measuring.measure_shape(shape, kernels, rivals, ceilings)
            except torch.cuda.OutOfMemoryError:
                say(f"{shape} is left out: it does not fit into this GPU's memory")
            torch.cuda.empty_cache()
    rows.sort(key=lambda row: row["config"] != own)  # the forced configuration's rows below the GPU's own
    document = dict(meta=measuring.about(command_of(arguments)) | dict(ceilings=ceilings, host=host_time), rows=rows)
    # The file first: it has taken minutes, and nothing that goes wrong with a picture shall cost it. Nor the table, if
    # it is the file that goes wrong.
    try:
        write_json(arguments.json, document)
    finally:
        status = present(document, arguments.plot)
    return status


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(steps: int) -> Iterator[Step]:
    """A bar on a terminal; elsewhere a line for each step, so that a log shows how far a run has come."""
    from kdtree_patch.console import open_console

    console = open_console(stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=steps, completed=-1)

            def advance(what: str) -> None:
                bar.update(task, advance=1, description=what)

            yield advance
            advance("done")
    else:
        done = 0

        def line(what: str) -> None:
            nonlocal done
            done += 1
            say(f"[{done}/{steps}] {what}")

        yield line


def present(document: dict[str, Any], picture: Path | None) -> int:
    from kdtree_patch import bench_report as report
    from kdtree_patch.console import open_console

    console = open_console()
    # Nobody has to read to the end for the picture to be drawn.
    try:
        console.print(report.run_table(document))
        if peers := report.peers_line(document):
            console.print(peers)
        console.print(report.ceilings_line(document["meta"]["ceilings"]))
        if "host" in document["meta"]:
            console.print(report.host_table(document["meta"]["host"]))
    finally:
        if picture is not None:
            exits.write(picture, lambda part: report.plot(document, part), "--plot")
            say(f"{picture} is drawn")
    wrong = [row for row in document["rows"] if report.wrong(row)]
    for row in wrong:
        say(f"WRONG: {report.shape_of(row)} {row['config']}: rel {row['rel']} is not below {report.REL_LIMIT}")
    return int(bool(wrong))


# ------------------------------------------------------------------------------------------------------- without a GPU


def show(arguments: argparse.Namespace) -> int:
    from kdtree_patch.bench_report import read_json, read_modes, read_run

    run = read_json(arguments.source)
    if isinstance(run, dict) and "modes" in run:
        if arguments.plot is not None:
            raise NotDone(f"{arguments.source} is of --modes, which has no plot", "leave out --plot")
        return present_modes(read_modes(run, arguments.source))
    return present(read_run(arguments.source), arguments.plot)


def host(arguments: argparse.Namespace) -> int:
    import torch

    from kdtree_patch import bench_host, bench_measure, bench_report
    from kdtree_patch.console import open_console

    on_gpu = torch.cuda.is_available()
    kernel = bench_measure.load_kernel(arguments.config or "auto") if on_gpu else bench_host.kernel_without_gpu()
    stock = bench_measure.stock_kernel() if on_gpu else None
    figures = bench_host.measure_host(kernel, stock)
    open_console().print(bench_report.host_table(figures))
    write_json(arguments.json, dict(meta=bench_measure.about(command_of(arguments)) | dict(host=figures), rows=[]))
    return 0


def predict(arguments: argparse.Namespace) -> int:
    from kdtree_patch import bench_predict, bench_report
    from kdtree_patch.console import open_console

    source = arguments.source or REFERENCE_RUN
    reference = bench_report.read_run(source)
    shapes: Sequence[Shape] = arguments.shapes or (*SHAPES, *(SWEEP if arguments.sweep else ()))
    kv_dtype = KV_DTYPES[arguments.kv_cache_dtype]
    predicted = bench_predict.predict(reference, tuple(dict.fromkeys(shapes)), kv_dtype)
    origin = {name: reference["meta"][name] for name in ("command", "gpu", "date")} | {"file": source.name}
    meta = dict(
        kind="prediction", command=command_of(arguments), date=datetime.date.today().isoformat(), reference=origin
    )
    document = dict(meta=meta, **predicted)
    console = open_console()
    for table in bench_report.prediction_tables(document):
        console.print(table)
        console.print()
    for line in bench_report.model_lines(document):
        console.print(line, markup=False)
    write_json(arguments.json, document)
    return 0
