"""`deploy.steps` without ssh: which hosts are asked, and the exit status that tells how far a failure had come."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deploy.bundle import Source
from deploy.host import wire
from deploy.options import Host, Options
from kdtree_patch import exits


class ConnectionLost(Exception):
    pass


class Unreachable(ConnectionLost):
    pass


class RemoteError(Exception):
    pass


class Remote:
    """What each host does: an answer, an exception, or what its transaction ends with."""

    does: dict[str, Any] = {}
    asked: list[str] = []

    def __init__(self, host: Host):
        self.host = host

    def ask(self, command: str, order: dict[str, Any]) -> dict[str, Any]:
        Remote.asked.append(f"{command} {self.host}")
        answer = Remote.does[str(self.host)]
        if isinstance(answer, Exception):
            raise answer
        return answer if command != "launch" else {"token": "kdtree-deploy-1"}

    def run(self, command: str, timeout: float) -> tuple[bool, str, str]:
        answer = Remote.does[str(self.host)]
        if answer == "lost":
            raise ConnectionLost("the connection was closed")
        if answer == "dead":
            return True, "==> release\nfailed", ""
        return True, f"==> release\n{wire._ANSWER}{wire.json.dumps(answer)}\ninactive", ""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with stand-ins for pyinfra, which only the operator's environment has, and for the connection."""
    for name in ("pyinfra", "pyinfra.operations", "deploy.remote"):
        module = ModuleType(name)
        vars(module).update(
            files=None, ConnectionLost=ConnectionLost, Unreachable=Unreachable, RemoteError=RemoteError, Remote=Remote
        )
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "deploy.steps", raising=False)
    found = importlib.import_module("deploy.steps")
    monkeypatch.setattr(found, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(found, "_RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(Remote, "asked", [])
    yield found
    sys.modules.pop("deploy.steps")


def run(
    steps: Any, monkeypatch: pytest.MonkeyPatch, action: str, words: dict[str, Any] | None = None, **does: Any
) -> int:
    monkeypatch.setattr(Remote, "does", does)
    status: int = steps.ACTIONS[action](Options(tuple(Host(name) for name in does), "x.service", **(words or {})))
    return status


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ({"ok": True, "outcome": "done"}, 0),
        ({"ok": False, "reason": "no", "outcome": "untouched"}, 1),
        ({"ok": False, "reason": "no", "outcome": "restored"}, 3),
        ({"ok": False, "reason": "no", "outcome": "broken"}, 4),
        ("dead", 4),
        (Unreachable("no route"), 1),
        (RemoteError("no python3"), 1),
        (ConnectionLost("the connection was closed"), 5),
        ("lost", 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("action", ["rollback", "undeploy"])
def test_exit_status_tells_how_far_a_failure_had_come(
    steps: Any, monkeypatch: pytest.MonkeyPatch, action: str, does: Any, status: int
) -> None:
    assert run(steps, monkeypatch, action, h1=does) == status


def test_transaction_that_is_told_to_stop_is_waited_for(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It puts back what it has begun, which takes the time of a start: so long its unit is deactivating."""
    polls = iter([*["told to stop\ndeactivating"] * 20, f"{wire._ANSWER}{wire.json.dumps({'ok': False})}\ninactive"])
    remote = Remote(Host("h1"))
    monkeypatch.setattr(remote, "run", lambda command, timeout: (True, next(polls), ""))
    assert steps.follow(remote, "kdtree-deploy-1") == {"ok": False}


@pytest.mark.parametrize("word", [{"dry_run": True}, {"mode": "shadow"}, {"force": True}], ids=str)
@pytest.mark.parametrize("action", ["rollback", "undeploy"])
def test_word_of_deploy_alone_is_refused_before_anything_is_done(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str, word: dict[str, Any]
) -> None:
    assert run(steps, monkeypatch, action, word, h1={"ok": True, "outcome": "done"}) == 2
    assert Remote.asked == []
    name = next(iter(word)).upper()
    assert f"{name} is for `make deploy` alone, and nothing has been done" in capsys.readouterr().out


@pytest.mark.parametrize("force", [False, True])
def test_dry_run_of_a_checkout_with_changes_says_that_a_deployment_is_refused(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], force: bool
) -> None:
    source = Source((), "0123456789ab", "0" * 64, ("README.md",))
    monkeypatch.setattr(steps.bundle, "source", lambda: source)
    answer = {"facts": [], "warnings": [], "findings": [], "plan": [], "data": {}}
    assert run(steps, monkeypatch, "deploy", {"dry_run": True, "force": force}, h1=answer) == 0
    assert ("in no commit: without DRY_RUN=1 this is refused" in capsys.readouterr().out) == (not force)


def test_only_what_root_has_logged_is_the_transactions(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answer = Remote.run

    def listen(self: Remote, command: str, timeout: float) -> tuple[bool, str, str]:
        asked.append(command)
        return answer(self, command, timeout)

    monkeypatch.setattr(Remote, "run", listen)
    assert run(steps, monkeypatch, "rollback", h1={"ok": True, "outcome": "done"}) == 0
    assert " --identifier=kdtree-deploy-1 _UID=0; " in asked[0]


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ("untouched", "exit status 1: refused, or `status` has something to report: no service has been touched: put "),
        ("restored", "exit status 3: it failed, and the service is as it was before: the reason is above, and in "),
        (
            "broken",
            "exit status 4: it failed, and the service is not as it was: somebody has to look at it: see `make ",
        ),
        ("lost", "exit status 5: the connection was lost while the host was at work: `make status` tells: see `make "),
    ],
)
def test_failure_says_what_it_means_for_the_service_and_what_to_do(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcome: str, says: str
) -> None:
    does = outcome if outcome == "lost" else {"ok": False, "reason": "no", "outcome": outcome}
    run(steps, monkeypatch, "rollback", h1=does)
    failed, last = capsys.readouterr().out.splitlines()[-2:]
    assert failed.startswith("FAILED: ") and last.startswith(says)


def test_reader_that_has_gone_stops_no_change(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make deploy | head`: the status is still that of the change."""

    def gone(text: str) -> str:
        if not dropped:
            raise exits.OutputLost from BrokenPipeError(32, "Broken pipe")
        return text

    dropped: list[bool] = []
    monkeypatch.setattr(steps.wire, "printable", gone)
    monkeypatch.setattr(exits, "drop_output", lambda: dropped.append(True))
    assert run(steps, monkeypatch, "rollback", h1={"ok": False, "reason": "no", "outcome": "restored"}) == 3
    captured = capsys.readouterr()
    assert dropped == [True] and captured.err.count("this goes on without") == 1
    assert "FAILED: h1: no" in captured.out


def test_change_stops_at_the_first_host_that_fails_and_names_the_rest(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"ok": True, "outcome": "done"}
    bad = {"ok": False, "reason": "it is no good", "outcome": "restored"}
    assert run(steps, monkeypatch, "rollback", h1=good, h2=bad, h3=good, h4=good) == 3
    assert Remote.asked == ["launch h1", "launch h2"]
    assert "FAILED: h2: it is no good; the service is as it was before; not begun: h3, h4" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["status", "logs"])
def test_every_host_is_asked_whatever_the_others_say(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    good = {"facts": [["release", "1-a"]], "lines": ["1 [kdtree] installed"], "findings": []}
    bad = {"facts": [], "lines": [], "findings": ["a change was cut off"]}
    assert run(steps, monkeypatch, action, h1=Unreachable("no route"), h2=bad, h3=good) == 1
    assert Remote.asked == [f"{action} {host}" for host in ("h1", "h2", "h3")]
    output = capsys.readouterr().out
    assert "FINDING: no route" in output and "FINDING: a change was cut off" in output
    assert ("1-a" in output) == (
        action == "status"
    ) and "\nFAILED: see what was found on h1, h2\nexit status 1: " in output
    assert run(steps, monkeypatch, action, h3=good) == 0


def test_log_that_has_nothing_in_it_is_said(
    steps: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(steps, monkeypatch, "logs", h1={"lines": [], "findings": []}) == 0
    assert "x.service has logged no [kdtree] line since it was started" in capsys.readouterr().out


@pytest.mark.parametrize(
    "output, python",
    [
        ("/usr/bin/python3\n", "/usr/bin/python3"),
        ("Welcome to h1\n$(reboot)\n/usr/local/bin/python3\n", "/usr/local/bin/python3"),
        ("/usr/bin/python3; reboot\n", None),
        ("Welcome\n", None),
        ("\n", None),
    ],
)
def test_greeting_of_a_login_shell_is_not_taken_for_its_python(output: str, python: str | None) -> None:
    assert wire.python_in(output) == python


def test_wheels_are_those_of_a_release_that_still_has_them(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []

    def pack(source: Any, key: Any, wheels: Any, donor: str | None, archive: Path) -> None:
        packed.append(donor)
        raise steps.Stop("enough")

    monkeypatch.setattr(steps.bundle, "wheels", lambda key: ())
    monkeypatch.setattr(steps.bundle, "pack", pack)
    options = types.SimpleNamespace(prefix="/opt/kdtree")
    source = types.SimpleNamespace(release="2-b")
    kept, gone = {"wheel_key": 1, "has_vendor": True}, {"wheel_key": 1, "has_vendor": False}
    for there in ({"1-a": gone}, {"1-a": gone, "1-b": kept}):
        with pytest.raises(steps.Stop):
            steps.send(None, options, source, 1, there)
    assert packed == [None, "1-b"]
