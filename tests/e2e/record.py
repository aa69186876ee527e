"""What a run has found so far: the document that `--json` names, its bars, and its lines of progress.

The file is written anew after each finding, so that a run that is killed keeps what it has; until the run ends, it has
a missed bar that says so. A disk that is full ends no run: what it has found is shown at its end.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdtree_patch import exits
from kdtree_patch.exits import NotDone
from tests.e2e.client import ServiceError
from tests.e2e.server import Server

CARRIED_THROUGH = "the run was carried through"
UNDER_WAY = {"bar": CARRIED_THROUGH, "ok": False, "found": "it is under way, or was killed"}


class Record:
    """`document` is {"meta": {...}, "verdict": [{"bar", "ok", "found"}], "servers": {...}, and a key for each run}."""

    def __init__(self, path: Path | None, command: str, quiet: bool = False):
        self._path = path
        self._quiet = quiet
        self._began = time.monotonic()
        self._folders: tuple[Path, ...] = ()
        self._ended = False
        self.unsaved: NotDone | None = None  # why the file does not have what the document has
        self.document: dict[str, Any] = {
            "meta": {"command": command, "date": datetime.date.today().isoformat()},
            "verdict": [],
            "servers": {},
        }

    def below(self, *folders: Path) -> None:
        """In the file, what is below one of these is named from there: it tells of the run, and not of who ran it."""
        self._folders = folders

    def say(self, text: str) -> None:
        if not self._quiet:
            minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
            exits.complain("e2e", f"{minutes:2}:{seconds:02} {text}")

    def bar(self, bar: str, ok: bool, found: object) -> bool:
        """What had to be so, whether it was, and what was found."""
        self.document["verdict"].append({"bar": bar, "ok": bool(ok), "found": str(found)})
        self.say(f"{'ok  ' if ok else 'MISS'} {bar}: {found}")
        self.save()
        return bool(ok)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A server that fails costs the bars that need it, and no others."""
        try:
            yield
        except ServiceError as error:
            self.bar(f"{what} could be run", False, error)

    def server(self, server: Server) -> None:
        """Keeps what a server's log says, before it is stopped."""
        kdtree = server.kdtree
        self.document["servers"][server.spec.name] = {
            "ready_s": None if server.ready_s is None else round(server.ready_s, 1),
            "options": list(server.spec.options),
            "environ": dict(server.spec.environ),
            # Layer lines come by the thousand.
            "lines": [line.text for line in kdtree if not line.is_layer][:40],
        }
        self.save()

    def end(self) -> None:
        """From now on the file says what the bars say."""
        self._ended = True
        self.save()

    def save(self) -> None:
        self.document["meta"]["seconds"] = round(time.monotonic() - self._began, 1)
        if self._path is not None:
            verdict = [*self.document["verdict"], *(() if self._ended else (UNDER_WAY,))]
            document = relative(finite(self.document | {"verdict": verdict}), self._folders)
            text = json.dumps(document, indent=1, allow_nan=False) + "\n"
            before, self.unsaved = self.unsaved, None
            try:
                exits.write(self._path, lambda part: part.write_text(text), "--json")
            except NotDone as error:
                self.unsaved = error
                if before is None:
                    self.say(f"{error}; the run goes on")


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def relative(value: Any, folders: Sequence[Path]) -> Any:
    """Paths in all words without those of `folders` that they begin with; the first one that fits counts."""
    if isinstance(value, str):
        prefixes = "|".join(re.escape(f"{folder}/") for folder in folders if folder != folder.parent)
        # Not in the middle of a longer path.
        return re.sub(rf"(?<![\w./-])(?:{prefixes})", "", value) if prefixes else value
    if isinstance(value, dict):
        return {name: relative(one, folders) for name, one in value.items()}
    return [relative(one, folders) for one in value] if isinstance(value, list) else value
