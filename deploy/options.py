"""What the operator wrote after `make deploy`, held to what it may be before anything is done with it.

The words arrive in environment variables of our own (DEPLOY_HOST and so on), which the Makefile fills without letting
make or a shell expand them. Here each is either understood or refused: nothing is quoted, escaped or repaired. Behind
this module every host name, unit name and path is made of characters that mean nothing to a shell, to systemd's unit
files or to PYTHONPATH.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import PurePosixPath

from kdtree_patch.settings import MODES

NAMES = ("HOST", "HOSTS", "UNIT", "MODE", "PREFIX", "TIMEOUT", "DRY_RUN", "FORCE")
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?"
)
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]*")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._+-]+)+")


class UsageError(Exception):
    """What was written cannot be meant; the message says what can."""


@dataclass(frozen=True)
class Host:
    """Where ssh goes. `name` may be an alias of ~/.ssh/config, or an IPv6 address, without its brackets."""

    name: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return (f"{self.user}@" if self.user else "") + name + (f":{self.port}" if self.port else "")


@dataclass(frozen=True)
class Options:
    hosts: tuple[Host, ...]
    unit: str
    mode: str | None = None  # the one that the unit has, and "on" if it has none
    prefix: str = "/opt/kdtree"
    timeout: int = 1200
    dry_run: bool = False
    force: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Options:
        """Raises UsageError with the first thing that is wrong."""
        unknown = environ.get("DEPLOY_UNKNOWN", "").split()
        if unknown:
            raise UsageError(f"{unknown[0]} means nothing here, {', '.join(NAMES)} do")
        given = {name: environ.get(f"DEPLOY_{name}", "") for name in NAMES}
        words = [*given["HOST"].split(), *given["HOSTS"].split()]
        if len(given["HOST"].split()) > 1:
            raise UsageError(f"HOST={given['HOST']!r} is more than one word: several hosts go into HOSTS")
        hosts = tuple(dict.fromkeys(_host(word) for word in words))
        if not hosts:
            raise UsageError("HOST is missing: HOST=root@h1, or HOSTS='root@h1 root@h2'")
        return cls(
            hosts=hosts,
            unit=_unit(given["UNIT"]),
            mode=_one_of("MODE", given["MODE"], MODES) if given["MODE"] else None,
            prefix=_prefix(given["PREFIX"] or "/opt/kdtree"),
            timeout=_seconds(given["TIMEOUT"] or "1200"),
            dry_run=_flag("DRY_RUN", given["DRY_RUN"]),
            force=_flag("FORCE", given["FORCE"]),
        )


def _host(word: str) -> Host:
    match = _HOST.fullmatch(word)
    user, _, rest = word.rpartition("@")
    if match is None and _is_address(rest):
        raise UsageError(f"HOST={word!r}: an IPv6 address goes into brackets: HOST={user and user + '@'}[{rest}]")
    if match is None or match["address"] and not _is_address(match["address"]):
        raise UsageError(
            f"HOST={word!r} is no host: allowed is [USER@]NAME[:PORT] of letters, digits, '.', '_' and '-', with an "
            "IPv6 address in brackets for NAME; whatever else ssh needs goes into ~/.ssh/config, under a NAME"
        )
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 0 < port < 65536:
        raise UsageError(f"HOST={word!r}: there is no port {port}, allowed are 1 to 65535")
    return Host(match["name"] or match["address"], match["user"], port)


def _is_address(text: str) -> bool:
    try:
        return "%" not in text and bool(IPv6Address(text))
    except ValueError:
        return False


def _unit(text: str) -> str:
    if not text:
        raise UsageError("UNIT is missing: the systemd unit of the service, UNIT=sglang-k26-ddtree")
    name = text if text.endswith(".service") else f"{text}.service"
    if not _UNIT.fullmatch(name) or len(name) > 255:
        raise UsageError(
            f"UNIT={text!r} is no name of a service unit: letters, digits, ':', '_', '.', '-', '@' and '\\\\', as "
            "`systemctl list-units` has it"
        )
    if name.endswith("@.service"):
        raise UsageError(f"UNIT={text!r} is a template: name an instance of it, such as {text.split('@')[0]}@0")
    return name


def _prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text) or ".." in PurePosixPath(text).parts or "." in text.split("/"):
        raise UsageError(
            f"PREFIX={text!r} is refused: allowed is an absolute path of letters, digits, '.', '_', '+' and '-': "
            "it goes into PYTHONPATH and into a unit file"
        )
    return text


def _seconds(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 1 <= int(text) <= 86400:
        raise UsageError(f"TIMEOUT={text!r} is refused: allowed are 1 to 86400 seconds")
    return int(text)


def _one_of(name: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise UsageError(f"{name}={text!r} is refused: allowed are {', '.join(allowed)}")
    return text


def _flag(name: str, text: str) -> bool:
    return _one_of(name, text or "0", ("0", "1")) == "1"


def operator() -> str:
    """Who is at work, for the record on the host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no variable says it, and the user database does not know the number
        user = str(os.getuid())
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", f"{user}@{os.uname().nodename}")
