"""The driver of `make e2e` against a stand-in for SGLang: what it does with servers that are well, and with others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e import gpus, server
from tests.e2e.client import Client, ServiceError
from tests.e2e.server import REPOSITORY, Fleet, ServerSpec, free_port

FAKE = (str(Path(__file__).with_name("e2e_fake.py")),)


def spec(name: str = "one", patched: bool = False, behind: Path | None = None, **environ: str) -> ServerSpec:
    return ServerSpec(name, patched, (), environ, behind)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fleet(tmp_path: Path, said: list[str]):
    with Fleet(tmp_path, 3, 20.0, said.append, FAKE) as fleet:
        yield fleet


def test_a_server_is_ready_and_answers(fleet: Fleet) -> None:
    fleet.want([spec()])
    server = fleet.ready("one")
    assert server.alive and server.ready_s is not None and server.ready_s < 20
    answers = server.client.generate([[1, 2], [3]], 5)
    assert [len(answer["output_ids"]) for answer in answers] == [5, 5]


def test_a_stream_has_each_request_to_its_end(fleet: Fleet) -> None:
    fleet.want([spec()])
    chunks = list(fleet.ready("one").client.stream([[1], [2]], 9))
    assert {chunk.index for chunk in chunks} == {0, 1}
    assert [chunk.tokens for chunk in chunks][-2:] == [9, 9]
    assert [chunk.at for chunk in chunks] == sorted(chunk.at for chunk in chunks)


def test_ports_are_none_that_the_system_takes_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of other servers open many while one starts, and it listens at the end."""
    given = [free_port() for _ in range(200)]
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len({*given}) == 200 and (max(given) < lowest or lowest <= 12000)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        taken, fresh = listening.getsockname()[1], given.pop()
        server._given.discard(fresh)
        offered = iter([taken, given[0], taken, fresh])
        monkeypatch.setattr(server.random, "choice", lambda ports: next(offered))
        assert free_port() == fresh


def test_each_server_has_a_port_of_its_own_for_its_ranks(fleet: Fleet) -> None:
    fleet.want([spec("one"), spec("two")])
    words = [gpus.command_line(one.pid).split() for one in fleet.started]
    ports = [own[own.index(name) + 1] for own in words for name in ("--port", "--nccl-port")]
    assert len({*ports}) == 4


def test_more_than_there_is_room_for_wait_for_their_turn(fleet: Fleet) -> None:
    fleet.want([spec(str(number)) for number in range(5)])
    assert [server.spec.name for server in fleet.started] == ["0", "1", "2"]
    with pytest.raises(ServiceError, match="no room"):
        fleet.ready("4")
    fleet.stop("0", "1")
    assert fleet.ready("4").alive
    assert [server.alive for server in fleet.started] == [False, False, True, True, True]


def test_the_others_stand_still_while_one_is_alone(fleet: Fleet) -> None:
    fleet.want([spec("one"), spec("two")])
    one, two = fleet.ready("one"), fleet.ready("two")
    with pytest.raises(KeyError), fleet.alone(one):
        assert one.client.generate([[1]], 2)
        assert Path(f"/proc/{two.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        raise KeyError  # whatever happens meanwhile, they go on
    assert two.client.generate([[1]], 2)


def test_a_server_that_dies_is_said_to_with_the_end_of_its_log(fleet: Fleet) -> None:
    fleet.want([spec(FAKE_START="die")])
    with pytest.raises(ServiceError, match=r"one: it ended with status 1 before it was ready(.|\n)*told to die"):
        fleet.ready("one")


def test_somebody_else_who_answers_on_its_port_is_not_taken_for_it(fleet: Fleet) -> None:
    fleet.want([spec("one", FAKE_START="hang")])  # as one that has not come to listen yet
    [one] = fleet.started
    fake, words = FAKE[0], ("--port", str(one.port))
    with subprocess.Popen([sys.executable, fake, *words], stdout=subprocess.DEVNULL) as other:
        try:
            with pytest.raises(ServiceError, match=f"one: somebody else answers on its port {one.port}"):
                fleet.ready("one")
        finally:
            other.kill()


def test_a_server_that_hangs_is_given_up(tmp_path: Path, said: list[str]) -> None:
    with Fleet(tmp_path, 1, 1.0, said.append, FAKE) as fleet:
        fleet.want([spec(FAKE_START="hang")])
        with pytest.raises(ServiceError, match="it was not ready after 1 s"):
            fleet.ready("one")
        [server] = fleet.started
        assert server.alive
    assert not server.alive


def test_settle_waits_for_all_and_tells_of_those_that_failed(fleet: Fleet, said: list[str]) -> None:
    fleet.want([spec("good"), spec("bad", FAKE_START="die")])
    fleet.settle()
    assert any("good ready after" in line for line in said) and any("bad: it ended" in line for line in said)


def test_a_server_that_nobody_has_asked_for_is_not_waited_for(fleet: Fleet) -> None:
    with pytest.raises(ServiceError, match="it is not running"):
        fleet.ready("one")


def test_refusals_and_endings_are_errors(fleet: Fleet) -> None:
    fleet.want([spec(FAKE_REFUSE="1"), spec("two", FAKE_DIE_AT="1")])
    with pytest.raises(ServiceError, match="/generate answers 500"):
        fleet.ready("one").client.generate([[1]], 2)
    with pytest.raises(ServiceError, match="/generate"):
        fleet.ready("two").client.generate([[1]], 2)


def test_nobody_there_is_an_error_and_not_healthy() -> None:
    client = Client(free_port())
    assert not client.healthy()
    with pytest.raises(ServiceError, match="refused"):
        client.generate([[1]], 2)


def test_a_proxy_in_the_environment_is_not_asked(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    fleet.want([spec()])
    assert fleet.ready("one").client.generate([[1]], 2)


def test_nothing_is_left_when_something_goes_wrong(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(RuntimeError), Fleet(tmp_path, 2, 20.0, said.append, FAKE) as fleet:
        fleet.want([spec("a"), spec("b")])
        fleet.ready("a")
        raise RuntimeError
    assert not any(server.alive for server in fleet.started)


def test_a_server_does_not_outlive_a_driver_that_is_killed(tmp_path: Path) -> None:
    driver = f"""
from pathlib import Path
from tests.e2e.server import Fleet, ServerSpec
fleet = Fleet(Path({str(tmp_path)!r}), 1, 20.0, print, {FAKE!r})
fleet.want([ServerSpec("one", False, ())])
print("pid", fleet.ready("one").pid, flush=True)
import time; time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", driver], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except (ProcessLookupError, FileNotFoundError):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the server is still there")


class TestEnvironment:
    def test_a_patched_server_has_our_folder_first_and_the_path_there_was_last(self, monkeypatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/theirs:/more")
        path = spec(patched=True, behind=Path("/behind")).environment()["PYTHONPATH"]
        assert path == f"{REPOSITORY}:/behind:/theirs:/more"

    def test_a_stock_server_has_the_path_there_was(self, monkeypatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/theirs")
        assert spec().environment()["PYTHONPATH"] == "/theirs"
        monkeypatch.delenv("PYTHONPATH")
        assert spec().environment()["PYTHONPATH"] == ""
        assert spec(patched=True).environment()["PYTHONPATH"] == str(REPOSITORY)

    def test_our_settings_are_those_of_the_run_alone(self, monkeypatch) -> None:
        monkeypatch.setenv("KDTREE_MODE", "off")
        environment = spec(patched=True, KDTREE_VALIDATE="1").environment()
        assert environment["KDTREE_VALIDATE"] == "1" and "KDTREE_MODE" not in environment
