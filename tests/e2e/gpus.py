"""Which processes are on which GPU, and with how much memory: from NVML, which needs no CUDA context. What else there
is to know of processes: from /proc."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdtree_patch.exits import NotDone

MIB = 1 << 20


class Nvml:
    """Raises NotDone where there is no NVML, with its words."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception as error:
            raise NotDone(
                f"NVML cannot be asked for the GPUs: {type(error).__name__}: {error}",
                "run it where there is an NVIDIA driver, in an environment with nvidia-ml-py, as `make e2e` does",
            ) from error

    @property
    def count(self) -> int:
        """Those that a server may use. NVML has all, and torch those that CUDA_VISIBLE_DEVICES leaves."""
        try:
            import torch
        except ImportError as error:
            raise NotDone(str(error), "run it in an environment with SGLang, as `make e2e` does") from error
        return torch.cuda.device_count()

    def name(self) -> str:
        name = self._nvml.nvmlDeviceGetName(self._handles[0])
        return name.decode() if isinstance(name, bytes) else str(name)

    def processes(self) -> list[dict[int, int]]:
        """For each GPU: process id to MiB. What a container's NVML does not tell is missing from it."""
        found = []
        for handle in self._handles:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            found.append({one.pid: (one.usedGpuMemory or 0) // MIB for one in running})
        return found

    def used(self) -> int:
        """MiB in use on all GPUs, whoever uses it."""
        return sum(self._nvml.nvmlDeviceGetMemoryInfo(handle).used // MIB for handle in self._handles)


def memory_of(nvml: Nvml, pids: Iterable[int]) -> tuple[int, str]:
    """MiB of some processes, and how that was found: by process where NVML tells, else all that is in use."""
    wanted = set(pids)
    own = sum(size for on_gpu in nvml.processes() for pid, size in on_gpu.items() if pid in wanted)
    return (own, "of the server's processes") if own else (nvml.used(), "of the whole GPU")


def process_tree(root: int) -> dict[int, str]:
    """A process and all that descend from it: id to command line."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    tree, added = {root}, True
    while added:
        new = {pid for pid, parent in parents.items() if parent in tree} - tree
        added = bool(new)
        tree |= new
    return {pid: command_line(pid) for pid in sorted(tree)}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def role(pid: int, root: int, command: str) -> str:
    """What a process of a server is for: SGLang writes it over its command line."""
    if pid == root:
        return "http"
    worker = re.search(r"sglang::scheduler(?:\S*?_TP(\d+))?", command)
    if worker:
        return f"rank {worker[1] or 0}"
    return "detokenizer" if "sglang::detokenizer" in command else "other"


def gpus_by_role(nvml: Nvml, root: int) -> dict[str, list[int]]:
    """The GPUs on which each kind of process of a server has memory; only kinds that have any."""
    found: dict[str, set[int]] = {}
    tree = process_tree(root)
    for index, on_gpu in enumerate(nvml.processes()):
        for pid in on_gpu:
            if pid in tree:
                found.setdefault(role(pid, root, tree[pid]), set()).add(index)
    return {name: sorted(indices) for name, indices in sorted(found.items())}


def listens(pids: Iterable[int], port: int) -> bool:
    """Whether one of some processes listens on a port of 127.0.0.1."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file) in sockets:
                        return True
    return False


def holder_of_lock(path: Path) -> int | None:
    """The process that holds a flock on a file."""
    try:
        inode = os.stat(path).st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    for line in locks.splitlines():
        parts = line.split()
        if len(parts) > 5 and parts[1] == "FLOCK" and parts[5].rpartition(":")[2] == str(inode):
            return int(parts[4])
    return None
