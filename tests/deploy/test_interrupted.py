"""What goes wrong in the middle, on a service that starts quickly: its workers have SGLang's signatures only. After
every failure the old service answers, and a second run finishes the job.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.deploy.machine import Checkout, Machine, Operator, Service

pytestmark = pytest.mark.deploy

COMMAND = "{python} /srv/service.py --tp=1 --port {port} --attention-backend triton --speculative-algorithm EAGLE"


class Scene:
    """A service that has had one release deployed, and a second one that is yet to come."""

    def __init__(self, host: Machine, operator: Operator, checkout: Checkout, service: Service):
        self.host, self.operator, self.checkout, self.service = host, operator, checkout, service
        self.first, self.second = self.release("first"), ""
        self.good("deploy")
        self.second = self.release("second")

    def release(self, name: str) -> str:
        """The release of the commit with this name, which is checked out."""
        if self.checkout.git("tag", "--list", name).strip():
            self.checkout.git("checkout", "-q", name)
            return f"0.1.0-{self.checkout.git('rev-parse', 'HEAD')[:12]}"
        found = self.checkout.commit(name)
        self.checkout.git("tag", name)
        return found

    def good(self, action: str, **words: str) -> str:
        status, output = self.operator.run(action, self.service.unit, **words)
        assert status == 0, output
        return output

    def bad(self, action: str, expected: int, **words: str) -> str:
        """`expected`: 1 for a refusal or a finding, 3 for a service that was put back, 4 for one that was not."""
        status, output = self.operator.run(action, self.service.unit, **words)
        assert status == expected, output
        return output

    def other(self) -> str:
        """Checks out the release that does not run."""
        return self.release("second" if self.service.runs() == self.first else "first")

    def assert_whole(self, release: str) -> None:
        """The unit, the running processes and the records all say the same release, and nothing is pending."""
        assert self.service.healthy() and self.service.runs() == release
        assert f"/releases/{release}:" in (self.host.read(self.service.drop_in) or "")
        assert self.host.ssh("readlink /opt/kdtree/current").stdout.strip() == f"releases/{release}"
        records = f"/opt/kdtree/units/{self.service.unit}"
        assert json.loads(self.host.read(f"{records}/state.json") or "{}")["release"] == release
        assert self.host.read(f"{records}/pending.json") is None
        assert self.host.ssh("ls /run | grep kdtree", check=False).stdout == ""

    def until(self, process: subprocess.Popen[str], line: str) -> str:
        """Reads what an operator sees until a line comes."""
        assert process.stdout is not None
        seen = ""
        for text in process.stdout:
            seen += text
            if line in text:
                return seen
        raise AssertionError(f"{line!r} never came:\n{seen}")

    def until_the_host_is_done(self) -> None:
        self.host.wait_for(self.service.transaction_is_over, 120, "the transaction to end")


@pytest.fixture(scope="module")
def scene(host: Machine, operator: Operator, checkout: Checkout) -> Iterator[Scene]:
    service = Service(host, "sglang-light", "/usr/bin/env LANG=C.UTF-8 nice -n 5 " + COMMAND, light=True)
    service.start()
    yield Scene(host, operator, checkout, service)
    service.set_faults()


# ----------------------------------------------------------------------------------------------------------- the faults


def test_service_that_never_gets_ready(scene: Scene) -> None:
    scene.service.set_faults(f"never-ready@{scene.second}")
    output = scene.bad("deploy", 3, TIMEOUT="8")
    assert "/health did not answer within 8 s" in output and "as it was before" in output
    scene.assert_whole(scene.first)


def test_service_in_a_restart_loop_is_noticed_within_seconds(scene: Scene) -> None:
    scene.service.set_faults(f"exits@{scene.second}")
    started = time.monotonic()
    output = scene.bad("deploy", 3, TIMEOUT="600")
    assert time.monotonic() - started < 60
    assert "it is in a loop" in output or "ended while it was starting" in output
    assert "| the service ends at once, as it was told to" in output
    scene.assert_whole(scene.first)


def test_worker_that_declines_is_noticed_before_health(scene: Scene) -> None:
    """The service would come up, and run stock in one of its workers."""
    scene.service.set_faults(f"declines@{scene.second}")
    output = scene.bad("deploy", 3, TIMEOUT="600")
    assert "a worker declined: [kdtree] ERROR declined reason=bad_setting KDTREE_LOG_LEVEL='loud'" in output
    assert "==> confirm" not in output
    scene.assert_whole(scene.first)


def test_worker_without_installed(scene: Scene) -> None:
    """In a second unit, which shares the releases and then has nothing of ours left."""
    service = Service(scene.host, "sglang-pair", COMMAND.replace("--tp=1", "--tp 2"), light=True)
    service.start()
    service.set_faults(f"no-installed@{scene.release('second')}")
    status, output = scene.operator.run("deploy", service.unit)
    assert status == 3 and "1 of 2 workers logged `installed`" in output and "==> roll back deployhost" in output
    assert "| [kdtree] installed " in output  # the journal's lines
    assert service.healthy() and service.runs() is None and scene.host.read(service.drop_in) is None
    scene.host.ssh(f"systemctl stop {service.unit}")
    scene.assert_whole(scene.first)


def test_release_whose_kernel_does_not_compile(scene: Scene) -> None:
    kernel = scene.checkout.folder / "kernels" / "verify_attn_flash.cu"
    text = kernel.read_text()
    kernel.write_text(text + "\nthis is no CUDA\n")
    broken = scene.release("broken")
    started, before = scene.service.invocation(), scene.host.tree()
    output = scene.bad("deploy", 1)
    assert "the doctor found" in output and "compile" in output.lower() and "error" in output
    assert "the service has not been touched" in output and "==> switch" not in output
    assert broken not in scene.host.ssh("ls /opt/kdtree/releases").stdout and scene.host.tree() == before
    assert scene.service.invocation() == started
    scene.assert_whole(scene.first)
    scene.release("second")


def test_validation_above_the_limit(scene: Scene) -> None:
    scene.service.set_faults(f"wrong@{scene.second}")
    output = scene.bad("deploy", 3, MODE="shadow")
    assert "rel is above 0.02" in output and "rel=1.0837e+00" in output
    scene.assert_whole(scene.first)
    scene.service.set_faults()


# ------------------------------------------------------------------------------------------------ the connection breaks


@pytest.mark.parametrize("step", ["preflight", "bundle"])
def test_operator_killed_before_the_host_has_begun(scene: Scene, step: str) -> None:
    before, started = scene.service.runs(), scene.service.invocation()
    scene.release("third")
    process = scene.operator.start("deploy", scene.service.unit)
    scene.until(process, f"==> {step}")
    process.kill()
    process.wait()
    assert scene.service.invocation() == started and scene.service.transaction_is_over()
    scene.assert_whole(before or "")


@pytest.mark.parametrize("step", ["release", "doctor", "switch", "confirm"])
def test_operator_killed_while_the_host_is_at_work(scene: Scene, step: str) -> None:
    release = scene.other()
    process = scene.operator.start("deploy", scene.service.unit)
    scene.until(process, f"==> {step}")
    process.kill()
    process.wait()
    scene.until_the_host_is_done()
    scene.assert_whole(release)
    started = scene.service.invocation()
    assert "no change" in scene.good("deploy")
    assert scene.service.invocation() == started


def test_connection_that_breaks_is_made_again(scene: Scene) -> None:
    release = scene.other()
    process = scene.operator.start("deploy", scene.service.unit)
    seen = scene.until(process, "==> switch")
    for pid in scene.host.ssh("pgrep -f 'sshd: root@notty'", check=False).stdout.split():
        scene.host.ssh(f"kill {pid}", check=False)
    seen += process.communicate(timeout=120)[0]
    assert process.returncode == 0, seen
    assert "connection lost; the host goes on by itself" in seen and f"runs {release} in mode on" in seen
    scene.assert_whole(release)


@pytest.mark.parametrize("again", ["deploy", "rollback"])
def test_host_that_dies_in_the_middle(scene: Scene, again: str) -> None:
    """As far as the unit's files go, it is what a reset in the middle of a switch leaves behind."""
    before, release = scene.service.runs(), scene.other()
    scene.service.set_faults(f"never-ready@{release}")
    process = scene.operator.start("deploy", scene.service.unit)
    scene.until(process, "active (running), no answer on /health")
    scene.host.ssh("systemctl kill --signal=KILL 'kdtree-deploy-*'")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 4 and "run the same command again" in output
    assert "cut off" in scene.bad("status", 1)
    scene.service.set_faults()
    output = scene.good(again)
    assert "putting back what was there before" in output
    scene.assert_whole(release if again == "deploy" else before or "")


def test_transaction_that_is_stopped_puts_back_what_was_there(scene: Scene) -> None:
    before, release = scene.service.runs(), scene.other()
    scene.service.set_faults(f"never-ready@{release}")
    process = scene.operator.start("deploy", scene.service.unit)
    scene.until(process, "active (running), no answer on /health")
    output = scene.good("status")
    assert f"deploy of {scene.service.unit} by " in output and "now at step switch" in output
    assert f"{release}, mode on, not confirmed yet" in output and f"{before}, mode on" in output
    scene.host.ssh("systemctl stop 'kdtree-deploy-*'")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 3 and "told to stop" in output and "as it was before" in output
    scene.service.set_faults()
    scene.assert_whole(before or "")


# ---------------------------------------------------------------------------------------------------------- at one time


def test_two_operators_at_once(scene: Scene) -> None:
    release = scene.other()
    first = scene.operator.start("deploy", scene.service.unit)
    scene.until(first, "==> release")
    status, output = scene.operator.run("undeploy", scene.service.unit)
    assert status == 1 and "somebody else is at work" in output and f"deploy of {scene.service.unit}" in output
    status, output = scene.operator.run("deploy", scene.service.unit)
    assert status == 1 and "somebody else is at work" in output
    rest = first.communicate(timeout=120)[0]
    assert first.returncode == 0, rest
    scene.assert_whole(release)


# ------------------------------------------------------------------------------------------------------------- and back


def test_rollback_is_idempotent(scene: Scene) -> None:
    before = scene.service.runs()
    release = scene.other()
    scene.good("deploy")
    assert scene.service.runs() == release
    output = scene.good("rollback")
    assert "contract checked" in output
    scene.assert_whole(before or "")
    started = scene.service.invocation()
    assert "already: nothing to do" in scene.good("rollback")
    assert scene.service.invocation() == started
    scene.assert_whole(before or "")


def test_mode_is_kept_where_none_is_named_and_comes_back(scene: Scene) -> None:
    release = scene.other()
    scene.good("deploy")
    assert "in mode shadow" in scene.good("deploy", MODE="shadow")
    assert f"{release}, mode shadow, since" in scene.good("status")
    output = scene.good("deploy")
    assert "shadow, which the unit has: MODE=on changes it" in output and "in mode shadow already, confirmed" in output
    scene.good("rollback")
    assert f"{release}, mode on, since" in scene.good("status")
    scene.assert_whole(release)


def test_instance_of_a_template_whose_python_path_has_specifiers(scene: Scene) -> None:
    unit = Service(scene.host, "sglang-t@light", COMMAND, light=True, python_path="/srv/site:/srv/%i")
    unit.start()
    release = scene.release("second")
    for said in (f"{unit.unit} runs {release} in mode on", "no change"):
        status, output = scene.operator.run("deploy", unit.unit)
        assert status == 0 and said in output, output
    assert unit.runs() == release and unit.about()["main"]["python_path"].endswith(f"{release}:/srv/site:/srv/light")
    status, output = scene.operator.run("undeploy", unit.unit)
    assert status == 0 and unit.runs() is None and scene.host.read(unit.drop_in) is None
    scene.host.ssh(f"systemctl stop {unit.unit}")


def test_only_five_releases_are_kept(scene: Scene) -> None:
    """Old ones are made by hand: what counts is when they came and whether a unit refers to them."""
    names = [f"0.0.{number}-old" for number in range(6)]
    for number, name in enumerate(names):
        folder = f"/opt/kdtree/releases/{name}"
        scene.host.ssh(
            f"mkdir {folder} && echo '{{\"wheel_key\": 0}}' > {folder}/manifest.json && "
            f"touch -d '2020-01-0{number + 1}' {folder}/manifest.json"
        )
    release = scene.other()
    assert "old releases removed: 0.0." in scene.good("deploy")
    left = scene.host.ssh("ls /opt/kdtree/releases").stdout.split()
    assert scene.first in left and scene.second in left and len(left) == 5
    scene.assert_whole(release)


# --------------------------------------------------------------------------------------- units that cannot be served so


@pytest.mark.parametrize(
    ("name", "command", "extra", "said"),
    [
        ("isolated", COMMAND.replace("{python}", "{python} -E"), "", "-E makes it ignore every PYTHON* variable"),
        (
            "container",
            "/usr/bin/docker run --rm lmsysorg/sglang",
            "",
            "the command runs docker: the service runs in a co",
        ),
        ("emptied", f"/usr/bin/env -i {COMMAND}", "", "`env -i`, which empties the environment"),
        ("filed", COMMAND, "StandardOutput=append:/var/log/x.log\n", "keeps the worker's lines out of the journal"),
        ("fleeting", COMMAND, "DynamicUser=yes\n", "no kernel cache can belong"),
        ("mistyped", COMMAND, "Environment=KDTREE_GUARD=1\n", "every worker would decline: KDTREE_GUARD="),
        ("overridden", COMMAND, "EnvironmentFile=/srv/variables\n", "PYTHONPATH is '/from/a/file' for the service"),
    ],
)
def test_unit_that_is_refused(scene: Scene, name: str, command: str, extra: str, said: str) -> None:
    scene.host.ssh("echo PYTHONPATH=/from/a/file > /srv/variables")
    unit = Service(scene.host, f"sglang-{name}", command, light=True, extra=extra)
    scene.host.ssh("systemctl daemon-reload")
    before = scene.host.tree()
    status, output = scene.operator.run("deploy", unit.unit)
    assert status == 1 and said in output and "nothing has been changed anywhere" in output
    assert "==> bundle" not in output and scene.host.tree() == before


def test_shell_script_is_seen_through_while_it_runs(scene: Scene) -> None:
    options = "--attention-backend triton --speculative-algorithm EAGLE --served sglang"
    script = f'#!/bin/sh\ncd /srv\nexec "$1" /srv/service.py --port "$2" {options}\n'
    scene.host.put("/srv/start.sh", script, 0o755)
    unit = Service(scene.host, "sglang-script", "/srv/start.sh {python} {port}", light=True)
    scene.host.ssh("systemctl daemon-reload")
    status, output = scene.operator.run("deploy", unit.unit, DRY_RUN="1")
    assert status == 1 and "the shell script /srv/start.sh" in output and "the service is not running" in output
    unit.start()
    status, output = scene.operator.run("deploy", unit.unit, DRY_RUN="1")
    assert status == 0 and "through start.sh (seen in the running service)" in output
    scene.host.ssh(f"systemctl stop {unit.unit}")


def test_unit_that_was_stopped_is_stopped_again_after_a_failure(scene: Scene) -> None:
    before = scene.service.runs()
    scene.host.ssh(f"systemctl stop {scene.service.unit}")
    scene.service.set_faults(f"exits@{scene.release('second' if before == scene.first else 'first')}")
    output = scene.bad("deploy", 3)
    assert "a deployment starts it" in output and "as it was before, not running" in output
    assert scene.host.ssh(f"systemctl is-active {scene.service.unit}", check=False).stdout.strip() == "inactive"
    scene.service.start()
    scene.assert_whole(before or "")
    scene.service.set_faults()


def test_unit_that_does_not_exist(scene: Scene) -> None:
    status, output = scene.operator.run("deploy", "sglang-lite")
    assert status == 1 and "there is no unit sglang-lite.service here; like it are sglang-light.service" in output


def test_hosts_are_all_looked_at_before_the_first_is_touched(scene: Scene) -> None:
    started = scene.service.invocation()
    scene.other()
    output = scene.bad("deploy", 1, HOSTS="127.0.0.1:1")
    assert "==> preflight 127.0.0.1:1" in output and "FINDING: ssh to 127.0.0.1:1" in output
    assert "==> bundle" not in output and scene.service.invocation() == started


@pytest.mark.parametrize("action", ["status", "logs"])
def test_every_host_is_shown_although_one_does_not_answer(scene: Scene, action: str) -> None:
    output = scene.bad(action, 1, HOST="127.0.0.1:1", HOSTS="deployhost 127.0.0.1:2")
    assert [output.count(f"==> {action} {host}\n") for host in ("127.0.0.1:1", "deployhost", "127.0.0.1:2")] == [
        1,
        1,
        1,
    ]
    assert "1 of 1 installed" in output or "[kdtree] installed " in output
    assert "FINDING: ssh to 127.0.0.1:1" in output
    assert "FAILED: see what was found on 127.0.0.1:1, 127.0.0.1:2\n" in output


def test_rollback_stops_at_the_first_host_that_fails_and_says_which_are_left(scene: Scene) -> None:
    before = scene.service.runs()
    output = scene.bad("rollback", 1, HOST="127.0.0.1:1", HOSTS="deployhost")
    assert "; not begun: deployhost" in output
    scene.assert_whole(before or "")


def test_address_of_six_versions(scene: Scene) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
    output = scene.good("status", HOST=f"root@[::1]:{scene.host.ssh_port}")
    assert f"==> status root@[::1]:{scene.host.ssh_port}" in output and "1 of 1 installed" in output


def test_several_hosts_one_after_the_other(scene: Scene) -> None:
    """The same machine under a second name."""
    other, release = f"root@127.0.0.1:{scene.host.ssh_port}", scene.other()
    scene.service.set_faults(f"exits@{release}")
    output = scene.bad("deploy", 3, HOSTS=other)
    assert output.index(f"==> preflight {other}") < output.index("==> bundle deployhost")
    assert f"not begun: {other}" in output and f"==> bundle {other}" not in output
    scene.service.set_faults()
    output = scene.good("deploy", HOSTS=other)
    assert output.index("==> confirm deployhost") < output.index(f"==> bundle {other}") < output.index("no change")
    scene.assert_whole(release)


def test_undeploy(scene: Scene) -> None:
    scene.good("undeploy")
    assert scene.service.healthy() and scene.service.runs() is None
    assert scene.host.ssh("ls /opt", check=False).stdout == ""
