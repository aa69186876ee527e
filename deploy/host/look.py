"""What stands on this host now: the unit without us, the command it runs, and what we have put beside it.

Reads only. `Look` is what preflight reports on and what a transaction starts from, so that both see the same thing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.host.systemd import SystemdError, Unit, environment_of, specifiers_of
from kdtree_patch import service_command as commands
from kdtree_patch.service_command import Command, Opaque, Refused, is_file, read_head
from kdtree_patch.settings import CONFIGS

# What our drop-in sets.
RESERVED = ("PYTHONPATH", "KDTREE_MODE", "KDTREE_CACHE_DIR", "KDTREE_LOG_LEVEL")
# Of the unit's own Environment=, what a process of ours is started with. Not all of it: it shows in the list of
# processes, and units keep tokens there. Environment files are read by systemd, and never by us.
_PASSED = (
    *("PATH", "LD_", "PYTHON", "CUDA", "NVIDIA_", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "XDG_", "TMPDIR", "LANG"),
    *("TORCH", "TRITON_", "SGLANG_", "KDTREE_", "CC", "CXX"),
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")


@dataclass(frozen=True)
class Place:
    """Where things lie under PREFIX."""

    prefix: Path
    unit: str

    @property
    def releases(self) -> Path:
        return self.prefix / "releases"

    @property
    def current(self) -> Path:
        return self.prefix / "current"

    @property
    def units(self) -> Path:
        return self.prefix / "units"

    @property
    def records(self) -> Path:
        return self.units / self.unit

    @property
    def state(self) -> Path:
        """What the unit runs, as it was last confirmed."""
        return self.records / "state.json"

    @property
    def pending(self) -> Path:
        """What it ran before a change that has not been confirmed yet. There only while a change is under way."""
        return self.records / "pending.json"

    def incoming(self, token: str) -> Path:
        return self.prefix / "incoming" / f"{token}.tar"


def read_json(path: Path) -> dict[str, Any] | None:
    """Raises Refused for what no deployment writes."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Refused(f"{path} is not what a deployment writes ({error}): look at it, then remove it") from error
    if not isinstance(value, dict):
        raise Refused(f"{path} is not what a deployment writes: look at it, then remove it")
    return value


def read_text(path: Path) -> str | None:
    """A unit file may have any bytes in its comments."""
    try:
        return path.read_text(errors="surrogateescape")
    except FileNotFoundError:
        return None


class Look:
    """A unit, and what of it is ours. Raises Refused where a deployment could not be right. Where that is because of
    the unit's own variables, it is raised when they are asked for: without them, ours can still be taken away.
    """

    def __init__(self, unit: Unit, prefix: Path):
        self.unit = unit
        self.place = Place(prefix, unit.name)
        self.drop_in = read_text(unit.drop_in)
        self.state = read_json(self.place.state)
        self.pending = read_json(self.place.pending)
        # True after an edit, and after a transaction that died between a file and the daemon-reload for it.
        self.reads_stale = bool(unit["NeedDaemonReload"])
        self._own: dict[str, str] | Refused
        try:
            self._own = self._read_own()
        except Refused as refused:
            self._own = refused

    @property
    def own(self) -> dict[str, str]:
        """The variables that the unit sets without us. Raises Refused."""
        if isinstance(self._own, Refused):
            raise self._own
        return self._own

    def _read_own(self) -> dict[str, str]:
        unit = self.unit
        # A file that is gone is one that systemd has not been told of yet: see reads_stale.
        texts = {path: text for path in unit.files() if (text := read_text(path)) is not None}
        ours = unit.drop_in.resolve()  # UNIT.d may be a link
        specifiers = specifiers_of(unit.name)
        for path, text in texts.items():
            try:
                environment_of([text])
            except ValueError as error:
                raise Refused(f"an Environment= in {path} cannot be read ({error}): put its quotes right") from error
        own = environment_of((text for path, text in texts.items() if path.resolve() != ours), specifiers)
        # The same reading with our drop-in must give what systemd says, or it is not to be trusted.
        everything = environment_of(texts.values(), specifiers)
        for name in () if self.reads_stale else RESERVED:
            if everything.get(name) != unit.environment.get(name):
                raise Refused(
                    f"{name} in the files of {unit.name} reads {everything.get(name)!r}, but systemd has "
                    f"{unit.environment.get(name)!r}: write it without that specifier or quoting"
                )
        # Under our drop-in, systemd does not tell what a specifier that we do not know has come to.
        deployed = environment_of([self.drop_in or ""]).get("PYTHONPATH", "").partition(":")[2]
        python_path = own.get("PYTHONPATH", "")
        if self.drop_in is not None and "%" in python_path and python_path != deployed:
            raise Refused(f"PYTHONPATH of {unit.name} is {python_path!r}: write it without that specifier")
        return own

    def mode(self, wanted: str | None) -> str:
        """The mode of a deployment: the one that is asked for, or else the one that the unit was last confirmed in."""
        return wanted or mode_of(self.pending["drop_in"] if self.pending else self.drop_in) or "on"

    @property
    def python_path(self) -> str:
        """The PYTHONPATH that the unit itself sets."""
        return self.own.get("PYTHONPATH", "")

    def runs_ours(self) -> bool:
        """Whether the running service has a release of ours on its PYTHONPATH, whatever the unit says by now."""
        pid = self.unit.state().main_pid
        environ = _words(pid, "environ") if pid else []
        return any(word.startswith("PYTHONPATH=") and f"{self.place.releases}/" in word for word in environ)

    def variables(self) -> dict[str, str]:
        """What a process of ours that asks on the unit's behalf is started with."""
        kept = {name: value for name, value in self.unit.environment.items() if passed(name) and name not in RESERVED}
        return kept | ({"PYTHONPATH": self.own["PYTHONPATH"]} if "PYTHONPATH" in self.own else {})

    @property
    def config(self) -> str:
        """The configuration of the kernel that the unit asks for. One that there is none of is for others to refuse."""
        value = self.unit.environment.get("KDTREE_CONFIG", "").strip().lower()
        return value if value in CONFIGS else CONFIGS[0]

    def command(self) -> Command:
        """The Python that the unit runs. Where ExecStart does not tell, the running service does."""
        unit = self.unit
        environment = self.own | unit.environment
        is_all = not unit["EnvironmentFiles"] and not unit["PassEnvironment"]
        try:
            argv = unit.argv if unit.is_literal else commands.expand(unit.argv, environment, is_all)
            found = commands.unwrap(argv, environment, read_head, is_file)
        except Opaque as opaque:
            found = self._running(opaque)
        if not is_file(found.interpreter):
            raise Refused(f"ExecStart runs {found.interpreter}, which is not there")
        return found

    def _running(self, opaque: Opaque) -> Command:
        pid = self.unit.state().main_pid
        if not pid:
            raise Refused(f"{opaque}, and the service is not running, so that there is nothing to look at") from opaque
        for process in _descendants(pid):
            argv = _words(process, "cmdline")
            if not argv or "sglang" not in " ".join(argv):
                continue
            environ = dict(word.partition("=")[::2] for word in _words(process, "environ"))
            try:
                found = commands.unwrap(argv, environ, read_head, is_file)
            except Refused:
                continue
            # The mode and the cache of a service change with a deployment that has not restarted it yet.
            names = {name for name in environ if name.startswith("KDTREE_")} - {"KDTREE_MODE", "KDTREE_CACHE_DIR"}
            for name in ("PYTHONPATH", *sorted(names)):
                if environ.get(name, "") != self.unit.environment.get(name, ""):
                    raise Refused(
                        f"{opaque}; it sets {name} itself (the running service has {environ.get(name)!r}): move that "
                        "into Environment= of the unit"
                    ) from opaque
            found.wrappers.append(f"{os.path.basename(self.unit.argv[0])} (seen in the running service)")
            return found
        raise Refused(
            f"{opaque}, and no Python with SGLang in its command line is running under it: is this the service's unit?"
        ) from opaque


def passed(name: str) -> bool:
    return name.startswith(_PASSED) and not any(word in name.upper() for word in _SECRET)


def _words(pid: int, name: str) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in content.split(b"\0") if word]


def _descendants(pid: int) -> list[int]:
    """A process and those below it, parents first."""
    found = [pid]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
    return found


def secrets_of(unit: Unit, pid: int) -> list[str]:
    """Values that must not be repeated: those of the service's command line and environment that are named like one."""
    words = unit.argv + _words(pid, "cmdline") if pid else unit.argv
    for word in [word for word in words if " " in word]:  # bash -c "..."
        with contextlib.suppress(ValueError):
            words = words + shlex.split(word)
    found = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("-") and any(part in name.upper() for part in _SECRET):
            found.append(value if equals else words[index + 1] if index + 1 < len(words) else "")
    environment = unit.environment | dict(word.partition("=")[::2] for word in (_words(pid, "environ") if pid else []))
    found += [value for name, value in environment.items() if any(part in name.upper() for part in _SECRET)]
    return sorted((value for value in found if len(value) > 3), key=len, reverse=True)


def ownership_problem(prefix: Path) -> str | None:
    """Who else than root could change what lies under `prefix`: what root does is read from there."""
    folders = [prefix, *prefix.parents, *(prefix / name for name in ("releases", "units", "incoming"))]
    folders += [*prefix.glob("releases/*"), *prefix.glob("units/*")]
    for path in (*folders, *prefix.glob("units/*/*.json")):
        info = info_of(path)
        if info is None:
            continue
        kind = "a plain file" if path not in folders else "a folder"
        if not (stat.S_ISDIR(info.st_mode) if path in folders else stat.S_ISREG(info.st_mode)):
            return f"{path} is not {kind}"
        if info.st_uid != 0:
            return f"{path} belongs to uid {info.st_uid}, who could change what is there: choose a PREFIX of root"
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {path} (mode {stat.S_IMODE(info.st_mode):04o}): choose another PREFIX"
    return None


def info_of(path: Path) -> os.stat_result | None:
    """Of what is at a path, itself and not what it may link to; None if nothing is."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def prefix_problem(prefix: Path, user_id: int) -> str | None:
    """Why releases may not lie under `prefix`: somebody else could change them, or the service could not read them."""
    problem = ownership_problem(prefix)
    if problem:
        return problem
    for folder in (prefix, *prefix.parents) if user_id != 0 else ():
        info = info_of(folder)
        if info is not None and not info.st_mode & stat.S_IXOTH:
            return f"the service's user cannot enter {folder} (mode {stat.S_IMODE(info.st_mode):04o})"
    existing = next(folder for folder in (prefix, *prefix.parents) if folder.exists())
    if os.statvfs(existing).f_flag & os.ST_NOEXEC:
        return f"{existing} is mounted noexec: libraries there cannot be loaded"
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return f"{existing} is mounted read-only"
    return None


def workers_of(command: Command) -> int:
    """How many processes of this start hold a part of the model, from the service's own arguments."""

    tensor = command.number("--tp", "--tp-size", "--tensor-parallel-size")
    if command.option("--config") is not None and command.option("--tp", "--tp-size", "--tensor-parallel-size") is None:
        raise Refused("the service's --config may set the tensor-parallel size: write --tp into ExecStart")
    ranks = tensor * command.number("--pp", "--pp-size", "--pipeline-parallel-size")
    if not command.has("--enable-dp-attention"):
        ranks *= command.number("--dp", "--dp-size", "--data-parallel-size")
    nodes = command.number("--nnodes")
    if ranks % nodes:
        raise Refused(f"{ranks} ranks cannot be shared out over {nodes} nodes")
    return ranks // nodes


def health_url(command: Command) -> str:
    host = command.option("--host") or "127.0.0.1"
    port = command.option("--port") or "30000"
    if not port.isdigit():
        raise Refused(f"--port {port} is no number")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(host, host)
    scheme = "https" if command.option("--ssl-keyfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def mode_of(drop_in: str | None) -> str | None:
    """The KDTREE_MODE that a drop-in sets."""
    return environment_of([drop_in or ""]).get("KDTREE_MODE")


def drop_in_problem(drop_in: str | None, place: Place) -> str | None:
    """Why what is in place of our drop-in cannot be dealt with under this PREFIX."""
    if drop_in is None or release_of(drop_in, place) is not None:
        return None
    entry = environment_of([drop_in]).get("PYTHONPATH", "").split(":")[0]
    if entry.count("/") > 2 and Path(entry).parent.name == "releases":
        prefix = Path(entry).parent.parent
        return f"the unit's drop-in is of another PREFIX, {prefix}: say PREFIX={prefix}"
    return "the unit has a drop-in of our name that no deployment has written: take it away or give it another name"


def release_of(drop_in: str | None, place: Place) -> str | None:
    """The release that a drop-in of ours puts on PYTHONPATH."""
    for line in (drop_in or "").splitlines():
        if line.startswith('Environment="PYTHONPATH='):
            entry = line.partition("=")[2].partition("=")[2].split(":")[0].rstrip('"')
            if Path(entry).parent == place.releases:
                return Path(entry).name
    return None


__all__ = ["Look", "Place", "Refused", "SystemdError"]
