"""`python -m kdtree_patch doctor`, in interpreters of their own: what it says of a restart; it changes nothing.

SGLang is a stand-in with the real signatures (tests/stand_in.py) except where a test says so, and the GPUs are those of
a library with NVML's names.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdtree_patch import compile as compiling
from kdtree_patch import doctor_questions, nvml
from kdtree_patch.contract import TABLE
from kdtree_patch.settings import Settings
from tests import stand_in
from tests.stand_in import BACKEND, NEW, Drift
from tests.support.env import REPO, child_env
from tests.support.nvml import GIB, fake_nvml

OPTIONS = ("--attention-backend", "triton", "--speculative-algorithm", "EAGLE3")
MODEL = {"num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


class Host:
    """A host with this SGLang, these GPUs and an empty home."""

    def __init__(self, folder: Path, sglang: Path, *gpus: tuple[int, int] | None, free: int = 80 * GIB):
        self.folder = folder
        self.sglang = sglang
        self.home = folder / "home"
        self.home.mkdir()
        drivers = folder / "drivers"
        drivers.mkdir()
        fake_nvml(drivers, gpus, name=nvml.LIBRARY, free=free)
        self.drivers = str(drivers)

    def start(
        self, *words: str, path: tuple[Path | str, ...] | None = None, flags: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHON", "XDG"))}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        entries = (REPO, self.sglang) if path is None else path
        env |= {"HOME": str(self.home), "LD_LIBRARY_PATH": self.drivers, **variables}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, entries))} if entries else {}
        command = [sys.executable, *flags, "-m", "kdtree_patch", "doctor", *words]
        found = not flags and any((Path(entry) / "kdtree_patch").is_dir() for entry in entries)
        return subprocess.Popen(command, env=env, cwd="/" if found else REPO, stdout=-1, stderr=-1, text=True)

    def says(self, *words: str, service: tuple[str, ...] = OPTIONS, **how: Any) -> dict[str, Any]:
        process = self.start("--json", *words, *(("--", *service) if service else ()), **how)
        output, error = process.communicate(timeout=120)
        assert error == "", error
        document: dict[str, Any] = json.loads(output)
        assert process.returncode == (0 if document["verdict"] in ("serve", "shadow") else 1)
        return document


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.write(tmp_path_factory.mktemp("sglang"), "0.5.23")


@pytest.fixture
def host(tmp_path: Path, sglang: Path) -> Iterator[Host]:
    host = Host(tmp_path, sglang, (9, 0), (9, 0))
    yield host
    # Whatever was asked, nothing was made: neither a cache nor cupy's own directory.
    assert list(host.home.iterdir()) == []


def fact(document: dict[str, Any], group: str, name: str) -> str:
    return next(one["value"] for one in document["groups"][group] if one["name"] == name)


def assert_reason(document: dict[str, Any], verdict: str, *words: str) -> None:
    """The first reason is the one that was meant."""
    assert document["verdict"] == verdict, document["summary"]
    assert all(word in document["because"][0] for word in words), document["because"]


# --------------------------------------------------------------------------------------------------------- will serve


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12", "0.5.23"])
def test_service_that_will_serve(host: Host, tmp_path: Path, version: str) -> None:
    host.sglang = stand_in.write(tmp_path / "sglang", version)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    document = host.says(service=(*OPTIONS, "--tp", "8", "--nnodes", "4", "--model-path", str(tmp_path)))
    assert document["summary"] == "will serve: verify calls go to the kernel, all others stay stock"
    assert fact(document, "SGLang", "version").startswith(f"{version}, {host.sglang}")
    assert fact(document, "command line", "model") == f"{tmp_path}: latent 512, rope 64, 64 heads, 8 a rank"
    assert fact(document, "GPUs", "driver") == "580.95.05"
    expected = "GPU 1, compute capability 9.0, 80.0 GiB free; hopper (sm_90a), row blocks of 32, 64, 72"
    assert fact(document, "GPUs", "GPU 1") == expected
    assert fact(document, "kernel", "sm_90a") == "not cached: compiled at the next start"
    assert fact(document, "settings", "KDTREE_MODE") == "on (default)"
    assert document["forward_modes"][0] == {
        "name": "TARGET_VERIFY",
        "backend": "triton",
        "route": "kernel",
        "why": "q_len as SGLang chooses, heads a rank 8",
    }
    rows = {(row["where"], row["name"]): row["outcome"] for row in document["contract"]}
    assert len(rows) == len({(row.where, row.name) for row in TABLE})
    assert "violated" not in rows.values()
    assert rows["extend_attention_fwd", "k_scale"] == ("absent" if version == "0.5.9" else "there")
    assert rows["extend_attention_fwd", "identity_kv_indices"] == ("there" if version == "0.5.23" else "absent")
    assert rows["data", "parents_first"] == rows["TritonAttnBackend instance", "use_mla"] == "checked at work"


@pytest.mark.parametrize("release", ["0.5.12", "0.5.23"])
def test_real_sglang(host: Host, release: str) -> None:
    variables = {name: value for name, value in child_env(release).items() if name.startswith(("TRITON", "SGLANG"))}
    host.sglang = Path(child_env(release)["PYTHONPATH"].split(os.pathsep)[1])
    document = host.says(**variables)
    assert document["verdict"] == "serve", document["because"]
    assert fact(document, "SGLang", "version").startswith(f"{release}, {host.sglang}")


def test_what_a_good_verdict_depends_on_is_said(host: Host) -> None:
    summary = host.says(service=())["summary"]
    assert summary.startswith("will serve: ") and "if verify calls go to the triton backend" in summary
    assert "if the model has MLA with 512 and 64" in host.says()["summary"]


def test_shadow_is_a_good_verdict_of_its_own(host: Host) -> None:
    assert_reason(host.says(KDTREE_MODE="shadow"), "shadow", "KDTREE_MODE=shadow")


# ------------------------------------------------------------------------------------- interpreter, path, sitecustomize


@pytest.mark.parametrize(("flag", "said"), [("-S", "leaves out `site`"), ("-E", "ignore every PYTHON* variable")])
def test_interpreter_that_does_not_load_the_patch(host: Host, flag: str, said: str) -> None:
    document = host.says(flags=(flag,))
    assert_reason(document, "stock", "the patch: ", said)
    assert flag in fact(document, "interpreter", "flags")


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_flag_in_the_service_s_command_line(host: Host, flag: str) -> None:
    document = host.says(service=(sys.executable, flag, "-m", "sglang.launch_server", *OPTIONS))
    assert_reason(document, "stock", "the patch: ", flag)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import sys\n")
    return tmp_path / "theirs"


def test_somebody_else_s_sitecustomize_after_ours(host: Host, theirs: Path) -> None:
    document = host.says(path=(REPO, theirs, host.sglang))
    assert document["verdict"] == "serve", document["because"]
    assert fact(document, "sitecustomize", "runs 1") == f"{REPO / 'sitecustomize.py'} (ours)"
    assert fact(document, "sitecustomize", "runs 2") == str(theirs / "sitecustomize.py")


def test_somebody_else_s_sitecustomize_before_ours(host: Host, theirs: Path) -> None:
    document = host.says(path=(theirs, REPO, host.sglang))
    assert_reason(document, "stock", f"{theirs}/sitecustomize.py is found first", f"put {REPO} before it")
    assert fact(document, "sitecustomize", "PYTHONPATH 1") == f"{theirs} (a sitecustomize of somebody else)"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), f"does not name the folder of the patch: put {REPO} first"),
        (("/nowhere",), f"does not name the folder of the patch: put {REPO} first"),
        ((REPO / "kdtree_patch",), f"names the package: name the folder above it, {REPO}"),
    ],
)
def test_path_without_the_patch(host: Host, entries: tuple[Path | str, ...], said: str) -> None:
    assert_reason(host.says(path=(*entries, host.sglang) if entries else ()), "stock", said)


def test_plugin_is_a_second_door(host: Host, tmp_path: Path) -> None:
    info = tmp_path / "installed" / "kdtree_patch-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kdtree-patch\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkdtree = kdtree_patch.plugin:install\n")
    path = (info.parent, host.sglang)
    assert_reason(host.says(path=path), "stock", "plugins: this release has none")
    plugins = tmp_path / "sglang" / "sglang" / "srt" / "plugins"
    host.sglang = stand_in.write(tmp_path / "sglang", "0.5.12")
    plugins.mkdir()
    (plugins / "__init__.py").touch()
    document = host.says(path=(info.parent, host.sglang))
    assert document["verdict"] == "serve", document["because"]
    assert "does not name the folder" in fact(document, "sitecustomize", "the patch")
    document = host.says(path=(info.parent, host.sglang), SGLANG_PLUGINS="another")
    said = ("add kdtree to SGLANG_PLUGINS", f"; or PYTHONPATH does not name the folder of the patch: put {REPO} first")
    assert_reason(document, "stock", *said)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"KDTREE_MOED": "on"}, ("KDTREE_MOED", "the nearest is KDTREE_MODE; the service runs stock")),
        ({"KDTREE_VALIDATE": "yes"}, ("KDTREE_VALIDATE='yes'", "allowed are 0, 1")),
        ({"KDTREE_MODE": "off"}, ("KDTREE_MODE=off",)),
    ],
)
def test_settings_with_which_nothing_is_served(host: Host, variables: dict[str, str], said: tuple[str, ...]) -> None:
    assert_reason(host.says(**variables), "stock", *said)


def test_settings_of_the_command_line_count(host: Host) -> None:
    service = ("env", "KDTREE_MODE=off", sys.executable, "-m", "sglang.launch_server", *OPTIONS)
    document = host.says(service=service, KDTREE_GUARD_REL="0.1")
    assert_reason(document, "stock", "KDTREE_MODE=off")
    assert fact(document, "settings", "KDTREE_GUARD_REL") == "0.1 (environment)"
    document = host.says(service=("env", "PYTHONPATH=/other", sys.executable, "-m", "x", *OPTIONS))
    assert "sets PYTHONPATH=/other" in document["because"][0]


# ------------------------------------------------------------------------------------------------- SGLang and packages


@pytest.mark.parametrize(
    ("drift", "said"),
    [
        (Drift(BACKEND, "def forward_extend(", "def forward_extend_("), "forward_extend: missing method"),
        (Drift(NEW, "custom_mask", "tree_mask"), "extend_attention_fwd(custom_mask): missing"),
    ],
)
def test_release_that_is_not_known(host: Host, tmp_path: Path, drift: Drift, said: str) -> None:
    host.sglang = stand_in.write(tmp_path / "sglang", "0.5.23", drift)
    document = host.says()
    assert_reason(document, "stock", said)
    violated = [row["name"] for row in document["contract"] if row["outcome"] == "violated"]
    assert any(name in said for name in violated)


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise SystemExit(3)", "SystemExit: 3"), ("1/0", "ZeroDivisionError"), ("import os; os._exit(7)", "status 7")],
)
def test_sglang_that_cannot_be_imported_is_unknown(host: Host, tmp_path: Path, code: str, said: str) -> None:
    host.sglang = stand_in.write(tmp_path / "sglang", "0.5.23")
    with (host.sglang / BACKEND).open("a") as file:
        file.write(code + "\n")
    assert_reason(host.says(), "unknown", said)


def test_no_sglang(host: Host) -> None:
    document = host.says(path=(REPO,))
    assert_reason(document, "stock", "No module named 'sglang'", "this is not the service's interpreter")


def test_what_sglang_prints_is_not_ours_and_it_sees_no_gpu(host: Host, tmp_path: Path) -> None:
    host.sglang = stand_in.write(tmp_path / "sglang", "0.5.23")
    with (host.sglang / BACKEND).open("a") as file:
        file.write("import os\nprint('hello', flush=True)\n")
        file.write(f"open({str(tmp_path / 'saw')!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    assert host.says()["verdict"] == "serve"
    assert (tmp_path / "saw").read_text() == ""


MISSING = "raise ModuleNotFoundError('No module named {}')"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"wrapt.py": MISSING.format("wrapt")}, ("wrapt_missing", "pip install wrapt")),
        ({"wrapt.py": "FunctionWrapper = 1"}, ("wrapt_missing", "register_post_import_hook")),
        ({"cupy.py": MISSING.format("cupy")}, ("cupy_missing", "cupy-cuda12x")),
        ({"torch/__init__.py": "", "torch/version.py": "__version__ = '2.11.0+cpu'; cuda = None"}, ("has no CUDA",)),
    ],
)
def test_package_that_is_missing_or_of_no_use(
    host: Host, tmp_path: Path, files: dict[str, str], said: tuple[str, ...]
) -> None:
    for name, text in files.items():
        file = tmp_path / "broken" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert_reason(host.says(path=(REPO, tmp_path / "broken", host.sglang)), "stock", *said)


# ----------------------------------------------------------------------------------------------------------------- GPUs


def gpus(tmp_path: Path, sglang: Path, *capabilities: tuple[int, int] | None, **variables: str) -> dict[str, Any]:
    return Host(tmp_path, sglang, *capabilities).says(**variables)


def test_host_without_a_driver(host: Host) -> None:
    document = host.says(LD_LIBRARY_PATH="/nowhere")
    assert_reason(document, "stock", "NVML", "cannot be loaded: cannot open shared object file")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tp 2", ""),
        ("--tp 4", "takes 4 GPUs of this host and sees 2"),
        ("--tp 4 --nnodes 2", ""),
        ("--tp 2 --dp 2", "takes 4 GPUs of this host and sees 2"),
        ("--tp 2 --dp 2 --enable-dp-attention", ""),
        ("--tp 2 --pp-size 2", "takes 4 GPUs of this host and sees 2"),
        ("--tp abc", "--tensor-parallel-size abc is no number"),
        ("--tp 0", "--tensor-parallel-size 0 is no number"),
    ],
)
def test_as_many_gpus_as_ranks(host: Host, options: str, said: str) -> None:
    document = host.says(service=(*OPTIONS, *options.split()))
    assert_reason(document, "unknown" if said else "serve", said)


def test_a_guard_that_an_fp8_pool_will_trip_is_said(host: Host) -> None:
    fp8 = (*OPTIONS, "--kv-cache-dtype", "fp8_e4m3")
    assert_reason(host.says(service=fp8, KDTREE_GUARD_REL="0.05"), "part", "KDTREE_GUARD_REL=0.05 will trip")
    assert host.says(service=fp8, KDTREE_GUARD_REL="0.5")["verdict"] == "serve"
    assert host.says(KDTREE_GUARD_REL="0.05")["verdict"] == "serve"
    document = host.says(service=fp8, KDTREE_GUARD_REL="0.05", KDTREE_MODE="shadow")
    assert document["verdict"] == "shadow" and "will trip" in fact(document, "settings", "guard")
    assert fact(document, "settings", "KDTREE_VALIDATE") == "1 (by KDTREE_MODE=shadow)"


def test_driver_that_does_not_answer_is_unknown(host: Host) -> None:
    fake_nvml(Path(host.drivers), [(9, 0)], init=18, name=nvml.LIBRARY)
    assert_reason(host.says(), "unknown", "nvmlInit_v2 answers 18")


@pytest.mark.parametrize(
    ("capabilities", "variables", "verdict", "said"),
    [
        ([], {}, "stock", "no GPU"),
        ([None], {}, "stock", "no GPU"),
        ([(7, 5)], {}, "stock", "too old"),
        ([(12, 0), (7, 5)], {}, "part", "GPU 1: compute capability 7.5 is too old"),
        ([(12, 0), (7, 5)], {"CUDA_VISIBLE_DEVICES": "0"}, "serve", ""),
        ([(12, 0), (7, 5)], {"CUDA_VISIBLE_DEVICES": "1"}, "stock", "too old"),
        ([(12, 0), (7, 5)], {"CUDA_VISIBLE_DEVICES": "GPU-0"}, "serve", ""),
        # CUDA stops at the first entry that names nothing.
        ([(7, 5), (12, 0)], {"CUDA_VISIBLE_DEVICES": "0,7,1"}, "stock", "too old"),
        ([(12, 0)], {"CUDA_VISIBLE_DEVICES": ""}, "stock", "no GPU"),
        ([(9, 0)], {"CUDA_VISIBLE_DEVICES": "MIG-12"}, "unknown", "MIG"),
        ([(12, 0)], {"KDTREE_CONFIG": "hopper"}, "stock", "unset KDTREE_CONFIG"),
    ],
)
def test_gpus(
    tmp_path: Path,
    sglang: Path,
    capabilities: list[tuple[int, int] | None],
    variables: dict[str, str],
    verdict: str,
    said: str,
) -> None:
    assert_reason(gpus(tmp_path, sglang, *capabilities, **variables), verdict, said)


def test_configuration_that_is_asked_for(tmp_path: Path, sglang: Path) -> None:
    document = gpus(tmp_path, sglang, (9, 0), (8, 9), KDTREE_CONFIG="portable")
    assert "; portable (sm_90), row blocks of 16, 32, 40" in fact(document, "GPUs", "GPU 0")
    assert "; portable (sm_89), row blocks of 16, 32, 40" in fact(document, "GPUs", "GPU 1")
    assert {one["name"] for one in document["groups"]["kernel"]} == {"sm_89", "sm_90"}


@pytest.fixture
def cached(host: Host, tmp_path: Path) -> Path:
    """A cubin that nobody has compiled, under the name that a worker looks for."""
    result = compiling.CompileResult("sm_90a", b"\x7fELF made up", "", (), "", 0.0)
    return compiling.keep(result, tmp_path / "cache")


def test_cubin_that_is_cached(host: Host, tmp_path: Path, cached: Path) -> None:
    document = host.says(KDTREE_CACHE_DIR=str(tmp_path / "cache"))
    assert fact(document, "kernel", "sm_90a") == f"cached, {cached}"
    cached.write_bytes(cached.read_bytes()[:-1])
    document = host.says(KDTREE_CACHE_DIR=str(tmp_path / "cache"))
    assert fact(document, "kernel", "sm_90a").startswith("not cached")
    assert host.says(KDTREE_CACHE_DIR=str(tmp_path / "none"))["verdict"] == "serve"
    assert not (tmp_path / "none").exists()


def test_compile_takes_what_is_cached_and_does_not_guess_the_self_test(
    host: Host, tmp_path: Path, cached: Path
) -> None:
    """NVML sees a GPU, and torch none: what the self-test would say is unknown."""
    document = host.says("--compile", KDTREE_CACHE_DIR=str(tmp_path / "cache"))
    assert fact(document, "kernel", "sm_90a compiled") == str(cached)
    assert_reason(document, "unknown", "self-test", "torch sees no NVIDIA GPU")


def test_self_test_needs_room(tmp_path: Path, sglang: Path) -> None:
    host = Host(tmp_path, sglang, (9, 0), free=GIB)
    compiling.keep(compiling.CompileResult("sm_90a", b"\x7fELF made up", "", (), "", 0.0), tmp_path / "cache")
    document = host.says("--compile", KDTREE_CACHE_DIR=str(tmp_path / "cache"))
    assert document["verdict"] == "serve" and "no GPU has 2 GiB free" in fact(document, "kernel", "self-test")


OLD_NVRTC = {
    "__init__.py": "__version__ = '13.6.0'",
    "cuda/__init__.py": "",
    "cuda/nvrtc.py": "def getVersion(): return 12, 4\ndef getSupportedArchs(): return [80, 90]",
}


@pytest.mark.parametrize(("capabilities", "verdict"), [([(12, 0)], "stock"), ([(12, 0), (8, 0)], "part")])
def test_compiler_that_is_too_old_for_a_gpu(
    tmp_path: Path, sglang: Path, capabilities: list[tuple[int, int]], verdict: str
) -> None:
    for name, text in OLD_NVRTC.items():
        file = tmp_path / "old" / "cupy" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    host = Host(tmp_path, sglang, *capabilities)
    document = host.says(path=(REPO, tmp_path / "old", sglang))
    assert_reason(document, verdict, "sm_120: nvrtc_too_old", "12.8")
    assert fact(document, "packages", "NVRTC").startswith("12.4")


@pytest.mark.parametrize(
    ("answer", "effect", "said"),
    [
        ({"good": True, "results": [{"case": "a", "good": True}], "error": ""}, "ok", "passed, on GPU 1"),
        ({"good": False, "results": [{"case": "a", "good": False}], "error": ""}, "stock", "selftest_failed: a"),
        ({"good": False, "results": [], "error": "KernelUnavailable: load"}, "stock", "KernelUnavailable"),
        ({"good": False, "results": [], "error": "OutOfMemoryError: x"}, "unknown", "OutOfMemory"),
        ({"error": "ended with status -11: x"}, "unknown", "status -11"),
    ],
)
@pytest.mark.parametrize("reason", ["", "compile_failed"])
def test_what_compile_and_self_test_find(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], effect: str, said: str, reason: str
) -> None:
    """On the GPU with the most room."""

    class Job:
        def __init__(self, targets: list[str], cache_dir: Path | None):
            assert targets == ["sm_120", "sm_90a"]

        def start(self) -> Job:
            return self

        def result(self, target: str) -> Path:
            if reason and target == "sm_120":
                raise compiling.CompileError(reason, "why")
            return Path("/cache") / target

    class Child:
        def __init__(self, question: str, order: dict[str, Any], **variables: str):
            assert question == "answer_selftest" and variables == {"CUDA_VISIBLE_DEVICES": "GPU-1"}

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def answer(self) -> dict[str, Any]:
            return answer

    monkeypatch.setattr(compiling, "CompileJob", Job)
    monkeypatch.setattr(doctor_questions, "_Child", Child)
    two = [
        nvml.Gpu(0, (12, 0), "a", "GPU-0", 3 * GIB, 80 * GIB, True),
        nvml.Gpu(1, (9, 0), "b", "GPU-1", 4 * GIB, 80 * GIB, True),
        nvml.Gpu(2, (9, 0), "c", "GPU-2", 80 * GIB, 80 * GIB, False),
    ]
    found = doctor_questions.Findings()
    doctor_questions.try_out(found, two, {0: "sm_120", 1: "sm_90a", 2: "sm_90a"}, Settings())
    facts = {one.name: one for one in found.groups["kernel"]}
    assert (facts["self-test"].effect, said in facts["self-test"].value) == (effect, True)
    assert facts["sm_120 compiled"].effect == ("part" if reason else "ok")
    assert facts["sm_90a compiled"].value == "/cache/sm_90a"


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("service", "verdict", "said"),
    [
        ((*OPTIONS, "--kv-cache-dtype", "fp4_e2m1"), "stock", "kv_dtype: --kv-cache-dtype fp4_e2m1"),
        ((*OPTIONS, "--kv-cache-dtype", "fp8_e4m3"), "serve", ""),
        (OPTIONS[:2], "stock", "no_speculation"),
        (OPTIONS[2:], "unknown", "SGLang chooses"),
        (("docker", "run", "x"), "unknown", "container"),
        (("/usr/bin/python3", "-m", "sglang.launch_server", *OPTIONS), "unknown", "run doctor with it"),
        (("bash", "-c", f"exec {sys.executable} -m sglang.launch_server {' '.join(OPTIONS)}"), "serve", ""),
    ],
)
def test_command_line(host: Host, service: tuple[str, ...], verdict: str, said: str) -> None:
    assert_reason(host.says(service=service), verdict, said)


def test_script_that_chooses_the_interpreter(host: Host, tmp_path: Path) -> None:
    """pyenv's, for one: to run doctor with it is to run doctor with another interpreter again."""
    shim = tmp_path / "python"
    shim.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    document = host.says(
        service=("python", "-m", "sglang.launch_server", *OPTIONS), PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert_reason(document, "unknown", f"{shim}, a script that chooses", f"write {sys.executable}, if that is the one")


def test_model_without_latent_attention(host: Host, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 32}')
    assert_reason(host.says(service=(*OPTIONS, "--model", str(tmp_path))), "stock", "not_mla")


def test_wrong_usage(host: Host) -> None:
    process = host.start("--jason")
    output, error = process.communicate(timeout=60)
    assert process.returncode == 2 and output == "" and "--jason" in error


@pytest.mark.parametrize("code", ["raise SystemExit('boo')", "import os; os._exit(7)"])
def test_package_that_ends_whoever_imports_it(host: Host, tmp_path: Path, code: str) -> None:
    (tmp_path / "cupy.py").write_text(code)
    document = host.says(path=(REPO, host.sglang, tmp_path))
    assert_reason(document, "unknown", "packages: ", "import wrapt and cupy with this interpreter")


def test_processes_that_cannot_be_started(host: Host) -> None:
    """Here because the words are too long; it might be the limit of processes, too."""
    many = [Path(f"/nonexistent/{number:05}") for number in range(6000)]
    document = host.says(path=(REPO, host.sglang, *many))
    assert_reason(document, "unknown", "packages: no process could be started (Argument list too long)")
    assert "no process could be started" in fact(document, "SGLang", "import")


def test_torch_without_its_version(host: Host, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    document = host.says(path=(REPO, host.sglang, tmp_path))
    assert_reason(document, "stock", "torch: ", f"{tmp_path}/torch is no whole torch")


# ------------------------------------------------------------------------------------------------------ what is printed


def test_verdict_first_and_the_same_content(host: Host) -> None:
    process = host.start("--", *OPTIONS, "--kv-cache-dtype", "fp4_e2m1", KDTREE_MODE="off")
    output, error = process.communicate(timeout=60)
    document = host.says(service=(*OPTIONS, "--kv-cache-dtype", "fp4_e2m1"), KDTREE_MODE="off")
    lines = output.splitlines()
    assert (process.returncode, error, lines[0]) == (1, "", document["summary"])
    assert lines[1 : len(document["because"])] == [f"  also {reason}" for reason in document["because"][1:]]
    for group, facts in document["groups"].items():
        assert group in lines
        assert all(any(one["name"] in line and one["value"] in line for line in lines) for one in facts)
    assert all(
        any(mode["name"] in line and mode["why"] in line for line in lines) for mode in document["forward_modes"]
    )
    assert all(any(row["where"] in line and row["name"] in line for line in lines) for row in document["contract"])
    assert "\033" not in output


@pytest.mark.parametrize(("variables", "colourful"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals(host: Host, variables: dict[str, str], colourful: bool) -> None:
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KDTREE_", "PYTHON", "NO_COLOR"))}
    env |= {"PYTHONPATH": f"{REPO}:{host.sglang}", "HOME": str(host.home), **variables}
    command = [sys.executable, "-m", "kdtree_patch", "doctor"]
    process = subprocess.Popen(command, env=env, cwd="/", stdout=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the terminal has been hung up
            break
    process.wait()
    os.close(ours)
    assert (b"\033[31mstock, because " in seen) == colourful and b"stock, because " in seen


def test_nothing_of_it_is_imported_in_a_worker(host: Host) -> None:
    code = (
        "import sys, sglang.srt.layers.attention.triton_backend;"
        "names = [name for name in sys.modules if 'doctor' in name or 'service_' in name];"
        "print(names, 'kdtree_patch.hook' in sys.modules)"
    )
    env = {"PYTHONPATH": f"{REPO}:{host.sglang}", "PATH": os.environ["PATH"], "HOME": str(host.home)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True)
    assert done.stdout == "[] True\n", done.stderr
