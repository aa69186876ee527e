"""What an operator may write, and what it can never become: `deploy.options`, and make in front of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.options import Host, Options, UsageError
from tests.support.env import REPO

# Each would do something if make, a shell, ssh, systemd or pyinfra ever took it for more than a word.
HOSTILE = (
    "$(touch {0})",
    "$(shell touch {0})",
    "h$(shell touch {0})",
    "`touch {0}`",
    "h; touch {0}",
    "h'; touch {0}; '",
    'h"; touch {0}; "',
    "h\ntouch {0}",
    "h&&touch${IFS}{0}",
    "-oProxyCommand=touch${IFS}{0}",
    "root@-oProxyCommand=x",
    "@local",
    "@docker/x",
    "h h2",
    "../../etc/passwd",
    "h%n",
    "é",
)


def options(**words: str) -> Options:
    words = {"HOST": "root@h1", "UNIT": "sglang", **words}
    return Options.from_environ({f"DEPLOY_{name}": value for name, value in words.items()})


def test_defaults() -> None:
    assert options() == Options((Host("h1", "root"),), "sglang.service", None, "/opt/kdtree", 1200, False, False)


def test_everything() -> None:
    words = dict(HOSTS="root@h2:2222 h1.example.org root@h1", MODE="shadow", PREFIX="/srv/k+d/x_1.0", TIMEOUT="60")
    given = options(**words, DRY_RUN="1", FORCE="1", UNIT="sglang@k2\\x2d6.service")
    assert given.hosts == (Host("h1", "root"), Host("h2", "root", 2222), Host("h1.example.org"))
    assert given.unit == "sglang@k2\\x2d6.service" and given.prefix == "/srv/k+d/x_1.0"
    assert (given.mode, given.timeout, given.dry_run, given.force) == ("shadow", 60, True, True)
    assert [str(host) for host in given.hosts] == ["root@h1", "root@h2:2222", "h1.example.org"]


@pytest.mark.parametrize("name", ["HOST", "UNIT", "PREFIX", "MODE", "TIMEOUT", "DRY_RUN", "FORCE"])
@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_word_is_refused(name: str, word: str) -> None:
    with pytest.raises(UsageError, match=name):
        options(**{name: word.replace("{0}", "/tmp/x")})


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("HOST", ""),
        ("HOST", "h1:0"),
        ("HOST", "h1:65536"),
        ("UNIT", ""),
        ("UNIT", "sglang@"),
        ("UNIT", "x" * 256),
        ("PREFIX", "opt/kdtree"),
        ("PREFIX", "/"),
        ("PREFIX", "/opt/../etc"),
        ("PREFIX", "/opt/./x"),
        ("PREFIX", "/opt//x"),
        ("PREFIX", "/opt/x/"),
        ("PREFIX", "/opt/a:b"),
        ("PREFIX", "/opt/a b"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "-1"),
        ("TIMEOUT", "99999"),
        ("MODE", "Shadow"),
        ("DRY_RUN", "yes"),
    ],
)
def test_other_things_that_are_refused(name: str, word: str) -> None:
    with pytest.raises(UsageError, match=name):
        options(**{name: word})


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("root@[::1]", Host("::1", "root")),
        ("[fd00::2]:2222", Host("fd00::2", None, 2222)),
        ("[::ffff:10.0.0.1]", Host("::ffff:10.0.0.1")),
    ],
)
def test_address_of_six_versions(word: str, host: Host) -> None:
    given = options(HOST=word).hosts[0]
    assert given == host and str(given) == word


@pytest.mark.parametrize("word", ["root@::1", "::1", "fd00::2:2222"])
def test_address_whose_port_cannot_be_told_is_sent_into_brackets(word: str) -> None:
    """fd00::2:2222 is an address, and may be meant as one with a port."""
    user, _, address = word.rpartition("@")
    with pytest.raises(UsageError, match="goes into brackets") as caught:
        options(HOST=word)
    assert str(caught.value).endswith(f"HOST={user and user + '@'}[{address}]")


@pytest.mark.parametrize(
    "word", ["[::1", "::1]", "[h1]", "[::g]", "[fe80::1%eth0]", "fe80::1%eth0", "[::1]x", "[]", "[10.0.0.1]"]
)
def test_address_that_is_none(word: str) -> None:
    with pytest.raises(UsageError, match="is no host: .* in brackets for NAME"):
        options(HOST=word)


@pytest.fixture
def makefile(tmp_path: Path) -> Path:
    """The Makefile, with commands that only show the words that arrive."""
    folder = tmp_path / "checkout"
    (folder / "deploy").mkdir(parents=True)
    (folder / ".venv" / "deploy" / "bin").mkdir(parents=True)
    (folder / "Makefile").write_text((REPO / "Makefile").read_text())
    shown = "#!/bin/sh\nenv -0 | tr '\\n\\0' '~\\n' | grep ^DEPLOY_ | sort; echo \"$@\"\n"
    for name, text in (("deploy/setup.sh", "#!/bin/sh\n"), (".venv/deploy/bin/python", shown)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def make(folder: Path, *words: str, **environment: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DEPLOY_", "MAKE"))} | environment
    done = subprocess.run(["make", "-s", "deploy", *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "-m deploy deploy"
    lines = [line.partition("=") for line in done.stdout.splitlines()[:-1]]
    return {name.removeprefix("DEPLOY_"): value for name, _, value in lines if value}


@pytest.mark.parametrize("name", ["HOST", "HOSTS", "UNIT", "PREFIX", "MODE", "TIMEOUT", "FORCE"])
@pytest.mark.parametrize("word", [*HOSTILE, "$$HOME", "$(info x)", "a\\b", "#x", "${PATH}", "$@"])
def test_make_passes_every_word_on_as_it_was_written(makefile: Path, tmp_path: Path, name: str, word: str) -> None:
    trap = tmp_path / "trap"
    word = word.replace("{0}", str(trap))
    assert make(makefile, f"{name}={word}") == {name: word.replace("\n", "~")}
    assert not trap.exists()


def test_make_takes_words_from_its_command_line_only(makefile: Path) -> None:
    """csh and others export HOST, the name of the operator's own machine."""
    assert make(makefile, "UNIT=x", HOST="mine", FORCE="1", DEPLOY_MODE="off", UNIT="y") == {"UNIT": "x"}


def test_a_word_that_means_nothing_is_refused(makefile: Path) -> None:
    """DRYRUN=1 for DRY_RUN=1 would otherwise be a deployment."""
    words = make(makefile, "HOST=h1", "UNIT=x", "DRYRUN=1", "PYTHON=python3", "ARGS=")
    assert words == {"HOST": "h1", "UNIT": "x", "UNKNOWN": "DRYRUN"}
    with pytest.raises(UsageError, match="DRYRUN means nothing here, HOST, .* DRY_RUN"):
        options(**words)


@pytest.mark.parametrize("name", ["DEPLOY_HOST", "DEPLOY_FORCE", "DEPLOY_UNIT", "DEPLOY_WORDS"])
def test_make_does_not_expand_its_own_names_for_these_words(makefile: Path, tmp_path: Path, name: str) -> None:
    trap = tmp_path / "trap"
    assert make(makefile, f"{name}=$(shell touch {trap})", "UNIT=x") == {"UNIT": "x"}
    assert not trap.exists()
