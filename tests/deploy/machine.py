"""A host for the deploy tests: Debian from debootstrap, booted with systemd-nspawn. systemd is its process 1, and a
real sshd listens on a loopback port.

The root is made once and kept in .venv; a run writes into an overlay over it, which goes with the run. The interpreter
and the packages of .venv are seen inside at the same paths, read-only, so that the service there imports the real
SGLang. Needs root on Debian or Ubuntu, and fetches what it needs with apt-get.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import stand_in
from tests.support.env import REPO, sglang_dir

PACKAGES = ("systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "g++")
# Nothing of the interpreter of .venv lies in /usr, unless it is Debian's own: then the root has the same one.
BASE = Path(os.path.realpath(sys.base_prefix))
VENV = (REPO / ".venv").resolve()
HERE = Path(__file__).resolve().parent

# Two parts that the kernel is made for, as nvidia-smi tells of them.
NVIDIA_SMI = """#!/bin/sh
echo "NVIDIA RTX PRO 6000 Blackwell, GPU-1111, Default, 12.0, 580.95.05, 1200"
echo "NVIDIA RTX PRO 6000 Blackwell, GPU-2222, Default, 12.0, 580.95.05, 95000"
"""
# Counts how often it has run in a process, as the user's own would be seen to.
OWN_SITECUSTOMIZE = "import sys\nsys.own_sitecustomize = getattr(sys, 'own_sitecustomize', 0) + 1\n"

# What a constructed backend has, for SGLang's bare signatures.
WITH_ATTRIBUTES = (
    "dllm_fa4=False):\n        pass",
    "dllm_fa4=False):\n"
    "        import torch\n"
    "        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd\n"
    "        self.extend_attention_fwd = extend_attention_fwd\n"
    "        self.num_draft_tokens, self.req_to_token = 3, torch.zeros(1)",
)


def why_not() -> str | None:
    """Why there can be no such host here."""
    if os.geteuid() != 0:
        return "only root can boot a host for the deploy tests"
    if platform.freedesktop_os_release().get("ID") not in ("debian", "ubuntu"):
        return "the host for the deploy tests is made with debootstrap, which is for Debian and Ubuntu"
    return None


def suite() -> str:
    return platform.freedesktop_os_release()["VERSION_CODENAME"]


def run(*words: object, **options: Any) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def install_tools() -> None:
    if all(shutil.which(tool) for tool in ("debootstrap", "systemd-nspawn", "ssh", "ssh-keygen")):
        return
    run("apt-get", "update", "-qq")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    tools = ("debootstrap", "systemd-container", "openssh-client")
    run("apt-get", "install", "-qq", "--no-install-recommends", *tools, env=env)


def make_root() -> Path:
    """The Debian root, made the first time; no half-made one is ever taken for a whole one. One process at a time."""
    name = hashlib.sha256(" ".join((suite(), *PACKAGES)).encode()).hexdigest()[:8]
    root = VENV / f"debian-{suite()}-{name}"
    if not root.is_dir():
        half = root.with_suffix(".part")
        shutil.rmtree(half, ignore_errors=True)
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite(), half)
        # No timer of Debian's may use the two cores in the middle of a test.
        for timer in ("apt-daily", "apt-daily-upgrade", "e2scrub_all", "fstrim"):
            (half / f"etc/systemd/system/{timer}.timer").symlink_to("/dev/null")
        half.rename(root)
    return root


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machine:
    """The booted host, and one service on it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ssh_port = free_port()
        self.home = folder / "home"  # the operator's
        self._process: subprocess.Popen[bytes] | None = None
        self._root = folder / "root"

    # -------------------------------------------------------------------------------------------------------- the host

    def __enter__(self) -> Machine:
        lower = make_root()
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir()
        layers = f"lowerdir={lower},upperdir={self.folder / 'upper'},workdir={self.folder / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, self._root)
        try:
            self._prepare()
            self._boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self) -> None:
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        key = self.home / ".ssh" / "id_ed25519"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        config = self.home / ".ssh" / "config"
        config.write_text(
            f"Host deployhost\n  HostName 127.0.0.1\n  Port {self.ssh_port}\n  User root\n  IdentityFile {key}\n"
            f"  UserKnownHostsFile {self.home / '.ssh' / 'known_hosts'}\n  StrictHostKeyChecking accept-new\n"
        )
        self._root.chmod(0o755)
        root_home = self._root / "root"
        root_home.chmod(0o711)  # the interpreter may lie under it
        (root_home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(f"{key}.pub", root_home / ".ssh" / "authorized_keys")
        self.put(
            "/etc/ssh/sshd_config.d/test.conf", f"Port {self.ssh_port}\nListenAddress 127.0.0.1\nListenAddress ::1\n"
        )
        self.put("/usr/local/bin/nvidia-smi", NVIDIA_SMI, 0o755)
        self.put("/etc/systemd/journald.conf.d/test.conf", "[Journal]\nRateLimitBurst=0\n")
        run("chroot", self._root, "useradd", "--create-home", "--shell", "/bin/sh", "sglang")
        self.put("/srv/service.py", (HERE / "service.py").read_text())
        self.put("/srv/bed.py", (REPO / "kdtree_patch" / "demo_backend.py").read_text())
        self.put("/srv/site/sitecustomize.py", OWN_SITECUSTOMIZE)
        stand_in.write(self._root / "srv" / "light", "0.5.23", stand_in.Drift(stand_in.BACKEND, *WITH_ATTRIBUTES))

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        target = self._root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def _boot(self) -> None:
        binds = {VENV}
        if not BASE.is_relative_to("/usr") or BASE.is_relative_to("/usr/local"):
            binds.add(BASE)
        # It ends with the process that started it, however that ends.
        words = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            "systemd-nspawn",
            "--quiet",
            f"--directory={self._root}",
            "--boot",
            "--register=no",
            "--keep-unit",
        ]
        words += [f"--machine=kdtree-{os.getpid()}", "--resolv-conf=off", "--timezone=off", "--link-journal=no"]
        words += [f"--bind-ro={path}" for path in sorted(binds)]
        # What a release brings along, the service must not have: an empty folder hides each of these packages.
        packages = Path(sysconfig.get_path("purelib")).resolve()
        for pattern in ("wrapt*", "cupy*"):
            words += [f"--tmpfs={path}:mode=755" for path in packages.glob(pattern) if path.is_dir()]
        console = (self.folder / "console").open("wb")
        self._process = subprocess.Popen(
            words,
            # With the older hierarchy systemd inside is not told when a group of processes has ended, and waits.
            env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
        self.wait_for(lambda: self.ssh("true", check=False).returncode == 0, 60, "sshd to answer")

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        subprocess.run(["umount", "--lazy", str(self._root)], check=False)
        shutil.rmtree(self.folder / "upper", ignore_errors=True)

    def ssh(self, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        config = self.home / ".ssh" / "config"
        words = ["ssh", "-F", str(config), "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=5", "deployhost", command]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def read(self, path: str) -> str | None:
        done = self.ssh(f"cat {path}", check=False)
        return done.stdout if done.returncode == 0 else None

    def tree(self) -> str:
        """Everything that a deployment could leave behind, by name and content."""
        return self.ssh(
            "find /etc/systemd /run/systemd/system /opt /usr/local /srv -path '*/vendor/*' -prune -o -type f -print | "
            "sort | xargs -r -d '\\n' sha256sum; find /opt /etc/systemd -type d -o -type l | sort; "
            "ls /run | grep kdtree-; true"
        ).stdout

    @staticmethod
    def wait_for(there: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < until, f"waited {seconds} s for {what}"
            time.sleep(0.1)


class Service:
    """A unit on the machine, and the answers of the service in it."""

    def __init__(
        self, machine: Machine, name: str, exec_start: str, light: bool = False, extra: str = "", python_path: str = ""
    ):
        self.machine = machine
        self.name = name
        self.unit = f"{name}.service"
        self.port = free_port()
        python = VENV / "bin" / "python"
        self.python_path = f"/srv/site:{'/srv/light' if light else sglang_dir('0.5.23').resolve()}"
        variables = {
            "PYTHONPATH": python_path or self.python_path,
            "TRITON_INTERPRET": "1",
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "HF_TOKEN": "hf_VerySecretToken",
        }
        if light:  # at this level no worker would say what a deployment is confirmed by, if a drop-in did not set it
            variables["KDTREE_LOG_LEVEL"] = "warning"
        lines = "\n".join(f'Environment="{key}={value}"' for key, value in variables.items())
        command = exec_start.format(python=python, port=self.port)
        machine.put(
            f"/etc/systemd/system/{re.sub('@.*', '@', name)}.service",
            f"[Service]\nUser=sglang\nWorkingDirectory=/srv\nRestart=always\nRestartSec=1\n{lines}\n"
            f"ExecStart={command}\n{extra}",
        )

    @property
    def drop_in(self) -> str:
        return f"/etc/systemd/system/{self.unit}.d/50-kdtree.conf"

    def start(self) -> None:
        self.machine.ssh(f"systemctl daemon-reload && systemctl start {self.unit}")
        self.machine.wait_for(self.healthy, 120, f"{self.unit} to be healthy")

    def set_faults(self, *names: str) -> None:
        self.machine.ssh(f"echo {' '.join(names)} > /srv/faults" if names else "rm -f /srv/faults")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def about(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/about", timeout=5) as answer:
            content: dict[str, Any] = json.load(answer)
            return content

    def runs(self) -> str | None:
        """The release that the running processes have on PYTHONPATH; None for stock. All must agree."""
        about = self.about()
        paths = {about["main"]["python_path"], *(worker["python_path"] for worker in about["workers"])}
        assert len(paths) == 1, paths
        first = paths.pop().split(":")[0]
        return Path(first).name if "/releases/" in first else None

    def invocation(self) -> str:
        return self.machine.ssh(f"systemctl show -p InvocationID --value {self.unit}").stdout.strip()

    def transaction_is_over(self) -> bool:
        words = "systemctl list-units --no-legend --state=active,activating,deactivating 'kdtree-deploy-*'"
        return not self.machine.ssh(words).stdout.strip()


class Checkout:
    """A clone of this repository as it stands, in which tests make commits."""

    def __init__(self, folder: Path):
        self.folder = folder
        names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPO).split("\0")
        for name in filter(None, names):
            if (REPO / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, folder / name)
        self.git("init", "-q")
        self.commit("the first")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
        return run("git", *identity, *words, cwd=self.folder)

    def commit(self, message: str) -> str:
        """Commits what there is. Returns the name of its release."""
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return f"0.1.0-{self.git('rev-parse', 'HEAD')[:12]}"


class Operator:
    """Somebody who types make commands on another machine."""

    def __init__(self, machine: Machine, checkout: Checkout):
        self.machine = machine
        self.checkout = checkout

    def start(self, action: str, unit: str, **words: str) -> subprocess.Popen[str]:
        words = {"HOST": "deployhost", "TIMEOUT": "90", **words, "UNIT": unit}
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("DEPLOY_", "PYTHON", "KDTREE_"))
        }
        env |= {"HOME": str(self.machine.home), **{f"DEPLOY_{name}": value for name, value in words.items()}}
        return subprocess.Popen(
            [str(VENV / "deploy" / "bin" / "python"), "-m", "deploy", action],
            cwd=self.checkout.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, action: str, unit: str, **words: str) -> tuple[int, str]:
        process = self.start(action, unit, **words)
        try:
            output = process.communicate(timeout=240)[0]
        finally:
            process.kill()
        return process.returncode, output


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    with (VENV / ".debian.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install_tools()
        make_root()
    with Machine(folder) as booted:
        yield booted


__all__ = ["Checkout", "Machine", "Operator", "Service", "machine", "urllib", "why_not"]
