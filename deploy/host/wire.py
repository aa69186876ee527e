"""How code and answers travel: a zip of this package on standard input, one JSON line back.

`LOADER` is the program that a Python on the host is started with. It keeps the zip in memory, so that looking at a host
writes nothing on it, and runs `deploy.host.main` with the words that follow it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import traceback
from typing import Any

# Of the host itself, never the service's: see docs/architecture.md.
PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3", "/usr/libexec/platform-python")
LOADER = (
    "import base64,os,sys;"
    "z=os.memfd_create('kdtree');"
    "open(z,'wb',closefd=False).write(base64.b64decode(sys.stdin.readline()));"
    "sys.path.insert(0,'/proc/self/fd/%d'%z);"
    "from deploy.host.main import main;"
    "main()"
)
_ANSWER = "kdtree-answer "


def say(answer: dict[str, Any]) -> None:
    """The answer of this process, as the last line of its standard output."""
    sys.stdout.flush()
    print(_ANSWER + json.dumps(answer), flush=True)


def line(text: str) -> None:
    """Prints one line. Some of its words are the service's: a line feed in them would begin another line, which might
    look like an answer. And that nobody can be told, because the journal is gone, is no reason to stop half way.
    """
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), flush=True)


def printable(text: str) -> str:
    """Without what moves a terminal's cursor, ends a line, or cannot be encoded."""
    return "".join(character if character.isprintable() else " " for character in text)


def python_in(output: str) -> str | None:
    """The interpreter that a host has named, in its last line: a login shell may greet before it does what it is asked
    to. Nothing else goes into a command line.
    """
    last = output.strip().rpartition("\n")[2].strip()
    return last if last in PYTHONS else None


def answer_in(output: str) -> dict[str, Any] | None:
    """The answer among what a process printed; None if it did not come to it."""
    for line in reversed(output.splitlines()):
        if line.startswith(_ANSWER):
            answer: dict[str, Any] = json.loads(line[len(_ANSWER) :])
            return answer
    return None


def own_zip() -> bytes:
    """The zip that this process was started from."""
    for entry in sys.path:
        if entry.startswith("/proc/self/fd/"):
            with open(entry, "rb") as file:
                return file.read()
    raise RuntimeError("this process was not started by LOADER")


def as_line(archive: bytes) -> str:
    return base64.b64encode(archive).decode() + "\n"


def packed(order: dict[str, Any]) -> str:
    """An order as one word of a command line: nothing in it means anything to any shell."""
    return base64.urlsafe_b64encode(json.dumps(order).encode()).decode()


def unpacked(word: str) -> dict[str, Any]:
    order: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word))
    return order


def quiet_stdout() -> int:
    """What is printed from now on goes to standard error. Returns a descriptor of what was standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def is_answer(line: str) -> bool:
    return line.startswith(_ANSWER)


def reason(error: BaseException) -> str:
    """One line for an error that nobody has foreseen: what it says, and where it comes from."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, OSError):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" in {os.path.basename(last[0].filename)}:{last[0].lineno}" if last else ""
    return f"unexpected {type(error).__name__}{where}: {text}; this is a fault of kdtree_patch, please report it"
