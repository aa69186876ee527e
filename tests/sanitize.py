"""python -m tests.sanitize: the kernels under the four tools of compute-sanitizer (`make sanitize`).

Each tool runs tests/gpu/test_every_part.py, whose batches use every part of both kernels. Anything that a tool reports
is a failure, hazards that it only warns of included, and so is a test that fails under it. Exit status: 0 if all is
clean, 1 if there are findings, 2 if it could not be run. SANITIZE_PYTHON=python3 of make names an interpreter that has
torch, cupy and pytest.

Each tensor gets memory of its own from the driver, so that the tools see where it ends and what was never written.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "compute-sanitizer"
TESTS = "tests/gpu/test_every_part.py"
FOUND = 99  # the exit status that a tool is asked to end with

# The last line of a tool: ERROR SUMMARY: 0 errors; RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings).
SUMMARY = re.compile(r"^=+ *(?:\w+ )?SUMMARY: (\d+) \w+", re.MULTILINE)
# A kernel of ours, in the lines of a finding.
KERNEL = re.compile(r"\b(?:verify_attn|combine_splits)_\w+")


def places() -> Iterator[Path]:
    """Where toolkits and NVIDIA's wheels have the program."""
    for root in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))):
        yield Path(root) / "bin"
    yield from sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    for folder in sys.path:
        yield from (found.parent for found in Path(folder or ".").glob(f"nvidia/**/{PROGRAM}"))


def find() -> str | None:
    return shutil.which(PROGRAM) or next(
        (found for place in places() if (found := shutil.which(PROGRAM, path=str(place)))), None
    )


def command(program: str, tool: str, more: Sequence[str]) -> list[str]:
    words = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    words += ["--print-limit", "20"]
    words += ["--racecheck-report", "all"] if tool == "racecheck" else []
    return [*words, *pytest(more)]


def pytest(more: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", TESTS, *more]


def verdict(status: int, output: str) -> str | None:
    """What is wrong with a run; None if nothing is."""
    counts = [int(count) for count in SUMMARY.findall(output)]
    if any(counts):
        named = sorted(set(KERNEL.findall(output)))
        return f"{sum(counts)} findings" + (f" ({', '.join(named)})" if named else "")
    if status == FOUND:
        return "findings"
    if not counts:
        return f"the tool came to no end: exit status {status}"
    if status:
        return f"tests failed: exit status {status}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.sanitize", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="this one alone; may be given more than once")
    parser.add_argument("more", nargs="*", help="words for pytest, behind --: -k hopper")
    options = parser.parse_args(arguments)
    program = find()
    if program is None:
        print(
            f"error: {PROGRAM} is not in PATH, nor in a CUDA toolkit or wheel that could be found; nothing was run.\n"
            "Install the toolkit's cuda-sanitizer package, or: pip install nvidia-cuda-sanitizer-api",
            file=sys.stderr,
        )
        return 2
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Without a tool first: the kernels are compiled then, and what fails by itself is no finding of a tool.
    if subprocess.run(pytest(options.more), cwd=REPO, env=environment).returncode:
        print("error: the tests fail without a tool as well; no tool was run", file=sys.stderr)
        return 2
    found = {}
    for tool in options.tool or TOOLS:
        started = time.monotonic()
        words = command(program, tool, options.more)
        print(f"==> {' '.join(words)}", flush=True)
        run = subprocess.run(
            words, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        wrong = verdict(run.returncode, run.stdout)
        lines = run.stdout.splitlines()
        # All of it if there is anything to see, else the two summaries.
        print("\n".join(lines if wrong else [line for line in lines if "SUMMARY" in line or " passed" in line]))
        found[tool] = f"{wrong or 'clean'}, {time.monotonic() - started:.0f} s"
    for tool, words_of in found.items():
        print(f"{tool}: {words_of}")
    return int(any(not words_of.startswith("clean") for words_of in found.values()))


if __name__ == "__main__":
    sys.exit(main())
