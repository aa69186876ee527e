"""What an operator's terminal shows when a connection comes to nothing: one line, and no traceback of a library's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.deploy.machine import VENV
from tests.support.env import REPO

pytestmark = pytest.mark.deploy


def status_of(port: int, home: Path) -> subprocess.Popen[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "DEPLOY_HOST": f"127.0.0.1:{port}", "DEPLOY_UNIT": "x"}
    words = [str(VENV / "deploy" / "bin" / "python"), "-m", "deploy", "status"]
    return subprocess.Popen(words, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_interrupt(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = status_of(port, tmp_path)
        silent.settimeout(60)
        connection, _ = silent.accept()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
        connection.close()
    assert process.returncode == 130
    said = "interrupted here. A change that is under way on the host goes on there: see `make status`"
    assert output.split("\n") == [f"==> status 127.0.0.1:{port}", "", said, ""]


def test_host_that_hangs_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        port = server.getsockname()[1]
        process = status_of(port, tmp_path)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "Traceback" not in output
    assert f"    FINDING: ssh to 127.0.0.1:{port}: " in output and output.count("\n") == 4, output
