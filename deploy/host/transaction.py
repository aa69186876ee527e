"""A change of one unit, from the release in place to the service confirmed, or back to where it was.

It runs on the host as a transient unit of its own, so that a connection that breaks, or an operator who goes home, does
not stop it half way. Before the service is touched, what it
ran before is written to `pending.json`, which goes when the outcome is certain; a transaction that finds one, because
the host itself went down in between, first puts back what it says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.host import gpus, look, release, service, systemd, wire
from deploy.host.look import Look, read_text
from deploy.host.release import ReleaseError
from deploy.host.service import Failed, Start
from deploy.host.systemd import SystemdError, Unit, run_as
from kdtree_patch import service_options
from kdtree_patch.service_command import Command, Refused, python_path_problem

DOCTOR_SECONDS = 900
# For a service that worked before: however short the time that a new release is given, this one is waited for.
PATIENCE = 1200.0
RUN = Path("/run")
LOCK = RUN / "kdtree-deploy.lock"


class Transaction:
    """`order`: action, unit, prefix, timeout, by; for a deployment also release, archive, and mode, None for that of
    the unit.
    """

    def __init__(self, order: dict[str, Any]):
        self.order = order
        self.prefix = Path(order["prefix"])
        self.timeout = float(order["timeout"])
        self.seen = Look(Unit(order["unit"]), self.prefix)
        missing = None if self.unit.exists else Refused(f"there is no unit {self.unit.name} here")
        if missing and order["action"] != "undeploy":  # which takes away what was left of one
            raise missing
        if self.seen.reads_stale and self.seen.pending is None:
            raise Refused(
                f"files of {order['unit']} have changed since systemd read them: systemctl daemon-reload first"
            )
        place = self.seen.place
        problem = look.ownership_problem(self.prefix) or look.drop_in_problem(self.seen.drop_in, place)
        if problem is None and order["action"] != "undeploy":  # which leaves alone what is not ours
            problem = release.foreign_problem(place)
        if problem:
            raise Refused(problem)
        pending = self.seen.pending
        if pending is not None and not self._is_safe(pending):
            raise Refused(f"{place.pending} has not been written by a deployment: look at it, then remove it")
        self.must_restart = False
        # What has become of the unit, for the operator's exit status: untouched, restored, or broken while it is
        # neither what it was nor what it was to be.
        self.outcome = "untouched"
        self._new: str | None = None  # the release that this transaction has put in place
        self._step = ""
        # Now, because it may be the running service that tells, which a failed start leaves us without.
        self._command: Command | Refused
        try:
            self._command = missing or self.seen.command()
        except Refused as refused:
            self._command = refused

    @property
    def unit(self) -> Unit:
        return self.seen.unit

    def _is_safe(self, record: dict[str, Any]) -> bool:
        """Whether root may put back what a record says: drop-ins of ours, or the very text that is there already."""
        text, name = record.get("drop_in"), record.get("current")
        known = text is None or text in (self.seen.drop_in, read_text(systemd.kept(self.unit.drop_in)))
        if not known and not (isinstance(text, str) and release.is_drop_in(text, self.seen.place)):
            return False
        return name is None or isinstance(name, str) and "/" not in name and name not in ("", ".", "..")

    def command(self) -> Command:
        if isinstance(self._command, Refused):
            raise self._command
        return self._command

    # ------------------------------------------------------------------------------------------------------ the actions

    def run(self) -> None:
        """What is ordered. Raises what went wrong, after it has been put right as far as that is possible."""
        try:
            getattr(self, self.order["action"])()
        finally:
            _remove_archive(self.order)
            self.tidy()

    def deploy(self) -> None:
        order = self.order
        self.to_release(order["release"], self.seen.mode(order["mode"]), _archive(order))

    def rollback(self) -> None:
        if self.seen.pending is not None:
            self.recover()
            self.put_back_and_wait(self.seen.pending, "the last change was cut off before it was confirmed")
            return
        state = self.seen.state
        if state is None:
            raise Refused(f"{self.unit.name} has no deployment in {self.prefix}")
        if state["rolled_back"]:
            self.say(f"{self.unit.name} was rolled back to {_about(state)} already: nothing to do")
            return
        previous = state["previous"]
        if not previous:
            raise Refused(f"{_about(state)} was the first deployment of {self.unit.name}: `make undeploy` takes it off")
        self.to_release(previous["release"], previous["mode"], None, rolled_back=True)

    def undeploy(self) -> None:
        self.recover()
        if self.seen.drop_in is None and not self.must_restart and not self.seen.runs_ours():
            left_over = release.left_over(self.seen.place)
            release.remove_everything(self.seen.place)
            self.say(
                f"{self.unit.name} has nothing of ours; removed what was left over: {', '.join(left_over)}"
                if left_over
                else f"{self.unit.name} has nothing of ours: nothing to do"
            )
            return
        self.step("switch")
        carry_on()  # the service without us is where undeploy leads to, and where a way back would lead to
        before = self.begin()
        self.put_drop_in(None)
        if before["active"] and not self.unit.exists:
            self.say(f"{self._command}: what runs under this name cannot be restarted, and keeps what it has loaded")
        elif before["active"] and isinstance(self._command, Refused):
            self.say(f"restarting {self.unit.name}: stock; whether it is healthy cannot be told ({self._command})")
            systemd.restart(self.unit.name)
        elif before["active"]:
            try:
                self.start("stock", serve=False, patience=PATIENCE)
            except Failed as failed:
                self.end()
                release.remove_everything(self.seen.place)
                raise Failed(f"{failed}; nothing of ours is left in the unit, so the reason lies elsewhere") from failed
        self.end()
        release.remove_everything(self.seen.place)
        self.say(f"{self.unit.name} is as it was before the first deployment")

    def to_release(self, name: str, mode: str, archive: Path | None, rolled_back: bool = False) -> None:
        self.recover()
        place = self.seen.place
        try:
            self.step("release")
            if release.install(place, name, archive):
                self._new = name
            self.say(f"{place.releases / name} " + ("is in place" if self._new else "is there already"))
            if release.is_changed(place.releases / name):
                changed = f"{place.releases / name} has been changed by hand since it was put in place"
                if not rolled_back:
                    raise ReleaseError(f"{changed}: commit what is to run, which makes a release of its own")
                self.say(f"warning: {changed}")
            command = self.command()
            text = release.drop_in_text(place.releases / name, self.seen.python_path, mode, self.unit.user.pw_uid)
            if self.is_done(name, text, command):
                self.say(f"{self.unit.name} runs {name} in mode {mode} already, confirmed: no change")
                self.outcome = "done"
                return
            self.step("doctor")
            self.doctor(place.releases / name, command)
        except Exception as error:
            if self._new:
                release.remove(place.releases / name)
                self._new = None
            if self.must_restart:
                self.put_back_and_wait(self.seen.pending or {}, str(error))
            else:
                self.say("the service has not been touched")
            raise
        self.switch(name, mode, text, command, rolled_back)

    def tidy(self) -> None:
        """Leaves nothing lying about: old releases go, and everything of ours after a first deployment that failed."""
        place = self.seen.place
        if place.pending.exists():  # what it names may still be needed
            return
        try:
            if place.state.exists():
                gone = release.prune(place)
                if gone:
                    self.say(f"old releases removed: {', '.join(gone)}")
            elif not self.unit.drop_in.exists():
                release.remove_everything(place, keep_archives=True)
        except Exception as error:  # whatever it is, no reason to call a confirmed deployment failed
            self.say(f"what is not needed any more could not be removed: {error}")
        if self._new and self.outcome != "done" and (place.releases / self._new).exists():
            self.say(f"{place.releases / self._new} stays, for another try, and goes with the old releases")

    def is_done(self, name: str, text: str, command: Command) -> bool:
        state = self.seen.state or {}
        return (
            not self.must_restart
            and self.seen.drop_in == text
            and state.get("release") == name
            and release.current(self.seen.place) == name
            and self.unit.state().is_up
            and service.healthy(look.health_url(command))
        )

    # -------------------------------------------------------------------------------------------------------- the steps

    def doctor(self, folder: Path, command: Command) -> None:
        """Everything that can fail in a worker, tried by the service's own interpreter while the service goes on."""
        problem = python_path_problem(command)
        if problem:
            raise Refused(problem)
        user = self.unit.user
        release.own_cache(folder, user.pw_uid, user.pw_gid)
        found = gpus.on_this_host()
        if all(gpu.problem(self.seen.config) for gpu in found):
            raise Failed("no GPU here that the kernel runs on")
        # Off: it looks, and does not patch itself.
        text = release.drop_in_text(folder, self.seen.python_path, "off", user.pw_uid)
        ours = systemd.environment_of([text])
        order = {
            "release": str(folder),
            "gpus": [vars(gpu) for gpu in found],
            "variables": ours,
            "contract": self.order["action"] != "deploy",
            "pool": service_options.fp8_pool(command),
        }
        variables = self.seen.variables() | ours
        words = [command.interpreter, "-c", wire.LOADER, "doctor", wire.packed(order)]
        archive = wire.as_line(self.order["code"])
        status, output, error = run_as(self.unit, variables, *words, stdin=archive, timeout=DOCTOR_SECONDS)
        answer = wire.answer_in(output)
        if answer is None:
            raise Failed(f"the doctor ended with status {status}: {' '.join(error.split())[-500:]}")
        for line in answer["done"]:
            self.say(line)
        if answer["findings"]:
            raise Failed("the doctor found: " + "; ".join(answer["findings"]))

    def switch(self, name: str, mode: str, text: str, command: Command, rolled_back: bool) -> None:
        self.step("switch")
        before = self.begin()
        place = self.seen.place
        start = None
        try:
            self.put_drop_in(text)
            self.check_environment(text)
            release.point_current(place, name)
            start = self.start(f"{name}, mode {mode}", serve=mode != "off")
            self.step("confirm")
            validates = mode == "shadow" or self.unit.environment.get("KDTREE_VALIDATE", "").strip() == "1"
            start.confirm(look.workers_of(command), command, mode, validates, self.say)
            carry_on()
            self.write_state(name, mode, start.invocation, rolled_back)
        except Exception as error:  # whatever it is, the service must not stay between the two
            lines = service.relevant(start.journal.lines) if start else getattr(error, "lines", [])
            try:
                self.put_back_and_wait(before, f"{error}")
            except Failed as failed:
                raise Failed(str(failed), failed.lines or lines) from error
            raise Failed(str(error), lines) from error
        self.end()
        self.outcome = "done"
        self.say(f"{self.unit.name} runs {name} in mode {mode}")

    def write_state(self, name: str, mode: str, invocation: str, rolled_back: bool) -> None:
        was = self.seen.state or {}
        previous = {key: was[key] for key in ("release", "mode")} if was else None
        if previous == {"release": name, "mode": mode}:  # confirmed anew
            previous = was["previous"]
        state = {
            "release": name,
            "mode": mode,
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "by": self.order["by"],
            "invocation": invocation,
            "previous": None if rolled_back else previous,
            "rolled_back": rolled_back,
        }
        systemd.write_whole(self.seen.place.state, json.dumps(state, indent=1) + "\n")

    def recover(self) -> None:
        """Puts back what a transaction that died in the middle had found. The service is restarted by what follows."""
        pending = self.seen.pending
        if pending is None:
            return
        self.say("the last change of this unit was cut off before it was confirmed: putting back what was there before")
        self.outcome = "broken"
        self.put_drop_in(pending["drop_in"], back=True)
        release.point_current(self.seen.place, pending["current"])
        self.must_restart = True

    def begin(self) -> dict[str, Any]:
        """Writes down what is there now. From here on, until the outcome is certain, it can be put back."""
        place = self.seen.place
        before = self.seen.pending
        if before is None:
            place.records.mkdir(parents=True, exist_ok=True)
            before = {
                "drop_in": self.seen.drop_in,
                "current": release.current(place),
                "active": self.unit.state().is_up,
                "action": self.order["action"],
                "release": self.order.get("release"),
            }
        try:
            systemd.write_whole(place.pending, json.dumps(before), mode=0o600)
            if before["drop_in"] is not None:
                # With a full disk, a rename may be all that is possible when it is to be put back.
                systemd.write_whole(systemd.kept(self.unit.drop_in), before["drop_in"])
        except (OSError, Stopped):
            if self.seen.pending is None:
                self.end()  # nothing has been changed yet
            raise
        self.outcome = "broken"
        return before

    def put_drop_in(self, text: str | None, back: bool = False) -> None:
        """Writes or removes the drop-in, and has systemd read it. `back`: the text is the one that `begin` has kept."""
        path = self.unit.drop_in
        if text is None:
            path.unlink(missing_ok=True)
            systemd.half_written(path).unlink(missing_ok=True)
            systemd.remove_folder(path.parent)
        elif back and read_text(systemd.kept(path)) == text:
            os.replace(systemd.kept(path), path)
            systemd.half_written(path).unlink(missing_ok=True)
        elif text != read_text(path):
            path.parent.mkdir(exist_ok=True)
            systemd.write_whole(path, text)
        systemd.reload_manager()
        self.unit.refresh()

    def end(self) -> None:
        """The outcome is certain: there is nothing to be put back any more."""
        kept = systemd.kept(self.unit.drop_in)
        for path in (kept, systemd.half_written(kept)):
            path.unlink(missing_ok=True)
        systemd.remove_folder(kept.parent)
        self.seen.place.pending.unlink(missing_ok=True)

    def check_environment(self, text: str) -> None:
        """That systemd now has what the drop-in says."""
        expected = self.seen.own | systemd.environment_of([text])
        for name in look.RESERVED:
            has = self.unit.environment.get(name)
            if has != expected.get(name):
                raise Failed(f"another file of {self.unit.name} sets {name}={has!r} after ours: remove it there")

    def start(self, what: str, serve: bool, patience: float = 0) -> Start:
        """Restarts the unit and waits until it is healthy, for `patience` seconds if TIMEOUT is less.

        Raises Failed with the journal's lines.
        """
        state = self.unit.state()
        secrets = look.secrets_of(self.unit, state.main_pid)
        start = Start(self.unit, look.health_url(self.command()), state.invocation)
        self.say(f"restarting {self.unit.name}: {what}")
        self.must_restart = True  # whatever comes, it does not run any more what it ran before
        systemd.restart(self.unit.name)
        try:
            start.wait(max(self.timeout, patience), self.say, secrets, serve)
        except Failed as failed:
            start.journal.read()
            failed.lines = service.relevant(start.journal.lines)
            raise
        return start

    def put_back_and_wait(self, before: dict[str, Any], why: str) -> None:
        """The service as it was. A step that fails keeps no other from being taken; Failed then says which."""
        carry_on()
        self.step("roll back")
        self.say(f"FAILED: {why}")
        self.say("putting back what was there before")
        place = self.seen.place
        problems: list[str] = []

        def attempt(what: str, step: Callable[[], object]) -> None:
            try:
                step()
            except (OSError, ReleaseError, SystemdError) as error:
                problems.append(f"{what}: {error}")
                self.say(f"{what}: {error}")

        attempt(f"{self.unit.drop_in} could not be put back", lambda: self.put_drop_in(before["drop_in"], back=True))
        attempt(f"{place.current} could not be put back", lambda: release.point_current(place, before["current"]))
        if not self.must_restart:
            self.say("the service has not been touched")
        elif not before["active"]:
            attempt(f"{self.unit.name} could not be stopped", lambda: systemd.stop(self.unit.name))
        elif isinstance(self._command, Refused):
            self.say(f"restarting {self.unit.name}: whether it is healthy cannot be told ({self._command})")
            attempt(f"{self.unit.name} could not be restarted", lambda: systemd.restart(self.unit.name))
        else:
            try:
                self.start("as it was before", serve=False, patience=PATIENCE)
            except (Failed, SystemdError) as failed:
                text = "; ".join([why, *problems])
                text += f"; AND THE SERVICE AS IT WAS BEFORE DOES NOT START EITHER: {failed}"
                raise Failed(text, getattr(failed, "lines", [])) from failed
        if problems:  # what is pending stays, so that the next run takes these steps again
            raise Failed("; ".join([why, *problems]) + "; put that right and run the same command again")
        attempt("what was kept to be put back could not be removed", self.end)
        self.outcome = "restored" if self.must_restart else "untouched"
        self.say(f"{self.unit.name} is as it was before" + ("" if before["active"] else ", not running"))

    # ------------------------------------------------------------------------------------------------------------ lines

    def step(self, name: str) -> None:
        if name != self._step:
            self._step = name
            wire.line(f"{systemd.STEP}{name}")

    def say(self, text: str) -> None:
        wire.line(f"    {text}")


def run_order(order: dict[str, Any]) -> int:
    """The transient unit's whole life. Its lines go to the journal, where whoever asked for it reads them."""
    os.umask(0o022)
    transaction = None
    code = Path(order["code"])
    order["code"] = code.read_bytes()
    code.unlink()  # at once, so that nothing is left behind whatever happens: this process has read all it needs
    signal.signal(signal.SIGTERM, _stop)
    try:
        lock = lock_the_host()
    except Busy as busy:
        _remove_archive(order)
        wire.say({"ok": False, "reason": str(busy), "lines": [], "outcome": "untouched"})
        return 1
    try:
        transaction = Transaction(order)
        transaction.run()
        result: dict[str, Any] = {"ok": True}
    except (Failed, Refused, ReleaseError, SystemdError) as error:
        result = {"ok": False, "reason": str(error), "lines": getattr(error, "lines", [])}
    except Exception as error:
        result = {"ok": False, "reason": wire.reason(error), "lines": []}
    carry_on()
    _remove_archive(order)
    result["outcome"] = transaction.outcome if transaction is not None else "untouched"
    LOCK.unlink(missing_ok=True)
    os.close(lock)
    wire.say(result)
    return 0 if result["ok"] else 1


def _archive(order: dict[str, Any]) -> Path | None:
    return Path(order["archive"]) if order.get("archive") else None


def _remove_archive(order: dict[str, Any]) -> None:
    """What was sent for this transaction is unpacked by now, or of no use."""
    archive = _archive(order)
    with contextlib.suppress(OSError):
        if archive is not None:
            archive.unlink()


def _about(record: dict[str, Any]) -> str:
    return f"{record['release']} in mode {record['mode']}"


class Busy(Exception):
    """Somebody else is changing this host; the message says who."""


class Stopped(Failed):
    """Somebody stops this transaction, or the host goes down: what has been begun is put back."""


def _stop(*_: object) -> None:
    carry_on()  # once is enough, and the way back is not to be cut off
    raise Stopped("the transaction was told to stop")


def carry_on() -> None:
    """From here on the way to the end is the shortest one, whoever says stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def lock_the_host() -> int:
    """One transaction at a time. The file is one that only root can open: who may read may lock. The kernel lets go of
    the lock when the process ends, however it does; whoever has it removes the file at the end.
    """
    while True:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            others = "; ".join(map(str, systemd.transactions())) or "just ending"
            raise Busy(f"somebody else is at work ({others}): wait for it, or see `make status`") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(LOCK), os.fstat(lock)):
                return lock
        os.close(lock)  # of a transaction that ended between our opening and our locking


def launch(order: dict[str, Any]) -> dict[str, Any]:
    """Starts a transaction and returns at once with its name, as a unit and in the journal."""
    token = f"{systemd.TRANSACTION}{os.urandom(6).hex()}"
    code = RUN / f"{token}.pyz"
    descriptor = os.open(code, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(wire.own_zip())
    words = ["systemd-run", "--quiet", "--collect", f"--unit={token}", f"--property=SyslogIdentifier={token}"]
    # SIGTERM is for the transaction, not for what it has called, and the way back takes the time of a start.
    words += ["--property=KillMode=mixed", f"--property=TimeoutStopSec={PATIENCE + 300:.0f}"]
    what = ", mode ".join(filter(None, (order.get("release"), order.get("mode"))))
    words += [f"--description={order['action']} of {order['unit']} by {order['by']}{what and f': {what}'}"]
    words += ["--", sys.executable, "-I", str(code), "transaction", wire.packed({**order, "code": str(code)})]
    try:
        systemd.run(*words)
    except SystemdError:
        code.unlink(missing_ok=True)
        raise
    return {"token": token}
