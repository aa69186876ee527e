"""A stand-in for SGLang: its real signatures, without what they need to run.

`signatures` cuts a release's own source down to the classes, methods and functions that the contract is about, bodies
removed. What is left imports in a millisecond, needs no dependency, and says about names exactly what the release says.
0.5.9 is not installed for the tests; its cut-down sources are in tests/data/sglang-0.5.9.json, made by this module.

`Drift` then changes one of the files, as a future release or a fork might.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.env import sglang_dir

DATA = Path(__file__).parent / "data"
OLD = "sglang/srt/layers/attention/triton_ops/extend_attention.py"
NEW = "sglang/kernels/ops/attention/extend_attention.py"
BACKEND = "sglang/srt/layers/attention/triton_backend.py"
BATCH = "sglang/srt/model_executor/forward_batch_info.py"
LAYER = "sglang/srt/layers/radix_attention.py"

# File -> what the contract looks at in it: a function, or a class with its methods, members and annotated fields.
KEEP: dict[str, dict[str, tuple[str, ...]]] = {
    BACKEND: {
        "TritonAttnBackend": (
            "__init__",
            "forward_extend",
            "forward_decode",
            "init_forward_metadata",
            "init_forward_metadata_capture_cuda_graph",
            "init_forward_metadata_replay_cuda_graph",
            "init_forward_metadata_out_graph",
        )
    },
    BATCH: {
        "ForwardMode": ("is_target_verify", "EXTEND", "DRAFT_EXTEND", "DRAFT_EXTEND_V2"),
        "ForwardBatch": (),
    },
    LAYER: {"RadixAttention": ("__init__",)},
    OLD: {"extend_attention_fwd": ()},
    NEW: {"extend_attention_fwd": ()},
}
# The backend's module has imported these when it is checked.
IMPORTS = "import sglang.srt.model_executor.forward_batch_info\nimport sglang.srt.layers.radix_attention\n"


def signatures(text: str, keep: dict[str, tuple[str, ...]]) -> str:
    """The parts of a source file that `keep` names, with no bodies, annotations, decorators or base classes."""
    parts = [node for node in ast.parse(text).body if getattr(node, "name", None) in keep]
    for part in parts:
        if isinstance(part, ast.ClassDef):
            part.bases, part.keywords, part.decorator_list = [], [], []
            part.body = [_bare(node) for node in part.body if _is_kept(node, keep[part.name])] or [ast.Pass()]
    return "\n\n\n".join(ast.unparse(ast.fix_missing_locations(_bare(part))) for part in parts) + "\n"


def _is_kept(node: ast.stmt, methods: tuple[str, ...]) -> bool:
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id in methods
    return isinstance(node, ast.AnnAssign) or (isinstance(node, ast.FunctionDef) and node.name in methods)


def _bare(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.AnnAssign):
        return ast.AnnAssign(node.target, ast.Constant("object"), None, node.simple)
    if isinstance(node, ast.Assign):
        return ast.Assign(node.targets, ast.Constant("object"))
    if isinstance(node, ast.FunctionDef):
        node.body, node.decorator_list, node.returns = [ast.Pass()], [], None
        arguments = node.args
        for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs:
            argument.annotation = None
        arguments.defaults = [_literal(default) for default in arguments.defaults]
        arguments.kw_defaults = [default and _literal(default) for default in arguments.kw_defaults]
    return node


def _literal(default: ast.expr) -> ast.expr:
    """A default that refers to a name of its module would not evaluate here: its text instead."""
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(ast.unparse(default))
    return default


def cut_down(release: Path | zipfile.Path) -> dict[str, str]:
    """The cut-down files of an unpacked release, or of one in its wheel, by path."""
    found = {name: release / name for name in KEEP}
    return {
        name: signatures(path.read_text(encoding="utf-8"), KEEP[name]) for name, path in found.items() if path.exists()
    }


def files_of(version: str) -> dict[str, str]:
    """The cut-down files of 0.5.9, 0.5.12 or 0.5.23."""
    stored = DATA / f"sglang-{version}.json"
    return json.loads(stored.read_text()) if stored.exists() else cut_down(sglang_dir(version))


@dataclass(frozen=True)
class Drift:
    """One textual change of one file. It must apply, so that a test cannot pass because it changed nothing."""

    file: str
    old: str
    new: str


def write(root: Path, version: str, *drifts: Drift) -> Path:
    """Writes a stand-in of a release to `root`, which is then a directory for PYTHONPATH."""
    files = files_of(version)
    for drift in drifts:
        assert drift.old in files[drift.file], f"{drift.old!r} is not in {drift.file}"
        files[drift.file] = files[drift.file].replace(drift.old, drift.new)
    write_files(root, files)
    (root / "sglang" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return root


def write_files(root: Path, files: dict[str, str]) -> None:
    """Cut-down files, by path; without a version, which the source of a wheel does not have either."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(IMPORTS + text if name == BACKEND else text)
    (root / "sglang" / "__init__.py").touch()


def forget_sglang() -> None:
    """Out of sys.modules with every module of SGLang, so that the next import finds another release."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


if __name__ == "__main__":  # python -m tests.stand_in UNPACKED-RELEASE VERSION: makes tests/data/sglang-VERSION.json
    (DATA / f"sglang-{sys.argv[2]}.json").write_text(json.dumps(cut_down(Path(sys.argv[1])), indent=1) + "\n")
