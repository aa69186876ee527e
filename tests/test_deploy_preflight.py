"""`deploy.host.preflight`: units that would doom a deployment are found before it, with the reason."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any

import pytest

from deploy.host import look, preflight, systemd
from deploy.host.command import Command, Refused
from deploy.host.look import Look
from deploy.host.preflight import Report
from deploy.host.systemd import State, Unit, environment_of

PREFIX = Path("/opt/kdtree")
PYTHON = "/opt/venv/bin/python3"
GOOD: dict[str, Any] = {
    "FragmentPath": "/etc/systemd/system/x.service",
    "NeedDaemonReload": False,
    "User": "nobody",
    "DynamicUser": False,
    "RootDirectory": "",
    "RootImage": "",
    "Environment": [],
    "EnvironmentFiles": [],
    "PassEnvironment": [],
    "UnsetEnvironment": [],
    "StandardOutput": "journal",
    "StandardError": "inherit",
    "SyslogLevel": 6,
    "LogLevelMax": -1,
    "LogNamespace": "",
    "ExecStart": [[PYTHON, [PYTHON, "-m", "sglang.launch_server"]]],
    "ExecStartEx": [],
    "TemporaryFileSystem": [],
    "InaccessiblePaths": [],
    "BindPaths": [],
    "BindReadOnlyPaths": [],
    "ProtectHome": "no",
}


class StandIn(Unit):
    """A unit of which systemd says this."""

    def __init__(self, active: str = "active", **values: Any):
        self.name = "x.service"
        self._values = GOOD | values
        self._active = active

    @property
    def user(self) -> pwd.struct_passwd:
        return pwd.struct_passwd((self["User"], "x", 65534, 65534, "", "/", "/bin/false"))

    def files(self) -> list[Path]:
        return []

    def state(self) -> State:
        return State(self._active, "running", "1" * 32, 0, "success", 4711)


@pytest.fixture(autouse=True)
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(systemd, "UNITS", tmp_path)
    return tmp_path


def findings(prefix: Path = PREFIX, **values: Any) -> str:
    report = Report()
    unit = StandIn(**values)
    preflight._unit(unit, report)
    preflight._hidden(unit, prefix, report)
    return "; ".join(report.findings)


def test_unit_in_which_there_is_nothing_to_find() -> None:
    assert findings() == ""
    assert findings(LogLevelMax=6, SyslogLevel=6) == ""
    assert findings(InaccessiblePaths=["-/srv", "+/opt/kdtree2"], ProtectHome="yes") == ""
    assert findings(TemporaryFileSystem=[["/opt", ""]], BindReadOnlyPaths=[["/x", "/opt/kdtree", False, 0]]) == ""
    assert findings(ExecStartEx=[[PYTHON, [PYTHON], ["privileged"]]], User="") == ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"FragmentPath": "/run/systemd/transient/x.service"}, "transient unit"),
        ({"LogLevelMax": 4}, "LogLevelMax="),
        ({"LogNamespace": "sglang"}, "LogNamespace=sglang"),
        ({"TemporaryFileSystem": [["/opt", "ro"]]}, "TemporaryFileSystem= hides /opt"),
        ({"InaccessiblePaths": ["-/opt/kdtree"]}, "InaccessiblePaths= hides /opt/kdtree"),
        ({"ProtectHome": "tmpfs", "prefix": Path("/root/kdtree")}, "ProtectHome=tmpfs hides /root"),
        ({"ExecStartEx": [[PYTHON, [PYTHON], ["privileged"]]]}, "not started as its User=nobody"),
        ({"ExecStartEx": [[PYTHON, [PYTHON], ["no-setuid"]]]}, "not started as its User=nobody"),
    ],
)
def test_unit_that_would_doom_a_deployment(values: dict[str, Any], said: str) -> None:
    assert said in findings(**values)


def test_folder_of_drop_ins_that_leads_nowhere(units: Path) -> None:
    (units / "x.service.d").symlink_to(units / "gone")
    assert "is no folder" in findings()


@pytest.mark.parametrize(
    ("active", "healthy", "pending", "found"),
    [
        ("active", True, None, False),
        ("active", False, None, True),
        ("activating", False, None, False),
        ("inactive", False, None, False),
        ("active", False, {"drop_in": None}, False),
    ],
)
def test_active_unit_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, active: str, healthy: bool, pending: Any, found: bool
) -> None:
    monkeypatch.setattr(preflight.service, "healthy", lambda url: healthy)
    seen = Look(StandIn(active), PREFIX)
    seen.pending = pending
    report = Report()
    preflight._command(Command(PYTHON, frozenset(), ["-m", "sglang.launch_server"]), seen, report)
    assert ("127.0.0.1:30000/health does not answer" in "; ".join(report.findings)) == found


# ------------------------------------------------------------------------------------------------ the running process

RUNNING = [PYTHON, "-m", "sglang.launch_server", "--tp", "8", "--port", "8000", "--api-key", "sk-$HOME"]


def command_of(monkeypatch: pytest.MonkeyPatch, argv: list[str], running: list[str], **values: Any) -> Command:
    monkeypatch.setattr(look, "is_file", lambda path: True)
    monkeypatch.setattr(look, "_descendants", lambda pid: [pid])
    monkeypatch.setattr(look, "_words", lambda pid, name: running if name == "cmdline" else [])
    return Look(StandIn(ExecStart=[[argv[0], argv]], **values), PREFIX).command()


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ([PYTHON, "$ARGS"], {}),
        ([PYTHON, "-m", "sglang.launch_server", "--port", "${PORT}"], {"EnvironmentFiles": [["/etc/x", False]]}),
        (
            [PYTHON, "-m", "sglang.launch_server", "--api-key", "${API_KEY}"],
            {"EnvironmentFiles": [["/etc/x", True]], "Environment": ["API_KEY=another"]},
        ),
        (["/bin/sh", "-c", f"exec {PYTHON} -m sglang.launch_server $ARGS"], {}),
    ],
)
def test_what_cannot_be_expanded_is_read_from_the_running_process(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], values: dict[str, Any]
) -> None:
    found = command_of(monkeypatch, argv, RUNNING, **values)
    assert look.workers_of(found) == 8 and look.health_url(found) == "http://127.0.0.1:8000"
    assert found.option("--api-key") == "sk-$HOME"  # as it is there: nothing expands it a second time
    with pytest.raises(Refused, match="no Python with SGLang"):
        command_of(monkeypatch, argv, [], **values)


def test_environment_of_the_unit_is_expanded_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"Environment": ["ARGS=-m x --tp 4 --port 81", "SECRET_KEY=k"]}
    found = command_of(monkeypatch, [PYTHON, "$ARGS", "--api-key", "${SECRET_KEY}"], [], **values)
    assert look.workers_of(found) == 4 and look.health_url(found) == "http://127.0.0.1:81"
    assert found.option("--api-key") == "k"
    found = command_of(monkeypatch, [PYTHON, "$ARGS"], [], ExecStartEx=[[PYTHON, [], ["no-env-expand"]]], **values)
    assert found.arguments == ["$ARGS"]


def test_what_systemd_says_wins_over_the_text_of_unit_files(monkeypatch: pytest.MonkeyPatch, units: Path) -> None:
    """A specifier such as %i is only known to systemd."""
    path = units / "x.service"
    path.write_text("[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=%i\n")
    monkeypatch.setattr(StandIn, "files", lambda self: [path])
    assert environment_of([path.read_text()]) == {"CUDA_VISIBLE_DEVICES": "%i"}
    assert Look(StandIn(Environment=["CUDA_VISIBLE_DEVICES=3"]), PREFIX).variables() == {"CUDA_VISIBLE_DEVICES": "3"}
