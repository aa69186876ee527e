"""`python -m tests.sanitize` with a stand-in for compute-sanitizer: what counts as a finding, and what it says when it
cannot run. The tests themselves need a GPU; here they are a stand-in too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sanitize

CLEAN = "========= ERROR SUMMARY: 0 errors"
HAZARDS = "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
ONE = "(verify_attn_bf16_h72)"
NO_HAZARDS = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer that writes its words down, prints `output` and ends with `status`; and tests that pass."""
    program = tmp_path / "bin" / sanitize.PROGRAM
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {tmp_path}/words\n'
        f'cat {tmp_path}/output\nexit "$(cat {tmp_path}/status)"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sanitize, "pytest", lambda more: ["true", *more])
    return tmp_path


def ended(tool: Path, output: str, status: int) -> None:
    (tool / "output").write_text(output + "\n")
    (tool / "status").write_text(str(status))


@pytest.mark.parametrize("output", [CLEAN, NO_HAZARDS])
def test_clean(tool: Path, output: str, capfd: pytest.CaptureFixture[str]) -> None:
    ended(tool, f"16 passed in 3 s\n{output}", 0)
    assert sanitize.main([]) == 0
    words = (tool / "words").read_text().splitlines()
    assert [line.split()[2] for line in words] == list(sanitize.TOOLS)
    assert all(line.startswith("1 --tool ") and "--error-exitcode 99" in line for line in words)
    assert [line.partition(",")[0] for line in capfd.readouterr().out.splitlines()[-4:]] == [
        f"{name}: clean" for name in sanitize.TOOLS
    ]


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors", 99, "3 findings"),
        (
            f"========= Race at verify_attn_bf16_h72+0x10\n========= in verify_attn_bf16_h72\n{HAZARDS}",
            0,
            f"1 findings {ONE}",
        ),
        (HAZARDS, 0, "1 findings"),  # racecheck's warnings do not change the exit status
        (CLEAN, 99, "findings"),
        (f"1 failed\n{CLEAN}", 1, "tests failed: exit status 1"),
        ("Error: the driver is too old", 255, "the tool came to no end: exit status 255"),
        ("16 passed", 0, "the tool came to no end: exit status 0"),
    ],
)
def test_findings(tool: Path, output: str, status: int, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    ended(tool, output, status)
    assert sanitize.main(["--tool", "racecheck"]) == 1
    said = capfd.readouterr().out
    assert output in said and f"racecheck: {words}, " in said


def test_tests_that_fail_by_themselves(
    tool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "pytest", lambda more: ["false"])
    assert sanitize.main([]) == 2
    assert "the tests fail without a tool as well" in capfd.readouterr().err
    assert not (tool / "words").exists()


def test_no_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "places", lambda: iter([tmp_path]))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main([]) == 2
    error = capfd.readouterr().err
    assert "compute-sanitizer is not in PATH" in error and "pip install nvidia-cuda-sanitizer-api" in error


def test_it_is_found_in_a_toolkit_and_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for home in (tmp_path / "toolkit" / "bin", tmp_path / "site" / "nvidia" / "cu13" / "bin"):
        home.mkdir(parents=True)
        (home / sanitize.PROGRAM).write_text("#!/bin/sh\n")
        (home / sanitize.PROGRAM).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert sanitize.find() == str(tmp_path / "toolkit" / "bin" / sanitize.PROGRAM)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    found = sanitize.find()
    assert found is not None and Path(found).name == sanitize.PROGRAM


def test_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sanitize.main(["--tool", "leakcheck"])
    assert ended.value.code == 2 and "racecheck" in capfd.readouterr().err
