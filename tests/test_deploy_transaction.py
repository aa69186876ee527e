"""`deploy.host.transaction` without a host: what it writes and puts back, with systemd's part of it stood in for."""

from __future__ import annotations

import errno
import io
import json
import os
import pwd
import shutil
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.host import look, release, service, systemd, transaction
from deploy.host.look import Look, Place, ownership_problem
from deploy.host.release import drop_in_text
from deploy.host.service import Failed
from deploy.host.systemd import State, environment_of
from deploy.host.transaction import Transaction
from kdtree_patch.service_command import Command, Refused
from tests.support.owners import pretend_owners

NAME = "x.service"
OLD, NEW = "0.1.0-000000000001", "0.1.0-000000000002"


class StandIn:
    """A unit whose files are real, and which systemd has read whenever `refresh` was called."""

    name = NAME
    exists = True
    argv = ["/bin/sh", "/opt/start.sh"]
    is_literal = False
    user = pwd.struct_passwd(("nobody", "x", 65534, 65534, "", "/", "/bin/false"))

    def __init__(self, name: str):
        self.stale = False
        self.refresh()

    def refresh(self) -> None:
        folder = self.drop_in.parent
        self._files = [systemd.UNITS / NAME, *sorted(folder.glob("*.conf"))]
        self.environment = environment_of(path.read_text() for path in self._files)

    def __getitem__(self, name: str) -> Any:
        return {"NeedDaemonReload": self.stale, "EnvironmentFiles": [], "PassEnvironment": []}[name]

    @property
    def drop_in(self) -> Path:
        return systemd.UNITS / f"{NAME}.d" / systemd.DROP_IN

    def files(self) -> list[Path]:
        return self._files

    def state(self) -> State:
        return State("active", "running", "1" * 32, 0, "success", 0)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """As it was: a transaction on its way back ignores it, and whoever is started by a later test would, too."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A unit with OLD deployed and NEW beside it."""
    place = Place(tmp_path / "kdtree", NAME)
    monkeypatch.setattr(systemd, "UNITS", tmp_path / "units")
    monkeypatch.setattr(transaction, "Unit", StandIn)
    monkeypatch.setattr(systemd, "run", lambda *words, **_: "")
    monkeypatch.setattr(look, "ownership_problem", lambda prefix: None)  # of /tmp; it has tests of its own
    systemd.UNITS.mkdir()
    (systemd.UNITS / NAME).write_text('[Service]\nEnvironment="PYTHONPATH=/mine"\n')
    for name in (OLD, NEW):
        (place.releases / name).mkdir(parents=True)
        (place.releases / name / release.MANIFEST).write_text('{"wheel_key": 0}')
    place.records.mkdir(parents=True)
    place.state.write_text(json.dumps({"release": OLD, "mode": "on", "previous": None, "rolled_back": False}))
    release.point_current(place, OLD)
    drop_in(place, OLD)
    return place


def text_of(place: Place, name: str) -> str:
    return drop_in_text(place.releases / name, "/mine", "on", 65534)


def drop_in(place: Place, name: str) -> None:
    path = systemd.UNITS / f"{NAME}.d" / systemd.DROP_IN
    path.parent.mkdir(exist_ok=True)
    path.write_text(text_of(place, name))


def begun(place: Place, action: str = "deploy", **more: Any) -> Transaction:
    order = {"action": action, "unit": NAME, "prefix": str(place.prefix), "timeout": 1, "by": "somebody"}
    return Transaction({**order, "mode": "on", "release": NEW, "archive": "", **more})


def switch(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A switch to NEW whose service never gets ready. Returns what was started; raises what the switch does."""
    starts: list[str] = []

    def start(self: Transaction, what: str, serve: bool, patience: float = 0) -> Any:
        starts.append(what)
        self.must_restart = True
        if what.startswith(NEW):
            raise Failed("it never got ready")

    monkeypatch.setattr(Transaction, "start", start)
    doing = begun(place)
    doing._command = object()  # type: ignore[assignment]
    with pytest.raises(Failed) as caught:
        doing.switch(NEW, "on", text_of(place, NEW), doing._command, False)  # type: ignore[arg-type]
    return [str(caught.value), *starts]


def assert_old(place: Place) -> None:
    unit = StandIn(NAME)
    assert unit.drop_in.read_text() == text_of(place, OLD) and release.current(place) == OLD
    assert os.listdir(unit.drop_in.parent) == [systemd.DROP_IN] and not place.pending.exists()


# ------------------------------------------------------------------------------------------------------------ roll back


def test_failed_switch_puts_everything_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert switch(place, monkeypatch) == ["it never got ready", f"{NEW}, mode on", "as it was before"]
    assert_old(place)


def test_release_that_somebody_has_changed_is_not_deployed_but_gone_back_to(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.releases / NEW / release.MANIFEST).write_text('{"wheel_key": 0, "digest": "another"}')
    doing = begun(place)
    doing._command = object()  # type: ignore[assignment]
    switched: list[str] = []
    monkeypatch.setattr(Transaction, "doctor", lambda *_: None)
    monkeypatch.setattr(Transaction, "is_done", lambda *_: False)
    monkeypatch.setattr(Transaction, "switch", lambda self, name, *_: switched.append(name))
    with pytest.raises(release.ReleaseError, match=f"{NEW} has been changed by hand since it was put in place: commit"):
        doing.to_release(NEW, "on", None)
    assert switched == []
    doing.to_release(NEW, "on", None, rolled_back=True)
    assert switched == [NEW] and "warning: " in capsys.readouterr().out


class Deaf(io.TextIOBase):
    """Standard output to a journal that is gone, or in an encoding that has not the character."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_failed_switch_of_which_nobody_can_be_told_puts_everything_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction.sys, "stdout", Deaf())
    assert switch(place, monkeypatch) == ["it never got ready", f"{NEW}, mode on", "as it was before"]
    assert_old(place)


def test_what_the_service_says_makes_no_lines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A line feed in it would begin a line that looks like the transaction's answer."""
    begun(place).say('last line: x\nkdtree-answer {"ok": true}\x1b[2J')
    assert capsys.readouterr().out == '    last line: x kdtree-answer {"ok": true} [2J\n'


def test_record_that_no_deployment_has_written(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another unit's does not make a confirmed deployment fail, and keeps every release; the unit's own is named."""
    other = place.units / "other.service" / "state.json"
    other.parent.mkdir()
    other.write_text("{")
    begun(place).tidy()
    assert (place.releases / OLD).is_dir() and (place.releases / NEW).is_dir()
    place.state.write_text("[]")
    with pytest.raises(Refused, match=f"{place.state} is not what a deployment writes: look at it, then remove it"):
        begun(place)


def test_undeploy_does_not_depend_on_what_the_units_own_files_say(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (systemd.UNITS / NAME).write_text("[Service]\nEnvironment=PYTHONPATH=/srv/%b\n")
    for action in ("deploy", "undeploy"):
        doing = begun(place, action)
        if action == "deploy":
            with pytest.raises(Refused, match="write it without that specifier"):
                doing.run()
        else:
            doing.run()
    assert not StandIn(NAME).drop_in.exists() and not place.prefix.exists()
    assert "restarting x.service: stock; whether it is healthy cannot be told" in capsys.readouterr().out


def test_full_disk_while_putting_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the restart on nothing can be written: a rename is still possible."""
    begin = Transaction.check_environment

    def full(path: Path, text: str, mode: int = 0) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def check(self: Transaction, text: str) -> None:
        begin(self, text)
        monkeypatch.setattr(systemd, "write_whole", full)

    monkeypatch.setattr(Transaction, "check_environment", check)
    assert switch(place, monkeypatch)[1:] == [f"{NEW}, mode on", "as it was before"]
    assert_old(place)


def test_step_back_that_fails_keeps_no_other_from_being_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    point = release.point_current

    def fails(where: Place, name: str | None) -> None:
        if name == OLD:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        point(where, name)

    monkeypatch.setattr(release, "point_current", fails)
    reason, *starts = switch(place, monkeypatch)
    assert starts == [f"{NEW}, mode on", "as it was before"]
    assert "could not be put back" in reason and "No space left" in reason and "run the same command again" in reason
    assert StandIn(NAME).drop_in.read_text() == text_of(place, OLD) and place.pending.exists()


def test_folder_of_drop_ins_that_is_a_link(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first deployment of a unit: what is put back is that there is no drop-in."""
    folder = systemd.UNITS / f"{NAME}.d"
    (folder / systemd.DROP_IN).unlink()
    folder.rmdir()
    (tmp_path / "kept-elsewhere").mkdir()
    folder.symlink_to(tmp_path / "kept-elsewhere")
    assert switch(place, monkeypatch) == ["it never got ready", f"{NEW}, mode on", "as it was before"]
    assert not place.pending.exists() and folder.is_symlink() and list(folder.iterdir()) == []


# ----------------------------------------------------------------------------------------- the mode, and its way back


def deployed(
    place: Place, monkeypatch: pytest.MonkeyPatch, action: str, name: str = NEW, mode: str | None = None
) -> str:
    """A deployment or a rollback that goes well. Returns what the unit has then, and what it would go back to."""

    class Confirmed:
        journal, invocation = None, "2" * 32

        def confirm(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(Transaction, "start", lambda *_, **__: Confirmed())
    monkeypatch.setattr(Transaction, "doctor", lambda *_: None)
    monkeypatch.setattr(service, "healthy", lambda url: True)
    doing = begun(place, action, release=name, mode=mode)
    doing._command = Command("/venv/bin/python", frozenset(), [])
    doing.run()
    assert doing.outcome == "done" and not place.pending.exists()
    unit, state = StandIn(NAME), json.loads(place.state.read_text())
    assert look.release_of(unit.drop_in.read_text(), place) == state["release"]
    assert look.mode_of(unit.drop_in.read_text()) == state["mode"]
    before = state["previous"] or {}
    return f"{state['release']} {state['mode']}, before {before.get('release')} {before.get('mode')}"


def test_deployment_that_names_no_mode_keeps_the_one_that_the_unit_has(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deployed(place, monkeypatch, "deploy", OLD, "shadow") == f"{OLD} shadow, before {OLD} on"
    assert deployed(place, monkeypatch, "deploy", NEW) == f"{NEW} shadow, before {OLD} shadow"
    assert deployed(place, monkeypatch, "deploy", NEW, "on") == f"{NEW} on, before {NEW} shadow"


def test_mode_of_a_unit_without_a_deployment_and_of_one_whose_change_was_cut_off(place: Place) -> None:
    seen = Look(StandIn(NAME), place.prefix)  # type: ignore[arg-type]
    seen.drop_in = None
    assert seen.mode(None) == "on" and seen.mode("off") == "off"
    seen.drop_in = drop_in_text(place.releases / NEW, "/mine", "off", 65534)
    seen.pending = {"drop_in": drop_in_text(place.releases / OLD, "/mine", "shadow", 65534)}
    assert seen.mode(None) == "shadow"
    seen.pending = {"drop_in": None}
    assert seen.mode(None) == "on"


def test_rollback_undoes_a_change_of_mode(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(place, monkeypatch, "deploy", OLD, "shadow")
    deployed(place, monkeypatch, "deploy", OLD, "on")
    assert deployed(place, monkeypatch, "rollback") == f"{OLD} shadow, before None None"
    begun(place, "rollback").run()  # nothing to do
    assert look.mode_of(StandIn(NAME).drop_in.read_text()) == "shadow"
    assert deployed(place, monkeypatch, "deploy", NEW) == f"{NEW} shadow, before {OLD} shadow"


def test_deployment_confirmed_anew_leaves_the_way_back_as_it_was(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(place, monkeypatch, "deploy", NEW)
    StandIn(NAME).drop_in.unlink()
    assert deployed(place, monkeypatch, "deploy", NEW) == f"{NEW} on, before {OLD} on"


# ----------------------------------------------------------------------------------------------- what a failure leaves


@pytest.fixture
def fresh(place: Place, tmp_path: Path) -> Place:
    """Nothing has been deployed yet, and an archive has been sent."""
    shutil.rmtree(place.prefix)
    shutil.rmtree(StandIn(NAME).drop_in.parent)
    archive = place.prefix / "incoming" / f"{NEW}-00c0ffee.tar"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w") as tar:
        for name in (release.MANIFEST, "wheels/none"):
            content = b'{"wheel_key": 0}'
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return place


def failing(place: Place, monkeypatch: pytest.MonkeyPatch, where: str) -> Transaction:
    """A deployment that fails in a step."""
    archives = list((place.prefix / "incoming").glob("*.tar"))

    def fails(self: Transaction, *words: Any, **_: Any) -> Any:
        self.must_restart = where == "start"
        if words[0] != "as it was before":
            raise Failed("it is no good")

    monkeypatch.setattr(Transaction, "doctor", lambda *_: None)
    monkeypatch.setattr(Transaction, where, fails)
    doing = begun(place, release=NEW, archive=str(archives[0]) if archives else "")
    doing._command = Command("/venv/bin/python", frozenset(), [])
    with pytest.raises(Failed, match="it is no good"):
        doing.run()
    return doing


@pytest.mark.parametrize(
    ("where", "outcome"), [("doctor", "untouched"), ("check_environment", "untouched"), ("start", "restored")]
)
def test_first_deployment_that_fails_leaves_nothing(
    fresh: Place, monkeypatch: pytest.MonkeyPatch, where: str, outcome: str
) -> None:
    assert failing(fresh, monkeypatch, where).outcome == outcome
    assert not fresh.prefix.exists() and not StandIn(NAME).drop_in.parent.exists()


def test_first_deployment_that_fails_leaves_what_others_have_and_says_so(
    fresh: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Place(fresh.prefix, "other.service")
    other.records.mkdir(parents=True)
    other.state.write_text(json.dumps({"release": OLD}))
    failing(fresh, monkeypatch, "start")
    assert other.state.exists() and not fresh.records.exists() and list(release.manifests(fresh)) == [NEW]
    assert f"{fresh.releases / NEW} stays, for another try, and goes with the old releases" in capsys.readouterr().out


def test_archive_on_its_way_for_another_unit_is_left_to_it(
    fresh: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = fresh.prefix / "incoming" / f"{OLD}-0badcafe.tar"
    theirs.touch()
    failing(fresh, monkeypatch, "doctor")
    assert theirs.exists() and release.left_over(fresh) == [str(theirs)]
    begun(fresh, "undeploy").run()
    assert not fresh.prefix.exists()
    assert f"removed what was left over: {theirs}" in capsys.readouterr().out


def test_way_back_that_fails_keeps_everything_that_it_needs(fresh: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(self: Transaction, *_: Any, **__: Any) -> Any:
        self.must_restart = True
        raise Failed("it is no good")

    monkeypatch.setattr(Transaction, "doctor", lambda *_: None)
    monkeypatch.setattr(Transaction, "start", dead)
    doing = begun(fresh, release=NEW, archive=str(next((fresh.prefix / "incoming").iterdir())))
    doing._command = Command("/venv/bin/python", frozenset(), [])
    with pytest.raises(Failed, match="DOES NOT START EITHER"):
        doing.run()
    assert doing.outcome == "broken" and fresh.pending.exists() and release.manifests(fresh)


def test_archive_goes_where_the_transaction_cannot_even_begin(
    fresh: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive = next((fresh.prefix / "incoming").iterdir())
    monkeypatch.setattr(transaction, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(systemd, "transactions", lambda: [])
    lock = transaction.lock_the_host()
    order = {"action": "deploy", "unit": NAME, "prefix": str(fresh.prefix), "timeout": 1, "by": "b", "mode": None}
    try:
        (tmp_path / "code").touch()
        whole = {**order, "release": NEW, "archive": str(archive), "code": str(tmp_path / "code")}
        assert transaction.run_order(whole) == 1
    finally:
        os.close(lock)
    answer = transaction.wire.answer_in(capfd.readouterr().out) or {}
    assert answer["outcome"] == "untouched" and "somebody else is at work (just ending)" in answer["reason"]
    assert not archive.exists()


# ----------------------------------------------------------------------------------------------------- what is believed


def test_cut_between_the_drop_in_and_the_reload(place: Place) -> None:
    """systemd still names a file that is gone, and every command must be able to look at that."""
    unit = StandIn(NAME)
    unit.stale = True
    unit.drop_in.unlink()
    seen = Look(unit, place.prefix)  # type: ignore[arg-type]
    assert seen.drop_in is None and seen.python_path == "/mine" and seen.reads_stale


@pytest.mark.parametrize(
    "text",
    [
        "[Service]\nExecStartPre=+/bin/sh -c 'touch /root-was-here'\n",
        "{ours}ExecStartPre=+/bin/sh\n",
        "{ours}\n",
        "",
        ["x"],
    ],
)
def test_recorded_drop_in_that_is_not_ours_is_refused(place: Place, text: Any) -> None:
    text = text.replace("{ours}", text_of(place, OLD)) if isinstance(text, str) else text
    place.pending.write_text(json.dumps({"drop_in": text, "current": OLD, "active": True}))
    for action in ("rollback", "undeploy", "deploy"):
        with pytest.raises(Refused, match="not been written by a deployment"):
            begun(place, action)


def test_recorded_drop_in_of_ours_is_believed(place: Place) -> None:
    place.pending.write_text(json.dumps({"drop_in": text_of(place, NEW), "current": NEW, "active": True}))
    doing = begun(place, "rollback")
    doing.recover()
    assert StandIn(NAME).drop_in.read_text() == text_of(place, NEW) and release.current(place) == NEW


@pytest.mark.parametrize("action", ["deploy", "rollback", "undeploy"])
def test_another_prefix_than_that_of_the_drop_in_is_refused(place: Place, tmp_path: Path, action: str) -> None:
    other = Place(tmp_path / "other", NAME)
    with pytest.raises(Refused, match=f"PREFIX={place.prefix}$"):
        begun(other, action)
    StandIn(NAME).drop_in.write_text("[Service]\nNice=5\n")
    with pytest.raises(Refused, match="no deployment has written"):
        begun(place, action)


@pytest.mark.parametrize("below", ["releases", f"releases/{OLD}", "units", f"units/{NAME}", "incoming"])
def test_folder_below_prefix_that_somebody_else_could_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    top, owners = tmp_path / "opt", pretend_owners(monkeypatch)
    folder = top / below
    folder.mkdir(parents=True)
    assert ownership_problem(top) is None
    owners[folder] = (0, 0o777)
    assert f"others may write to {folder}" in (ownership_problem(top) or "")
    owners[folder] = (1000, 0o755)
    assert f"{folder} belongs to uid 1000" in (ownership_problem(top) or "")


def test_unit_that_is_gone_is_refused_and_undeploy_takes_the_rest_of_it_away(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StandIn, "exists", False)
    monkeypatch.setattr(StandIn, "argv", property(lambda self: [][0]))
    for action in ("deploy", "rollback"):
        with pytest.raises(Refused, match=f"there is no unit {NAME} here"):
            begun(place, action)
    begun(place, "undeploy").run()
    assert not place.prefix.exists() and not StandIn(NAME).drop_in.parent.exists()
    assert "cannot be restarted, and keeps what it has loaded" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["deploy", "rollback"])
def test_prefix_with_something_else_in_it_is_refused(place: Place, action: str) -> None:
    (place.prefix / "theirs").touch()
    with pytest.raises(Refused, match="no deployment has put there"):
        begun(place, action)
    begun(place, "undeploy")  # which leaves it alone


@pytest.mark.parametrize("action", ["deploy", "rollback", "undeploy"])
def test_every_transaction_looks_at_whose_prefix_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(look, "ownership_problem", lambda prefix: "others may write there")
    with pytest.raises(Refused, match="others may write there"):
        begun(place, action)


# --------------------------------------------------------------------------------------------------------- told to stop


def test_stop_in_the_middle_puts_everything_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def start(self: Transaction, what: str, serve: bool, patience: float = 0) -> Any:
        starts.append(what)
        self.must_restart = True
        os.kill(os.getpid(), signal.SIGTERM)  # and once more on the way back, which goes on

    monkeypatch.setattr(Transaction, "start", start)
    signal.signal(signal.SIGTERM, transaction._stop)
    doing = begun(place)
    with pytest.raises(Failed, match="told to stop"):
        doing.switch(NEW, "on", text_of(place, NEW), object(), False)  # type: ignore[arg-type]
    assert starts == [f"{NEW}, mode on"]
    assert_old(place)


def test_stop_on_the_way_back_does_not_cut_it_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    point = release.point_current

    def stopped(where: Place, name: str | None) -> None:
        if name == OLD:
            os.kill(os.getpid(), signal.SIGTERM)
        point(where, name)

    monkeypatch.setattr(release, "point_current", stopped)
    signal.signal(signal.SIGTERM, transaction._stop)
    assert switch(place, monkeypatch) == ["it never got ready", f"{NEW}, mode on", "as it was before"]
    assert_old(place)


def test_stop_is_for_the_transaction_alone_and_leaves_it_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(systemd, "run", lambda *words, **_: asked.extend(words))
    monkeypatch.setattr(transaction.wire, "own_zip", lambda: b"")
    monkeypatch.setattr(transaction, "RUN", tmp_path)
    token = transaction.launch({"action": "deploy", "unit": NAME, "by": "somebody"})["token"]
    assert (tmp_path / f"{token}.pyz").stat().st_mode & 0o777 == 0o600
    assert "--property=KillMode=mixed" in asked and "--property=TimeoutStopSec=1500" in asked


# ----------------------------------------------------------------------------------------------------- lock and reasons


def test_lock_is_for_root_and_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(systemd, "transactions", lambda: ["deploy of x"])
    lock = transaction.lock_the_host()
    assert transaction.LOCK.stat().st_mode & 0o777 == 0o600
    with pytest.raises(transaction.Busy, match="deploy of x"):
        transaction.lock_the_host()
    transaction.LOCK.unlink()
    os.close(lock)
    os.close(transaction.lock_the_host())


def test_lock_of_a_file_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "LOCK", tmp_path / "lock")
    flock, removed = transaction.fcntl.flock, []

    def late(lock: int, how: int) -> None:
        flock(lock, how)
        if not removed:
            removed.append(transaction.LOCK.unlink())

    monkeypatch.setattr(transaction.fcntl, "flock", late)
    lock = transaction.lock_the_host()
    assert removed and os.path.samestat(os.fstat(lock), transaction.LOCK.stat())
    os.close(lock)


def test_what_nobody_has_foreseen_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code").touch()
    monkeypatch.setattr(transaction, "LOCK", tmp_path / "lock")

    def fails(order: dict[str, Any]) -> None:
        raise KeyError("what")

    monkeypatch.setattr(transaction, "Transaction", fails)
    assert transaction.run_order({"action": "deploy", "code": str(tmp_path / "code")}) == 1
    output, errors = capfd.readouterr()
    answer = transaction.wire.answer_in(output) or {}
    assert errors == "" and "unexpected KeyError in test_deploy_transaction.py:" in answer["reason"]
    assert os.listdir(tmp_path) == []
