"""SGLang servers as processes: started side by side, watched, and never left behind.

Starting one takes a minute or more, whether alone or among others, and what it then does takes seconds. So a `Fleet`
starts as many as it may at once, and whoever needs one waits for that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.e2e import gpus, lines
from tests.e2e.client import Client, ServiceError

REPOSITORY = Path(__file__).resolve().parents[2]
SGLANG = ("-m", "sglang.launch_server")

_POLL = 0.25
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

Say = Callable[[str], None]


@dataclass(frozen=True)
class ServerSpec:
    """How a server is started. `options` are SGLang's; `environ` is put on top of our own environment. A patched one
    has our folder first on its PYTHONPATH, then `behind`, then what PYTHONPATH there is."""

    name: str
    patched: bool
    options: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    behind: Path | None = None

    def environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KDTREE_")}
        path = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        if self.behind is not None:
            path.insert(0, str(self.behind))
        if self.patched:
            path.insert(0, str(REPOSITORY))
        environment["PYTHONPATH"] = os.pathsep.join(path)
        # The servers measure free memory while others beside them take some, which SGLang would refuse.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
        return environment | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | dict(self.environ)


class Server:
    """One process and all that it has started. `ready_s` is the time from its start until /health has answered."""

    def __init__(self, spec: ServerSpec, folder: Path, program: Sequence[str] = SGLANG):
        self.spec = spec
        self.port = free_port()
        self.client = Client(self.port)
        self.log = folder / f"{spec.name}.log"
        self.ready_s: float | None = None
        self.failure: str | None = None
        self._started = time.monotonic()
        ports = ("--port", str(self.port), "--nccl-port", str(free_port()))
        command = [sys.executable, *program, *spec.options, "--host", "127.0.0.1", *ports]
        with self.log.open("wb") as log:
            # Not in our folder: Python would put it on the path of the stock servers too.
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=spec.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_the_driver,
            )
        self.pid = self._process.pid

    def watch(self, timeout: float) -> None:
        """Until it answers on /health, or has failed; `failure` says how."""
        while self.failure is None:
            if self._process.poll() is not None:
                self.failure = f"it ended with status {self._process.returncode} before it was ready"
            elif time.monotonic() - self._started > timeout:
                self.failure = f"it was not ready after {timeout:.0f} s"
            elif self.client.healthy():
                if not gpus.listens(gpus.process_tree(self.pid), self.port):
                    self.failure = f"somebody else answers on its port {self.port}"
                    return
                self.ready_s = time.monotonic() - self._started
                return
            else:
                time.sleep(_POLL)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def kdtree(self) -> list[lines.Line]:
        return lines.read(self.log)

    def tail(self, count: int = 25) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line[:300] for line in text[-count:])

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes, if there are any."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def stop(self) -> None:
        """Asks, then does not ask. Nothing of its group is left afterwards."""
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
            self.signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self.signal(signal.SIGKILL)


def _end_with_the_driver() -> None:
    """In the child: if whoever drives the run is killed, so is the server, and its workers follow it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_given: set[int] = set()


def free_port() -> int:
    """One that nobody listens on, and that this function has not given to anybody else.

    A server listens there a minute later, and the ranks of those beside it open hundreds of connections meanwhile: so
    it is below the ports that the system takes for them.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # SGLang adds up to 10,000 to the number for ports of its own.
    ports = range(10000, lowest if 12000 < lowest <= 50000 else 50000)
    while True:
        port = random.choice(ports)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


class Fleet:
    """Servers that are wanted, in their order, `side_by_side` of them at a time. Its methods belong to the thread that
    made it: a server ends with the thread that has started it."""

    def __init__(self, folder: Path, side_by_side: int, timeout: float, say: Say, program: Sequence[str] = SGLANG):
        self.folder = folder
        self.started: list[Server] = []
        self._side_by_side = side_by_side
        self._timeout = timeout
        self._say = say
        self._program = program
        self._wanted: list[ServerSpec] = []
        self._servers: dict[str, Server] = {}
        self._watchers: dict[str, threading.Thread] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wanted.clear()
        self.stop(*self._servers)

    def want(self, specs: Iterable[ServerSpec]) -> None:
        self._wanted += specs
        self.fill()

    def fill(self) -> None:
        """Starts those that are next, as far as there is room."""
        while self._wanted and len(self._servers) < self._side_by_side:
            spec = self._wanted.pop(0)
            self._say(f"starting {spec.name}")
            server = Server(spec, self.folder, self._program)
            self.started.append(server)
            self._servers[spec.name] = server
            watcher = threading.Thread(target=server.watch, args=(self._timeout,), daemon=True)
            watcher.start()
            self._watchers[spec.name] = watcher

    def ready(self, name: str) -> Server:
        """Waits for a server. Raises ServiceError if it fails, or was never wanted."""
        if name not in self._servers and any(spec.name == name for spec in self._wanted):
            raise ServiceError(f"{name}: there is no room for it: raise --side-by-side")
        if name not in self._servers:
            raise ServiceError(f"{name}: it is not running")
        self._watchers[name].join()
        server = self._servers[name]
        if server.failure is not None:
            raise ServiceError(f"{name}: {server.failure}; the end of {server.log.name}:\n{server.tail()}")
        return server

    def settle(self) -> None:
        """Waits until none of those that have been started is still starting: they would disturb a measurement."""
        for name, watcher in list(self._watchers.items()):
            watcher.join()
            server = self._servers[name]
            self._say(f"{name} ready after {server.ready_s:.0f} s" if server.ready_s else f"{name}: {server.failure}")

    @contextlib.contextmanager
    def alone(self, server: Server) -> Iterator[None]:
        """All others stand still meanwhile: what they do without being asked would be in somebody's measurement."""
        others = [one for one in self._servers.values() if one is not server]
        try:
            for other in others:
                other.signal(signal.SIGSTOP)
            yield
        finally:
            for other in others:
                other.signal(signal.SIGCONT)

    def stop(self, *names: str) -> None:
        """Stops these and starts those that are next."""
        stopping = []
        for name in names:
            server = self._servers.pop(name, None)
            if server is not None:
                server.failure = server.failure or "it was stopped"
                stopping.append(threading.Thread(target=server.stop))
                stopping[-1].start()
        for thread in stopping:
            thread.join()
        for name in names:
            watcher = self._watchers.pop(name, None)
            if watcher is not None:
                watcher.join()
        self.fill()
