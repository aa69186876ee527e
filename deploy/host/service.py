"""The service as it runs: its health, its journal, and whether its workers say what they should.

A start is told from every other by systemd's invocation id, which each journal line carries too: a line of an earlier
start can never be taken for one of this start.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.host.systemd import Unit, last_word, run
from kdtree_patch.notice import start_time
from kdtree_patch.service_command import Command

PREFIX = "[kdtree] "
# A start that goes on says something at least this often.
_PROGRESS_SECONDS = 5.0
_POLL_SECONDS = 0.5
# For /health, which generates a token in newer releases. The same whenever it is asked: a service that is as slow after
# a deployment as it was before it must not be waited for in vain.
_HEALTH_SECONDS = 10.0
# After /health: for the lines that are still on their way, and for the first answer, which may compile something.
_LINES_SECONDS = 10.0
_GENERATE_SECONDS = 180.0
# rel of a validated layer: bf16 rounds to about 2e-3, and a wrong answer is near 1.
REL_LIMIT = 0.02
# With an fp8 KV pool the stock kernel itself rounds queries and weights to fp8: as in kdtree_patch/report_judge.py.
FP8_REL_LIMIT = 0.3

Say = Callable[[str], None]


class Failed(Exception):
    """The service is not what it should be; the message is the reason, `lines` what its journal says to that."""

    def __init__(self, reason: str, lines: Sequence[str] = ()):
        super().__init__(reason)
        self.lines = list(lines)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    """To this very host: no proxy, and a certificate that is made out to another name is no reason to fail."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), NoRedirect())
    return urllib.request.build_opener(*handlers)


def healthy(url: str) -> bool:
    try:
        with _opener().open(f"{url}/health", timeout=_HEALTH_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def generate(url: str, command: Command) -> None:
    """A few tokens, with the draft tokens that they take verified. Raises Failed."""
    headers = {"Content-Type": "application/json"}
    key = command.option("--api-key")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    question = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(question).encode(), headers)
    try:
        with _opener().open(request, timeout=_GENERATE_SECONDS) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise Failed(f"/generate answered {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"/generate did not answer: {getattr(error, 'reason', error)}") from error


# -------------------------------------------------------------------------------------------------------------- journal


@dataclass(frozen=True)
class Line:
    pid: str
    text: str

    @property
    def is_ours(self) -> bool:
        return self.text.startswith(PREFIX)


class Journal:
    """The lines of one start, each read once."""

    def __init__(self, invocation: str, secrets: Sequence[str] = ()):
        self._match = f"_SYSTEMD_INVOCATION_ID={invocation}"
        self._cursor: str | None = None
        self._secrets = list(secrets)
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """What has come since the last time."""
        words = ["journalctl", "--quiet", "--no-pager", "--output=json", "--output-fields=MESSAGE,_PID", self._match]
        if self._cursor is not None:
            words.append(f"--after-cursor={self._cursor}")
        found = []
        for text in run(*words, check=False).splitlines():
            try:
                entry = json.loads(text)
            except ValueError:
                continue
            self._cursor = entry["__CURSOR"]
            message = entry.get("MESSAGE") or ""
            if isinstance(message, list):  # not UTF-8
                message = bytes(message).decode(errors="replace")
            found.append(Line(str(entry.get("_PID", "")), self.clean(message)))
        self.lines += found
        return found

    def clean(self, text: str) -> str:
        """The line without what is secret: SGLang prints its arguments when it starts, the API key among them."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _SECRET.sub(r"\1***", text)

    def ours(self, word: str = "") -> list[Line]:
        return [line for line in self.lines if line.text.startswith(PREFIX + word)]

    def last(self) -> str:
        return self.lines[-1].text[:160] if self.lines else "nothing yet"


def installed(journal: Journal, main_pid: int) -> set[str]:
    """The workers of a start that have said so. Those of the start before it may outlive that (KillMode=process) and
    write into this one's journal: they are older than its main process.
    """
    began = began_at(main_pid)
    pids = {line.pid for line in journal.ours("installed ")}
    return {pid for pid in pids if began is None or (at := began_at(pid)) is None or at >= began}


def began_at(pid: int | str) -> int | None:
    """When a process began, in clock ticks since the host did; None if there is none of that number."""
    try:
        return start_time(int(pid))
    except (OSError, IndexError, ValueError):
        return None


_SECRET = re.compile(
    r"(?i)([\w-]*(?:api_?key|token|secret|passw(?:or)?d)[\w-]*['\"]?\s*[=:]\s*['\"]?)(?=[^\s'\",)])[^\s'\",)]+"
)


def relevant(lines: Sequence[Line], count: int = 12) -> list[str]:
    """What explains a failure: our lines that say no, errors, and the end."""
    wrong = re.compile(r"\[kdtree\] (ERROR|WARNING|declined|disabled)|Traceback|Error\b|error:|FATAL|CUDA|Killed")
    picked = [line for line in lines if wrong.search(line.text)][-count:]
    tail = list(lines[-count:])
    return [line.text[:400] for line in dict.fromkeys([*picked, *tail])]


# ---------------------------------------------------------------------------------------------------------------- start


@dataclass
class Start:
    """One start of a unit, watched from the restart on."""

    unit: Unit
    url: str
    before: str  # the invocation that was to end
    journal: Journal = field(default_factory=lambda: Journal("0" * 32))
    invocation: str = ""

    def wait(self, timeout: float, say: Say, secrets: Sequence[str], workers_must_serve: bool) -> None:
        """Until /health answers. Raises Failed as soon as it is certain that it will not."""
        started = time.monotonic()
        next_line = started
        while True:
            now = time.monotonic()
            state = self.unit.state()
            if state.invocation != self.before and state.invocation and not self.invocation:
                self.invocation = state.invocation
                self.journal = Journal(self.invocation, secrets)
            if self.invocation:
                self.journal.read()
                self._check(state.invocation, state.active, state.sub, state.restarts, state.result)
                if workers_must_serve:
                    self._check_lines()
            elif state.active in ("inactive", "failed") and not state.has_job:
                said = last_word(self.unit.name)
                raise Failed(f"{self.unit.name} was stopped and systemd does not start it again ({said})")
            well = bool(self.invocation) and healthy(self.url)
            if well and self.unit.state().invocation == self.invocation:
                say(f"{now - started:5.0f} s  /health answers")
                return
            if now - started > timeout:
                raise Failed(f"/health did not answer within {timeout:.0f} s")
            if now >= next_line:
                next_line = now + _PROGRESS_SECONDS
                where = self.journal.last() if self.invocation else "the old process is being stopped"
                say(f"{now - started:5.0f} s  {state.active} ({state.sub}), no answer on /health; last line: {where}")
            time.sleep(_POLL_SECONDS)

    def _check(self, invocation: str, active: str, sub: str, restarts: int, result: str) -> None:
        if invocation != self.invocation or restarts or sub == "auto-restart":
            raise Failed(f"{self.unit.name} ended and was started again by systemd ({result}): it is in a loop")
        if active in ("failed", "inactive", "deactivating"):
            raise Failed(f"{self.unit.name} ended while it was starting ({active}, {result})")

    def _check_lines(self) -> None:
        for line in self.journal.lines:
            if _DECLINED.match(line.text):
                raise Failed(f"a worker declined: {line.text}")

    def confirm(self, workers: int, command: Command, mode: str, validates: bool, say: Say) -> None:
        """That every worker of this start serves, with calls that are checked. `validates`: the workers log how far
        each layer is off. Raises Failed.
        """
        if mode == "off":
            say("mode off: the workers load nothing, so there is nothing to confirm")
            return
        main_pid = self.unit.state().main_pid
        self._wait_for(lambda: len(installed(self.journal, main_pid)) >= workers)
        self._check_lines()
        count = len(installed(self.journal, main_pid))
        if count < workers:
            raise Failed(f"{count} of {workers} workers logged `installed`")
        say(f"{count} of {workers} workers: installed")
        for line in self.journal.ours("installed "):
            say(f"    {line.text}")
        generate(self.url, command)
        self._wait_for(lambda: bool(self.journal.ours("shapes ")))
        shapes = self.journal.ours("shapes ")
        if not shapes:
            raise Failed("/generate was answered, but no verify call came to the patch: no worker logged `shapes`")
        say(f"verify calls arrive: {shapes[-1].text}")
        if validates:
            self._wait_for(lambda: bool(self._layers()))
            if not self._layers():
                generate(self.url, command)  # the lines of a CUDA graph may only come with the next request
                self._wait_for(lambda: bool(self._layers()))
        self._validated(validates, say)
        for word in ("disabled ", "ERROR "):
            for line in self.journal.ours(word):
                raise Failed(f"a worker says: {line.text}")
        state = self.unit.state()
        self._check(state.invocation, state.active, state.sub, state.restarts, state.result)
        if not healthy(self.url):
            raise Failed("/health does not answer any more after the first request")

    def _layers(self) -> list[tuple[re.Match[str], Line]]:
        return [(match, line) for line in self.journal.ours("L") if (match := _LAYER.search(line.text))]

    def _validated(self, validates: bool, say: Say) -> None:
        found = self._layers()
        if validates and not found:
            say("warning: validation is on, and no layer has been compared yet: see `make logs` after some requests")
        fp8 = any(_FP8_KERNEL.search(line.text) for line in self.journal.ours("installed "))
        limit = FP8_REL_LIMIT if fp8 else REL_LIMIT
        for match, line in found:
            if not float(match[1]) <= limit:  # NaN too
                raise Failed(f"validation: rel is above {limit}: {line.text}")
        if found:
            say(f"validation: {len(found)} layer lines, largest rel {max(float(match[1]) for match, _ in found):.2e}")

    def _wait_for(self, there: Callable[[], bool]) -> None:
        until = time.monotonic() + _LINES_SECONDS
        self.journal.read()
        while not there() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self.journal.read()


_DECLINED = re.compile(r"\[kdtree\] (ERROR )?declined .*the service runs stock$")
_FP8_KERNEL = re.compile(r" target=\S+-fp8_")
_LAYER = re.compile(r"^\[kdtree\] L\d+ .*\brel=(\S+)")
