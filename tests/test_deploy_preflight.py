"""`deploy.host.preflight`: units that would doom a deployment are found before it, with the reason."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.host import gpus, look, preflight, service, status, systemd
from deploy.host.look import Look
from deploy.host.preflight import Report
from deploy.host.release import drop_in_text
from deploy.host.systemd import State, Unit, environment_of
from kdtree_patch.service_command import Command, Refused

PREFIX = Path("/opt/kdtree")
PYTHON = "/opt/venv/bin/python3"
GOOD: dict[str, Any] = {
    "FragmentPath": "/etc/systemd/system/x.service",
    "NeedDaemonReload": False,
    "RefuseManualStart": False,
    "RefuseManualStop": False,
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
        ({"RefuseManualStop": True}, "RefuseManualStop= keeps it from being restarted"),
        ({"PassEnvironment": ["HOME", "PYTHONPATH"]}, "PassEnvironment= takes PYTHONPATH from the system manager"),
        ({"LogLevelMax": 4}, "LogLevelMax="),
        ({"LogNamespace": "sglang"}, "LogNamespace=sglang"),
        ({"TemporaryFileSystem": [["/opt", "ro"]]}, "TemporaryFileSystem= hides /opt"),
        ({"InaccessiblePaths": ["-/opt/kdtree"]}, "InaccessiblePaths= hides /opt/kdtree"),
        ({"ProtectHome": "tmpfs", "prefix": Path("/root/kdtree")}, "ProtectHome=tmpfs hides /root"),
        ({"UnsetEnvironment": ["LANG", "PYTHONPATH"]}, "UnsetEnvironment= takes PYTHONPATH away"),
        ({"UnsetEnvironment": ["KDTREE_MODE=on"]}, "UnsetEnvironment= takes KDTREE_MODE away"),
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
    preflight._command(Command(PYTHON, frozenset(), ["-m", "sglang.launch_server"]), seen, None, report)
    assert ("127.0.0.1:30000/health does not answer" in "; ".join(report.findings)) == found


@pytest.mark.parametrize("ours", [False, True])
def test_service_that_does_not_get_ready_with_our_release_has_a_way_back(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr(preflight.service, "healthy", lambda url: False)
    seen = Look(StandIn("active"), PREFIX)
    seen.drop_in = drop_in_text(PREFIX / "releases" / "1-a", "", "on", 0) if ours else None
    report = Report()
    preflight._command(Command(PYTHON, frozenset(), SPECULATES.split()), seen, None, report)
    assert any("`make rollback` or `make undeploy`" in text for text in report.findings) == ours


def test_variable_that_the_command_line_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.service, "healthy", lambda url: True)
    overrides = {"KDTREE_LOG_LEVEL": "error", "KDTREE_CONFIG": "", "LANG": "C"}
    report = Report()
    command = Command(PYTHON, frozenset(), SPECULATES.split(), overrides)
    preflight._command(command, Look(StandIn(), PREFIX), None, report)
    assert [text.split(",")[0] for text in report.findings] == [
        "the command line itself sets KDTREE_LOG_LEVEL=error",
        "the command line itself removes KDTREE_CONFIG",
    ]


HYBRID = "--prefill-attention-backend fa3 --decode-attention-backend=triton --speculative-algo EAGLE"
SPECULATES = "--attention-backend triton --speculative-algorithm EAGLE"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SPECULATES, ""),
        (f"{HYBRID} --speculative-attention-mode decode", ""),
        (HYBRID, "verify calls go to fa3"),
        ("--speculative-algorithm EAGLE", ""),  # SGLang chooses, and the warning says what may come of it
        (SPECULATES.replace("triton", "flashinfer"), "--attention-backend flashinfer: the patch serves triton"),
        ("--attention-backend triton", "no --speculative-algorithm"),
        (f"{SPECULATES} --kv-cache-dtype fp4_e2m1", "--kv-cache-dtype fp4_e2m1"),
        (f"{SPECULATES} --kv-cache-dtype fp8_e4m3", ""),
        (f"{SPECULATES} --enable-deterministic-inference", "--enable-deterministic-inference"),
        ("--attention-backend fa3 --config x.yaml --tp 1", ""),
    ],
)
def test_what_every_worker_would_decline_for_is_found_before_the_restart(
    monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    monkeypatch.setattr(preflight.service, "healthy", lambda url: True)
    command = Command(PYTHON, frozenset(), ["-m", "sglang.launch_server", *options.split()])
    for mode, finds in ((None, bool(said)), ("on", bool(said)), ("off", False)):
        report = Report()
        preflight._command(command, Look(StandIn(), PREFIX), mode, report)
        assert bool(report.findings) == finds
        assert not finds or said in report.findings[0]


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
    with pytest.raises(Refused, match="no Python with SGLang.*: is this the service's unit"):
        command_of(monkeypatch, argv, [], **values)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PYTHONPATH": "/mine"}, ""),
        ({"PYTHONPATH": "/other"}, "it sets PYTHONPATH itself"),
        ({"PYTHONPATH": "/mine", "KDTREE_LOG_LEVEL": "error"}, "it sets KDTREE_LOG_LEVEL itself"),
        ({"PYTHONPATH": "/mine", "KDTREE_MODE": "shadow", "LANG": "C"}, ""),
    ],
)
def test_variable_that_a_script_sets_is_refused(
    monkeypatch: pytest.MonkeyPatch, units: Path, variables: dict[str, str], said: str
) -> None:
    words = {"cmdline": RUNNING, "environ": [f"{name}={value}" for name, value in variables.items()]}
    monkeypatch.setattr(look, "is_file", lambda path: True)
    monkeypatch.setattr(look, "_descendants", lambda pid: [pid])
    monkeypatch.setattr(look, "_words", lambda pid, name: words[name])
    path = units / "x.service"
    path.write_text("[Service]\nEnvironment=PYTHONPATH=/mine\n")
    monkeypatch.setattr(StandIn, "files", lambda self: [path])
    seen = Look(StandIn(ExecStart=[["/opt/start.sh", ["/opt/start.sh"]]], Environment=["PYTHONPATH=/mine"]), PREFIX)
    monkeypatch.setattr(look, "read_head", lambda path: "#!/bin/sh\n")
    if said:
        with pytest.raises(Refused, match=said):
            seen.command()
    else:
        assert seen.command().option("--tp") == "8"


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


def test_unit_file_that_only_systemd_can_read_to_its_end(monkeypatch: pytest.MonkeyPatch, units: Path) -> None:
    """Bytes that are no UTF-8 are legal in a comment; quotes that are not closed make systemd leave a line out."""
    path = units / "x.service"
    monkeypatch.setattr(StandIn, "files", lambda self: [path])
    path.write_bytes(b"# f\xfcr\n[Service]\nEnvironment=PYTHONPATH=/mine\n")
    assert Look(StandIn(Environment=["PYTHONPATH=/mine"]), PREFIX).python_path == "/mine"
    path.write_text("[Service]\nEnvironment=A=it's\n")
    seen = Look(StandIn(), PREFIX)
    with pytest.raises(Refused, match=f"Environment= in {path} cannot be read .No closing quotation.: put its quotes"):
        _ = seen.own


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Environment=KDTREE_MODE=off", "sets KDTREE_MODE"),
        ("Environment=", "takes away PYTHONPATH, KDTREE_MODE, KDTREE_CACHE_DIR, KDTREE_LOG_LEVEL"),
        ("Environment=OTHER=1", ""),
    ],
)
def test_file_that_is_read_after_ours(monkeypatch: pytest.MonkeyPatch, units: Path, line: str, said: str) -> None:
    path = units / "60-later.conf"
    path.write_text(f"[Service]\n{line}\n")
    monkeypatch.setattr(StandIn, "files", lambda self: [path])
    report = reserved(monkeypatch, {}, {})
    assert bool(report.findings) == bool(said) and said in "".join(report.findings)


def test_first_word_of_a_command_may_be_a_name_alone() -> None:
    assert StandIn(ExecStart=[[PYTHON, ["sglang", "-m", "x"]]]).argv == [PYTHON, "-m", "x"]
    assert StandIn(ExecStart=[["python3", ["python3", "-m", "x"]]]).argv == ["python3", "-m", "x"]


def test_secret_in_the_command_of_a_shell_is_one() -> None:
    text = "cd /srv && exec python -m sglang.launch_server --api-key 'sk-very' --port 1"
    unit = StandIn(ExecStart=[["/bin/bash", ["/bin/bash", "-c", text]]])
    assert look.secrets_of(unit, 0) == ["sk-very"]


def test_pipe_in_the_place_of_a_script_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sglang")
    assert look.read_head(str(tmp_path / "sglang")) == ""


# ------------------------------------------------------------------------ what a restart and a confirmation depend upon


def test_condition_that_does_not_hold_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    said = "x.service: ConditionPathExists=/srv/model failed.\nConditions failed.\n"
    monkeypatch.setattr(preflight, "run", lambda *_, **__: said)
    preflight._conditions(StandIn(), report)
    assert report.findings == [
        "ConditionPathExists=/srv/model failed: systemd would stop x.service and not start it again"
    ]
    one_of_two = "x.service: ConditionPathExists=|/srv/model failed.\nConditions succeeded.\n"
    for said in ("Unknown command verb condition.\n", one_of_two):
        monkeypatch.setattr(preflight, "run", lambda *_, _said=said, **__: _said)
        preflight._conditions(StandIn(), report)
    assert len(report.findings) == 1


@pytest.mark.parametrize("kept", ["", "kept\n"])
def test_journal_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    report, asked = Report(), []

    def run(*words: str, **_: Any) -> str:
        asked.append(words)
        return kept

    monkeypatch.setattr(preflight, "run", run)
    monkeypatch.setattr(preflight, "JOURNAL_SECONDS", 0.0)
    preflight._journal(StandIn(), report)
    assert "--priority=6" in asked[0] and bool(report.findings) == (not kept)


# ------------------------------------------------------------------------------------------------ specifiers, templates


def look_at(monkeypatch: pytest.MonkeyPatch, units: Path, name: str, text: str, says: str, ours: str = "") -> Look:
    """A unit with this PYTHONPATH in its file, of which systemd says that. `ours`: what our drop-in was made with."""
    path = units / "x.service"
    path.write_text(f'[Service]\nEnvironment="PYTHONPATH={text}"\n')
    unit = StandIn(Environment=[f"PYTHONPATH={says}"])
    unit.name = name
    paths = [path]
    if ours:
        unit.drop_in.parent.mkdir()
        unit.drop_in.write_text(drop_in_text(PREFIX / "releases" / "1-a", ours, "on", 1000))
        paths.append(unit.drop_in)
        values = environment_of([unit.drop_in.read_text()])
        unit._values["Environment"] = [f"{key}={value}" for key, value in values.items()]
    monkeypatch.setattr(StandIn, "files", lambda self: paths)
    return Look(unit, PREFIX)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("x@k26.service", "/srv/%i:/srv/%p/%j", "/srv/k26:/srv/x/x"),
        ("x@a-b\\x2dc.service", "/srv/%i:/srv/%I", "/srv/a-b\\x2dc:/srv/a/b-c"),
        ("a-b.service", "%h/%N/%n/%J", "/root/a-b/a-b.service/b"),
        ("x.service", "%S/%C/%L/%E/%t/%T/%V/%u/%U", "/var/lib//var/cache//var/log//etc//run//tmp//var/tmp/root/0"),
        ("x.service", "/srv/100%%/%%i", "/srv/100%/%i"),
    ],
)
def test_specifiers_in_python_path(
    monkeypatch: pytest.MonkeyPatch, units: Path, name: str, text: str, found: str
) -> None:
    text = text.replace("\\", "\\\\")
    assert look_at(monkeypatch, units, name, text, says=found).python_path == found
    assert look_at(monkeypatch, units, name, text, says="", ours=found).python_path == found


def test_specifier_that_is_not_known_is_refused_with_our_drop_in_and_without(
    monkeypatch: pytest.MonkeyPatch, units: Path
) -> None:
    with pytest.raises(Refused, match="reads '/srv/%b', but systemd has '/srv/0123': write it without that specifier"):
        _ = look_at(monkeypatch, units, "x.service", "/srv/%b", says="/srv/0123").own
    with pytest.raises(Refused, match="is '/srv/%b': write it without that specifier"):
        _ = look_at(monkeypatch, units, "x.service", "/srv/%b", says="", ours="/srv/before").own


# ----------------------------------------------------------------------------------------------- variables, mode, plan


def reserved(monkeypatch: pytest.MonkeyPatch, own: dict[str, str], arrives: dict[str, str]) -> Report:
    seen = Look(StandIn(), PREFIX)
    seen._own = own
    report = Report()
    report.data["probe"] = {"python_path": seen.python_path, "kdtree": arrives}
    preflight._reserved(seen, report)
    return report


def test_log_level_that_would_hide_what_confirms_is_overridden_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    report = reserved(monkeypatch, {"KDTREE_LOG_LEVEL": "warning"}, {})
    assert report.findings == []
    assert "KDTREE_LOG_LEVEL=warning; the drop-in comes on top of it: without the lines of" in report.warnings[0]
    text = drop_in_text(PREFIX / "releases" / "1-a", "", "on", 0)
    assert environment_of(["[Service]\nEnvironment=KDTREE_LOG_LEVEL=warning\n", text])["KDTREE_LOG_LEVEL"] == "info"


@pytest.mark.parametrize("name", ["KDTREE_LOG_LEVEL", "KDTREE_MODE", "KDTREE_GUARD_REL"])
@pytest.mark.parametrize("own", [{}, {"KDTREE_LOG_LEVEL": "info", "KDTREE_MODE": "on", "KDTREE_GUARD_REL": "0.1"}])
def test_variable_from_a_file_is_refused_whatever_the_unit_says(
    monkeypatch: pytest.MonkeyPatch, name: str, own: dict[str, str]
) -> None:
    """A file wins over Environment=, and so over our drop-in."""
    value = {"KDTREE_LOG_LEVEL": "error", "KDTREE_MODE": "off", "KDTREE_GUARD_REL": "0.2"}[name]
    report = reserved(monkeypatch, own, {name: value})
    assert f"{name}={value} comes from an EnvironmentFile= of the unit" in report.findings[0]
    report = reserved(monkeypatch, {"KDTREE_GUARD_REL": "0.1"}, {"KDTREE_GUARD_REL": "0.1"})
    assert report.findings == [] and "stays as it is" in report.warnings[0]


@pytest.mark.parametrize(
    ("has", "wanted", "said"),
    [
        (None, None, "on (now: stock)"),
        (None, "shadow", "shadow (now: stock)"),
        ("shadow", None, "shadow, which the unit has: MODE=on changes it"),
        ("on", None, "on, which the unit has: MODE=shadow changes it"),
        ("shadow", "on", "on (now: shadow)"),
    ],
)
def test_mode_is_said_and_where_it_comes_from(has: str | None, wanted: str | None, said: str) -> None:
    seen = Look(StandIn(), PREFIX)
    seen.drop_in = drop_in_text(PREFIX / "releases" / "1-a", "", has, 0) if has else None
    report = Report()
    report.data["probe"] = {"tag": "cp312"}
    preflight._plan({"release": "2-b", "mode": wanted}, seen, report)
    assert ["mode", said] in report.facts


@pytest.mark.parametrize(
    ("config", "capability", "said"),
    [
        ("hopper", "9.0", ""),
        ("hopper", "12.0", "the hopper configuration needs compute capability 9.0"),
        ("", "12.0", ""),
        ("Hopper ", "12.0", "the hopper configuration needs"),
        ("", "7.5", "too old"),
        ("nonsense", "12.0", ""),  # refused where the variables are
    ],
)
def test_configuration_that_no_gpu_here_has(
    monkeypatch: pytest.MonkeyPatch, config: str, capability: str, said: str
) -> None:
    line = f"A GPU, GPU-1, Default, {capability}, 580.95.05, 90000\n"
    monkeypatch.setattr(gpus, "run", lambda *words: line)
    report = Report()
    preflight._gpus(Look(StandIn(Environment=[f"KDTREE_CONFIG={config}"]), PREFIX).config, report)
    assert (said in "".join(report.findings)) and bool(said) == bool(report.findings)


# ---------------------------------------------------------------------------------------------- transactions under way

UNDER_WAY = f"""Id=kdtree-deploy-00.service
Description=deploy of x.service by me@there: 1-a, mode on
ActiveState=active
MainPID=1
ExecMainStartTimestampMonotonic=1000000

Id=kdtree-deploy-01.service
Description=undeploy of y.service by me@there
ActiveState=failed
MainPID=0
ExecMainStartTimestampMonotonic=1000000

Id=kdtree-deploy-02.service
Description=undeploy of y.service by the one who asks
ActiveState=active
MainPID={os.getpid()}
ExecMainStartTimestampMonotonic=1000000
"""


def test_transactions_under_way_are_told_with_step_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "==> release\n    in place\n==> switch\n    restarting x\n"
    monkeypatch.setattr(systemd, "run", lambda program, *_, **__: UNDER_WAY if program == "systemctl" else lines)
    monkeypatch.setattr(systemd.time, "monotonic", lambda: 46.2)
    (found,) = systemd.transactions()
    assert str(found) == "deploy of x.service by me@there: 1-a, mode on, for 45 s, now at step switch"
    assert found.unit == "x.service" and found.line == "restarting x"
    monkeypatch.setattr(systemd, "run", lambda *_, **__: "")
    assert systemd.transactions() == []


@pytest.mark.parametrize("of", ["x.service", "y.service", None])
@pytest.mark.parametrize("pending", [True, False])
def test_status_tells_a_deployment_under_way_from_one_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, of: str | None, pending: bool
) -> None:
    going = [systemd.UnderWay(f"deploy of {of} by me: 1-a", 9, "switch", "restarting")] if of else []
    unit = StandIn()
    monkeypatch.setattr(status, "transactions", lambda: going)
    monkeypatch.setattr(status, "Unit", lambda name: unit if name == "x.service" else StandIn2(name))
    monkeypatch.setattr(StandIn, "exists", True)
    monkeypatch.setattr(look, "is_file", lambda path: True)
    monkeypatch.setattr(look, "read_json", lambda path: {"drop_in": None} if path.name[0] == "p" and pending else None)
    monkeypatch.setattr(status.service, "healthy", lambda url: False)
    monkeypatch.setattr(status, "journal_of", lambda *_: service.Journal("0" * 32))
    answer = status.status({"unit": "x.service", "prefix": "/nowhere"})
    assert (answer["findings"] == []) == (not pending or of == "x.service")
    assert any("cut off" in text for text in answer["findings"]) == (pending and of != "x.service")
    facts = dict(answer["facts"])
    assert facts.get("under way") == (f"deploy of {of} by me: 1-a, for 9 s, now at step switch" if of else None)


@pytest.mark.parametrize("age", [1, 3600])
def test_archive_that_is_being_sent_is_not_told_as_left_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, age: int
) -> None:
    archive = tmp_path / "incoming" / "0.1.0-0123456789ab-0badcafe.tar"
    archive.parent.mkdir()
    archive.touch()
    os.utime(archive, (time.time() - age, time.time() - age))
    monkeypatch.setattr(status, "transactions", lambda: [])
    monkeypatch.setattr(status, "Unit", lambda name: StandIn())
    monkeypatch.setattr(StandIn, "exists", True)
    monkeypatch.setattr(status.service, "healthy", lambda url: True)
    monkeypatch.setattr(status, "journal_of", lambda *_: service.Journal("0" * 32))
    facts = dict(status.status({"unit": "x.service", "prefix": str(tmp_path)})["facts"])
    said = {"under way": f"{archive} is being sent, or was until a minute ago"}
    if age > 60:
        said = {"left over": f"{archive}, which no unit uses: `make undeploy` removes it"}
    assert {name: facts[name] for name in ("under way", "left over") if name in facts} == said


def test_status_of_a_deployment_under_another_prefix_says_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unit = StandIn()
    unit.drop_in.parent.mkdir()
    unit.drop_in.write_text(drop_in_text(Path("/srv/kd/releases/1-a"), "", "on", 0))
    monkeypatch.setattr(status, "transactions", lambda: [])
    monkeypatch.setattr(status, "Unit", lambda name: unit)
    monkeypatch.setattr(StandIn, "exists", True)
    answer = status.status({"unit": "x.service", "prefix": str(tmp_path)})
    assert answer["findings"] == ["the unit's drop-in is of another PREFIX, /srv/kd: say PREFIX=/srv/kd"]
    assert "release" not in dict(answer["facts"])


def test_counters_are_the_last_of_each_worker_and_say_so() -> None:
    journal = service.Journal("0" * 32)
    assert status.counters(journal) == "no counts yet: the first come after 10 calls"
    said = (("1", "served=10 tp_rank=0"), ("2", "served=10 tp_rank=1"), ("1", "served=100 forward_mode=61 tp_rank=0"))
    journal.lines = [service.Line(pid, f"[kdtree] calls {text}") for pid, text in said]
    assert status.counters(journal) == "served=110 forward_mode=61, when each worker last logged them"


class StandIn2:
    def __init__(self, name: str):
        self.name = name


def test_status_puts_a_kernel_that_is_off_among_the_findings_and_errors_first() -> None:
    journal = service.Journal("0" * 32)
    for rank in range(8):
        pid = str(100 + rank)
        for code in ("forward_mode", "q_len"):
            journal.lines.append(service.Line(pid, f"[kdtree] declined reason={code} scope=call such calls run stock"))
        reason = "guard" if rank == 1 else "guard_elsewhere"
        journal.lines.append(service.Line(pid, f"[kdtree] ERROR disabled reason={reason} tp_rank={rank} ...; stock"))
    journal.lines.append(service.Line("99", "[kdtree] declined reason=draft_only ...; the service runs stock"))
    assert status.turned_off(journal, 8) == ["8 of 8 workers have turned the kernel off: guard, guard_elsewhere"]
    said = status.alarms(journal)
    assert len(said) == 9 and all(text.startswith("[kdtree] ERROR disabled") for text in said[:8])
    assert "draft_only" in said[8]
    assert status.turned_off(service.Journal("0" * 32), 8) == []
