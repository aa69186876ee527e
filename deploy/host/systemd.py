"""systemd on this host: what it knows of a unit, through its D-Bus interface, and the few things we ask it to do.

D-Bus rather than the text of `systemctl show`, which does not quote: a word with a space in it looks like two.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUS = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
# Before the name of each transaction's transient unit.
TRANSACTION = "kdtree-deploy-"
# The states of its unit in which it is under way: one that is told to stop puts back what it has begun.
UNDER_WAY = ("active", "activating", "deactivating")
# Before the name of each step that a transaction takes, in its lines.
STEP = "==> "
DROP_IN = "50-kdtree.conf"
UNITS = Path("/etc/systemd/system")

_UNIT = "org.freedesktop.systemd1.Unit"
_SERVICE = "org.freedesktop.systemd1.Service"
_OF_UNIT = (
    *("Id", "LoadState", "ActiveState", "SubState", "FragmentPath", "DropInPaths", "InvocationID", "NeedDaemonReload"),
    *("ActiveEnterTimestamp", "StateChangeTimestamp", "RefuseManualStart", "RefuseManualStop"),
)
_OF_SERVICE = (
    *("ExecStart", "User", "Group", "DynamicUser", "WorkingDirectory", "RootDirectory", "RootImage"),
    *("Environment", "EnvironmentFiles", "UnsetEnvironment", "PassEnvironment"),
    *("StandardOutput", "StandardError", "SyslogLevel", "LogLevelMax", "MainPID", "NRestarts", "Result"),
    *("TemporaryFileSystem", "InaccessiblePaths", "BindPaths", "BindReadOnlyPaths", "ProtectHome"),
)
# Properties that not every systemd has, and what a unit has in their place there.
_NEWER: dict[str, Any] = {"ExecStartEx": [], "LogNamespace": ""}


class SystemdError(Exception):
    """systemd, or a program that talks to it, did not do what was asked; the message has its words."""


def run(*words: str, check: bool = True, timeout: float = 60, stdin: str | None = None, both: bool = False) -> str:
    """Standard output of a program, and standard error too with `both`; SystemdError with that one if it fails."""
    try:
        done = subprocess.run(
            words, input=stdin or "", capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except FileNotFoundError:
        raise SystemdError(f"{words[0]} is not on this host") from None
    except subprocess.TimeoutExpired:
        raise SystemdError(f"{words[0]} {words[1]} did not answer within {timeout:.0f} s") from None
    if check and done.returncode != 0:
        what = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise SystemdError(f"{' '.join(words[:2])}: {what}")
    return done.stdout + (done.stderr if both else "")


def _bus(*words: str) -> list[Any]:
    output = run("busctl", "--json=short", *words)
    return [json.loads(line)["data"] for line in output.splitlines() if line.strip()]


@dataclass(frozen=True)
class State:
    """Where a unit stands at one moment."""

    active: str  # active, activating, deactivating, inactive, failed
    sub: str
    invocation: str  # of the current or last start, 32 hex digits; "" if there was none
    restarts: int  # by systemd itself, since somebody last started it by hand
    result: str
    main_pid: int
    has_job: bool = False  # whether systemd is about to start or stop it

    @property
    def is_up(self) -> bool:
        return self.active in ("active", "activating", "reloading")


class Unit:
    """A service unit. What is configured is read once; `state` asks anew."""

    def __init__(self, name: str):
        self.name = name
        self._path = _bus("call", *BUS, "org.freedesktop.systemd1.Manager", "LoadUnit", "s", name)[0][0]
        self.refresh()
        self.name = self["Id"]  # an alias is no other unit: two names must not have two records and two drop-ins

    def refresh(self) -> None:
        """Reads the configuration again, after a daemon-reload."""
        self._values = self._get(_UNIT, _OF_UNIT)
        if not self._is_service():
            return
        self._values |= _NEWER | self._get(_SERVICE, _OF_SERVICE)
        for name in _NEWER:
            with contextlib.suppress(SystemdError):
                self._values |= self._get(_SERVICE, (name,))

    def _is_service(self) -> bool:
        return self.name.endswith(".service")

    def _get(self, interface: str, names: Iterable[str]) -> dict[str, Any]:
        wanted = list(names)
        values = _bus("get-property", BUS[0], self._path, interface, *wanted)
        return {name: values[index] for index, name in enumerate(wanted)}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    @property
    def exists(self) -> bool:
        return self["LoadState"] == "loaded"

    def state(self) -> State:
        # One question after the other, and a restart may fall between them: with the start asked for first, the rest is
        # never older than it. The other way round, the dead moment before a start would look like its end.
        # And the job before the state: a unit that has none and then is not up is not on its way up.
        unit = self._get(_UNIT, ("InvocationID", "Job", "ActiveState", "SubState"))
        service = self._get(_SERVICE, ("NRestarts", "Result", "MainPID"))
        return State(
            active=unit["ActiveState"],
            sub=unit["SubState"],
            invocation=bytes(unit["InvocationID"]).hex(),
            restarts=service["NRestarts"],
            result=service["Result"],
            main_pid=service["MainPID"],
            has_job=unit["Job"][0] != 0,
        )

    @property
    def argv(self) -> list[str]:
        """Of its one ExecStart, with what is really run in front: after an @, the first word is only a name."""
        path, words = self["ExecStart"][0][:2]
        return [path if os.path.isabs(path) else words[0], *words[1:]]

    @property
    def flags(self) -> list[str]:
        """What stands before its ExecStart: "privileged" for +, "no-setuid" for !, "no-env-expand" for :."""
        return list(self["ExecStartEx"][0][2]) if self["ExecStartEx"] else []

    @property
    def is_literal(self) -> bool:
        """Whether systemd leaves the dollars in ExecStart as they are."""
        return "no-env-expand" in self.flags

    @property
    def user(self) -> pwd.struct_passwd:
        """Whom it runs as. KeyError if there is no such user."""
        name = self["User"] or "root"
        return pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)

    @property
    def environment(self) -> dict[str, str]:
        """Environment= as systemd holds it, our drop-in included; of EnvironmentFile= nothing is here."""
        return as_mapping(self["Environment"])

    @property
    def drop_in(self) -> Path:
        return UNITS / f"{self.name}.d" / DROP_IN

    def files(self) -> list[Path]:
        """The unit file and its drop-ins, in the order in which systemd reads them."""
        return [Path(path) for path in (self["FragmentPath"], *self["DropInPaths"]) if path]


def as_mapping(words: Iterable[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


_CONTINUED = re.compile(r"\\\n")


def specifiers_of(name: str) -> dict[str, str]:
    """What the specifiers of unit files stand for in a unit of this name, by letter: those of systemd.unit(5) that a
    path may have in it. The system manager's own user, not that of the unit, is meant by %h and %u.
    """
    bare = name.rpartition(".")[0]
    prefix, _, instance = bare.partition("@")
    last = prefix.rpartition("-")[2]
    return {
        **{"n": name, "N": bare, "p": prefix, "P": _unescaped(prefix), "i": instance, "I": _unescaped(instance)},
        **{"j": last, "J": _unescaped(last), "H": os.uname().nodename, "h": "/root", "u": "root", "U": "0"},
        **{"t": "/run", "S": "/var/lib", "C": "/var/cache", "L": "/var/log", "E": "/etc", "T": "/tmp", "V": "/var/tmp"},
    }


def _unescaped(text: str) -> str:
    """The reverse of systemd-escape."""
    return re.sub(r"\\x([0-9a-f]{2})", lambda match: chr(int(match[1], 16)), text.replace("-", "/"))


def environment_of(texts: Iterable[str], specifiers: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the Environment= lines of unit files say, read in this order.

    systemd itself only tells the sum of all files, and what a unit would say without our drop-in is needed. Specifiers
    that are not among those given stay as they are; %% is always a percent sign. Raises ValueError for quoting that is
    not closed.
    """
    known = {**(specifiers or {}), "%": "%"}

    def expanded(word: str) -> str:
        return re.sub("%(.)", lambda match: known.get(match[1], match[0]), word)

    found: dict[str, str] = {}
    for text in texts:
        section = ""
        for line in _CONTINUED.sub(" ", text).splitlines():
            line = line.strip()
            if line.startswith("["):
                section = line
            name, equals, value = line.partition("=")
            if section != "[Service]" or name.strip() != "Environment" or not equals:
                continue
            if not value.strip():
                found.clear()
            found.update(as_mapping(expanded(word) for word in shlex.split(value)))
    return found


def quoted(name: str, value: str) -> str:
    """`Environment="NAME=value"`, such that systemd reads exactly the value."""
    text = f"{name}={value}".replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'Environment="{text}"'


def run_as(unit: Unit, variables: Mapping[str, str], *words: str, stdin: str, timeout: float) -> tuple[int, str, str]:
    """Runs a program as the unit would: systemd starts it, with the unit's user, folder and environment files.

    `variables` is its Environment=. Returns the exit status, standard output and standard error.
    """
    settings = [f"--setenv={name}={value}" for name, value in variables.items()]
    for name in ("User", "Group", "WorkingDirectory"):
        if unit[name]:
            # "!" marks a folder that may be missing, which a unit file says with "-".
            settings.append(f"--property={name}={unit[name].replace('!', '-', 1)}")
    for path, optional in unit["EnvironmentFiles"]:
        settings.append(f"--property=EnvironmentFile={'-' if optional else ''}{path}")
    settings += [f"--property=RuntimeMaxSec={timeout:.0f}", f"--description=kdtree_patch looks at {unit.name}"]
    command = [
        "systemd-run",
        "--quiet",
        "--pipe",
        "--wait",
        "--collect",
        "--service-type=exec",
        *settings,
        "--",
        *words,
    ]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout + 30, check=False
    )
    return done.returncode, done.stdout, done.stderr


@dataclass(frozen=True)
class UnderWay:
    """A transaction that runs on this host at this moment."""

    about: str  # the description that `transaction.launch` has given it: "deploy of UNIT by USER@MACHINE: ..."
    seconds: float
    step: str  # "" before the first
    line: str  # the last one that it said

    @property
    def unit(self) -> str:
        """The unit that it changes."""
        return self.about.split(" ")[2]

    def __str__(self) -> str:
        return f"{self.about}, for {self.seconds:.0f} s, now at step {self.step or 'begin'}"


def transactions() -> list[UnderWay]:
    """What is being done on this host, by whomever but the process that asks."""
    properties = "--property=Id,Description,ActiveState,MainPID,ExecMainStartTimestampMonotonic"
    found = []
    for block in run("systemctl", "show", properties, f"{TRANSACTION}*", check=False).split("\n\n"):
        values = as_mapping(block.splitlines())
        if values.get("ActiveState") not in UNDER_WAY:
            continue
        if values["MainPID"] == str(os.getpid()):
            continue
        token = values["Id"].removesuffix(".service")
        seconds = time.monotonic() - int(values["ExecMainStartTimestampMonotonic"]) / 1e6
        of_it = (f"--identifier={token}", "_UID=0")  # anybody may log under this name
        said = run("journalctl", "--quiet", "--no-pager", "--output=cat", *of_it, check=False)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        steps = [line.removeprefix(STEP) for line in lines if line.startswith(STEP)]
        found.append(UnderWay(values["Description"], seconds, *(part[-1] if part else "" for part in (steps, lines))))
    return found


def reload_manager() -> None:
    run("systemctl", "daemon-reload", timeout=120)


def restart(name: str) -> None:
    """Asks for a restart and does not wait for it. A unit that has failed too often is forgiven first."""
    run("systemctl", "reset-failed", name, check=False)
    run("systemctl", "restart", "--no-block", name)


def last_word(name: str) -> str:
    """What systemd itself said last of a unit."""
    words = ("journalctl", "--quiet", "--no-pager", "--output=cat", "--lines=1", "_PID=1", f"UNIT={name}")
    return " ".join(run(*words, check=False).split())


def stop(name: str) -> None:
    run("systemctl", "stop", name, timeout=300)


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """The old file or the new one, whatever happens in between."""
    temporary = half_written(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def half_written(path: Path) -> Path:
    """What `write_whole` leaves behind if it is killed."""
    return path.with_name(f".{path.name}.new")


def kept(path: Path) -> Path:
    """Beside a drop-in, where systemd does not read it: what it said before a change that is under way."""
    return path.with_name(f".{path.name}.before")


def remove_folder(folder: Path) -> None:
    """Removes UNIT.d if nothing is left in it. One that is a link is somebody's own arrangement, and stays."""
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
