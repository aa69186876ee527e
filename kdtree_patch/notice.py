"""How one worker tells the others of its service on this host that its guard has tripped: a file in /dev/shm.

Whoever trips posts it; the others look for it once a step, find it, and go stock as well. Nobody waits for anybody, so
nobody can wait in vain, and no collective carries it. It does not matter that they switch a step or a few apart: the
attention of a rank covers its own heads, and both results are whole and right to rounding, so each rank goes on to the
same collectives in the same order, and all of them sample from the same reduced values.

Which service, the parent process tells: SGLang's schedulers are children of one process. Its start time makes a
restarted service another one, and the namespace of process ids tells apart containers that share the folder. A parent
may outlive its service, as under Ray, so a notice counts only while whoever posted it lives. The folder is in memory:
to look there can neither block nor take long, as in a home on a network. Anybody may write to it, so no link is
followed, and a file is believed only if nobody else can have made it. Knows the log and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from pathlib import Path
from typing import Final

from kdtree_patch import log

FOLDER = Path("/dev/shm")
MAX_BYTES: Final = 200

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: not for the other end of a pipe, nor for the lease of somebody else's file.
_LOOK: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class Notice:
    """The notice of one service. Its name is worked out here, once; `path` is None where that cannot be done, and then
    nobody is told. Nothing of it raises.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._why_none = ""
        try:
            self.path = FOLDER / name_of_service()
        except (OSError, ValueError, IndexError) as error:
            self._why_none = f"{type(error).__name__}: {error}"
        # What `look` asks for in each step, and believes: the name, who has posted it, since when that one runs.
        self._asked = None if self.path is None else str(self.path)
        self._line = re.compile(rf"{re.escape(self.path.name if self.path else '')} (\d+) (\d+) (.*)")

    def post(self, text: str) -> None:
        """Tells the others, in one short line. If one of them has done so before, that one's words stay.

        It appears whole: written under another name first, which is then linked to the one that is looked for.
        """
        if self.path is None:
            self._could_not(self._why_none)
            return
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            words = f"{self.path.name} {os.getpid()} {start_time(os.getpid())} {log.one_line(text)}\n"
            descriptor = os.open(part, _NEW_FILE, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    os.fchmod(descriptor, 0o600)  # whatever the umask
                    file.write(words.encode()[:MAX_BYTES])
                try:
                    os.link(part, self.path)
                except FileExistsError:
                    if self.look() is None:  # of somebody who has ended; what is another user's cannot be replaced
                        os.replace(part, self.path)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(part)
        except (OSError, ValueError, IndexError) as error:
            self._could_not(f"{type(error).__name__}: {error}")

    def look(self) -> str | None:
        """What another worker has posted, with its process id behind it, or None: once a step, and at the cost of one
        system call if there is nothing.

        Believed is a plain file, no link, of our own user, that nobody else can write to and that begins with its own
        name: so it is none of ours that somebody else has given that name by a link. And whoever posted it must live.
        """
        if self._asked is None or not os.access(self._asked, os.F_OK, follow_symlinks=False):
            return None
        try:
            descriptor = os.open(self._asked, _LOOK)
        except OSError:
            return None
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & _OTHERS_WRITE:
                return None
            words = log.one_line(os.read(descriptor, MAX_BYTES).decode(errors="replace"))
        except OSError:
            return None
        finally:
            os.close(descriptor)
        said = self._line.fullmatch(words)
        return f"{said[3]} of_pid={said[1]}" if said and _lives(int(said[1]), int(said[2])) else None

    @staticmethod
    def _could_not(why: str) -> None:
        log.get_logger().error(
            "the other ranks cannot be told that the guard has tripped (%s): each goes on with the kernel until its "
            "own guard trips; for stock in all of them restart with KDTREE_MODE=off",
            why,
        )


def name_of_service() -> str:
    """The name of the file, the same in all workers that one process has started. Raises OSError, ValueError or
    IndexError where /proc does not say.
    """
    parent = os.getppid()
    if os.readlink("/proc/self") != str(os.getpid()):
        raise ValueError("/proc is that of another namespace of process ids")
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"kdtree-tripped-{os.geteuid()}-{parent}-{start_time(parent)}-{namespace}"


def _lives(process: int, began: int) -> bool:
    try:
        return start_time(process) == began
    except (OSError, ValueError, IndexError):
        return False


def start_time(process: int) -> int:
    """When a process was started, in clock ticks since the boot: field 22 of its stat."""
    # The second field is a name in parentheses, which may have spaces and parentheses of its own.
    return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
