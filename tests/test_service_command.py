"""`kdtree_patch.service_command`: from what a service is started with to the Python that really runs."""

from __future__ import annotations

import pytest

from deploy.host.look import health_url, workers_of
from kdtree_patch.service_command import Command, Opaque, Refused, expand, python_path_problem, unwrap

PYTHON = "/opt/venv/bin/python3"
LAUNCH = "-m sglang.launch_server --tp 8"
FILES = {
    "/opt/venv/bin/sglang": f"#!{PYTHON}\nimport sys\n",
    "/opt/venv/bin/isolated": f"#!{PYTHON} -I\nimport sys\n",
    "/opt/venv/bin/long": "#!/bin/sh\n'''exec' /opt/a/very/long/path/bin/python \"$0\" \"$@\"\n' '''\nimport sys\n",
    "/opt/start.sh": "#!/bin/bash\nexec python\n",
    "/usr/bin/false": "",
}
IN_PATH = {PYTHON, "/usr/bin/python3", "/opt/venv/bin/python", "/opt/other/bin/python"}


def through(*argv: str, **environment: str) -> Command:
    return unwrap(
        expand(argv, environment), environment, lambda path: FILES.get(path, ""), lambda path: path in IN_PATH
    )


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize(
    ("argv", "interpreter"),
    [
        (words(f"{PYTHON} {LAUNCH}"), PYTHON),
        (words(f"/usr/bin/numactl --cpunodebind=0 --membind 0 {PYTHON} {LAUNCH}"), PYTHON),
        (words(f"/usr/bin/numactl -N 0 -m 0 -- {PYTHON} {LAUNCH}"), PYTHON),
        (words(f"/usr/bin/env A=1 -u B -C /srv CUDA_VISIBLE_DEVICES=0,1 {PYTHON} {LAUNCH}"), PYTHON),
        (["/usr/bin/env", "-S", f"A=1 {PYTHON} {LAUNCH}"], PYTHON),
        (["/usr/bin/env", f"-S{PYTHON} -u", *LAUNCH.split()], PYTHON),
        (words(f"/usr/bin/env python3 {LAUNCH}"), "/usr/bin/python3"),
        (words(f"nice -n 5 ionice -c 2 taskset -c 0-7 chrt -f 50 {PYTHON} {LAUNCH}"), PYTHON),
        (words(f"timeout --signal TERM -k 5 1000 stdbuf -oL nohup setsid {PYTHON} {LAUNCH}"), PYTHON),
        (words(f"/usr/bin/tini -g -- {PYTHON} {LAUNCH}"), PYTHON),
        (["/bin/bash", "-c", f"exec {PYTHON} {LAUNCH}"], PYTHON),
        (["/bin/bash", "-lc", f"cd /srv && ulimit -n 65536; A=1 exec {PYTHON} {LAUNCH}"], PYTHON),
        (["/bin/bash", "-o", "pipefail", "-c", f"export A='x y'\n{PYTHON} {LAUNCH}\n"], PYTHON),
        (["/bin/sh", "-c", f"source /opt/venv/bin/activate && exec python {LAUNCH}"], "/opt/venv/bin/python"),
        (["/bin/sh", "-c", f"export PATH=/opt/other/bin:$PATH; exec python {LAUNCH}"], "/opt/other/bin/python"),
        (["/bin/bash", "-c", f"exec numactl -N 0 bash -c 'exec {PYTHON} {LAUNCH}'"], PYTHON),
        (words("/opt/venv/bin/sglang serve --tp 8"), PYTHON),
        (words("/opt/venv/bin/long --tp 8"), "/opt/a/very/long/path/bin/python"),
        (["${VENV}/bin/python3", "-m", "x", "--tp", "8"], PYTHON),
        (["$RUN", "-m", "x", "--tp", "8"], PYTHON),
        ([PYTHON, "$ARGS"], PYTHON),
        ([PYTHON, "-m", "x", "--tp=${TP}", "$NONE"], PYTHON),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_interpreter_behind_its_wrappers(argv: list[str], interpreter: str) -> None:
    found = through(*argv, VENV="/opt/venv", RUN=PYTHON, ARGS="-m x --name 'a b' --tp 8", TP="8", NONE="")
    assert found.interpreter == interpreter and found.flags <= {"u"}
    assert found.option("--tp") == "8" and workers_of(found) == 8


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["-u", "-m", "x"], "u"),
        (["-I", "-m", "x"], "I"),
        (["-uE", "-X", "dev", "-W", "ignore", "-m", "x"], "uE"),
        (["-Xdev", "-S", "/srv/x.py", "-E"], "S"),
        (["-um", "x", "-I"], "u"),
        (["-c", "-E"], ""),
        (["--check-hash-based-pycs", "always", "-s", "x"], "s"),
        (["-"], ""),
    ],
    ids=str,
)
def test_flags_of_python_itself(argv: list[str], flags: str) -> None:
    found = through(PYTHON, *argv)
    assert found.flags == set(flags)
    assert (python_path_problem(found) is None) == (not set("IES") & set(flags))


def test_flags_in_a_first_line() -> None:
    assert "isolates" in (python_path_problem(through("/opt/venv/bin/isolated")) or "")


@pytest.mark.parametrize("flag", ["-I", "-E", "-S", "-uE"])
def test_flag_that_keeps_the_patch_out_is_named_with_what_to_do(flag: str) -> None:
    said = python_path_problem(through(PYTHON, flag, "-m", "sglang.launch_server")) or ""
    assert f"-{flag[-1]} " in said and said.endswith(": take that out of the command")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (words("/usr/bin/docker run --rm lmsysorg/sglang"), "docker: the service runs in a container"),
        (words("/usr/bin/podman run x"), "podman"),
        (words("conda run -n sglang python"), "conda: it chooses the interpreter"),
        (words("/usr/bin/uv run python"), "uv"),
        (words(f"/usr/bin/sudo -u sglang {PYTHON}"), "sudo: it does not pass PYTHONPATH on"),
        (words(f"/usr/bin/env -i {PYTHON}"), "empties the environment"),
        (
            words("/usr/bin/false"),
            "/usr/bin/false, which is neither Python nor a wrapper that is known here: name the Python",
        ),
        (words("/usr/bin/env python3.9"), "python3.9 is not found in PATH"),
        (words("venv/bin/python x"), "relative path"),
        (["/bin/bash", "-c", f"exec '{PYTHON}"], "cannot be read"),
        (["/usr/bin/env", "-S", f"'{PYTHON}"], "env -S is given cannot be split"),
        (["/usr/bin/env", f"-S'{PYTHON}"], "env -S is given cannot be split"),
        (["nice"], "no command behind nice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_that_cannot_be_followed_is_refused_by_name(argv: list[str], said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        through(*argv)
    assert not isinstance(caught.value, Opaque)


@pytest.mark.parametrize(
    "argv",
    [
        ["/opt/start.sh"],
        ["/bin/bash", "/opt/start.sh"],
        ["/bin/bash", "-c", f"if true; then exec {PYTHON}; fi"],
        ["/bin/bash", "-c", f"{PYTHON} x | tee log"],
        ["/bin/bash", "-c", f"{PYTHON} x >> /var/log/x"],
        ["/bin/bash", "-c", f"source /etc/profile.d/x.sh; {PYTHON} x"],
        ["/bin/bash", "-c", "$(which python) x"],
        ["/bin/bash", "-c", "`which python` x"],
        ["/bin/bash", "-c", "eval x; python"],
        ["/bin/bash", "-c", "$PY x"],
        ["/bin/bash", "-c", f"exec {PYTHON} -m x $$ARGS"],
        ["/bin/bash", "-c", f'exec {PYTHON} -m x "$$@"'],
        [PYTHON, "-m", "x", "$ARGS"],
        [PYTHON, "-m", "x", "--port", "${BIND}"],
    ],
    ids=lambda argv: argv[-1],
)
def test_what_only_the_running_process_can_tell(argv: list[str]) -> None:
    with pytest.raises(Opaque):
        through(*argv)


def test_key_beside_a_variable_is_not_repeated() -> None:
    with pytest.raises(Opaque, match="has \\$SUFFIX in it") as caught:
        through("/bin/bash", "-c", f"exec {PYTHON} -m x --api-key=sk-secret$SUFFIX")
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"export PYTHONPATH=/mine; exec {PYTHON} x", "sets PYTHONPATH=/mine"),
        (f"PYTHONPATH=/mine exec {PYTHON} x", "sets PYTHONPATH=/mine"),
        (f"unset PYTHONPATH && exec {PYTHON} x", "removes PYTHONPATH"),
        (f"env -u PYTHONPATH {PYTHON} x", "removes PYTHONPATH"),
        (f"export PYTHONPATH=/mine:$PYTHONPATH; exec {PYTHON} x", None),
        (f"export PYTHONPATH=/mine:${{PYTHONPATH:-}}; exec {PYTHON} x", None),
    ],
)
def test_command_line_that_sets_python_path_itself(text: str, said: str | None) -> None:
    problem = python_path_problem(through("/bin/bash", "-c", text))
    assert (said is None and problem is None) or (said is not None and said in (problem or ""))


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ("", 1),
        ("--tp 8", 8),
        ("--tp-size=8", 8),
        ("--tensor-parallel-size 4 --pp 2", 8),
        ("--tp 16 --nnodes 2 --node-rank 1", 8),
        ("--tp 8 --dp 4 --enable-dp-attention", 8),
        ("--tp 2 --dp 4", 8),
        ("--tp 4 --tp 2", 2),
    ],
)
def test_workers_of_a_service(options: str, workers: int) -> None:
    assert workers_of(through(PYTHON, "-m", "x", *options.split())) == workers


@pytest.mark.parametrize(
    "options", ["--tp eight", "--tp 0", "--tp 3 --nnodes 2", "--config /srv/x.yaml", "--config=/srv/x.yaml"]
)
def test_workers_that_cannot_be_counted(options: str) -> None:
    with pytest.raises(Refused):
        workers_of(through(PYTHON, "-m", "x", *options.split()))


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ("", "http://127.0.0.1:30000"),
        ("--host 0.0.0.0 --port 8000", "http://127.0.0.1:8000"),
        ("--host=:: --port=1", "http://[::1]:1"),
        ("--host 10.0.0.3 --ssl-keyfile x", "https://10.0.0.3:30000"),
    ],
)
def test_where_health_is_asked(options: str, url: str) -> None:
    assert health_url(through(PYTHON, "-m", "x", *options.split())) == url


def test_words_of_exec_start_are_those_that_systemd_starts() -> None:
    environment = {"A": "x  'y z'", "B": "p q", "E": ""}
    assert expand(["$A", "${B}", "a$A", "$$B", "c${B}$$", "$E"], environment) == [
        "x",
        "y z",
        "p q",
        "a$A",
        "$B",
        "cp q$",
    ]
    assert expand(["a", "$$HOME"], {}, is_all=False) == ["a", "$HOME"]


@pytest.mark.parametrize("word", ["$KEY", "${KEY}"])
def test_variable_that_a_file_may_set_is_not_guessed(word: str) -> None:
    with pytest.raises(Opaque, match="EnvironmentFile="):
        expand([PYTHON, "--api-key", word], {"KEY": "of-environment"}, is_all=False)
