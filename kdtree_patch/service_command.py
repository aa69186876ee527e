"""From the words that a service is started with to the Python that really runs, through the wrappers that people put in
front; what its options say that matters to the patch is service_options.py's.

Knows words, not processes: what it must read of the host (the first line of a script, whether a file exists) it asks
through functions. What cannot be followed with certainty is refused with the name of what stands in the way: a guess
here would be paid for with a restart.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# systemd's own, for a unit that sets no PATH.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PYTHON = re.compile(r"python(\d+(\.\d+)*t?)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# The options of Python itself that take the next word.
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")

# Wrappers that change nothing that matters here: options with a value, and how many words come before the command.
_WRAPPERS: dict[str, tuple[tuple[str, ...], int]] = {
    "numactl": (
        ("-i", "--interleave", "-N", "--cpunodebind", "-C", "--physcpubind", "-m", "--membind")
        + ("-p", "--preferred", "-P", "--preferred-many", "-w", "--weighted-interleave"),
        0,
    ),
    "taskset": ((), 1),
    "nice": (("-n", "--adjustment"), 0),
    "ionice": (("-c", "--class", "-n", "--classdata"), 0),
    "chrt": (("-T", "--sched-runtime", "-P", "--sched-period", "-D", "--sched-deadline"), 1),
    "nohup": ((), 0),
    "setsid": ((), 0),
    "stdbuf": (("-i", "--input", "-o", "--output", "-e", "--error"), 0),
    "timeout": (("-s", "--signal", "-k", "--kill-after"), 1),
    "tini": (("-p", "-e"), 0),
    "dumb-init": (("-r", "--rewrite"), 0),
}
_SHELLS = ("sh", "bash", "dash")

# Refused by name, each with what to do.
_CONTAINERS = "the service runs in a container, which has a Python and files of its own: put the folder into the image"
_ENVIRONMENTS = "it chooses the interpreter when it starts: write the path of the interpreter itself"
_USERS = "it does not pass PYTHONPATH on: use User= in the unit instead"
_REFUSED = {
    **dict.fromkeys(("docker", "podman", "nerdctl", "ctr", "runc", "kubectl"), _CONTAINERS),
    **dict.fromkeys(("apptainer", "singularity", "enroot", "lxc-start", "systemd-nspawn", "chroot"), _CONTAINERS),
    **dict.fromkeys(("conda", "mamba", "micromamba", "uv", "uvx", "poetry", "pipenv", "pixi", "hatch"), _ENVIRONMENTS),
    **dict.fromkeys(("sudo", "su", "runuser", "doas", "setpriv", "systemd-run"), _USERS),
    **dict.fromkeys(("srun", "mpirun", "mpiexec"), "it starts the service elsewhere"),
}


class Refused(Exception):
    """The command cannot be followed; the message says what stands in the way."""


class Opaque(Refused):
    """A program of which only the running process can tell what it starts, such as a shell script."""


@dataclass
class Command:
    """One Python command line."""

    interpreter: str  # the path as the unit has it: a virtual environment is known by it, not by what it links to
    flags: frozenset[str]  # single letters, such as I or E
    arguments: list[str]  # what follows Python's own options
    overrides: dict[str, str] = field(default_factory=dict)  # variables that the command line sets or, "", removes
    wrappers: list[str] = field(default_factory=list)

    def option(self, *names: str) -> str | None:
        """The value of an option of the service, written as `--name value` or `--name=value`; the last one counts."""
        value = None
        for index, word in enumerate(self.arguments):
            name, equals, rest = word.partition("=")
            if _means(name, names):
                following = self.arguments[index + 1] if index + 1 < len(self.arguments) else ""
                value = rest if equals else following
        return value

    def number(self, *names: str) -> int:
        """The value of an option that counts something, 1 where it is not given. Raises Refused."""
        value = self.option(*names)
        if value is None:
            return 1
        if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
            raise Refused(f"{names[0]} {value} is no number")
        return int(value)

    def has(self, name: str) -> bool:
        return any(_means(word, (name,)) for word in self.arguments)


def _means(word: str, names: Sequence[str]) -> bool:
    """Whether a word is one of these options. Python's argument parser takes beginnings of names, too: one that could
    mean two options it refuses.
    """
    return word in names or (len(word) > 3 and word.startswith("--") and any(name.startswith(word) for name in names))


ReadHead = Callable[[str], str]  # of a path: the first lines of the file, "" if it is no text
Exists = Callable[[str], bool]


def unwrap(argv: Sequence[str], environment: Mapping[str, str], read_head: ReadHead, exists: Exists) -> Command:
    """The Python command in `argv`, whose words are those that are started. Raises Refused, or Opaque where only the
    running process can tell.
    """
    words = list(argv)
    path = environment.get("PATH", DEFAULT_PATH)
    wrappers: list[str] = []
    overrides: dict[str, str] = {}
    while True:
        if not words:
            raise Refused("there is no command behind " + " ".join(wrappers))
        if len(wrappers) > 16:
            raise Refused("the command is wrapped too often: " + " ".join(wrappers))
        program = os.path.basename(words[0])
        if _PYTHON.fullmatch(program):
            flags, rest = _python_flags(words[1:])
            return Command(_find(words[0], path, exists), flags, rest, overrides, wrappers)
        if program in _REFUSED:
            raise Refused(f"the command runs {program}: {_REFUSED[program]}")
        if program == "env":
            words = _through_env(words[1:], overrides)
        elif program in _SHELLS:
            words, path = _through_shell(program, words[1:], overrides, path)
        elif program in _WRAPPERS:
            words = _through_wrapper(program, words[1:])
        else:
            words = _through_script(words, _find(words[0], path, exists), read_head)
        if "PATH" in overrides:
            path = overrides["PATH"]
        wrappers.append(program)


def read_head(path: str) -> str:
    """What this host answers: the beginning of a script, "" for anything else."""
    try:
        # What a service's user names may be anything: a pipe would never be read to its end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            head = file.read(1024) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return ""
    return head.decode(errors="replace") if head.startswith(b"#!") else ""


def is_file(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _find(program: str, path: str, exists: Exists) -> str:
    if "/" in program:
        if not os.path.isabs(program):
            raise Refused(f"{program} is a relative path: write an absolute one")
        return program
    for folder in path.split(":"):
        if folder and exists(os.path.join(folder, program)):
            return os.path.join(folder, program)
    raise Refused(f"{program} is not found in PATH={path}")


def expand(argv: Sequence[str], environment: Mapping[str, str], is_all: bool = True) -> list[str]:
    """The words that systemd makes of those of ExecStart: ${NAME} is replaced anywhere, $NAME as a whole word and then
    split, and $$ is a dollar. `environment` is Environment=; `is_all`: nothing else can set a variable. Raises Opaque
    for a variable of which only the running process can tell what it was.
    """

    def value(name: str) -> str:
        if name not in environment:
            raise Opaque(f"ExecStart has ${name}, which no Environment= of the unit sets")
        if not is_all:
            raise Opaque(f"ExecStart has ${name}, which EnvironmentFile= or PassEnvironment= may set")
        return environment[name]

    words: list[str] = []
    for word in argv:
        if re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", word):
            try:
                words += shlex.split(value(word[1:]))
            except ValueError as error:
                raise Opaque(f"ExecStart has {word}, whose value cannot be split: {error}") from error
        else:
            pattern = r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}"
            words.append(re.sub(pattern, lambda match: "$" if match[0] == "$$" else value(match[1]), word))
    return words


def _python_flags(words: list[str]) -> tuple[frozenset[str], list[str]]:
    flags: set[str] = set()
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "-m", "-c", "--"):
        word = words[at]
        at += 2 if word in _PYTHON_VALUES else 1
        if word.startswith("--") or word[:2] in _PYTHON_VALUES:
            continue
        for index, letter in enumerate(word[1:], start=1):
            if letter in "mc":  # -um sglang.launch_server
                tail = [word[index + 1 :]] if word[index + 1 :] else []
                return frozenset(flags), ["-" + letter, *tail, *words[at:]]
            flags.add(letter)
    return frozenset(flags), words[at:]


def _through_env(words: list[str], overrides: dict[str, str]) -> list[str]:
    at = 0
    while at < len(words):
        word = words[at]
        if word in ("-i", "-", "--ignore-environment"):
            raise Refused("the command runs `env -i`, which empties the environment: PYTHONPATH would not arrive")
        if word in ("-u", "--unset") or word.startswith("--unset="):
            if word.startswith("--unset="):
                overrides[word.partition("=")[2]] = ""
                at += 1
            else:
                overrides[words[at + 1] if at + 1 < len(words) else ""] = ""
                at += 2
        elif word in ("-C", "--chdir"):
            at += 2
        elif word in ("-S", "--split-string"):
            words, at = _split(" ".join(words[at + 1 : at + 2])) + words[at + 2 :], 0
        elif word.startswith("-S"):
            words, at = _split(word[2:]) + words[at + 1 :], 0
        elif word == "--" or word.startswith("-"):
            at += 1
        elif _ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            overrides[name] = value
            at += 1
        else:
            break
    return words[at:]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(f"what env -S is given cannot be split: {error}") from error


def _through_wrapper(program: str, words: list[str]) -> list[str]:
    with_value, positions = _WRAPPERS[program]
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            at += 1
            break
        at += 2 if words[at] in with_value else 1
    return words[at + positions :]


def _through_script(words: list[str], path: str, read_head: ReadHead) -> list[str]:
    """A console script such as /opt/venv/bin/sglang: its first line names the interpreter."""
    lines = read_head(path).splitlines()
    if not lines or not lines[0].startswith("#!"):
        raise Refused(
            f"the command runs {path}, which is neither Python nor a wrapper that is known here: name the Python there"
        )
    interpreter, _, argument = lines[0][2:].strip().partition(" ")
    # pip writes this where the path of the interpreter is too long for a first line.
    long_path = re.match(r"'''exec' \"?(/[^\"]+?)\"? \"\$0\" \"\$@\"", lines[1]) if len(lines) > 1 else None
    if long_path:
        return [long_path[1], path, *words[1:]]
    if os.path.basename(interpreter) in _SHELLS:
        raise Opaque(f"the command runs the shell script {path}, which can start anything")
    return [interpreter, *([argument.strip()] if argument.strip() else []), path, *words[1:]]


def _through_shell(program: str, words: list[str], overrides: dict[str, str], path: str) -> tuple[list[str], str]:
    """`bash -c "cd X && export A=B && exec python ..."`: the last command of a plain list of them."""
    at = 0
    text = None
    while at < len(words) and words[at].startswith(("-", "+")):
        if words[at] in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file"):
            at += 2
            continue
        if not words[at].startswith("--") and "c" in words[at]:
            text = words[at + 1] if at + 1 < len(words) else ""
        at += 1
    if text is None:
        script = words[at] if at < len(words) else program
        raise Opaque(f"the command runs the shell script {script}, which can start anything")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise Refused(f"the command of {program} -c cannot be read: {error}") from error
    commands: list[list[str]] = [[]]
    for token in tokens:
        if token in ("&&", ";") or not token.strip("\n"):
            commands.append([])
        elif not token.strip(";&|()<>\n") or "`" in token:
            raise Opaque(f"the command of {program} -c has a {token.strip()}, which cannot be followed with certainty")
        else:
            commands[-1].append(token)
    commands = [command for command in commands if command]
    for command in commands[:-1]:
        path = _note(program, command, overrides, path)
    last = commands[-1] if commands else []
    while last and (last[0] == "exec" or _ASSIGNMENT.match(last[0])):
        name, equals, value = last[0].partition("=")
        if equals:
            overrides[name] = value
        last = last[1:]
    # Port and ranks may be in it, and a default in their place would be a guess.
    for word in last:
        if "$" in word:
            variable = word[word.index("$") :]  # what stands before it may be a key
            raise Opaque(f"the command of {program} -c has {variable} in it, whose value cannot be known")
    return last, path


def _note(program: str, command: list[str], overrides: dict[str, str], path: str) -> str:
    """One command before the last. Returns PATH after it."""
    name, arguments = command[0], command[1:]
    if name in ("if", "for", "while", "until", "case", "select", "function", "{", "trap", "eval"):
        raise Opaque(f"the command of {program} -c has a `{name}`, which cannot be followed with certainty")
    if name in (".", "source"):
        script = arguments[0] if arguments else ""
        if not script.endswith("/bin/activate"):
            raise Opaque(f"the command of {program} -c runs {script}, which can set anything")
        return f"{os.path.dirname(script)}:{path}"
    if name == "unset":
        overrides.update(dict.fromkeys((word for word in arguments if not word.startswith("-")), ""))
    for word in arguments if name == "export" else command:
        if _ASSIGNMENT.match(word):
            variable, _, value = word.partition("=")
            overrides[variable] = value
    return overrides.get("PATH", path).replace("${PATH}", path).replace("$PATH", path)


def python_path_problem(command: Command) -> str | None:
    """Why a PYTHONPATH that the unit sets would not reach the interpreter, or would be ignored by it."""
    why = {
        "I": "-I isolates it: neither PYTHONPATH nor its own folder is looked at",
        "E": "-E makes it ignore every PYTHON* variable, PYTHONPATH among them",
        "S": "-S leaves out `site`, which is what imports sitecustomize",
    }
    found = [text for letter, text in why.items() if letter in command.flags]
    if found:
        what = "; ".join(found)
        return f"{command.interpreter} is started so that the patch cannot load: {what}: take that out of the command"
    value = command.overrides.get("PYTHONPATH")
    if value is None or re.search(r"\$\{?PYTHONPATH\b", value):
        return None
    how = f"sets PYTHONPATH={value}" if value else "removes PYTHONPATH"
    return f"the command line itself {how}, whatever the unit says: move that into Environment= of the unit"
