"""`make compat`: which released SGLangs the contract lets us serve, and why not the others.

Fetches the wheel of each release (pip, without dependencies, kept in .venv/compat), checks the contract against its
sources without installing or running any of it, and writes the table of the README between its two marks. What is
imported is a stand-in with the release's own signatures (`tests/stand_in.py`), so it takes no GPU, no torch of that
release, and a few seconds.

The contract itself looks at names. Here the sources also answer what a worker asks of a constructed backend: that the
instance gets the attributes which we need, and that `forward_extend` still calls the one which we replace.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType

from kdtree_patch import contract, exits
from tests import stand_in

REPO = Path(__file__).resolve().parents[1]
FOLDER = REPO / ".venv" / "compat"
README = REPO / "README.md"
BEGIN, END = "<!-- made by `make compat` -->", "<!-- until here -->"
FIRST = "0.5.9"

# Wheels of SGLang are built for a Python and a Linux from 0.5.11 on. Which one does not matter: only text is read.
BUILD = ("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_34_x86_64")

Pip = Callable[..., str]


class CompatError(Exception):
    """It cannot be found out; the message says why and what to do."""


@dataclass(frozen=True)
class Found:
    """What the sources of a release say."""

    release: str
    violations: tuple[str, ...]
    parameters: int  # of the inner call
    graphs: str  # the methods that announce captures and replays

    @property
    def facts(self) -> tuple[object, ...]:
        return self.violations, self.parameters, self.graphs


# ------------------------------------------------------------------------------------------------------------- fetching


def pip(*words: str) -> str:
    """What pip prints. Raises CompatError with its last word."""
    process = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"], capture_output=True, text=True
    )
    if process.returncode:
        said = [line for line in process.stderr.splitlines() if line.startswith("ERROR")] or [process.stderr.strip()]
        raise CompatError(f"pip {words[0]}: {said[-1]}")
    return process.stdout


def order(release: str) -> tuple[int, ...]:
    """0.5.10.post1 comes after 0.5.10."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def releases(run: Pip = pip) -> list[str]:
    """Those of the package index from `FIRST` on, the oldest first."""
    try:
        text = run("index", "versions", "sglang", "--ignore-requires-python", *BUILD)
    except CompatError as error:
        raise CompatError(
            f"the package index does not say which releases there are ({error}). The README is as it was. With a "
            "network, run it again; without one, --offline checks the wheels that are here already"
        ) from None
    listed = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    found = [word.strip() for word in listed[1].split(",")] if listed else []
    return sorted((word for word in found if order(word) >= order(FIRST)), key=order)


def fetch(release: str, folder: Path, run: Pip = pip) -> Path:
    """The wheel of a release, from the folder or into it."""
    if (found := cached(folder).get(release)) is not None:
        return found
    with tempfile.TemporaryDirectory(dir=folder) as part:
        run(
            "download",
            "--quiet",
            "--no-deps",
            "--ignore-requires-python",
            *BUILD,
            f"--dest={part}",
            f"sglang=={release}",
        )
        for wheel in Path(part).iterdir():
            wheel.replace(folder / wheel.name)
    if (found := cached(folder).get(release)) is None:
        raise CompatError(f"pip has downloaded no wheel of sglang {release}")
    return found


def cached(folder: Path) -> dict[str, Path]:
    """The wheels in a folder, by release."""
    return {wheel.name.split("-")[1]: wheel for wheel in folder.glob("sglang-*.whl")}


# ------------------------------------------------------------------------------------------------------------- checking


def check(release: str, wheel: Path) -> Found:
    """Reads the sources in a wheel. Raises CompatError if it is torn."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            root = zipfile.Path(archive)
            files = stand_in.cut_down(root)
            source = root / stand_in.BACKEND
            text = source.read_text(encoding="utf-8") if source.exists() else ""
    except (zipfile.BadZipFile, OSError, UnicodeDecodeError) as error:
        raise CompatError(f"{wheel} cannot be read ({error}): delete it and run this again") from None
    with imported(files) as module:
        violations = [*contract.check(module), *seam_violations(text)]
        graphs = [name for name in vars(getattr(module, contract.BACKEND, object)) if name in GRAPH_NAMES]
    inner = next((files[name] for name in (stand_in.NEW, stand_in.OLD) if name in files), "")
    parameters = contract.source_parameters(inner, contract.INNER) or {}
    return Found(release, tuple(violations), len(parameters), ", ".join(GRAPH_NAMES[name] for name in graphs))


GRAPH_NAMES = {
    "init_forward_metadata_capture_cuda_graph": "capture",
    "init_forward_metadata_replay_cuda_graph": "replay",
    "init_forward_metadata_out_graph": "out_graph",
}


@contextmanager
def imported(files: dict[str, str]) -> Iterator[ModuleType]:
    """The backend's module of a stand-in, for as long as it lasts."""
    stand_in.forget_sglang()
    with tempfile.TemporaryDirectory() as folder:
        stand_in.write_files(Path(folder), files)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield importlib.import_module("sglang.srt.layers.attention.triton_backend")
        finally:
            sys.path.remove(folder)
            stand_in.forget_sglang()


def seam_violations(text: str) -> list[str]:
    """What the bodies of the backend's methods say and no signature does: the instance's attributes, and the call."""
    backend = next(
        (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == contract.BACKEND),
        None,
    )
    if backend is None:
        return []  # the contract has said so
    given = {node.attr for node in own_attributes(backend) if isinstance(node.ctx, ast.Store)}
    found = [
        f"{contract.INSTANCE}: no method gives it the attribute {row.name}"
        for row in contract.rows(contract.INSTANCE)
        if row.required and row.name not in given
    ]
    # From forward_extend through the methods that it calls on itself.
    methods = {node.name: node for node in backend.body if isinstance(node, ast.FunctionDef)}
    seen: set[str] = set()
    ahead = ["forward_extend"]
    while ahead:
        name = ahead.pop()
        if name not in seen and name in methods:
            seen.add(name)
            ahead += [node.attr for node in own_attributes(methods[name])]
        elif name == contract.INNER:
            return found
    return [*found, f"{contract.FORWARD}: does not call {contract.INNER} of the instance"]


def own_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """Every `self.name` below a node."""
    for below in ast.walk(node):
        if isinstance(below, ast.Attribute) and isinstance(below.value, ast.Name) and below.value.id == "self":
            yield below


# -------------------------------------------------------------------------------------------------------------- showing


def table(found: Iterable[Found]) -> str:
    """Markdown. Releases one after the other of which the same is to be said share a row."""
    rows = ["| SGLang | | parameters of the inner call | graphs are announced by |", "|---|---|---|---|"]
    for _, same in groupby(found, key=lambda one: one.facts):
        of_one = list(same)
        verdict = f"declined: {'; '.join(of_one[0].violations)}" if of_one[0].violations else "served"
        names = ", ".join(one.release for one in of_one)
        rows.append(f"| {names} | {verdict} | {of_one[0].parameters} | {of_one[0].graphs} |")
    return "\n".join(rows)


def with_table(readme: str, rows: str) -> str:
    """The README with the table between its marks. Raises CompatError without them."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CompatError(f"README.md has lost the marks {BEGIN} and {END}: put them back where the table belongs")
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}"


def main(words: Sequence[str] | None = None, run: Pip = pip) -> int:
    parser = exits.Parser(
        prog="python -m tools.compat",
        description="Checks the contract against the sources of released SGLangs and writes the README's table. Exit "
        "status: 0 all are served, 1 some are declined, 2 it could not be found out.",
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where wheels are kept (.venv/compat)")
    parser.add_argument("--offline", action="store_true", help="those in the folder alone; the README stays as it is")
    arguments = parser.parse_args(words)
    folder = arguments.folder
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CompatError(
                f"{folder} cannot be made: {error.strerror}; the README is as it was: name a folder with --folder"
            ) from None
        wanted = sorted(cached(folder), key=order) if arguments.offline else releases(run)
        if not wanted:
            raise CompatError(
                f"there is no wheel of SGLang in {folder}; the README is as it was: leave out --offline, or name a "
                "folder that has some with --folder"
                if arguments.offline
                else "the package index lists no release; the README is as it was: look at what pip says"
            )
        found = []
        for release in wanted:
            print(f"compat: {release}", file=sys.stderr, flush=True)
            found.append(check(release, fetch(release, folder, run)))
        if not arguments.offline:
            README.write_text(with_table(README.read_text(), table(found)))
    except CompatError as error:
        exits.complain("compat", error)
        return exits.NOT_DONE
    print(table(found))
    return int(any(one.violations for one in found))


if __name__ == "__main__":
    sys.exit(exits.run("compat", main))
