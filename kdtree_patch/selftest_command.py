"""`python -m kdtree_patch selftest`: the start-up self-test of a worker, by hand."""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict
from typing import Any

from kdtree_patch.arguments import settings_of_environment
from kdtree_patch.exits import NotDone
from kdtree_patch.settings import Settings
from kdtree_patch.tiles import FP8_POOLS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "selftest",
        help="the kernel against a float64 reference on this GPU",
        description="Compiles or loads the kernel and compares it with float64 on a few small cases, as each worker of "
        "a service does when it starts. Exit status: 0 good; 1 if a result is wrong or there is no kernel; 2 not "
        "done: wrong usage, or no GPU or no torch.",
    )
    parser.add_argument(
        "--device",
        type=device_name,
        default="cuda",
        metavar="DEVICE",
        help="cuda, cuda:N, or cpu for the same source compiled by g++; default: %(default)s",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=tuple(FP8_POOLS),
        metavar="TYPE",
        help="the kernel for an fp8 KV pool: %(choices)s. Default: that for a pool of the model's own type",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def device_name(text: str) -> str:
    if not re.fullmatch("cuda(:[0-9]+)?|cpu", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cuda, cuda:N or cpu")
    return text


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of_environment()
    found = examine(arguments.device, settings, arguments.kv_cache_dtype)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for one in found["results"]:
            print(f"{'ok   ' if one['good'] else 'WRONG'} rel={one['rel']:.2e} limit={one['limit']:.0e} {one['case']}")
        where = f" on {found['device']} ({found['target']}) in {found['seconds']:.2f} s" if found["results"] else ""
        print(f"{'PASS' if found['good'] else 'FAIL'}{where}" + (f": {found['error']}" if found["error"] else ""))
    return 0 if found["good"] else 1


def examine(name: str, settings: Settings, pool: str | None = None) -> dict[str, Any]:
    """The results and the verdict, as printed with --json; `seconds` without loading the kernel. `pool`: the type of an
    fp8 KV pool. Raises NotDone where there is nothing to try, or nothing to try it with.
    """
    found: dict[str, Any] = {"good": False, "device": name, "target": None, "seconds": 0.0, "results": [], "error": ""}
    try:
        import torch

        from kdtree_patch import selftest
        from kdtree_patch.kernel import FP8_POOLS as TYPES
        from kdtree_patch.kernel import VerifyKernel
    except ImportError as error:
        raise NotDone(str(error), "run it with the service's interpreter") from error
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NotDone("torch sees no NVIDIA GPU here", "run it where there is one; --device cpu tests the CPU build")
    try:
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        fp8 = next((dtype for dtype, word in TYPES.items() if word == pool), None)
        kernel = VerifyKernel.load(device, settings.cache_dir, config=settings.config, pool=fp8)
        found["target"] = kernel.target
        if device.type == "cuda":
            found["device"] = torch.cuda.get_device_name(device)
        start = time.perf_counter()
        for one in selftest.run(kernel):
            found["results"].append({"case": one.name, **asdict(one), "good": one.good})
            del found["results"][-1]["name"]
        found["seconds"] = time.perf_counter() - start
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"}
    return found | {"good": all(one["good"] for one in found["results"])}
