"""Compiled kernels on disk: a directory that is ours alone, files that prove they are whole, one writer at a time.

Who may have written a file is answered by the directory: it belongs to our user, nobody else may write to it or to
what leads to it, and links are not followed. Whether a file is whole is answered by its last line, a digest over the
key and the content; this matters more than it seems, because the CUDA driver does not report a torn cubin, it crashes
the process. The digest is no signature: it tells accidents, not forgers.

`fetch` is the interface. A directory that cannot be used costs one warning line and is replaced by one under the
temporary directory.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kdtree_patch.log import get_logger

# How long a process waits for another one that is compiling the same thing: seconds until it says so, and until it
# compiles on its own.
WAIT_NOTICE = 5.0
WAIT_LIMIT = 300.0
_POLL = 0.05

# Files of earlier versions and other toolkits: the newest few stay, and any that was used this month.
_KEEP_FILES = 8
_KEEP_SECONDS = 30 * 86400.0
_TOUCH_SECONDS = 86400.0
# Something temporary this old was left by a process that was killed while it compiled or wrote.
_STALE_SECONDS = 3600.0

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TRAILER_START = b"\n# kdtree_patch sha256 "
_TRAILER_LENGTH = len(_TRAILER_START) + 64 + 1


class CacheUnusable(OSError):
    """A directory may not be used for compiled kernels; the message says why."""


@dataclass(frozen=True)
class Entry:
    """What `fetch` returns: the file, the key it was stored under, and whether its directory is to be removed
    at exit.
    """

    path: Path
    key: str
    temporary: bool = False


def trailer(key: str, payload: bytes) -> bytes:
    """The last line of a cached file. Loaders of ELF files, the CUDA driver's and the C library's, do not look behind
    the ELF image.
    """
    return _TRAILER_START + hashlib.sha256(key.encode() + payload).hexdigest().encode() + b"\n"


def default_directory() -> Path:
    """`$XDG_CACHE_HOME/kdtree_patch`, else `~/.cache/kdtree_patch`; relative paths are ignored, as that
    standard says.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "kdtree_patch"
    home = os.environ["HOME"] if "HOME" in os.environ else os.path.expanduser("~")
    if not os.path.isabs(home):
        raise CacheUnusable("no home directory is known")
    return Path(home) / ".cache" / "kdtree_patch"


# -------------------------------------------------------------------------------------------------------- one directory

# Lock files held by this process. A child made by fork shares the open file, and would keep the lock after our death:
# it closes them first.
_held_locks: set[int] = set()


def _forget_locks() -> None:
    for fd in _held_locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


class PrivateDirectory:
    """A directory that only our user can write to, held open, so that what was checked is what is used."""

    def __init__(self, path: Path, fd: int):
        self.path = path
        self._fd = fd

    @classmethod
    @contextlib.contextmanager
    def open(cls, wanted: Path, fresh: bool = False) -> Iterator[PrivateDirectory]:
        """Creates the directory where needed and checks it. Raises CacheUnusable, or an OSError that says as much.

        A `fresh` one was made a moment ago under a name that cannot be guessed: what is above it is not looked at.
        """
        parent = Path(os.path.realpath(wanted.parent))
        if not fresh:
            _check_ancestors(parent)
            _make_private(parent)
        path = parent / wanted.name
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise CacheUnusable("it is a symbolic link")
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid():
                raise CacheUnusable(f"it belongs to uid {info.st_uid}, this process runs as uid {os.geteuid()}")
            if info.st_mode & _OTHERS_WRITE:
                raise CacheUnusable(f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o})")
            yield cls(path, fd)
        finally:
            os.close(fd)

    def read(self, name: str, key: str, warn: bool = True) -> bytes | None:
        """The content stored under name and key, or None if there is none that can be trusted; a warning says why."""
        payload, why = self._read(name, key)
        if why is not None and warn:
            get_logger().warning("cached kernel %s %s: compiling it again", self.path / name, why)
        return payload

    def _read(self, name: str, key: str) -> tuple[bytes | None, str | None]:
        """The content, or what is wrong with it; neither if there is no such file."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            return None, None
        except OSError as error:
            return None, "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return None, "is not a plain file"
            if info.st_uid != os.geteuid():
                return None, f"belongs to uid {info.st_uid}"
            if info.st_mode & _OTHERS_WRITE:
                return None, "can be written by others"
            content = file.read()
            if info.st_mtime < time.time() - _TOUCH_SECONDS:
                with contextlib.suppress(OSError):
                    os.utime(fd)  # in use: not to be removed as old
        payload = content[:-_TRAILER_LENGTH]
        if not payload or content[-_TRAILER_LENGTH:] != trailer(key, payload):
            return None, "is torn or altered"
        return payload, None

    def store(self, name: str, key: str, payload: bytes) -> Path:
        """Puts a whole file in place at once: a reader sees the old one or the new one, never a part."""
        temporary = f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=self._fd), "wb") as file:
                file.write(payload)
                file.write(trailer(key, payload))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            raise
        # Not every file system can sync a directory; the rename is atomic without it.
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        return self.path / name

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """One process at a time. The kernel releases the lock of a process that dies. Who has waited too long goes on
        without it.
        """
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        _held_locks.add(fd)
        try:
            self._wait_for(fd, name)
            yield
        finally:
            _held_locks.discard(fd)
            os.close(fd)

    def _wait_for(self, fd: int, name: str) -> None:
        started = time.monotonic()
        noticed = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    return  # a file system without locks: at worst two processes compile, and the later rename wins
            waited = time.monotonic() - started
            if waited > WAIT_LIMIT:
                get_logger().warning(
                    "waited %.0f s for another process to compile (%s): compiling here too", waited, self.path / name
                )
                return
            if waited > WAIT_NOTICE and not noticed:
                noticed = True
                get_logger().info("waiting for another process that is compiling the kernel (%s)", self.path / name)
            time.sleep(_POLL)

    def prune(self, family: str, suffix: str) -> None:
        """Removes what earlier versions of the same target left behind, and what killed writers did."""
        now = time.time()
        ours = re.compile(re.escape(family) + "-[0-9a-f]{16}" + re.escape(suffix))
        kept: list[tuple[float, str]] = []
        for name in os.listdir(self._fd):
            with contextlib.suppress(OSError):
                info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if name.startswith(f".{family}-") and name.endswith(".tmp"):
                    if info.st_mtime >= now - _STALE_SECONDS:
                        continue
                    if stat.S_ISDIR(info.st_mode):
                        shutil.rmtree(self.path / name, ignore_errors=True)
                    else:
                        os.unlink(name, dir_fd=self._fd)
                elif ours.fullmatch(name):
                    kept.append((info.st_mtime, name))
        for modified, name in sorted(kept, reverse=True)[_KEEP_FILES:]:
            if modified < now - _KEEP_SECONDS:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)


def _make_private(directory: Path) -> None:
    """Like `mkdir -p`, but whatever is new is ours alone, whatever the umask."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(new, 0o700)


def _check_ancestors(directory: Path) -> None:
    """Whoever may write to a directory above can put another one in our place; only root, we and our own group may, or
    the sticky bit forbids it.
    """
    for ancestor in (directory, *directory.parents):
        try:
            info = os.stat(ancestor)
        except FileNotFoundError:
            continue  # ours to create, if what is above it passes
        if info.st_uid not in (0, os.geteuid()):
            raise CacheUnusable(f"{ancestor} above it belongs to uid {info.st_uid}")
        if info.st_mode & stat.S_ISVTX:
            continue
        foreign_group = info.st_gid not in (0, os.getegid())
        if info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and foreign_group):
            raise CacheUnusable(f"others may write to {ancestor} above it (mode {stat.S_IMODE(info.st_mode):04o})")


# ------------------------------------------------------------------------------------------- which directory it will be

_warned: set[str] = set()
_fresh_directory: tuple[int, Path] | None = None


def candidates(wanted: Path | None) -> Iterator[tuple[Callable[[], Path], bool]]:
    """Directories in the order in which they are tried, each with whether it is to be removed at exit.

    The second one is shared by the processes of our user, so that eight workers with an unwritable HOME still compile
    once. Somebody else may have taken its name, hence the third.
    """
    yield (lambda: Path(os.path.abspath(wanted)) if wanted is not None else default_directory()), False
    yield (lambda: Path(tempfile.gettempdir()) / f"kdtree_patch-{os.geteuid()}"), False
    yield _make_fresh_directory, True


def _make_fresh_directory() -> Path:
    global _fresh_directory
    if _fresh_directory is None or _fresh_directory[0] != os.getpid() or not _fresh_directory[1].is_dir():
        _fresh_directory = (os.getpid(), Path(tempfile.mkdtemp(prefix="kdtree_patch-")))
    return _fresh_directory[1]


def remove_at_exit(directory: Path) -> None:
    """Removes a temporary directory when this process ends, but not when a child that was forked from it does."""
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)


def first_usable(wanted: Path | None, use: Callable[[PrivateDirectory], Path]) -> tuple[Path, bool]:
    """Applies `use` to the first directory with which it raises no OSError. Returns its result and whether that is
    temporary.

    One warning for each directory that was passed over. Raises CacheUnusable if none will do.
    """
    problems: list[tuple[str, str]] = []
    for locate, temporary in candidates(wanted):
        name = "(by default)"
        try:
            directory = locate()
            name = str(directory)
            with PrivateDirectory.open(directory, fresh=temporary) as private:
                result = use(private)
                used = private.path
        except OSError as error:
            problems.append((name, error.strerror or str(error)))
            continue
        for name, why in problems:
            if name not in _warned:
                _warned.add(name)
                get_logger().warning(
                    "cache directory %s cannot be used (%s): using %s; KDTREE_CACHE_DIR names another", name, why, used
                )
        return result, temporary
    raise CacheUnusable("; ".join(f"{name}: {why}" for name, why in problems))


# ------------------------------------------------------------------------------------------------------------ interface


def fetch(family: str, suffix: str, key: str, make: Callable[[Path], bytes], wanted: Path | None) -> Entry:
    """The file `<family>-<key, 16 digits><suffix>`; `make` is called if it is missing or not whole, in one process at
    a time. It is given the directory, where `.<family>-*.tmp` is its own: what a kill leaves of it is removed later.

    Raises CacheUnusable if no directory will do, and what `make` raises (which must not be an OSError).
    """
    name = _file_name(family, suffix, key)
    made: list[bytes] = []

    def use(private: PrivateDirectory) -> Path:
        if private.read(name, key) is None:
            with private.lock(f"{family}.lock"):
                # Another process may have made it while we waited.
                if private.read(name, key, warn=False) is None:
                    made[:] = made or [make(private.path)]
                    private.store(name, key, made[0])
                    private.prune(family, suffix)
        return private.path / name

    path, temporary = first_usable(wanted, use)
    return Entry(path, key, temporary)


def look_up(family: str, suffix: str, key: str, wanted: Path | None) -> Path | None:
    """The file that `fetch` would return without a call of `make`, or None. Makes nothing, whoever asks: a directory
    that root made for a service would be one that the service refuses.
    """
    name = _file_name(family, suffix, key)
    for locate, temporary in candidates(wanted):
        if temporary:
            break
        with contextlib.suppress(OSError):
            directory = locate()
            if not directory.is_dir():
                if _can_be_made(directory):
                    break  # `fetch` would begin an empty one here
                continue
            with PrivateDirectory.open(directory) as private:
                return private.path / name if private.read(name, key, warn=False) is not None else None
    return None


def _can_be_made(directory: Path) -> bool:
    parent = Path(os.path.realpath(directory.parent))
    _check_ancestors(parent)
    return os.access(next(folder for folder in (parent, *parent.parents) if folder.exists()), os.W_OK | os.X_OK)


def _file_name(family: str, suffix: str, key: str) -> str:
    return f"{family}-{key[:16]}{suffix}"


def is_whole(entry: Entry) -> bool:
    """Whether a file that another process of ours has stored is still there and good."""
    try:
        with PrivateDirectory.open(entry.path.parent, fresh=entry.temporary) as private:
            return private.read(entry.path.name, entry.key) is not None
    except OSError:
        return False
