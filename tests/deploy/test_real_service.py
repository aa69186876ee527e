"""A deployment and its way back on a real service: two spawned workers with SGLang's real Triton backend, a unit with a
PYTHONPATH, a sitecustomize and secrets of its own, started through a shell. One story; its tests run in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.deploy.machine import Checkout, Machine, Operator, Service

pytestmark = pytest.mark.deploy

SECRETS = ("sk-verysecret", "hf_VerySecretToken")


@pytest.fixture(scope="module")
def service(host: Machine) -> Iterator[Service]:
    command = "{python} -u /srv/service.py --tp 2 --port {port} --attention-backend triton"
    options = "--speculative-algorithm EAGLE --disable-cuda-graph --api-key sk-verysecret --ready-after 2"
    started = Service(host, "sglang-k26", f"/bin/bash -c 'cd /srv && exec {command} {options}'")
    started.start()
    yield started


@pytest.fixture(scope="module")
def story() -> dict[str, str]:
    """What one test tells the next."""
    return {}


def good(answer: tuple[int, str]) -> str:
    assert answer[0] == 0, answer[1]
    assert not any(secret in answer[1] for secret in SECRETS)
    return answer[1]


def test_dry_run_changes_nothing_and_shows_what_would(
    host: Machine, service: Service, operator: Operator, checkout: Checkout, story: dict[str, str]
) -> None:
    story["stock"] = host.tree()
    story["first"] = checkout.commit("first")
    started = service.invocation()
    output = good(operator.run("deploy", service.unit, MODE="shadow", DRY_RUN="1"))
    assert "through bash" in output and "SGLang        0.5.23, passes the contract" in output
    assert "2 x NVIDIA RTX PRO 6000 Blackwell, compute capability 12.0, driver 580.95.05" in output
    assert "no wrapt, no cupy" in output and "cpython-311" in output or "cpython-3" in output
    assert f"PYTHONPATH    {service.python_path}" in output and "sitecustomize /srv/site/sitecustomize.py" in output
    assert f'+Environment="PYTHONPATH=/opt/kdtree/releases/{story["first"]}:{service.python_path}"' in output
    assert '+Environment="KDTREE_MODE=shadow"' in output and f"restart {service.unit}" in output
    assert host.tree() == story["stock"] and service.invocation() == started


def test_checkout_with_changes_is_refused(operator: Operator, service: Service, checkout: Checkout) -> None:
    notes = checkout.folder / "kdtree_patch" / "notes.py"
    notes.write_text("# not committed\n")
    status, output = operator.run("deploy", service.unit)
    assert status == 1 and "kdtree_patch/notes.py" in output and "FORCE=1" in output and "preflight" not in output
    notes.unlink()


def test_first_deployment_that_fails_leaves_nothing(
    host: Machine, service: Service, operator: Operator, story: dict[str, str]
) -> None:
    service.set_faults(f"exits@{story['first']}")
    status, output = operator.run("deploy", service.unit, MODE="shadow")
    assert status == 3 and f"{service.unit} is as it was before" in output
    service.set_faults()
    assert service.healthy() and service.runs() is None and host.tree() == story["stock"]
    assert host.ssh("ls -A /opt").stdout == "" and "left over" not in good(operator.run("status", service.unit))


def test_deploy(host: Machine, service: Service, operator: Operator, story: dict[str, str]) -> None:
    output = good(operator.run("deploy", service.unit, MODE="shadow"))
    assert re.findall(r"^==> (\w+) deployhost$", output, re.M) == [
        *("preflight", "bundle", "release", "doctor", "switch", "confirm"),
    ]
    assert "2 of 2 workers: installed" in output and "verify calls arrive: [kdtree] shapes q=(3, 2, 576)" in output
    assert re.search(r"\d+ s  active \(running\), no answer on /health; last line: server_args", output)
    assert re.search(r"validation: 2 layer lines, largest rel \d\.\d+e-0[34]", output)
    assert service.healthy() and service.runs() == story["first"]


def test_every_process_runs_both_sitecustomizes_once_and_finds_the_bundled_packages_last(service: Service) -> None:
    about = service.about()
    for process in (about["main"], *about["workers"]):
        assert process["own_sitecustomize"] == 1 and process["patched"]
        assert process["python_path"].endswith(f":{service.python_path}")
    release = about["main"]["python_path"].split(":")[0]
    assert {worker["wrapt"] for worker in about["workers"]} == {f"{release}/vendor/wrapt/__init__.py"}
    assert about["main"]["wrapt"] is None  # a process that has not imported the backend


def test_release_belongs_to_root_and_only_its_cache_to_the_service(host: Machine, story: dict[str, str]) -> None:
    release = f"/opt/kdtree/releases/{story['first']}"
    writable = host.ssh("runuser -u sglang -- find /opt/kdtree -writable -not -type l", check=False).stdout.split()
    assert writable and all(path.startswith(f"{release}/cache/1000") for path in writable)
    assert host.ssh("readlink /opt/kdtree/current").stdout.strip() == f"releases/{story['first']}"
    names = host.ssh(f"ls {release}/cache/1000").stdout
    assert "verify_attn_flash-sm_120-" in names and "verify_attn_flash-host-" in names
    assert host.ssh("ls /run | grep kdtree; ls /opt/kdtree/incoming").stdout == ""


def test_deploy_again_changes_nothing(host: Machine, service: Service, operator: Operator) -> None:
    before, started = host.tree(), service.invocation()
    output = good(operator.run("deploy", service.unit, MODE="shadow"))
    assert "no change" in output and "nothing to send" in output and "nothing is to be done" in output
    assert host.tree() == before and service.invocation() == started


def test_status_and_logs(service: Service, operator: Operator, story: dict[str, str]) -> None:
    status = good(operator.run("status", service.unit))
    assert f"{story['first']}, mode shadow, since 20" in status and "2 of 2 installed" in status
    assert "/health answers" in status
    logs = good(operator.run("logs", service.unit))
    assert logs.count("[kdtree] installed ") == 2 and "[kdtree] shapes " in logs


def test_undeploy_leaves_no_trace(host: Machine, service: Service, operator: Operator, story: dict[str, str]) -> None:
    good(operator.run("undeploy", service.unit))
    assert service.healthy() and service.runs() is None
    service.set_faults()
    assert host.tree() == story["stock"]
    assert all(worker["kdtree"] == {} and not worker["patched"] for worker in service.about()["workers"])
    started = service.invocation()
    assert "nothing to do" in good(operator.run("undeploy", service.unit))
    assert service.invocation() == started and host.tree() == story["stock"]
    assert "none: the unit runs stock" in good(operator.run("status", service.unit))
