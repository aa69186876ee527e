"""One worker tells the others of its service that its guard has tripped: who is told, and what is believed.

Replays of CUDA graphs: test_graphs.py.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kdtree_patch import notice
from kdtree_patch.ledger import Ledger
from kdtree_patch.notice import Notice
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from tests.e2e import lines
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support.cases import reference
from tests.support.env import REPO
from tests.support.reference import rel

pytestmark = pytest.mark.usefixtures("all_lines")

GUARD = Settings(guard_rel=0.05)
WORDS = "of=1 of_layer=3"
FOUND = f"{WORDS} of_pid={os.getpid()}"  # posted by this process


class Worker:
    """A router in this process, whose parent is that of all `Notice` here."""

    def __init__(self, settings: Settings = GUARD, mark: float = 0.0, ledger: Ledger | None = None, **how: Any):
        self.ledger = ledger or Ledger()
        self.kernel = FakeKernel(mark=mark, **how)
        self.router = VerifyRouter(Stock().function, self.kernel, settings, self.ledger, rank=2)

    def step(self) -> bool:
        """One call; whether it is right."""
        case = a_case()
        self.router.before_step()
        self.router.context = (a_layer(3), a_batch())
        self.router(**arguments(case))
        return rel(case.out, reference(case)) < 1e-3


def said(capsys: pytest.CaptureFixture[str], level: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"[kdtree] {level} ")]


# ------------------------------------------------------------------------------------------------------- who is told


class Child:
    def __init__(self, folder: Path, rank: int, log: Path):
        self.log = log
        with log.open("wb") as error:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.notice_child", str(folder), str(rank)],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
            )

    def step(self, wrong: float = 0.0) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(wrong, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "ERROR" in line]

    def end(self) -> None:
        self._process.communicate()


@contextmanager
def children(folder: Path, count: int) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        started = [Child(folder, rank, folder / f"{rank}.log") for rank in range(count)]
        for child in started:
            stack.callback(child.end)
        yield started


def test_a_guard_that_trips_on_one_rank_brings_all_to_stock(tmp_path: Path) -> None:
    """Three processes of one parent: the one that trips, one that steps, and one that has a while yet until it does."""
    with children(tmp_path, 3) as (zero, one, two):
        for child in (zero, one, two):
            assert child.step() == {"right": True, "counts": {"kernel/verify": 1}}
        assert one.step(wrong=1.0) == {"right": True, "counts": {"kernel/verify": 1, "stock/guard": 1}}
        for child in (zero, two):
            for calls in (1, 2):
                counts = {"kernel/verify": 1, "stock/guard_elsewhere": calls}
                assert child.step(wrong=1.0) == {"right": True, "counts": counts}
    (own,) = one.errors
    assert " reason=guard layer=3 " in own
    for rank, child in ((0, zero), (2, two)):
        (line,) = child.errors
        assert f" reason=guard_elsewhere tp_rank={rank} of=1 of_layer=3 of_pid=" in line
        words = "the guard of another worker of this service has tripped; the line of that worker has the details"
        assert line.endswith(f"{words}; verify calls run stock from here on")


def named_by(command: str) -> str:
    done = subprocess.run([sys.executable, "-c", command], cwd=REPO, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_workers_of_one_parent_have_one_name_and_those_of_another_have_another() -> None:
    name = "from kdtree_patch import notice; print(notice.name_of_service(), flush=True)"
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {name!r}], check=True)"
    first, second, other = named_by(name), named_by(name), named_by(between)
    assert first == second != other
    own = f"{os.geteuid()}-{os.getpid()}-{notice.start_time(os.getpid())}-{os.stat('/proc/self/ns/pid').st_ino}"
    assert first == f"kdtree-tripped-{own}"


@pytest.mark.parametrize(
    ("module", "function", "other"),
    [(os, "getppid", lambda: os.getpid()), (notice, "start_time", lambda process: 1)],
    ids=["parent", "start time"],
)
def test_another_service_is_not_told(module: Any, function: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Notice()
    with monkeypatch.context() as patch:
        patch.setattr(module, function, other)
        theirs = Notice()
        theirs.post(WORDS)
        assert theirs.look() == FOUND
    assert ours.look() is None


def test_the_start_time_is_that_of_the_process() -> None:
    """Also of one whose name has spaces and parentheses."""
    begin = time.clock_gettime(time.CLOCK_BOOTTIME)
    title = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) b (c 1 2'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", title], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = notice.start_time(process.pid) / os.sysconf("SC_CLK_TCK")
    assert begin - 0.1 < started < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_what_the_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    tripped: list[bool] = []

    class Meters:
        def count(self, route: str, reason: str, calls: int) -> None: ...
        def compared(self, mode: str, layer: int, rel: float) -> None: ...
        def tripped(self) -> None:
            tripped.append(True)

    worker = Worker(ledger=Ledger(Meters()))
    assert worker.step()
    Notice().post(WORDS)
    assert worker.step() and worker.step()
    assert worker.ledger.counts == {("kernel", "verify"): 1, ("stock", "guard_elsewhere"): 2}
    (line,) = said(capsys, "ERROR")
    assert f"disabled reason=guard_elsewhere tp_rank=2 {FOUND} the guard of another worker" in line
    (read_back,) = lines.parse(line)
    assert (read_back.word, read_back.rank, read_back.fields["of"]) == ("disabled", 2, "1")
    assert tripped == []  # that metric is of the worker that has tripped


def test_in_shadow_mode_too() -> None:
    worker = Worker(Settings(mode="shadow", validate=True, guard_rel=0.05))
    Notice().post(WORDS)
    assert worker.step() and len(worker.kernel.calls) == 0 and worker.ledger.disabled == "guard_elsewhere"


def test_without_a_guard_nobody_looks() -> None:
    worker = Worker(Settings(validate=True))
    Notice().post(WORDS)
    assert worker.step() and worker.ledger.counts == {("kernel", "verify"): 1}


def test_the_first_to_trip_is_named_and_the_second_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Notice(), Notice()
    first.post(WORDS)
    second.post("of=5 of_layer=6")
    assert first.look() == second.look() == FOUND
    assert said(capsys, "WARNING") == []


def test_other_reasons_are_a_workers_own(notices: Path) -> None:
    worker = Worker(error=RuntimeError("no launch"))
    assert worker.step() and worker.ledger.disabled == "launch_failed"
    assert list(notices.iterdir()) == []


# -------------------------------------------------------------------------------------------------- what is believed


@pytest.fixture
def posted() -> Iterator[tuple[Notice, Path]]:
    one = Notice()
    one.post(WORDS)
    assert one.look() == FOUND and one.path is not None
    yield one, one.path


def test_it_is_ours_alone_whatever_the_umask() -> None:
    one = Notice()
    for mask in (0, 0o777):
        before = os.umask(mask)
        try:
            one.post(WORDS)
        finally:
            os.umask(before)
        assert one.path is not None and stat.S_IMODE(one.path.stat().st_mode) == 0o600
        one.path.unlink()


def test_nothing_else_is_left(posted: tuple[Notice, Path], notices: Path) -> None:
    assert list(notices.iterdir()) == [posted[1]]


def test_another_users_file_is_not_believed(posted: tuple[Notice, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert posted[0].look() is None


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_can_write_to_is_not_believed(posted: tuple[Notice, Path], mode: int) -> None:
    posted[1].chmod(mode)
    assert posted[0].look() is None


def test_a_link_is_not_followed(posted: tuple[Notice, Path], tmp_path: Path) -> None:
    one, path = posted
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert elsewhere.read_text().split(" ", 3)[3] == f"{WORDS}\n" and one.look() is None
    path.unlink()
    path.symlink_to("nowhere")
    assert one.look() is None


def test_nor_is_it_looked_at_where_a_link_leads(posted: tuple[Notice, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another user lets it lead may be a file system that does not answer."""
    one, path = posted
    path.unlink()
    path.symlink_to("nowhere")
    opened = []

    def refuse(name: str, flags: int) -> int:
        opened.append(flags & os.O_NOFOLLOW)
        raise OSError

    monkeypatch.setattr(os, "open", refuse)
    # There is something of that name, the link itself: whoever had followed it would have found nothing.
    assert one.look() is None and opened == [os.O_NOFOLLOW]


def test_who_has_ended_is_not_believed_and_gives_way(posted: tuple[Notice, Path]) -> None:
    """The parent may outlive the service: the next one of the same parent begins anew."""
    one, path = posted
    name, process, began, text = path.read_text().split(" ", 3)
    path.write_text(f"{name} {process} {int(began) - 1} {text}")
    assert one.look() is None
    one.post("of=3")
    assert one.look() == f"of=3 of_pid={os.getpid()}" and len(list(path.parent.iterdir())) == 1
    path.write_text(f"{name} {2**22 + 1} {began} {text}")
    assert one.look() is None


def test_proc_of_another_namespace_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: "1")
    assert Notice().path is None


@pytest.mark.parametrize("text", ["", "kdtree-tripped of=1\n", "anything at all, of another program of ours\n" * 20])
def test_a_file_of_ours_that_somebody_has_linked_there_is_not_believed(
    posted: tuple[Notice, Path], text: str, tmp_path: Path
) -> None:
    one, path = posted
    path.unlink()
    (tmp_path / "ours").write_text(text)
    (tmp_path / "ours").chmod(0o600)
    os.link(tmp_path / "ours", path)
    assert one.look() is None


def test_a_pipe_or_a_folder_in_its_place_blocks_nobody() -> None:
    one, found = Notice(), [WORDS]
    assert one.path is not None
    os.mkfifo(one.path, 0o600)
    looking = threading.Thread(target=lambda: found.append(str(one.look())), daemon=True)
    looking.start()
    looking.join(10)
    assert found[1:] == ["None"]
    # With somebody at the other end, too.
    pipe = os.open(one.path, os.O_RDWR)
    os.write(pipe, f"{one.path.name} {os.getpid()} {notice.start_time(os.getpid())} {WORDS}\n".encode())
    assert one.look() is None
    os.close(pipe)
    one.path.unlink()
    one.path.mkdir()
    assert one.look() is None
    one.path.rmdir()


def test_a_text_of_any_kind_is_one_short_line(posted: tuple[Notice, Path]) -> None:
    one, path = posted
    path.unlink()
    one.post("a\nb " + 1000 * "y")
    found = one.look()
    assert found is not None and found.startswith("a b yyy") and len(path.read_bytes()) == notice.MAX_BYTES
    head = " ".join(path.read_text().split(" ", 3)[:3])
    path.write_bytes(f"{head} ".encode() + b"\xff\n[kdtree] x")
    assert one.look() == f"\ufffd [kdtree] x of_pid={os.getpid()}"


def test_a_look_costs_next_to_nothing() -> None:
    one, times = Notice(), []
    for _ in range(2000):
        begin = time.perf_counter_ns()
        one.look()
        times.append(time.perf_counter_ns() - begin)
    assert statistics.median(times) < 5000


# ----------------------------------------------------------------------------------------------- nobody can be told


def no_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(notice, "FOLDER", folder / "gone")


def no_proc(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def start_time(process: int) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/1/stat")

    patch.setattr(notice, "start_time", start_time)


def another_proc(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(Path, "read_text", lambda self, **how: "1 (x) S 1")


def full(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def link(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "link", link)


def taken(patch: pytest.MonkeyPatch, folder: Path) -> None:
    path = Notice().path
    assert path is not None
    path.touch()
    path.chmod(0o666)

    def replace(*args: Any) -> None:  # as in a sticky directory, where the file is another user's
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    patch.setattr(os, "replace", replace)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (no_folder, "FileNotFoundError: "),
        (no_proc, "FileNotFoundError: "),
        (another_proc, "IndexError: "),
        (full, "OSError: [Errno 28] No space left on device"),
        (taken, "PermissionError: "),
    ],
)
def test_whoever_trips_is_stock_all_the_same_and_says_that_the_others_are_not_told(
    what: Any,
    why: str,
    notices: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        what(patch, tmp_path)
        worker = Worker(mark=1.0)
        for _ in range(2):
            assert worker.step()
    assert worker.ledger.counts == {("stock", "guard"): 2}
    # Said at every level, and before the line of the trip.
    line, trip = said(capsys, "ERROR")
    assert trip.startswith("[kdtree] ERROR disabled reason=guard ")
    assert line.startswith("[kdtree] ERROR the other ranks cannot be told that the guard has tripped (")
    assert why in line and line.endswith("for stock in all of them restart with KDTREE_MODE=off")
    assert len(list(notices.iterdir())) == (what is taken)  # no half a file
