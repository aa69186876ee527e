"""The log lines read back, and what the operating system says of a server's processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from kdtree_patch import log
from tests.e2e import gpus, lines

LOG = """\
INFO: started
Capturing:  33%|###   | 1/3 [kdtree] installed version=0.1.0 mode=on gpu="NVIDIA H200" cc=9.0 tp_rank=1
[kdtree] declined reason=forward_mode scope=call layer=0 such calls run stock
[kdtree] declined reason=contract sglang=9.9 it's not known; the service runs stock
[kdtree] calls served=10 forward_mode=3
[kdtree] calls served=1000
[kdtree] L12 max_abs_diff=9.7656e-04 mean=1.7253e-05 rel=1.3099e-04 tp_rank=0
[kdtree] L3 max_abs_diff=9.7656e-04 mean=1.7253e-05 rel=2.5e-03 calls=4 tp_rank=1
[kdtree] WARNING cached kernel is torn: compiling it again
[kdtree] ERROR disabled reason=guard layer=3 rel=0.9 tp_rank=1; verify calls run stock from here on
"""


def test_a_line_is_read_whatever_stands_before_it() -> None:
    first = lines.parse(LOG)[0]
    assert (first.word, first.rank, first.fields["gpu"]) == ("installed", 1, "NVIDIA H200")


def test_a_log_is_summed_up() -> None:
    kdtree = lines.parse(LOG)
    assert [line.word for line in kdtree if line.of_the_process] == ["installed", "declined"]
    assert lines.served(kdtree) == 1000
    assert lines.worst_rel(kdtree) == 2.5e-3
    assert [line.level for line in kdtree if line.level] == ["WARNING", "ERROR"]


def test_the_last_field_of_an_error_is_read_without_its_semicolon() -> None:
    [disabled] = [line for line in lines.parse(LOG) if line.word == "disabled"]
    assert (disabled.rank, disabled.fields["reason"]) == (1, "guard")


def test_errors_and_processes_that_stay_stock_are_alarms() -> None:
    assert [alarm.split()[0] for alarm in lines.alarms(lines.parse(LOG))] == ["declined", "ERROR"]


def test_a_nan_of_ours_is_worse_than_any_rel() -> None:
    assert lines.worst_rel(lines.parse("[kdtree] L0 max_abs_diff=0 mean=0 rel=1e-3 nan=2")) == float("inf")


def test_no_layer_line_is_not_a_good_one() -> None:
    assert lines.worst_rel(lines.parse("[kdtree] installed tp_rank=0")) is None


def test_what_log_writes_is_what_is_read(capsys) -> None:
    log.installed(gpu="NVIDIA H200", tp_rank=0)
    log.stays_stock("contract", "it is not known")
    written = lines.parse(capsys.readouterr().err)
    assert [(line.word, line.of_the_process) for line in written] == [("installed", True), ("declined", True)]
    assert written[0].rank == 0


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert lines.read(tmp_path / "none.log") == []


def test_roles_are_read_off_command_lines() -> None:
    assert gpus.role(1, 1, "python -m sglang.launch_server") == "http"
    assert gpus.role(2, 1, "sglang::scheduler") == "rank 0"
    assert gpus.role(2, 1, "sglang::scheduler_TP1") == "rank 1"
    assert gpus.role(2, 1, "sglang::scheduler_DP0_TP1") == "rank 1"
    assert gpus.role(2, 1, "sglang::detokenizer") == "detokenizer"
    assert gpus.role(2, 1, "python -c from multiprocessing") == "other"


def test_the_tree_of_a_process_has_its_grandchildren() -> None:
    grandchild = "import time; time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    try:
        for _ in range(200):
            tree = gpus.process_tree(process.pid)
            if len(tree) == 2:
                break
        assert os.getpid() not in tree and list(tree)[0] == process.pid and len(tree) == 2
    finally:
        os.killpg(process.pid, 9)
        process.wait()


class FakeNvml:
    def __init__(self, *processes: dict[int, int]):
        self._processes = list(processes)

    def processes(self) -> list[dict[int, int]]:
        return self._processes

    def used(self) -> int:
        return 5000


def test_gpus_are_told_by_what_a_process_is_for() -> None:
    own = os.getpid()
    assert gpus.gpus_by_role(FakeNvml({own: 5, 1: 7}, {own: 2}), own) == {"http": [0, 1]}


def test_memory_is_of_the_processes_where_nvml_tells_and_else_of_the_gpu() -> None:
    assert gpus.memory_of(FakeNvml({11: 500, 12: 20, 13: 1}), [11, 12]) == (520, "of the server's processes")
    assert gpus.memory_of(FakeNvml({}), [11]) == (5000, "of the whole GPU")


def test_the_holder_of_a_lock_is_found(tmp_path: Path) -> None:
    path = tmp_path / "family.lock"
    with path.open("w") as file:
        assert gpus.holder_of_lock(path) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert gpus.holder_of_lock(path) == os.getpid()
    assert gpus.holder_of_lock(path) is None
