"""How the commands end: the table of exit statuses, and the errors that users can provoke, provoked as they would."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdtree_patch import exits, log
from kdtree_patch.exits import NotDone
from kdtree_patch.settings import VARIABLES, SettingError, Settings
from tests.support.env import REPO, sglang_dir

COMMANDS = ("doctor", "demo", "compile", "selftest", "bench", "report")
RUN, E2E_RUN = "docs/results/h200.json", "docs/results/h200-e2e.json"
LOG = "[kdtree] L5 max_abs_diff=9.7656e-04 mean=1.7253e-05 rel=1.3099e-04 tp_rank=0\n"

# What happened; what happens now: what to do.
ERROR = re.compile(r"(?P<name>\w+): (?P<what>.+?); (?P<now>.+?): (?P<do>.+)")
NOTHING = "nothing has been done"


def environment(folder: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHON", "DEPLOY_"))}
    variables = {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", "KDTREE_CACHE_DIR": str(folder / "cache")}
    return env | variables | {"D": str(folder), "COLUMNS": "80"}


def shell(line: str, folder: Path, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """What a user writes, in bash. `bare` is an interpreter that has nothing but its standard library."""
    begin = f"""
kdtree() {{ {sys.executable} -m kdtree_patch "$@"; }}
bare() {{ {sys.executable} -S -m kdtree_patch "$@"; }}
e2e() {{ {sys.executable} -m tests.e2e "$@"; }}
deploy() {{ {sys.executable} -S -m deploy "$@"; }}
cd {REPO} || exit 99
"""
    words = ["bash", "-c", begin + line]
    env = environment(folder)
    return subprocess.run(words, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the errors below are about."""
    (tmp_path / "good.log").write_text(LOG)
    (tmp_path / "bad.log").write_text(LOG.replace("1.3099e-04", "9.0837e-01"))
    (tmp_path / "no-layers.log").write_text("[kdtree] installed version=0.1.0 tp_rank=0\n")
    (tmp_path / "zipped.log").write_bytes(b"\x1f\x8b" + bytes(100))
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 64)
    # What stands for a full disk below is `ulimit -f`: a test that names a device of this machine would replace it
    # if the command did.
    missed = (REPO / E2E_RUN).read_text().replace('"ok": true', '"ok": false', 1)
    (tmp_path / "missed.json").write_text(missed)
    (tmp_path / "nested.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


# What is written; what the one line on standard error says of what happened, of what happens now, and of what to do.
NOT_DONE = [
    # Words.
    ("kdtree", "arguments are required: COMMAND", NOTHING, "--help"),
    ("kdtree nonsense", "invalid choice: 'nonsense'", NOTHING, "see python -m kdtree_patch --help"),
    *(
        (f"kdtree {command} --nonsense x", "arguments: --nonsense", NOTHING, f"kdtree_patch {command} --help")
        for command in COMMANDS
    ),
    ("kdtree report", "arguments are required: LOG", NOTHING, "--help"),
    ("kdtree doctor --tp 8", "those of the service go behind --", NOTHING, "--help"),
    ("kdtree demo --q-len 513", "'513' is not a whole number, from 1 to 512", NOTHING, "--help"),
    ("kdtree demo --device cuda", "needs an NVIDIA GPU", NOTHING, "--device cpu needs none"),
    ("kdtree demo --device cpu --dtype bfloat16", "needs a GPU", NOTHING, "leave out --dtype"),
    ("kdtree demo --device cpu --slots 30", "--slots must be 31 or more", NOTHING, "leave out --slots"),
    ("kdtree compile --arch sm_75", "invalid choice: 'sm_75'", NOTHING, "--help"),
    ("kdtree selftest --device tpu", "'tpu' is not cuda, cuda:N or cpu", NOTHING, "--help"),
    ("kdtree bench --shapes 1,9,8", "'1,9,8' is not bs,q_len,heads,prefix", NOTHING, "--help"),
    ("kdtree bench --host --sweep", "--host and --sweep do not go together", NOTHING, "leave one of them out"),
    ("kdtree bench --predict --config hopper", "portable configuration alone", NOTHING, "leave out --config"),
    ("kdtree bench", "torch sees no NVIDIA GPU here", NOTHING, "--predict, --host and --from need none"),
    ("kdtree selftest", "torch sees no NVIDIA GPU here", NOTHING, "--device cpu tests the CPU build"),
    ("kdtree selftest --json", "torch sees no NVIDIA GPU here", NOTHING, "--device cpu tests the CPU build"),
    ("bare selftest", "No module named 'torch'", NOTHING, "run it with the service's interpreter"),
    ("e2e --tp x", "'x' is not a whole number, from 1 to 8", NOTHING, "python -m tests.e2e --help"),
    ("e2e", "NVML cannot be asked for the GPUs", NOTHING, "run it where there is an NVIDIA driver"),
    (f"e2e --from {E2E_RUN} --json x", "--json is for a new run, and --from", NOTHING, "--help"),
    ("deploy status", "has no pyinfra", NOTHING, "`make deploy` makes .venv/deploy"),
    # Settings.
    ("KDTREE_MODE=onn kdtree selftest", "KDTREE_MODE='onn' is not understood", NOTHING, "allowed are on, shadow, off"),
    ("KDTREE_MOED=on kdtree compile", "KDTREE_MOED='on' is not understood", NOTHING, "the nearest is KDTREE_MODE"),
    # Files that are read.
    ("kdtree report /nonexistent", "/nonexistent cannot be read: No such file", NOTHING, "name a log"),
    ("kdtree report $D", "is a folder, and not a log", NOTHING, "name the files in it"),
    ("kdtree report $D/loop", "Too many levels of symbolic links", NOTHING, "name a log"),
    ("kdtree report /proc/self/mem", "cannot be read: Input/output error", "nothing has been judged", "copy"),
    ("kdtree report $D/zipped.log", "zipped.log is compressed", NOTHING, "zcat"),
    ("kdtree report - <$D/zipped.log", "standard input is compressed", NOTHING, "put zcat before it: ... | zcat | "),
    ("kdtree report - <&-", "standard input is closed", NOTHING, "journalctl"),
    ("kdtree report - - </dev/null", "can be read once", NOTHING, "name it once"),
    ("kdtree report $'a\\e[2Jb'", r"a\x1b[2Jb cannot be read", NOTHING, "name a log"),
    ("kdtree bench --from /nonexistent", "cannot be read: No such file", NOTHING, "--json of this command"),
    ("kdtree bench --from $D", "cannot be read: Is a directory", NOTHING, "--json of this command"),
    ("kdtree bench --from $D/binary", "is not JSON", NOTHING, "--json of this command"),
    ("kdtree bench --from $D/nested.json", "is not JSON", NOTHING, "--json of this command"),
    (f"kdtree bench --from {E2E_RUN}", "is not a run of the benchmark", NOTHING, "--json of this command"),
    (f"e2e --from {RUN}", "is not a run of make e2e", NOTHING, "name a file that its --json"),
    ("kdtree demo --sglang /nonexistent", "there is no package sglang in /nonexistent", NOTHING, "--sglang"),
    # Files that are written.
    ("ulimit -f 0; kdtree bench --predict --json $D/x.json", "cannot be written: File too", "as it was", "--json"),
    (f"ulimit -f 0; kdtree bench --from {RUN} --plot $D/x.png", "cannot be written: File too", "as it was", "--plot"),
    (f"ulimit -f 0; e2e --from {E2E_RUN} --plot $D/x.png", "cannot be written: File too", "as it was", "--plot"),
    ("ulimit -f 0; kdtree report $D/good.log --plot $D/x.png", "cannot be written: File too", "as it was", "--plot"),
    ("kdtree report $D/no-layers.log --plot $D/x.png", "nothing to plot", "nothing has been drawn", "KDTREE_VALIDATE"),
    ("kdtree report $D/good.log --plot $D/x.gif", "must end in one of .png, .svg, .pdf", NOTHING, "--help"),
    ("kdtree demo --json $D", "is a folder", NOTHING, "--help"),
    (f"kdtree demo --json {'x' * 256}", "cannot be written: File name too long", NOTHING, "--help"),
    # Nothing goes beside a name that is nearly too long.
    (f"ulimit -f 0; kdtree bench --predict --json $D/{'x' * 250}", "cannot be written: File", "as it was", "--json"),
    ("cd $D && mkdir gone && cd gone && rmdir ../gone; kdtree bench --predict --json x", "x cannot be written: No such",
     NOTHING, "--help"),
    ("kdtree demo --json /nonexistent/f", "there is no folder /nonexistent", NOTHING, "--help"),
    # Packages.
    ("bare bench --predict", "the package rich is needed and not installed", NOTHING, "pip install rich"),
    ("bare report $D/good.log --plot $D/x.png", "the package matplotlib is needed", NOTHING, "pip install matplotlib"),
    # Standard output.
    *(
        (f"{command} {to}", what, now, do)
        for command in ("kdtree --help", "kdtree doctor", f"kdtree bench --from {RUN}", f"e2e --from {E2E_RUN}",
                        "kdtree report $D/good.log", "bare report --json $D/good.log")
        for to, what, now, do in (
            (">/dev/full", "standard output cannot be written: No space left", "the output is not whole", "make room"),
            (">&-", "standard output is closed", NOTHING, "send it to a file, or to /dev/null"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "what", "now", "do"), NOT_DONE, ids=[line for line, *_ in NOT_DONE])
def test_what_cannot_be_done_is_one_line_and_status_2(line: str, what: str, now: str, do: str, folder: Path) -> None:
    done = shell(line, folder)
    assert done.returncode == exits.NOT_DONE, done.stdout + done.stderr
    *before, said = done.stderr.splitlines()
    assert before == [] and said.isprintable()
    found = ERROR.fullmatch(said)
    assert found is not None, said
    words = [word for word in line.split("; ")[-1].split() if "=" not in word]
    command = words[1] if len(words) > 1 and words[1] in COMMANDS else words[0]
    assert found["name"] == {"kdtree": "kdtree_patch"}.get(command, command)
    # In this order; the parts themselves may have a colon or a semicolon.
    places = [said.find(part) for part in (what, now, do)]
    assert -1 not in places and places == sorted(places), (said, places)


# A value of each variable that cannot be understood.
BAD_VALUES = {
    "KDTREE_MODE": "shadw",
    "KDTREE_VALIDATE": "yes",
    "KDTREE_VALIDATE_EVERY": "0",
    "KDTREE_GUARD_REL": "-1",
    "KDTREE_GUARD_DUMP": "/tmp",
    "KDTREE_SELFTEST": "2",
    "KDTREE_CONFIG": "fast",
    "KDTREE_FORWARD_MODES": "decode2",
    "KDTREE_CACHE_DIR": "cache",
    "KDTREE_LOG_LEVEL": "debug",
}


def test_every_variable_has_a_bad_value() -> None:
    assert set(BAD_VALUES) == set(VARIABLES)


@pytest.mark.parametrize("variable", BAD_VALUES)
def test_a_value_that_is_not_understood(variable: str, folder: Path) -> None:
    """The same words in a command, which then does nothing, and in a service, which then runs stock."""
    value = BAD_VALUES[variable]
    done = shell(f"{variable}={value} kdtree compile --arch host", folder)
    begins = f"compile: {variable}='{value}' is not understood; {NOTHING}: "
    assert done.returncode == exits.NOT_DONE and done.stderr.startswith(begins) and done.stderr.count("\n") == 1
    allowed = done.stderr.removeprefix(begins).strip()
    with pytest.raises(SettingError) as refused:
        Settings.from_environ({variable: value})
    assert str(refused.value) == f"{variable}='{value}' is not understood: {allowed}; the service runs stock"


OTHERS = [
    # What is printed of a finding says what to do as well; the status is all that is asked here.
    ("kdtree --version", 0, "kdtree_patch "),
    ("kdtree report $D/good.log", 0, "nothing found"),
    ("kdtree report $D/bad.log", 1, "1 finding: "),
    ("kdtree report /dev/null", 1, "1 finding: there is no [kdtree] line"),
    ("kdtree report $D/binary", 1, "1 finding: there is no [kdtree] line"),
    ("kdtree doctor", 1, "stock, because "),
    ("KDTREE_MODE=onn kdtree doctor", 1, "KDTREE_MODE"),
    ("kdtree doctor nonsense", 1, "nonsense is not found"),
    # Names that standard output cannot encode, or that a terminal would obey.
    ("PYTHONIOENCODING=ascii kdtree doctor -- ü", 1, r"\xfc is not found"),
    ("PYTHONIOENCODING=utf-8 kdtree doctor -- $'\\xff'", 1, r"\udcff is not found"),
    ("kdtree doctor -- --model-path $'a\\e[31m'", 1, r"a\x1b[31m: no config.json"),
    ("kdtree doctor -- --speculative-algorithm EAGLE --attention-backend $'\\e[31m'", 1, r"  \x1b[31m  "),
    ("CXX=no-such kdtree compile --arch host", 1, "no-such is not found in PATH; CXX names it: name another"),
    ("bare compile --arch sm_90", 1, "install cupy-cuda12x or cupy-cuda13x"),
    (f"kdtree bench --from {RUN}", 0, "NVIDIA H200"),
    (f"kdtree bench --from {RUN} 2>&-", 0, "NVIDIA H200"),
    (f"e2e --from {E2E_RUN}", 0, "PASS"),
    ("e2e --from $D/missed.json", 1, "MISS"),
    # Standard error that cannot take a line changes no status, and its lines do not go elsewhere.
    ("kdtree report --json $D/good.log 2>&-", 0, "nothing found"),
    ("kdtree report /nonexistent 2>&-", 2, ""),
    ("kdtree report /nonexistent 2>/dev/full", 2, ""),
    ("kdtree nonsense 2>/dev/full", 2, ""),
    ("kdtree report /nonexistent >&- 2>&-", 2, ""),
    # What is named for a file and is none stays what it is.
    ("timeout 60 cat $D/pipe & kdtree bench --predict --json $D/pipe && wait && test -p $D/pipe", 0, '"prediction"'),
]


@pytest.mark.parametrize(("line", "status", "says"), OTHERS, ids=[line for line, *_ in OTHERS])
def test_other_statuses(line: str, status: int, says: str, folder: Path) -> None:
    done = shell(line, folder)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout and "Traceback" not in done.stderr and "\033" not in done.stdout
    assert says or done.stdout == ""


@pytest.mark.parametrize(
    "line",
    [
        *("kdtree --help", "kdtree --version", "kdtree doctor", f"kdtree bench --from {RUN}", "kdtree bench --predict"),
        *("kdtree report $D/bad.log", "bare report $D/bad.log", f"e2e --from {E2E_RUN}", "e2e --help"),
        *("CXX=no-such kdtree compile --arch host --json", "CXX=no-such kdtree selftest --device cpu --json"),
    ],
)
def test_reader_that_has_gone_is_no_error(line: str, folder: Path) -> None:
    """As `| head` may be, but for certain."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = shell(line, folder, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (exits.READER_GONE, "")


def test_picture_is_drawn_although_the_reader_has_gone(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for line in ("kdtree report $D/bad.log", f"kdtree bench --from {RUN}"):
        done = shell(f"{line} --plot $D/x.png", folder, stdout=writer)
        assert done.returncode == exits.READER_GONE and done.stderr.endswith("x.png is drawn\n")
        assert (folder / "x.png").read_bytes().startswith(b"\x89PNG")
        (folder / "x.png").unlink()
    os.close(writer)


def test_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdtree_patch", "demo", "--sglang", str(sglang_dir("0.5.12"))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), text=True, **pipes) as demo:  # type: ignore[call-overload]
        assert demo.stdout is not None and "[kdtree] " in demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        _, error = demo.communicate(timeout=60)
    assert demo.returncode == exits.INTERRUPTED
    assert error == "demo: interrupted; what it was at is not finished: run it again\n"


def test_fault_of_the_command_itself_is_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.run("x", lambda: 1 // 0) == exits.FAULT
    error = capsys.readouterr().err
    assert error.startswith("Traceback") and error.splitlines()[-1].startswith(
        "x: this is a fault of the command itself; "
    )


# ------------------------------------------------------------------------------------------------------- files, helps


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path, link = tmp_path / "f.json", tmp_path / "link.json"
    link.symlink_to(path)
    exits.write(link, lambda part: part.write_text("first"), "--json")
    assert link.is_symlink() and path.read_text() == "first"

    def half(part: Path) -> None:
        part.write_text("sec")
        raise OSError(28, "No space left on device")

    with pytest.raises(NotDone, match="link.json cannot be written: No space left on device; the file is as it was"):
        exits.write(link, half, "--json")
    assert path.read_text() == "first" and sorted(tmp_path.iterdir()) == [path, link]
    # A name of which not even the part beside it can be made.
    with pytest.raises(NotDone, match="cannot be written: File name too long; the file is as it was before"):
        exits.write(tmp_path / f"f.{'x' * 250}", half, "--json")


@pytest.mark.parametrize("command", ["kdtree", *(f"kdtree {name}" for name in COMMANDS), "e2e"])
def test_help_fits_a_terminal_and_names_the_statuses(command: str, tmp_path: Path) -> None:
    done = shell(f"{command} --help", tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "exit status" in " ".join(done.stdout.lower().split())
    for name in COMMANDS if command == "kdtree" else ():
        assert f"\n    {name} " in done.stdout


def test_table_is_in_the_documents_in_the_same_words() -> None:
    documents = "\n".join(path.read_text() for path in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))))
    rows = [*exits.STATUSES.items(), *exits.DEPLOY_STATUSES.items()]
    assert [row for row in rows if f"| {row[0]} | {row[1]} |" not in documents] == []
    assert all(words in " ".join(exits.table(exits.STATUSES).split()) for words in exits.STATUSES.values())


# --------------------------------------------------------------------------------------------------- lines of a service

# Reasons whose own words say what to do, and some of these words.
SAYS_IT_ITSELF = {
    "wrapt_missing": "install wrapt into the service's environment",
    "cupy_missing": "install cupy-cuda12x or cupy-cuda13x",
    "compiler_missing": "install g++, or set CXX to a C++17 compiler",
    "nvrtc_too_old": "install nvidia-cuda-nvrtc",
    "configuration": "unset KDTREE_CONFIG",
}


def reasons() -> Iterator[str]:
    """The codes with which a process declines or turns its kernel off, from the sources."""
    said_by = {"Declined", "CompileError", "KernelUnavailable", "stays_stock", "disable"}
    for path in sorted((REPO / "kdtree_patch").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in said_by and isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value)
    yield from (
        "guard",
        "guard_elsewhere",
        "configuration",
        "compute_capability",
    )  # these are not written where they are raised


def test_every_reason_of_a_worker_says_what_to_do() -> None:
    sources = "\n".join(path.read_text() for path in (REPO / "kdtree_patch").glob("*.py"))
    found = set(reasons())
    assert len(found) > 20
    assert {reason for reason in found if reason not in log.TO_DO} == set(SAYS_IT_ITSELF)
    assert [words for words in SAYS_IT_ITSELF.values() if words not in sources] == []
    assert set(log.TO_DO) <= found


def test_every_reason_of_a_worker_is_in_the_documents() -> None:
    documents = "\n".join(path.read_text() for path in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))))
    assert {
        reason for reason in reasons() if f"`{reason}`" not in documents and f"reason={reason}`" not in documents
    } == set()
