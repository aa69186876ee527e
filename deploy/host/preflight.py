"""Everything that can be known before a deployment, found out without changing anything.

The report has `facts` to be shown, `findings` that forbid a deployment, `warnings` that do not, `plan`, what a
deployment would do, and what the operator's side needs to go on.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import platform
import re
import shutil
import time
import urllib.error
from pathlib import Path
from typing import Any

from deploy.host import gpus, look, service, wire
from deploy.host.look import Look, Place
from deploy.host.release import drop_in_text, foreign_problem, manifests
from deploy.host.systemd import DROP_IN, SystemdError, Unit, environment_of, quoted, run, run_as, transactions
from kdtree_patch import service_options
from kdtree_patch.service_command import Command, Refused, python_path_problem
from kdtree_patch.settings import SettingError, Settings

PROBE_SECONDS = 300
JOURNAL_SECONDS = 5.0
# wrapt and cupy unpacked, the archive they come in, and the kernels.
DISK_BYTES = 1 << 30
TRANSIENT = "/run/systemd/transient/"
_JOURNAL = ("journal", "journal+console", "syslog", "syslog+console", "kmsg", "kmsg+console", "inherit")


class Report:
    def __init__(self) -> None:
        self.facts: list[list[str]] = []
        self.findings: list[str] = []
        self.warnings: list[str] = []
        self.plan: list[str] = []
        self.data: dict[str, Any] = {}

    def fact(self, name: str, value: object) -> None:
        self.facts.append([name, str(value)])

    def find(self, text: str) -> None:
        self.findings.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def as_answer(self) -> dict[str, Any]:
        return vars(self)


def inspect(order: dict[str, Any]) -> dict[str, Any]:
    """`order`: unit, prefix, mode, release (a name)."""
    report = Report()
    try:
        _inspect(order, report)
    except (Refused, SystemdError, ValueError) as error:
        report.find(str(error))
    return report.as_answer()


def _inspect(order: dict[str, Any], report: Report) -> None:
    report.fact("host", f"{platform.node()}, {_system()}, {run('systemctl', '--version').split(chr(10))[0]}")
    if os.geteuid() != 0:
        raise Refused(f"ssh logs in as uid {os.geteuid()}: systemd and {order['prefix']} need root, HOST=root@...")
    _somebody_else(report)
    unit = Unit(order["unit"])
    if not unit.exists:
        raise Refused(f"there is no unit {unit.name} here{_alike(unit.name)}")
    _unit(unit, report)
    _conditions(unit, report)
    _journal(unit, report)
    if report.findings:
        return
    seen = Look(unit, Path(order["prefix"]))
    if seen.reads_stale and seen.pending is None:
        report.find("its files have changed since systemd read them: look at them, then run systemctl daemon-reload")
    problem = look.drop_in_problem(seen.drop_in, seen.place)
    if problem:
        report.find(problem)
    user = unit.user
    command = seen.command()
    _command(command, seen, order["mode"], report)
    _prefix(seen.place, user.pw_uid, report)
    _hidden(unit, seen.place.prefix, report)
    _gpus(seen.config, report)
    if report.findings:
        return
    _probe(command, seen, report)
    _reserved(seen, report)
    _plan(order, seen, report)
    report.data["releases"] = manifests(seen.place)


def _system() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return "Linux"


def _somebody_else(report: Report) -> None:
    under_way = transactions()
    if under_way:
        report.find(f"somebody else is at work on this host ({'; '.join(map(str, under_way))}): see `make status`")


def _alike(name: str) -> str:
    listed = run("systemctl", "list-unit-files", "--type=service", "--no-legend", "--no-pager", check=False)
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; like it are {', '.join(close)}" if close else ""


def _unit(unit: Unit, report: Report) -> None:
    state = unit.state()
    report.fact("unit", f"{unit.name}, {state.active} ({state.sub}), {unit['FragmentPath'] or 'no file of its own'}")
    if unit["FragmentPath"].startswith(TRANSIENT):
        report.find("it is a transient unit, which systemd forgets when it ends: make a unit file of it first")
    folder = unit.drop_in.parent
    if os.path.lexists(folder) and not folder.is_dir():
        report.find(f"{folder} is no folder, so that there can be no drop-in in it")
    if unit["RefuseManualStart"] or unit["RefuseManualStop"]:
        report.find("RefuseManualStart= or RefuseManualStop= keeps it from being restarted: remove that")
    if unit["DynamicUser"]:
        report.find("DynamicUser= gives it another user at every start, to whom no kernel cache can belong: set User=")
    if unit["RootDirectory"] or unit["RootImage"]:
        report.find("RootDirectory= or RootImage= gives it a file system of its own, in which PREFIX is not")
    if set(unit.flags) & {"privileged", "no-setuid"} and unit["User"]:
        report.find(f"its ExecStart begins with + or !, and so is not started as its User={unit['User']}: remove that")
    for name in sorted(set(look.RESERVED) & {word.partition("=")[0] for word in unit["UnsetEnvironment"]}):
        report.find(f"UnsetEnvironment= takes {name} away: remove it there")
    for name in sorted(set(look.RESERVED) & set(unit["PassEnvironment"])):
        report.find(
            f"PassEnvironment= takes {name} from the system manager, where it is not seen: set it in Environment="
        )
    for name in ("StandardOutput", "StandardError"):
        if unit[name] not in _JOURNAL:
            report.find(f"{name}={unit[name]} keeps the worker's lines out of the journal, where they are looked for")
    if 0 <= unit["LogLevelMax"] < unit["SyslogLevel"]:
        report.find(f"LogLevelMax= keeps lines of level {unit['SyslogLevel']} out of the journal: remove it")
    if unit["LogNamespace"]:
        report.find(f"LogNamespace={unit['LogNamespace']} is another journal than the one that is looked at: remove it")
    if len(unit["ExecStart"]) != 1:
        report.find(f"it has {len(unit['ExecStart'])} ExecStart commands, and one is understood")
    if not state.is_up:
        report.warn(f"{unit.name} is {state.active}: a deployment starts it, and one that fails stops it again")
    with contextlib.suppress(KeyError):
        report.fact("runs as", unit.user.pw_name)
        return
    report.find(f"its User={unit['User']} does not exist")


def _conditions(unit: Unit, report: Report) -> None:
    """A service goes on when what it was started under is gone; a restart would stop it, and not start it again."""
    with contextlib.suppress(SystemdError):  # no such verb before systemd 250
        said = run("systemd-analyze", "condition", f"--unit={unit.name}", check=False, both=True)
        if not re.search(r"^(Conditions|Asserts) failed", said, re.M):
            return  # one of several that are or-ed may well have failed
        failed = [line.partition(": ")[2] or line for line in said.splitlines() if re.search(r": .*=.* failed", line)]
        for line in failed:
            report.find(f"{line.removesuffix('.')}: systemd would stop {unit.name} and not start it again")


def _journal(unit: Unit, report: Report) -> None:
    """Whether a line of the service's level is kept: its workers' lines are what a deployment is confirmed by."""
    name = f"kdtree-preflight-{os.urandom(6).hex()}"
    run("systemd-cat", f"--identifier={name}", f"--priority={unit['SyslogLevel'] & 7}", "echo", "kept")
    until = time.monotonic() + JOURNAL_SECONDS
    while not run("journalctl", "--quiet", "--no-pager", "--output=cat", f"--identifier={name}", check=False):
        if time.monotonic() > until:
            report.find(
                f"a line of level {unit['SyslogLevel'] & 7} that was sent to the journal is not in it, and so would be "
                "the workers' lines: see Storage= and MaxLevelStore= in journald.conf"
            )
            return
        time.sleep(0.2)


def _command(command: Command, seen: Look, mode: str | None, report: Report) -> None:
    through = f", through {' '.join(command.wrappers)}" if command.wrappers else ""
    flags = f" with -{''.join(sorted(command.flags))}" if command.flags else ""
    report.fact("interpreter", f"{command.interpreter}{flags}{through}")
    problem = python_path_problem(command)
    if problem:
        report.find(problem)
    for name, value in command.overrides.items():
        if name.startswith("KDTREE_"):
            how = f"sets {name}={value}" if value else f"removes {name}"
            report.find(
                f"the command line itself {how}, whatever the unit says: move that into Environment= of the unit"
            )
    workers = look.workers_of(command)
    url = look.health_url(command)
    health = _health(url)
    report.fact("service", f"{workers} worker(s) here, {url}/health {health}")
    if health != "answers" and seen.unit.state().active == "active" and seen.pending is None:
        back = "; if it does not get ready with our release, `make rollback` or `make undeploy`" if seen.drop_in else ""
        report.find(
            f"{seen.unit.name} is active, and {url}/health {health}: wait until it is ready, or, if it is elsewhere, "
            f"write --host and --port into ExecStart{back}"
        )
    if seen.mode(mode) != "off":
        _would_decline(command, report)


def _would_decline(command: Command, report: Report) -> None:
    """For what every worker would decline, or never come to be asked: the command line tells before the restart."""
    # Options may also come from a file, which we do not read.
    find = report.find if command.option("--config") is None else report.warn
    for judgement in service_options.judge(command):
        if judgement.effect == service_options.STOCK:
            find(judgement.why)
        else:
            report.warn(f"{judgement.why}; if that is not for the patch, the deployment is taken back")


def _health(url: str) -> str:
    try:
        return "answers" if service.healthy(url) else "does not answer 200"
    except (OSError, urllib.error.URLError) as error:
        return f"does not answer ({getattr(error, 'reason', error)})"


def _prefix(place: Place, user_id: int, report: Report) -> None:
    prefix = place.prefix
    problem = look.prefix_problem(prefix, user_id) or foreign_problem(place)
    if problem:
        report.find(problem)
        return
    existing = next(folder for folder in (prefix, *prefix.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    report.fact("disk", f"{free / (1 << 30):.1f} GiB free for {prefix}")
    if free < DISK_BYTES:
        report.find(f"{existing} has {free >> 20} MiB free, and {DISK_BYTES >> 20} MiB are needed")


def _hidden(unit: Unit, prefix: Path, report: Report) -> None:
    """Whether the unit's own view of the file system has PREFIX in it."""
    hiding = {path.lstrip("-+"): "InaccessiblePaths=" for path in unit["InaccessiblePaths"]}
    hiding |= {path: "TemporaryFileSystem=" for path, _ in unit["TemporaryFileSystem"]}
    if unit["ProtectHome"] in ("yes", "tmpfs"):
        hiding |= dict.fromkeys(("/home", "/root", "/run/user"), f"ProtectHome={unit['ProtectHome']}")
    shown = [Path(bind[1]) for bind in (*unit["BindPaths"], *unit["BindReadOnlyPaths"])]
    for path, setting in hiding.items():
        if not prefix.is_relative_to(path):
            continue
        if not any(prefix.is_relative_to(bind) and bind.is_relative_to(path) for bind in shown):
            report.find(f"{setting} hides {path}, in which {prefix} lies, from the service: choose another PREFIX")


def _gpus(config: str, report: Report) -> None:
    try:
        found = gpus.on_this_host()
    except SystemdError as error:
        report.find(f"no GPU can be seen: {error}")
        return
    for gpu in dict.fromkeys((gpu.name, gpu.capability, gpu.driver) for gpu in found):
        same = [other for other in found if (other.name, other.capability, other.driver) == gpu]
        free = max(other.free_bytes for other in same) / (1 << 30)
        about = f"compute capability {same[0].about_capability}, driver {gpu[2]}, up to {free:.1f} GiB free"
        report.fact("GPU", f"{len(same)} x {gpu[0]}, {about}")
    if not found:
        report.find("nvidia-smi lists no GPU")
    problems = [gpu.problem(config) for gpu in found]
    if all(problems):
        report.findings += dict.fromkeys(problem for problem in problems if problem)


def _probe(command: Command, seen: Look, report: Report) -> None:
    facts = _ask(command, seen, hide_gpus=True)
    if facts["violations"] is None:  # perhaps this SGLang cannot be imported without seeing a GPU
        facts = _ask(command, seen, hide_gpus=False)
    report.data["probe"] = facts
    report.fact("Python", f"{facts['implementation']} {facts['version']}, {facts['abi']}, {' '.join(facts['libc'])}")
    report.fact("torch", f"{facts['torch']}, CUDA {facts['cuda']}; numpy {facts['numpy']}")
    have = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in facts["have"].items())
    report.fact("of its own", have)
    version = tuple(int(part) for part in facts["version"].split(".")[:2])
    if facts["implementation"] != "cpython" or not (3, 10) <= version <= (3, 13):
        report.find(f"{facts['implementation']} {facts['version']} is none that the patch knows: CPython 3.10 to 3.13")
    if not facts["cuda"]:
        report.find(f"torch {facts['torch']} of {command.interpreter} has no CUDA")
    if facts["violations"] is None:
        report.find(f"SGLang's Triton backend cannot be imported by {command.interpreter}: {facts['import_error']}")
    elif facts["violations"]:
        report.find(f"SGLang {facts['sglang']} is none that the patch knows: {'; '.join(facts['violations'])}")
    else:
        report.fact("SGLang", f"{facts['sglang']}, passes the contract")
    report.fact("PYTHONPATH", facts["python_path"] or "not set")
    report.fact("sitecustomize", facts["sitecustomize"] or "none")


def _ask(command: Command, seen: Look, hide_gpus: bool) -> dict[str, Any]:
    words = [command.interpreter, "-c", wire.LOADER, "probe", wire.packed({"hide_gpus": hide_gpus})]
    archive = wire.as_line(wire.own_zip())
    status, output, error = run_as(seen.unit, seen.variables(), *words, stdin=archive, timeout=PROBE_SECONDS)
    facts = wire.answer_in(output)
    if facts is None:
        last = " ".join((error.strip().splitlines() or [f"status {status}"])[-1].split())
        raise Refused(f"{command.interpreter} cannot be asked as {seen.unit.user.pw_name}: {last}")
    return facts


def _reserved(seen: Look, report: Report) -> None:
    """Whether the variables we set would arrive."""
    facts = report.data["probe"]
    if facts["python_path"] != seen.python_path:
        report.find(
            f"PYTHONPATH is {facts['python_path']!r} for the service, but its unit files say {seen.python_path!r}: an "
            "EnvironmentFile= or the manager sets it, over which a drop-in has no power: move it into Environment="
        )
    for name, value in facts["kdtree"].items():
        if name in look.RESERVED or seen.own.get(name) != value:  # of the reserved ones we have passed none on
            report.find(
                f"{name}={value} comes from an EnvironmentFile= of the unit, over which a drop-in has no power: "
                "remove it there"
            )
        else:
            report.warn(f"the unit itself sets {name}={value}, which stays as it is")
    for name in look.RESERVED[1:]:
        if name in seen.own:
            value = seen.own[name]
            report.warn(f"the unit itself sets {name}={value}; the drop-in comes on top of it{_WHY.get(name, '')}")
    try:
        Settings.from_environ(facts["kdtree"])
    except SettingError as error:
        report.find(f"every worker would decline: {error}")
    for path in seen.unit.files():
        text = (look.read_text(path) if path.name > DROP_IN and path.suffix == ".conf" else None) or ""
        ours = "[Service]\n" + "\n".join(quoted(name, "ours") for name in look.RESERVED)
        after = environment_of([ours, text])  # an empty Environment= takes all away
        if names := [name for name in look.RESERVED if after.get(name) != "ours"]:
            does = "sets" if after.keys() & set(names) else "takes away"
            report.find(f"{path} is read after our {DROP_IN} and {does} {', '.join(names)}: give it a lower number")
    for entry in filter(None, seen.python_path.split(":")):
        if os.path.isfile(f"{entry}/kdtree_patch/boot.py"):
            report.find(f"PYTHONPATH of the unit already has the patch, in {entry}: take it out there first")


# What an operator may not expect of a variable that we set.
_WHY = {"KDTREE_LOG_LEVEL": ": without the lines of level info no deployment can be confirmed"}


def _plan(order: dict[str, Any], seen: Look, report: Report) -> None:
    place: Place = seen.place
    release = place.releases / order["release"]
    mode = seen.mode(order["mode"])
    has = look.mode_of(seen.drop_in)
    kept = f", which the unit has: MODE={'shadow' if mode == 'on' else 'on'} changes it"
    report.fact("mode", mode + (kept if has and not order["mode"] else f" (now: {has or 'stock'})"))
    text = drop_in_text(release, seen.python_path, mode, seen.unit.user.pw_uid)
    report.data["running"] = look.release_of(seen.drop_in, place)
    if seen.pending:
        report.warn("a change of this unit was cut off before it was confirmed: this run puts that right first")
    if not release.exists():
        report.plan.append(f"create {release} (our files, wrapt and cupy for {report.data['probe']['tag']})")
        report.plan.append(f"compile the kernel into {release}/cache/{seen.unit.user.pw_uid}")
    target = os.readlink(place.current) if place.current.is_symlink() else None
    if target != f"releases/{release.name}":
        report.plan.append(f"link {place.current} -> releases/{release.name} (now: {target or 'none'})")
    if seen.drop_in != text:
        report.plan.append(f"write {seen.unit.drop_in}:")
        before, after = (seen.drop_in or "").splitlines(), text.splitlines()
        report.plan += [f"    {line}" for line in list(difflib.unified_diff(before, after, lineterm="", n=9))[2:]]
    confirmed = (seen.state or {}).get("release") == release.name and not seen.pending
    if seen.drop_in != text or not confirmed or not seen.unit.state().is_up:
        report.plan.append(f"systemctl daemon-reload, restart {seen.unit.name}, wait for /health, confirm every worker")
