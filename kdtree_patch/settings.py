"""The environment variables `KDTREE_*`, read once into one frozen `Settings`, or refused with one clear error.

There is no third way: a value that is not understood is never replaced by a default, because an operator who mistypes
`shadow` must not get `on`. The caller logs the error and leaves the service as it is.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "KDTREE_"
MODES = ("on", "shadow", "off")
FLAGS = ("0", "1")
FORWARD_MODES = ("verify", "draft_extend", "extend")
CONFIGS = ("auto", "portable", "hopper")
LOG_LEVELS = ("info", "warning", "error")
# How far the stock result is from float64 with an fp8 KV pool, since it rounds queries and weights to fp8 before it
# multiplies: so far at least a guard's limit must be. Random inputs give 0.03 to 0.2.
FP8_STOCK_REL = 0.3
# A guard's limit at most. Its square is compared, so there must be a bound; a result that has nothing to do with
# stock's is near 1.
MOST_REL = 1_000_000

VARIABLES = (
    "KDTREE_MODE",
    "KDTREE_VALIDATE",
    "KDTREE_VALIDATE_EVERY",
    "KDTREE_GUARD_REL",
    "KDTREE_GUARD_DUMP",
    "KDTREE_SELFTEST",
    "KDTREE_CONFIG",
    "KDTREE_FORWARD_MODES",
    "KDTREE_CACHE_DIR",
    "KDTREE_LOG_LEVEL",
)


class SettingError(ValueError):
    """A variable that is not understood. `str()` says which, its value, what is allowed, and what happens now."""

    def __init__(self, variable: str, value: str, allowed: str):
        super().__init__(f"{variable}={value!r} is not understood: {allowed}; the service runs stock")
        self.variable = variable
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True)
class Settings:
    """What the operator asked for. The defaults are what an empty environment means."""

    mode: str = "on"
    validate: bool = False
    validate_every: int = 1
    forward_modes: frozenset[str] = frozenset({"verify"})
    cache_dir: Path | None = None
    log_level: str = "info"
    guard_rel: float | None = None
    guard_dump: Path | None = None
    selftest: bool = True
    config: str = "auto"

    @property
    def compares(self) -> bool:
        """True if stock results are computed beside ours: to log how far they differ, or to act on it."""
        return self.validate or self.guard_rel is not None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Reads every KDTREE_* variable of `environ`. An empty value counts as unset, as unit files leave it."""
        given = {name: value.strip() for name, value in environ.items() if name.startswith(PREFIX) and value.strip()}
        _refuse_unknown_names(given)
        mode = _one_of(given, "KDTREE_MODE", MODES)
        return cls(
            mode=mode,
            # Shadow mode exists to compare, so it validates whatever KDTREE_VALIDATE says.
            validate=_one_of(given, "KDTREE_VALIDATE", FLAGS) == "1" or mode == "shadow",
            validate_every=_positive(given, "KDTREE_VALIDATE_EVERY", 1),
            forward_modes=_some_of(given, "KDTREE_FORWARD_MODES", FORWARD_MODES),
            cache_dir=_folder(given, "KDTREE_CACHE_DIR"),
            log_level=_one_of(given, "KDTREE_LOG_LEVEL", LOG_LEVELS),
            guard_rel=_limit(given, "KDTREE_GUARD_REL"),
            guard_dump=_guard_dump(given),
            selftest=_one_of(given, "KDTREE_SELFTEST", FLAGS[::-1]) == "1",
            config=_one_of(given, "KDTREE_CONFIG", CONFIGS),
        )


def _refuse_unknown_names(given: Mapping[str, str]) -> None:
    """A misspelt variable would otherwise be an ignored one."""
    for name in sorted(given):
        if name not in VARIABLES:
            nearest = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)[0]
            raise SettingError(name, given[name], f"there is no such variable, the nearest is {nearest}")


def _one_of(given: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """The default is the first of `allowed`."""
    value = given.get(name, allowed[0])
    if value.lower() not in allowed:
        raise SettingError(name, value, f"allowed are {_listed(allowed)}")
    return value.lower()


def _some_of(given: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> frozenset[str]:
    """A comma list, of at least one. The default is the first of `allowed`."""
    value = given.get(name, allowed[0])
    chosen = frozenset(part.strip().lower() for part in value.split(","))
    if not chosen <= set(allowed):
        raise SettingError(name, value, f"allowed is a comma list of {_listed(allowed)}")
    return chosen


def _positive(given: Mapping[str, str], name: str, default: int) -> int:
    value = given.get(name, str(default))
    if not re.fullmatch("0*[1-9][0-9]{0,8}", value):
        raise SettingError(name, value, "allowed is a whole number from 1 to 999999999")
    return int(value)


def _folder(given: Mapping[str, str], name: str) -> Path | None:
    """Absolute, because every process of a service resolves a relative path against its own working directory."""
    if name not in given:
        return None
    try:
        folder = Path(given[name]).expanduser()
    except RuntimeError:  # "~somebody" whose home is not known
        folder = Path()
    if not folder.is_absolute():
        raise SettingError(name, given[name], "allowed is an absolute path")
    return folder


def _limit(given: Mapping[str, str], name: str) -> float | None:
    if name not in given:
        return None
    written = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", given[name])
    limit = float(given[name]) if written else 0.0
    # 0 would trip on rounding, so it can only be a mistake for "no limit".
    if not 0 < limit <= MOST_REL:
        raise SettingError(name, given[name], f"allowed is a number above 0 and up to {MOST_REL}, for example 0.05")
    return limit


def _guard_dump(given: Mapping[str, str]) -> Path | None:
    """Looked at now, because the moment at which the guard trips comes once, and is too late to find out."""
    name = "KDTREE_GUARD_DUMP"
    folder = _folder(given, name)
    if folder is None:
        return None
    if "KDTREE_GUARD_REL" not in given:
        raise SettingError(name, given[name], "it needs KDTREE_GUARD_REL, which is not set")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise SettingError(name, given[name], "allowed is a folder that exists and that the service can write to")
    return folder


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
