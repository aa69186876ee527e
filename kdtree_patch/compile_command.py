"""`python -m kdtree_patch compile`: compiles the kernel, says what each variant takes, and leaves it in the cache.

Needs no GPU. Run as the user of the service, with its environment, it also saves the service's next start the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kdtree_patch import compile as compiling
from kdtree_patch import tiles
from kdtree_patch.arguments import settings_of_environment

MAX_REGISTERS = 255


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compile",
        help="compile the kernel, without a GPU; registers, spills and shared memory per variant",
        description="Compiles the kernel with NVRTC, or with g++ for the CPU, and puts it into the cache. Exit status: "
        "0 good; 1 if a target does not compile, a kernel spills or does not fit; 2 not done.",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        action="extend",
        choices=(*compiling.NVRTC_TARGETS, *compiling.HOST_TARGETS),
        metavar="TARGET",
        help="what to compile for: %(choices)s. Default: those that serve the GPUs which NVML sees on this host, "
        "whatever CUDA_VISIBLE_DEVICES says; if it sees none that the kernel runs on, "
        + ", ".join(compiling.GPU_TARGETS)
        + ". The others are compiled only when they are named.",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=tuple(tiles.FP8_POOLS),
        metavar="TYPE",
        help="for a service with an fp8 KV pool: %(choices)s. Default: a pool of the model's own type",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of_environment()
    archs = arguments.arch or compiling.visible_targets(config=settings.config) or compiling.GPU_TARGETS
    targets = [compiling.with_pool(arch, arguments.kv_cache_dtype) for arch in dict.fromkeys(archs)]
    reports = []
    for target in targets:
        report = examine(target, settings.cache_dir)
        reports.append(report)
        if not arguments.json:
            print(table(report), flush=True)
    findings = [f"{report['target']}: {finding}" for report in reports for finding in report["findings"]]
    if arguments.json:
        print(json.dumps({"targets": reports, "findings": findings}, indent=2))
    elif findings:
        print(f"{len(findings)} finding(s)")
    return 1 if findings else 0


def examine(target: str, cache_dir: Path | None = None, kernels: Path = compiling.KERNELS) -> dict[str, Any]:
    """Compiles for one target. What is wrong with the result is in `findings`, a list of sentences."""
    report: dict[str, Any] = {"target": target, "kernels": [], "findings": []}
    try:
        if compiling.parts_of(target)[0] in compiling.HOST_TARGETS:
            report["path"] = str(compiling.cached_binary(target, cache_dir, kernels))
            return report
        result = compiling.compile_cubin(target, kernels, cache_dir)
        report.update(compiler=result.compiler, seconds=round(result.seconds, 1), bytes=len(result.cubin))
        dynamic = dynamic_shared(target)
        for kernel in result.kernels:
            asked = dynamic.get(kernel.name, 0)
            shared = None if asked is None else kernel.static_shared + asked
            report["kernels"].append({**asdict(kernel), "shared": shared})
            report["findings"] += judge(kernel, shared, configuration(target).shared_limit)
        missing = sorted(set(dynamic) - {kernel.name for kernel in result.kernels})
        report["findings"] += [f"{name} is not in the cubin" for name in missing]
        report["path"] = str(compiling.keep(result, cache_dir, kernels))
    except compiling.CompileError as error:
        report["findings"].append(f"{error.reason}: {error}")
    return report


def dynamic_shared(target: str) -> dict[str, int | None]:
    """Kernel of the target's cubin -> the shared memory it asks for at launch. None for combine: it depends on how many
    multiprocessors the GPU has, and is small on all of them.
    """
    asked: dict[str, int | None] = {}
    for variant, element in itertools.product(configuration(target).variants, tiles.ELEMENTS):
        asked[variant.kernel_name(element)] = variant.shared_bytes
        asked[variant.combine_name(element)] = None
    return asked


def configuration(target: str) -> tiles.Configuration:
    """The one that a target's cubin holds."""
    return tiles.CONFIGS["hopper" if compiling.parts_of(target)[0] == compiling.HOPPER_TARGET else "portable"]


def judge(kernel: compiling.KernelResources, shared: int | None, limit: int) -> list[str]:
    findings = []
    if kernel.spill_stores or kernel.spill_loads:
        findings.append(f"{kernel.name} spills {kernel.spill_stores} bytes and reads {kernel.spill_loads} back")
    if kernel.registers > MAX_REGISTERS:
        findings.append(f"{kernel.name} uses {kernel.registers} registers, more than {MAX_REGISTERS}")
    if shared is not None and shared > limit:
        findings.append(f"{kernel.name} takes {shared} bytes of shared memory, more than {limit}")
    return findings


def table(report: dict[str, Any]) -> str:
    lines = [report["target"]]
    if "compiler" in report:
        lines[0] += f"  {report['compiler']}, {report['seconds']} s, {report['bytes']:,} bytes"
    if "path" in report:
        lines[0] += f"  {report['path']}"
    if report["kernels"]:
        lines.append(f"  {'kernel':<32} {'registers':>9} {'spilled':>8} {'stack':>6} {'shared':>8}")
    for kernel in report["kernels"]:
        spilled = kernel["spill_stores"] + kernel["spill_loads"]
        shared = "-" if kernel["shared"] is None else f"{kernel['shared']:,}"
        lines.append(f"  {kernel['name']:<32} {kernel['registers']:>9} {spilled:>8} {kernel['stack']:>6} {shared:>8}")
    return "\n".join([*lines, *(f"  FINDING {finding}" for finding in report["findings"])])
