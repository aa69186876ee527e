"""The cache on disk: private, whole or refused, one compilation among many processes, and never a reason to fail."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdtree_patch import cache
from kdtree_patch import compile as compiling
from tests.support.small_sources import HOST_SOURCE, CountingCompiler, kernels_folder, python

PAYLOAD = b"\x7fELF" + bytes(range(256)) * 64
KEY = "0123456789abcdef" * 4
NAME = f"kernel-{KEY[:16]}.bin"


class Maker:
    """Stands for the compiler."""

    def __init__(self, payload: bytes = PAYLOAD):
        self.payload = payload
        self.calls = 0

    def __call__(self, directory: Path) -> bytes:
        self.calls += 1
        return self.payload


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where caches go that cannot be where they should."""
    directory = tmp_path / "temporary"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_fresh_directory", None)
    return directory


@pytest.fixture
def maker() -> Maker:
    return Maker()


def fetch(maker: Maker, wanted: Path | None, key: str = KEY) -> cache.Entry:
    return cache.fetch("kernel", ".bin", key, maker, wanted)


def content(path: Path, key: str = KEY) -> bytes:
    """The payload of a cached file; fails if the file is not whole."""
    data = path.read_bytes()
    payload = data[: -len(cache.trailer(key, b""))]
    assert data == payload + cache.trailer(key, payload)
    return payload


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("[kdtree] WARNING")]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file or directory somebody else's; as far as this process can tell, if it may not do that."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        return
    inode, real = path.stat().st_ino, os.fstat

    def fstat(fd: int) -> os.stat_result:
        info = real(fd)
        return os.stat_result((*info[:4], info.st_uid + 1, *info[5:10])) if info.st_ino == inode else info

    monkeypatch.setattr(os, "fstat", fstat)


# ------------------------------------------------------------------------------------------------------------- ordinary


def test_second_fetch_finds_what_the_first_one_made(tmp_path: Path, maker: Maker, capsys: pytest.CaptureFixture[str]):
    first = fetch(maker, tmp_path / "cache")
    second = fetch(maker, tmp_path / "cache")
    assert first == second == cache.Entry(tmp_path / "cache" / NAME, KEY)
    assert maker.calls == 1
    assert content(first.path) == PAYLOAD
    assert cache.is_whole(first)
    assert warnings(capsys) == []


def test_looking_up_makes_nothing_and_finds_what_a_fetch_would(tmp_path: Path, maker: Maker):
    def look(key: str = KEY) -> Path | None:
        return cache.look_up("kernel", ".bin", key, tmp_path / "a" / "cache")

    assert look() is None and not (tmp_path / "a").exists()
    entry = fetch(maker, tmp_path / "a" / "cache")
    before = sorted(path.name for path in entry.path.parent.iterdir())
    assert look() == entry.path and look("0" * 64) is None
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    assert look() is None
    assert sorted(path.name for path in entry.path.parent.iterdir()) == before


def test_looking_up_goes_on_where_a_fetch_would(tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch):
    """The wanted directory cannot be used: the one under the temporary directory is where the file is."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    wanted = tmp_path / "open" / "cache"
    entry = fetch(maker, wanted)
    assert entry.path.parent != wanted and cache.look_up("kernel", ".bin", KEY, wanted) == entry.path
    assert not wanted.exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache.look_up("kernel", ".bin", KEY, tmp_path / "locked" / "cache") == entry.path


def test_everything_is_ours_alone_whatever_the_umask(tmp_path: Path, maker: Maker):
    before = os.umask(0)
    try:
        path = fetch(maker, tmp_path / "a" / "b" / "cache").path
    finally:
        os.umask(before)
    for directory in (tmp_path / "a", tmp_path / "a" / "b", path.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_directory() == tmp_path / ".cache" / "kdtree_patch"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.default_directory() == tmp_path / ".cache" / "kdtree_patch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_directory() == tmp_path / "xdg" / "kdtree_patch"


def test_another_key_is_another_file(tmp_path: Path):
    other = "f" * 64
    assert fetch(Maker(b"one"), tmp_path / "cache").path != fetch(Maker(b"two"), tmp_path / "cache", other).path


def test_failure_of_the_compiler_is_passed_on_and_leaves_nothing(tmp_path: Path, maker: Maker):
    def fail(directory: Path) -> bytes:
        raise compiling.CompileError("compile_failed", "no")

    with pytest.raises(compiling.CompileError):
        cache.fetch("kernel", ".bin", KEY, fail, tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["kernel.lock"]
    fetch(maker, tmp_path / "cache")  # the lock is free again
    assert maker.calls == 1


def test_old_files_go_and_recent_ones_stay(tmp_path: Path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    now = time.time()
    for index in range(20):
        old = directory / f"kernel-{index:016x}.bin"
        old.write_bytes(b"x")
        os.utime(old, (now - (40 if index < 15 else 1) * 86400, now - (40 if index < 15 else 1) * 86400 + index))
    (directory / ".kernel-aaaa.bin.1.2.tmp").write_bytes(b"x")
    os.utime(directory / ".kernel-aaaa.bin.1.2.tmp", (now - 7200, now - 7200))
    for name, age in ((".kernel-old.tmp", 7200), (".kernel-new.tmp", 60)):  # where a compiler worked or works
        (directory / name).mkdir()
        (directory / name / "library.so").write_bytes(b"x")
        os.utime(directory / name, (now - age, now - age))
    (directory / "somebody-elses").write_bytes(b"x")
    os.utime(directory / "somebody-elses", (0, 0))
    fetch(Maker(), directory)
    # The newest eight are the new file, the five of yesterday and two of the old ones.
    expected = {NAME, "kernel.lock", "somebody-elses", *(f"kernel-{index:016x}.bin" for index in range(13, 20))}
    assert {p.name for p in directory.iterdir()} == expected | {".kernel-new.tmp"}


# ---------------------------------------------------------------------------------------------------- torn and tampered


def flip(data: bytes) -> bytes:
    return data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "no trailer": lambda data: data[: -len(cache.trailer(KEY, b""))],
    "only the trailer": lambda data: data[-len(cache.trailer(KEY, b"")) :],
    "one bit": flip,
    "more behind it": lambda data: data + b"more",
    "another key's": lambda data: PAYLOAD + cache.trailer("f" * 64, PAYLOAD),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_noticed_said_once_and_made_again(
    damage: str, tmp_path: Path, maker: Maker, capsys: pytest.CaptureFixture[str]
):
    entry = fetch(maker, tmp_path / "cache")
    entry.path.write_bytes(DAMAGE[damage](entry.path.read_bytes()))
    assert fetch(maker, tmp_path / "cache").path == entry.path
    assert maker.calls == 2
    assert content(entry.path) == PAYLOAD
    (line,) = warnings(capsys)
    assert NAME in line and "torn or altered" in line and "compiling it again" in line


def test_writer_killed_in_the_middle_leaves_no_file_under_the_name(tmp_path: Path):
    """The file appears by a rename, so a reader never meets a part of it."""
    code = """
import os, signal
from pathlib import Path
from kdtree_patch import cache
real = os.fsync
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
cache.fetch("kernel", ".bin", sys.argv[2], lambda _: b"x" * 100000, Path(sys.argv[1]))
"""
    process = python(code, tmp_path / "cache", KEY)
    assert process.wait(30) == -signal.SIGKILL
    assert NAME not in {p.name for p in (tmp_path / "cache").iterdir()}
    assert content(fetch(Maker(), tmp_path / "cache").path) == PAYLOAD


# ------------------------------------------------------------------------------------------------------ other people's


def test_foreign_file_is_not_loaded(
    tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    entry = fetch(maker, tmp_path / "cache")
    give_away(entry.path, monkeypatch)
    assert not cache.is_whole(entry)
    capsys.readouterr()
    fetch(maker, tmp_path / "cache")
    assert maker.calls == 2
    assert entry.path.stat().st_uid == os.geteuid()
    (line,) = warnings(capsys)
    assert "belongs to uid" in line


def test_file_that_others_can_write_is_not_loaded(tmp_path: Path, maker: Maker, capsys: pytest.CaptureFixture[str]):
    entry = fetch(maker, tmp_path / "cache")
    entry.path.chmod(0o620)
    fetch(maker, tmp_path / "cache")
    assert maker.calls == 2
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    assert "can be written by others" in warnings(capsys)[0]


def test_symbolic_link_in_place_of_the_file_is_not_followed(
    tmp_path: Path, maker: Maker, capsys: pytest.CaptureFixture[str]
):
    entry = fetch(maker, tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    entry.path.rename(elsewhere)
    entry.path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    fetch(maker, tmp_path / "cache")
    assert maker.calls == 2
    assert not entry.path.is_symlink() and content(entry.path) == PAYLOAD
    assert elsewhere.read_bytes() == before
    assert "is a symbolic link" in warnings(capsys)[0]


def test_pipe_in_place_of_the_file_does_not_block(tmp_path: Path, maker: Maker):
    (tmp_path / "cache").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "cache" / NAME)
    assert content(fetch(maker, tmp_path / "cache").path) == PAYLOAD


def link_to_directory(path: Path) -> None:
    path.with_name("real").mkdir(mode=0o700)
    path.symlink_to(path.with_name("real"))


def plain_file(path: Path) -> None:
    path.write_text("")


def open_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def group_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "link": (link_to_directory, "symbolic link"),
    "file": (plain_file, "Not a directory"),
    "world-writable": (open_directory, "others may write to it"),
    "group-writable": (group_directory, "others may write to it"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_directory_that_is_not_ours_alone_is_refused(
    kind: str, tmp_path: Path, maker: Maker, temporary_directory: Path, capsys: pytest.CaptureFixture[str]
):
    wanted = tmp_path / "cache"
    REFUSED[kind][0](wanted)
    entry = fetch(maker, wanted)
    assert entry.path.parent == temporary_directory / f"kdtree_patch-{os.geteuid()}"
    assert content(entry.path) == PAYLOAD
    fetch(maker, wanted)
    assert maker.calls == 1  # the directory that was taken instead serves the next start
    (line,) = warnings(capsys)  # and one line was enough
    assert str(wanted) in line and REFUSED[kind][1] in line and str(entry.path.parent) in line


def test_foreign_directory_is_refused(
    tmp_path: Path,
    maker: Maker,
    temporary_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    wanted = tmp_path / "cache"
    wanted.mkdir(mode=0o700)
    give_away(wanted, monkeypatch)
    assert fetch(maker, wanted).path.is_relative_to(temporary_directory)
    assert list(wanted.iterdir()) == []
    assert "it belongs to uid" in warnings(capsys)[0]


def test_nothing_is_created_below_a_directory_of_somebody_else(
    tmp_path: Path, maker: Maker, temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """root with the HOME of a service user must not leave root's directories there."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    real = os.stat

    def foreign(path: object, **options: object) -> os.stat_result:
        info = real(path, **options)  # type: ignore[arg-type]
        return os.stat_result((*info[:4], 65534, *info[5:10])) if str(path) == str(home) else info

    monkeypatch.setattr(os, "stat", foreign)
    assert fetch(maker, home / ".cache" / "kdtree_patch").path.is_relative_to(temporary_directory)
    assert list(home.iterdir()) == []


def test_who_may_write_above_the_directory(
    tmp_path: Path, maker: Maker, temporary_directory: Path, capsys: pytest.CaptureFixture[str]
):
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    assert fetch(maker, above / "cache").path.is_relative_to(temporary_directory)
    assert f"others may write to {above} above it" in warnings(capsys)[0]
    above.chmod(0o1777)  # as /tmp is
    assert fetch(maker, above / "cache").path.is_relative_to(above)
    above.chmod(0o775)  # a umask of 002 and a group of one's own
    os.chown(above, -1, os.getegid())
    assert fetch(maker, above / "cache").path.is_relative_to(above)


def test_name_of_the_shared_directory_is_taken(
    tmp_path: Path, maker: Maker, temporary_directory: Path, capsys: pytest.CaptureFixture[str]
):
    """Somebody made /tmp/kdtree_patch-<our uid> before us: a directory of this process, removed when it ends."""
    open_directory(temporary_directory / f"kdtree_patch-{os.geteuid()}")
    plain_file(tmp_path / "cache")
    entry = fetch(maker, tmp_path / "cache")
    assert entry.temporary and content(entry.path) == PAYLOAD and cache.is_whole(entry)
    assert re.fullmatch(r"kdtree_patch-\w{8}", entry.path.parent.name)
    assert stat.S_IMODE(entry.path.parent.stat().st_mode) == 0o700
    assert len(warnings(capsys)) == 2
    assert fetch(maker, tmp_path / "cache") == entry and maker.calls == 1


def test_temporary_directory_goes_with_the_process(tmp_path: Path, temporary_directory: Path):
    open_directory(temporary_directory / f"kdtree_patch-{os.geteuid()}")
    kernels = kernels_folder(tmp_path, HOST_SOURCE)
    code = """
import os
from pathlib import Path
from kdtree_patch.compile import cached_binary
path = cached_binary("host", Path("/dev/null/cache"), Path(sys.argv[1]))
if os.fork() == 0:
    sys.exit(0)  # a child that ends in the ordinary way leaves it alone
os.wait()
print(path, path.exists())
"""
    process = python(code, kernels, env={**os.environ, "TMPDIR": str(temporary_directory)})
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    path, existed = output.split()
    assert existed == "True" and not Path(path).parent.exists()


# ------------------------------------------------------------------------------------------------- no room, no rights


@pytest.mark.parametrize("home", ["/dev/null/nonexistent", ""])
def test_unwritable_home(
    home: str,
    maker: Maker,
    temporary_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert fetch(maker, None).path.is_relative_to(temporary_directory)
    (line,) = warnings(capsys)
    assert "cannot be used" in line


def full_disk(below: Path) -> Callable[[int], None]:
    real = os.fsync

    def fsync(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(below):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    return fsync


def test_full_disk(
    tmp_path: Path,
    maker: Maker,
    temporary_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(os, "fsync", full_disk(tmp_path / "cache"))
    entry = fetch(maker, tmp_path / "cache")
    assert entry.path.is_relative_to(temporary_directory) and content(entry.path) == PAYLOAD
    assert maker.calls == 1  # what was made is not thrown away
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {"kernel.lock"}
    (line,) = warnings(capsys)
    assert "No space left on device" in line


def test_every_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", full_disk(tmp_path))
    kernels = kernels_folder(tmp_path, HOST_SOURCE)
    with pytest.raises(compiling.CompileError, match="No space left on device") as caught:
        compiling.cached_binary("host", tmp_path / "cache", kernels)
    assert caught.value.reason == "cache_unwritable"


def test_read_only_directory_still_serves(
    tmp_path: Path, maker: Maker, temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """A directory that was filled beforehand, mounted read-only."""
    directory = tmp_path / "cache"
    stored = fetch(maker, directory)
    real = os.open

    def read_only(path: object, flags: int, *rest: object, dir_fd: int | None = None) -> int:
        here = None if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        if flags & os.O_CREAT and here == directory:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest, dir_fd=dir_fd)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    assert fetch(maker, directory) == stored and maker.calls == 1
    assert fetch(maker, directory, "f" * 64).path.is_relative_to(temporary_directory) and maker.calls == 2


# ------------------------------------------------------------------------------------------------------ many processes

WORKER = """
import ctypes
from pathlib import Path
from kdtree_patch.compile import cached_binary
print("ready", flush=True)
for line in sys.stdin:
    path = cached_binary("host", Path(line.strip()), Path(sys.argv[1]))
    print(path, ctypes.CDLL(str(path)).answer(), flush=True)
"""


def ask(workers: list[subprocess.Popen[str]], line: str) -> None:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(line + "\n")
        worker.stdin.flush()


def answers(workers: list[subprocess.Popen[str]]) -> list[str]:
    lines = []
    for worker in workers:
        assert worker.stdout is not None
        lines.append(worker.stdout.readline().strip())
    return lines


def test_eight_cold_processes_compile_once(tmp_path: Path):
    kernels = kernels_folder(tmp_path, HOST_SOURCE)
    compiler = CountingCompiler(tmp_path)
    environment = {**os.environ, "CXX": str(compiler.path)}
    workers = [python(WORKER, kernels, env=environment, stderr=None) for _ in range(8)]
    try:
        assert answers(workers) == ["ready"] * 8
        for attempt in range(20):
            ask(workers, str(tmp_path / f"cache-{attempt}"))
            (answer,) = set(answers(workers))
            assert answer.endswith(".so 42")
            assert compiler.count == attempt + 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_lock_of_a_killed_process_is_free_at_once(tmp_path: Path):
    kernels = kernels_folder(tmp_path, HOST_SOURCE)
    slow, quick = CountingCompiler(tmp_path, 30), CountingCompiler(tmp_path)
    # The holder has a child made by fork, which must not hold the lock in its place.
    code = """
import os, threading, time
from pathlib import Path
from kdtree_patch.compile import cached_binary
threading.Thread(target=cached_binary, args=("host", Path(sys.argv[2]), Path(sys.argv[1]))).start()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
"""
    arguments = (kernels, tmp_path / "cache", tmp_path / "compilations")
    holder = python(code, *arguments, env={**os.environ, "CXX": str(slow.path)}, start_new_session=True)
    assert holder.stdout is not None
    assert int(holder.stdout.readline()) > 0
    try:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        started = time.monotonic()
        worker = python(WORKER, kernels, env={**os.environ, "CXX": str(quick.path)})
        output, error = worker.communicate(f"{tmp_path / 'cache'}\n", timeout=20)
        assert output.strip().endswith("42"), error
        assert time.monotonic() - started < 10
        assert compiling_count(error) == 1
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the child, and the compiler that nobody waits for any more


def compiling_count(output: str) -> int:
    return len(re.findall(r"^\[kdtree\] compiled ", output, re.MULTILINE))


def test_who_has_waited_too_long_compiles_alone(
    tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cache, "WAIT_NOTICE", 0.1)
    monkeypatch.setattr(cache, "WAIT_LIMIT", 0.3)
    with cache.PrivateDirectory.open(tmp_path / "cache") as private, private.lock("kernel.lock"):
        assert content(fetch(maker, tmp_path / "cache").path) == PAYLOAD
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["waiting", "WARNING"], lines


def test_file_system_without_locks(tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch):
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache.fcntl, "flock", flock)
    assert content(fetch(maker, tmp_path / "cache").path) == PAYLOAD
