"""Metrics with the real prometheus_client in multiprocess mode, on the /metrics that each SGLang release serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdtree_patch import metrics
from kdtree_patch.ledger import Ledger
from tests.support.env import child_env

ON = SimpleNamespace(enable_metrics=True)


def python(code: str, release: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because prometheus_client has one registry for each."""
    env = child_env(release, variables, patched=False)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


WORKER = """
import sys
from types import SimpleNamespace
from kdtree_patch import metrics
from kdtree_patch.ledger import Ledger
rank = int(sys.argv[1])
assert "prometheus_client" not in sys.modules
ledger = Ledger(metrics.of_service(SimpleNamespace(enable_metrics=True)))
for _ in range(61):
    ledger.count_routed("kernel", "verify")
ledger.count_routed("kernel", "verify", 61)
ledger.count("stock", "kv_dtype", rank)
ledger.meters.compared("verify", 7, 0.5)
ledger.meters.compared("verify", 7, 0.001 * rank)
ledger.meters.compared("draft_extend", 7, 0.25)
if rank == 2:
    ledger.disable("guard", "a line")
elif rank == 1:
    ledger.disable("launch_failed", "no guard")
"""

SERVER = """
import asyncio, os, subprocess, sys
from types import SimpleNamespace
from sglang.srt.utils.common import add_prometheus_middleware, set_prometheus_multiproc_dir
set_prometheus_multiproc_dir()
for rank in sys.argv[2:]:
    subprocess.run([sys.executable, "-c", sys.argv[1], rank], check=True)
app = SimpleNamespace(routes=[])
add_prometheus_middleware(app)
async def get():
    sent = []
    async def receive():
        return {"type": "http.request", "body": b""}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "GET", "path": "/metrics", "root_path": "", "query_string": b"", "headers": []}
    await app.routes[0].app(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent).decode()
print(asyncio.run(get()))
"""


def test_they_are_on_the_services_own_page(release: str) -> None:
    """Three workers: their calls are summed, and of the gauges the largest is shown."""
    run = f"import sys; sys.argv = ['', {WORKER!r}, '0', '1', '2']\n{SERVER}"
    page = python(run, release).stdout
    figures = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[:1] == "k"}
    assert figures == {
        'kdtree:verify_calls_total{reason="verify",route="kernel"}': 3 * 122,
        'kdtree:verify_calls_total{reason="kv_dtype",route="stock"}': 3,
        'kdtree:validation_rel{layer="7",mode="verify"}': 0.002,
        'kdtree:validation_rel{layer="7",mode="draft_extend"}': 0.25,
        "kdtree:guard_tripped": 1,
    }


def test_a_guard_that_has_not_tripped_is_shown_too(tmp_path: Path) -> None:
    code = f"""
{WORKER.replace("sys.argv[1]", "0")}
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    page = python(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).stdout
    assert "\nkdtree:guard_tripped 0.0\n" in page


def test_a_service_without_metrics_does_not_import_prometheus() -> None:
    code = (
        "import sys; from types import SimpleNamespace; from kdtree_patch import hook, metrics\n"
        "assert metrics.of_service(SimpleNamespace(enable_metrics=False)) is None\n"
        "assert metrics.of_service(None) is None\n"
        "assert 'prometheus_client' not in sys.modules"
    )
    assert python(code, PROMETHEUS_MULTIPROC_DIR="/nonexistent").stderr == ""


def test_metrics_without_a_directory_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(metrics.DIRECTORY, raising=False)
    assert metrics.of_service(ON) is None
    assert "WARNING metrics are on, but PROMETHEUS_MULTIPROC_DIR is not set" in capsys.readouterr().err


def test_a_client_that_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(metrics.DIRECTORY, "/somewhere")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert metrics.of_service(ON) is None
    assert "WARNING metrics failed: ModuleNotFoundError: " in capsys.readouterr().err


def test_a_failure_while_counting_costs_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    class Full:
        def __init__(self, *args: Any, **kwargs: Any):
            pass

        def labels(self, *values: Any) -> Full:
            return self

        def inc(self, calls: int) -> None:
            tried.append(calls)
            raise OSError(28, "No space left on device")

        def set(self, value: float) -> None:
            pass

    monkeypatch.setenv(metrics.DIRECTORY, str(tmp_path))
    values = SimpleNamespace(ValueClass=SimpleNamespace(_multiprocess=True))
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=Full, Gauge=Full, values=values))
    ledger = Ledger(metrics.of_service(ON))
    for _ in range(3):
        ledger.count_routed("kernel", "verify")
    assert ledger.counts["kernel", "verify"] == 3 and tried == [1]
    assert capsys.readouterr().err.count("No space left on device; ours stop here") == 1


def test_a_client_that_was_imported_too_early_is_said(tmp_path: Path) -> None:
    """It has decided then that it writes no files."""
    code = f"""
import os, prometheus_client
os.environ["PROMETHEUS_MULTIPROC_DIR"] = {str(tmp_path)!r}
from types import SimpleNamespace
from kdtree_patch import metrics
assert metrics.of_service(SimpleNamespace(enable_metrics=True)) is None
"""
    (line,) = python(code).stderr.splitlines()
    assert "WARNING metrics are on, but prometheus_client was imported before PROMETHEUS_MULTIPROC_DIR was set" in line


# Many entries, some of them longer than a page with their like.
MANY = """
import os
from pathlib import Path
from types import SimpleNamespace
from kdtree_patch import metrics
from kdtree_patch.ledger import Ledger
folder = Path(os.environ[metrics.DIRECTORY])
ledger = Ledger(metrics.of_service(SimpleNamespace(enable_metrics=True)))
for number in range(600):
    ledger.count("stock", "x" * 60 + str(number))
    if ledger.meters:
        ledger.meters.compared("verify", number, 0.1)
"""


def test_what_is_written_to_has_its_blocks(tmp_path: Path) -> None:
    """Those that the next entry needs as well."""
    python(MANY, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    for path in tmp_path.iterdir():
        used = int.from_bytes(path.read_bytes()[:4], sys.byteorder)
        assert used > metrics.ROOM  # prometheus_client has made the file longer than it began
        assert path.stat().st_blocks * 512 > used + metrics.ROOM - 1000


@pytest.mark.parametrize(("free", "words"), [(0, "not exported"), (12, "not exported"), (180, "stop here")])
def test_a_disk_that_is_full_does_not_end_the_worker(free: int, words: str, tmp_path: Path) -> None:
    """A small disk in a namespace of its own; prometheus_client alone is ended by SIGBUS there."""
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    mount = 'mount -t tmpfs -o size=256k tmpfs "$0"'
    try:
        subprocess.run([*namespace, mount, str(tmp_path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespace with a disk of its own: {error}")
    code = f"{MANY}print(ledger.counts['stock', 'x' * 60 + '599'], sorted(path.name[:5] for path in folder.iterdir()))"
    fill = f'head -c {256 - free}k /dev/zero >"$0/full"; exec "$@"'
    env = child_env(None, {metrics.DIRECTORY: str(tmp_path)}, patched=False)
    done = subprocess.run(
        [*namespace, f"{mount}; {fill}", str(tmp_path), sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done
    (line,) = done.stderr.splitlines()
    assert "No space left on device for 64 KB more: " in line and f"; ours {'are ' * (free < 64)}{words}, " in line
    # No empty file, at which the service's own page would fail.
    files = ["full"] if free < 64 else ["count", "full", "gauge"]
    assert done.stdout == f"1 {files}\n"
