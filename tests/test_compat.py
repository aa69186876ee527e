"""`make compat` on wheels made of recorded signatures, with a stand-in for pip: no network, and no wheel of SGLang."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import stand_in
from tests.stand_in import BACKEND, NEW, OLD, Drift
from tools import compat

# The cut-down sources have no bodies, and what the seam is asked needs two.
BODIES = (
    "self.extend_attention_fwd = self.num_draft_tokens = self.req_to_token = None",
    "self._run(q)\n    def _run(self, q):\n        self.extend_attention_fwd(q)",
)
LISTED = "sglang (0.5.23)\nAvailable versions: 0.5.23, 0.5.12.post1, 0.5.12, 0.5.10, 0.5.9, 0.5.8.post1, 0.4.10\n"


def a_wheel(folder: Path, release: str, source: str, *drifts: Drift) -> Path:
    """A wheel of `release` with the signatures of `source`, one of those that are recorded or unpacked."""
    files = stand_in.files_of(source)
    for method, body in zip(("__init__", "forward_extend"), BODIES, strict=True):
        head = next(line for line in files[BACKEND].splitlines() if f"def {method}(" in line)
        files[BACKEND] = files[BACKEND].replace(f"{head}\n        pass", f"{head}\n        {body}")
    for drift in drifts:
        assert drift.old in files[drift.file], f"{drift.old!r} is not in {drift.file}"
        files[drift.file] = files[drift.file].replace(drift.old, drift.new)
    folder.mkdir(exist_ok=True)
    path = folder / f"sglang-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("sglang/__init__.py", "raise RuntimeError('the release itself was imported')\n")
    return path


class FakePip:
    """A package index: the releases that it lists, and a wheel of each."""

    def __init__(self, listed: str = LISTED, drifts: tuple[Drift, ...] = ()):
        self.listed = listed
        self.drifts = drifts
        self.downloads: list[str] = []

    def __call__(self, *words: str) -> str:
        if words[0] == "index":
            return self.listed
        release = words[-1].partition("==")[2]
        self.downloads.append(release)
        (target,) = (Path(word.partition("=")[2]) for word in words if word.startswith("--dest="))
        source = "0.5.9" if release == "0.5.9" else "0.5.23" if release == "0.5.23" else "0.5.12"
        a_wheel(target, release, source, *(self.drifts if source == "0.5.23" else ()))
        return ""


def no_network(*words: str) -> str:
    raise compat.CompatError(f"pip {words[0]}: ERROR: No matching distribution found for sglang")


Compat = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compat:
    """`main` with folders of its own."""
    readme = tmp_path / "README.md"
    readme.write_text(f"Before.\n{compat.BEGIN}\nold\n{compat.END}\nAfter.\n")
    monkeypatch.setattr(compat, "README", readme)
    return lambda pip, *words: compat.main(["--folder", str(tmp_path / "wheels"), *words], pip)


def test_every_release_of_the_range_is_in_the_table(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    pip = FakePip()
    assert run(pip) == 0
    assert pip.downloads == ["0.5.9", "0.5.10", "0.5.12", "0.5.12.post1", "0.5.23"]
    rows = (
        "| SGLang | | parameters of the inner call | graphs are announced by |\n|---|---|---|---|\n"
        "| 0.5.9 | served | 20 | capture, replay |\n"
        "| 0.5.10, 0.5.12, 0.5.12.post1 | served | 22 | capture, replay |\n"
        "| 0.5.23 | served | 30 | out_graph |"
    )
    assert capsys.readouterr().out == rows + "\n"
    assert compat.README.read_text() == f"Before.\n{compat.BEGIN}\n\n{rows}\n\n{compat.END}\nAfter.\n"
    # What has been fetched is not fetched again, and the table stays as it is.
    assert run(pip) == 0 and len(pip.downloads) == 5
    assert compat.README.read_text().count(rows) == 1


DRIFTS = [
    (
        Drift(NEW, "identity_kv_indices=False", "identity_kv_indices=False, q_descale=None"),
        "extend_attention_fwd(q_descale): unknown",
    ),
    (Drift(NEW, "logit_cap=0.0", "logit_cap=30.0"), "extend_attention_fwd(logit_cap=30.0): the default was 0.0"),
    (
        Drift(BACKEND, "self.extend_attention_fwd(q)", "self.extend_attention_fwd_unified(q)"),
        "TritonAttnBackend.forward_extend: does not call extend_attention_fwd of the instance",
    ),
    (
        Drift(BACKEND, "self.num_draft_tokens = ", ""),
        "TritonAttnBackend instance: no method gives it the attribute num_draft_tokens",
    ),
    (Drift(BACKEND, "class TritonAttnBackend", "class TritonBackend"), "TritonAttnBackend: missing class"),
]


@pytest.mark.parametrize(("drift", "violation"), DRIFTS, ids=[violation for _, violation in DRIFTS])
def test_a_release_that_has_drifted_is_declined_and_says_why(
    run: Compat, drift: Drift, violation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(FakePip(drifts=(drift,))) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"| 0.5.23 | declined: {violation} | ")
    assert last in compat.README.read_text()


def test_an_inner_module_that_has_moved_again_is_declined(tmp_path: Path) -> None:
    wheel = a_wheel(tmp_path, "0.5.24", "0.5.9")
    files = {name: text for name, text in stand_in.files_of("0.5.9").items() if name != OLD}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    assert "extend_attention_fwd: no source in " in compat.check("0.5.24", wheel).violations[0]


def test_without_a_network_it_says_so_and_writes_nothing(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    before = compat.README.read_text()
    assert run(no_network) == 2
    said = capsys.readouterr().err
    assert said == (
        "compat: the package index does not say which releases there are (pip index: ERROR: No matching distribution "
        "found for sglang). The README is as it was. With a network, run it again; without one, --offline checks the "
        "wheels that are here already\n"
    )
    assert compat.README.read_text() == before


def test_offline_checks_what_is_there(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(no_network, "--offline") == 2
    assert re.fullmatch(
        "compat: there is no wheel of SGLang in .*wheels; the README is as it was: leave out --offline, or name a "
        "folder that has some with --folder\n",
        capsys.readouterr().err,
    )
    before = compat.README.read_text()
    a_wheel(compat.README.parent / "wheels", "0.5.23", "0.5.23")
    assert run(no_network, "--offline") == 0
    assert "| 0.5.23 | served | 30 | out_graph |" in capsys.readouterr().out
    assert compat.README.read_text() == before


def test_a_network_that_breaks_off_changes_nothing(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    before = compat.README.read_text()
    assert run(lambda *words: LISTED if words[0] == "index" else no_network(*words)) == 2
    assert "pip download: ERROR" in capsys.readouterr().err
    assert compat.README.read_text() == before


def test_a_torn_wheel_is_named(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    folder = compat.README.parent / "wheels"
    folder.mkdir()
    (folder / "sglang-0.5.9-py3-none-any.whl").write_bytes(b"PK\x03\x04 and no more")
    assert run(no_network, "--offline") == 2
    assert "sglang-0.5.9-py3-none-any.whl cannot be read" in capsys.readouterr().err


def test_a_wheel_whose_text_is_none_is_named(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    folder = compat.README.parent / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "sglang-0.5.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr(stand_in.BACKEND, b"\xff")
    assert run(no_network, "--offline") == 2
    assert "sglang-0.5.9-py3-none-any.whl cannot be read" in capsys.readouterr().err


def test_wrong_usage_and_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert compat.main(["--offline", "--folder", str(tmp_path / "file")]) == 2
    assert re.fullmatch("compat: .*/file cannot be made: File exists; .*\n", capsys.readouterr().err)
    with pytest.raises(SystemExit) as ended:
        compat.main(["--nonsense"])
    assert ended.value.code == 2
    assert re.fullmatch("compat: .*--nonsense; nothing has been done: see .*\n", capsys.readouterr().err)


def test_a_readme_without_the_marks_is_not_written_over(run: Compat, capsys: pytest.CaptureFixture[str]) -> None:
    compat.README.write_text("Nothing of ours.\n")
    assert run(FakePip()) == 2
    assert "README.md has lost the marks" in capsys.readouterr().err
    assert compat.README.read_text() == "Nothing of ours.\n"


def test_the_readme_has_the_marks_and_every_release_that_the_tests_run() -> None:
    text = (compat.REPO / "README.md").read_text()
    assert compat.with_table(text, "rows") != text
    rows = text.partition(compat.BEGIN)[2].partition(compat.END)[0]
    assert {"0.5.12", "0.5.23"} <= {word.strip(",") for word in rows.split()}


def test_releases_come_in_order() -> None:
    by_name = ["0.5.10", "0.5.10.post1", "0.5.11", "0.5.23", "0.5.9"]
    assert sorted(by_name, key=compat.order) == ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.23"]
