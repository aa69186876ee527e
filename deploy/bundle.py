"""What goes onto a host: our files as git knows them, and the wheels of wrapt and cupy for the service's interpreter.

The wheels are fetched here, so that the host needs no internet, and kept between deployments. pip resolves them for the
other machine: its Python, ABI, C library and CUDA version, and the numpy that the service has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree_patch import __version__

REPO = Path(__file__).resolve().parent.parent
# What a worker reads. Everything else of the repository stays here.
PARTS = ("sitecustomize.py", "kdtree_patch", "kernels")
# What these bring along and a service has already. numpy is in the resolution so that cupy fits it.
_NOT_BUNDLED = ("numpy",)
WHEELS = Path(sys.prefix) / "wheels"


class BundleError(Exception):
    """There is nothing to deploy; the message says why."""


@dataclass(frozen=True)
class Source:
    """The files of this checkout."""

    files: tuple[str, ...]
    commit: str
    digest: str
    dirty: tuple[str, ...]

    @property
    def release(self) -> str:
        """VERSION-GITSHA. What git does not know needs another name: a release never changes once it is on a host."""
        name = f"{__version__}-{self.commit[:12]}"
        return f"{name}-dirty-{self.digest[:8]}" if self.dirty else name


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True)
    except FileNotFoundError:
        raise BundleError("git is missing: a release is named after the commit it was made from") from None
    if done.returncode != 0:
        raise BundleError(f"git {words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout


def source() -> Source:
    """Raises BundleError where git does not know this folder."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS).split("\0")
    files = sorted({name for name in listed if name and (REPO / name).is_file()})
    digest = hashlib.sha256()
    for name in files:
        content = (REPO / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    changed = [line[3:] for line in _git("status", "--porcelain").splitlines()]
    return Source(tuple(files), _git("rev-parse", "HEAD").strip(), digest.hexdigest(), tuple(changed))


def host_code() -> bytes:
    """The zip that runs on the host: deploy.host, and kdtree_patch for the contract and the list of GPUs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for folder in ("deploy", "deploy/host", "kdtree_patch"):
            for path in sorted((REPO / folder).glob("*.py")):
                if folder != "deploy" or path.name == "__init__.py":
                    archive.write(path, f"{folder}/{path.name}")
        archive.writestr("__main__.py", "from deploy.host.main import main\n\nmain()\n")
    return buffer.getvalue()


def requirements(cuda: str) -> list[str]:
    """The lines of requirements.txt, for the CUDA version of the service's torch."""
    lines = [line.split(";")[0].strip() for line in (REPO / "requirements.txt").read_text().splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    return [re.sub(r"^cupy-cuda\d+x", f"cupy-cuda{cuda.split('.')[0]}x", line) for line in wanted]


# What a probe may say of an interpreter. It is that interpreter's word, which belongs to the service's user, and goes
# into pip's command line on this machine: a name of a package that goes on with " @ URL" would be fetched and run here.
_PROBED = {
    "tag": r"cp3\d{1,2}t?",
    "machine": r"[a-z0-9_]{1,16}",
    "libc": r"glibc 2\.\d{1,3}|(?!glibc)[a-z]* [0-9.]*",
    "numpy": r"[0-9][0-9a-z.+]{0,31}",
    "cuda": r"\d{1,2}\.\d{1,2}",
}


def wheel_key(probe: dict[str, Any]) -> dict[str, Any]:
    """What decides which wheels fit. Two releases with the same key can use the same ones. Raises BundleError for an
    answer that no Python gives.
    """
    for name, pattern in _PROBED.items():
        value = probe.get(name)
        text = " ".join(map(str, value)) if name == "libc" and isinstance(value, list) and len(value) == 2 else value
        if not (isinstance(text, str) and re.fullmatch(pattern, text)) and not (name == "numpy" and value is None):
            raise BundleError(
                f"the service's interpreter says that its {name} is {value!r}, which cannot be: see what is imported "
                "when it starts; the service has not been touched"
            )
    return {
        "tag": probe["tag"],
        "machine": probe["machine"],
        "libc": probe["libc"],
        "numpy": probe["numpy"],
        "requirements": requirements(probe["cuda"]),
    }


def pip_words(key: dict[str, Any]) -> list[str]:
    """The options of `pip download` for another machine than this."""
    name, version = key["libc"]
    if name != "glibc":
        raise BundleError(
            f"the service's Python is built on {name or 'an unknown C library'}: cupy has wheels for glibc"
        )
    minor = int(version.split(".")[1])
    machine = key["machine"]
    tags = [f"manylinux_2_{number}_{machine}" for number in range(minor, 16, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    python = key["tag"][2:].rstrip("t")
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", f"{python[0]}.{python[1:]}"]
    for abi in (key["tag"], "abi3", "none"):
        words += ["--abi", abi]
    for tag in tags:
        words += ["--platform", tag]
    return words


def wheels(key: dict[str, Any]) -> tuple[Path, ...]:
    """The wheels for a key, fetched with pip the first time and kept beside the environment that runs this."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = WHEELS / f"{key['tag']}-{name}"
    if not folder.is_dir():
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS) as scratch:
            numpy = [f"numpy=={key['numpy']}"] if key["numpy"] else []
            _download(Path(scratch), pip_words(key), [*key["requirements"], *numpy])
            for wheel in Path(scratch).iterdir():
                if wheel.name.split("-")[0].lower() in _NOT_BUNDLED:
                    wheel.unlink()
            try:
                os.rename(shutil.copytree(scratch, f"{scratch}.whole"), folder)
            except OSError as error:
                shutil.rmtree(f"{scratch}.whole", ignore_errors=True)
                if not folder.is_dir():  # or else somebody was quicker
                    raise BundleError(f"the wheels could not be kept in {folder}: {error}") from error
    return tuple(sorted(folder.glob("*.whl")))


def _download(folder: Path, options: list[str], wanted: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, *options, *wanted], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise BundleError(
            f"pip on this machine could not fetch {', '.join(wanted)} for the service: {' '.join(errors[-3:])}; the "
            "service has not been touched"
        )


def pack(made_from: Source, key: dict[str, Any], parts: Sequence[Path], donor: str | None, target: Path) -> None:
    """Writes the archive of a release: our files, the wheels or the release that has the same ones, a manifest."""
    manifest = {
        "release": made_from.release,
        "commit": made_from.commit,
        "digest": made_from.digest,
        "dirty": bool(made_from.dirty),
        "wheel_key": key,
        "wheels": [wheel.name for wheel in parts],
        "vendor_from": donor,
    }
    with tarfile.open(target, "w") as tar:
        for name in made_from.files:
            tar.add(REPO / name, name, recursive=False)
        for wheel in parts:
            tar.add(wheel, f"wheels/{wheel.name}", recursive=False)
        content = (json.dumps(manifest, indent=1) + "\n").encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
