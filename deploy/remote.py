"""One host over ssh, through pyinfra: connections, commands, files. Knows nothing of what they are for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from paramiko import SSHException
from pyinfra.api import Config, Inventory, State, StringCommand
from pyinfra.api.connect import connect_all
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.api.operation import add_op
from pyinfra.api.operations import run_ops
from pyinfra.api.state import StateStage

from deploy.bundle import host_code
from deploy.host import wire
from deploy.options import Host

# Belongs to root and is no part of any service, so that root may run it.
_FIND_PYTHON = (
    f"for p in {' '.join(wire.PYTHONS)}; do "
    "$p -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $p && exit 0; done; exit 1"
)
# The longest that is asked of a host in one command is a preflight, which imports SGLang.
_LIMIT = 900


class ConnectionLost(Exception):
    """The connection is not there, or is not there any more; what was asked may or may not have happened."""


class Unreachable(ConnectionLost):
    """There was no connection to begin with: what was asked has not happened."""


class RemoteError(Exception):
    """The host answered, and not as it should; the message has its words."""


class Remote:
    """A connection, made when it is first needed and again after it was lost."""

    def __init__(self, host: Host):
        self.host = host
        self._state: State | None = None
        self._python: str | None = None
        self._code = wire.as_line(host_code())

    def connect(self) -> None:
        data: dict[str, Any] = {"ssh_hostname": self.host.name, "ssh_strict_host_key_checking": "accept-new"}
        if self.host.user:
            data["ssh_user"] = self.host.user
        if self.host.port:
            data["ssh_port"] = self.host.port
        inventory = Inventory(([(self.host.name, data)], {}))
        self._state = State(inventory, Config(CONNECT_TIMEOUT=15))
        _first_error()
        try:
            connect_all(self._state)
        except (PyinfraError, SSHException, OSError, EOFError) as error:
            self._state = None
            why = f"ssh to {self.host}: {_first_error() or error}"
            raise Unreachable(f"{why}: it must get in from here without a question (a key, ~/.ssh/config)") from error

    def run(self, command: str, stdin: str | None = None, timeout: int = _LIMIT) -> tuple[bool, str, str]:
        """Whether a command succeeded, its standard output and its standard error. `command` goes through a shell: it
        is made of constants and of words that options.py or wire.packed has made harmless. A connection on which
        nothing has come for `timeout` seconds counts as lost.
        """
        host = self._connected()
        try:
            good, output = host.run_shell_command(StringCommand(command), _stdin=stdin, _timeout=timeout)
        except (SSHException, OSError, EOFError, ConnectError) as error:
            self._state = None
            raise ConnectionLost(f"ssh to {self.host}: {error}") from error
        if not good and not self.is_alive():
            self._state = None
            raise ConnectionLost(f"ssh to {self.host}: the connection was closed")
        return good, output.stdout, output.stderr

    def ask(self, command: str, order: dict[str, Any]) -> dict[str, Any]:
        """The answer of deploy.host to an order."""
        if self._python is None:
            good, output, _ = self.run(_FIND_PYTHON)
            if not good or wire.python_in(output) is None:
                raise RemoteError(f"{self.host} has no python3 of 3.10 or later in /usr: install python3")
            self._python = wire.python_in(output)
        words = f'{self._python} -I -c "{wire.LOADER}" {command} {wire.packed(order)}'
        _, output, error = self.run(words, stdin=self._code)
        answer = wire.answer_in(output)
        if answer is None:
            if not self.is_alive():
                self._state = None
                raise ConnectionLost(f"ssh to {self.host}: the connection was closed")
            last = " ".join((error.strip() or output.strip() or "no output").splitlines()[-1:])
            raise RemoteError(f"{self.host} could not {command}: {last}")
        return answer

    def apply(self, *operations: tuple[Callable[..., Any], dict[str, Any]]) -> None:
        """Runs operations of pyinfra, each only as far as the host is not yet as it says."""
        self._connected()
        state = self._state
        assert state is not None
        _first_error()
        try:
            state.set_stage(StateStage.Prepare)
            for operation, arguments in operations:
                add_op(state, operation, **arguments)
            state.set_stage(StateStage.Execute)
            run_ops(state)
        except (PyinfraError, SSHException, OSError, EOFError) as error:
            alive = self.is_alive()
            self._state = None
            if not alive:
                raise ConnectionLost(f"ssh to {self.host}: the connection was closed") from error
            raise RemoteError(f"{self.host}: {_first_error() or error}") from error
        # A State is for one run of operations; the connection itself is made again when it is next needed.
        self.close()

    def is_alive(self) -> bool:
        try:
            transport = self._connected().connector.client.get_transport()
        except ConnectionLost:
            return False
        return bool(transport and transport.is_active())

    def close(self) -> None:
        if self._state is not None:
            for host in self._state.inventory:
                client = getattr(host.connector, "client", None)
                if client is not None:
                    client.close()
        self._state = None

    def _connected(self) -> Any:
        if self._state is None:
            self.connect()
        assert self._state is not None
        return self._state.inventory.get_host(self.host.name)


class _FirstError(logging.Handler):
    """pyinfra says why something failed in its log, and only that it did in its exception and in the lines after it."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            _FirstError.text = _FirstError.text or " ".join(record.getMessage().split())


def _first_error() -> str:
    text, _FirstError.text = _FirstError.text, ""
    return text


_logger = logging.getLogger("pyinfra")
_logger.addHandler(_FirstError())
_logger.propagate = False
