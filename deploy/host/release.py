"""Releases on the host: unpacked beside each other, never changed once they are there, the last five kept."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from deploy.host.look import Place, read_json
from deploy.host.systemd import quoted, sync_folder

KEEP = 5
MANIFEST = "manifest.json"
_HALF = ".part-"
# Archives of deployments that were cut off while they were sent.
_STALE_SECONDS = 86400.0


class ReleaseError(Exception):
    """A release cannot be put in place; the message says why."""


def drop_in_text(release: Path, python_path: str, mode: str, user_id: int) -> str:
    """The whole of what changes the service. It names the release itself, not `current`: what a unit runs changes when
    its own drop-in does and at no other time, whatever is deployed for another unit.
    """
    entries = f"{release}:{python_path}" if python_path else str(release)
    return "\n".join(
        (
            "# Written by `make deploy` of kdtree_patch; `make undeploy` removes it.",
            "[Service]",
            quoted("PYTHONPATH", entries),
            quoted("KDTREE_MODE", mode),
            quoted("KDTREE_CACHE_DIR", str(cache_of(release, user_id))),
            "",
        )
    )


def cache_of(release: Path, user_id: int) -> Path:
    """A cache belongs to one user, and units with other users may share a release."""
    return release / "cache" / str(user_id)


def manifests(place: Place) -> dict[str, Any]:
    """Of every whole release, by name."""
    found = {}
    for path in sorted(place.releases.glob(f"*/{MANIFEST}")):
        if not path.parent.name.startswith(_HALF):
            found[path.parent.name] = read_json(path)
    return found


def install(place: Place, name: str, archive: Path | None) -> bool:
    """Unpacks a release and puts it in place in one step. False if it is there already."""
    release = place.releases / name
    if (release / MANIFEST).is_file():
        return False
    if archive is None or not archive.is_file():
        raise ReleaseError(f"release {name} is neither on the host nor has it been sent")
    place.releases.mkdir(parents=True, exist_ok=True)
    half = place.releases / f"{_HALF}{name}"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(mode=0o755)
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.isreg() or member.name.startswith("/") or ".." in Path(member.name).parts:
                raise ReleaseError(f"{archive} has {member.name!r} in it, which is no plain file of a release")
            target = half / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    manifest = read_json(half / MANIFEST) or {}
    _vendor(place, half, manifest)
    (half / "cache").mkdir(mode=0o755)
    for folder, folders, files in os.walk(half):
        for entry in folders:
            os.chmod(os.path.join(folder, entry), 0o755)
        for entry in files:
            os.chmod(os.path.join(folder, entry), 0o644)
    os.sync()
    os.rename(half, release)
    sync_folder(place.releases)
    return True


def _vendor(place: Place, half: Path, manifest: dict[str, Any]) -> None:
    """wrapt and cupy: from the wheels that were sent, or the same files as those of another release, linked."""
    vendor = half / "vendor"
    donor = manifest.get("vendor_from")
    if donor:
        source = place.releases / donor / "vendor"
        if not source.is_dir():
            raise ReleaseError(f"release {donor}, whose wheels were to be used again, is gone: run it again")
        shutil.copytree(source, vendor, copy_function=os.link)
        return
    vendor.mkdir()
    for wheel in sorted((half / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(vendor)
        _spread(vendor)
    shutil.rmtree(half / "wheels")


def _spread(vendor: Path) -> None:
    """A wheel may keep modules in NAME.data/purelib and the like; what else is there is of no use here."""
    for data in vendor.glob("*.data"):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, vendor, dirs_exist_ok=True)
        shutil.rmtree(data)


def own_cache(release: Path, user_id: int, group_id: int) -> None:
    """The one folder of a release that the service's user may write to. Everything above it stays root's."""
    cache = cache_of(release, user_id)
    cache.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(descriptor, user_id, group_id)
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def point_current(place: Place, name: str | None) -> None:
    """Flips `current`, the release that was last confirmed on this host, in one step. None removes it."""
    if name is None:
        place.current.unlink(missing_ok=True)
        return
    temporary = place.prefix / ".current.new"
    temporary.unlink(missing_ok=True)
    os.symlink(f"releases/{name}", temporary)
    os.replace(temporary, place.current)
    sync_folder(place.prefix)


def current(place: Place) -> str | None:
    return Path(os.readlink(place.current)).name if place.current.is_symlink() else None


def in_use(place: Place) -> set[str]:
    """What a unit runs, ran before, or would go back to."""
    used = {current(place) or ""}
    for name in ("state.json", "pending.json"):
        for path in place.units.glob(f"*/{name}"):
            used |= set(re.findall(r"releases/([^/\":\\]+)", path.read_text()))
            record = read_json(path) or {}
            used |= {record.get("release") or "", (record.get("previous") or {}).get("release") or ""}
    return used


def prune(place: Place) -> list[str]:
    """Removes what is older than the last five releases and in nobody's use, and what was left half done."""
    releases = [path for path in place.releases.iterdir() if not path.name.startswith(_HALF)]
    releases.sort(key=lambda path: (path / MANIFEST).stat().st_mtime if (path / MANIFEST).exists() else 0, reverse=True)
    used = in_use(place)
    gone = [path for path in releases[KEEP:] if path.name not in used]
    for path in [*gone, *place.releases.glob(f"{_HALF}*")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in (place.prefix / "incoming").glob("*"):
        if path.stat().st_mtime < time.time() - _STALE_SECONDS:
            path.unlink(missing_ok=True)
    return [path.name for path in gone]


def remove_everything(place: Place) -> None:
    """What this unit had here, and the rest too if no other unit has anything."""
    shutil.rmtree(place.records, ignore_errors=True)
    if place.units.is_dir() and any(place.units.iterdir()):
        return
    for folder in (place.units, place.releases, place.prefix / "incoming"):
        shutil.rmtree(folder, ignore_errors=True)
    place.current.unlink(missing_ok=True)
    if place.prefix.is_dir() and not any(place.prefix.iterdir()):
        place.prefix.rmdir()
