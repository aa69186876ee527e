"""Releases on the host: unpacked beside each other, never changed once they are there, the last five kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from deploy.host import systemd
from deploy.host.look import Place, read_json, read_text, release_of
from deploy.host.systemd import DROP_IN, environment_of, quoted, sync_folder
from kdtree_patch.service_command import Refused
from kdtree_patch.settings import MODES

KEEP = 5
MANIFEST = "manifest.json"
# What the host itself makes of a release.
_NOT_SENT = (MANIFEST, "vendor", "cache")
_HALF = ".part-"
# The names that deploy.bundle gives, and those of the archives that steps.py sends.
_NAME = r"[0-9][0-9A-Za-z.+]*-[0-9a-f]{12}(-dirty-[0-9a-f]{8})?"
_ARCHIVE = _NAME + r"-[0-9a-f]{8}\.tar"
_NEW_LINK = ".current.new"
_RECORDS = {"state.json", "pending.json", ".state.json.new", ".pending.json.new"}
# Archives of deployments that were cut off while they were sent.
_STALE_SECONDS = 86400.0
# One that has not grown for so long is not being sent any more.
_SENDING_SECONDS = 60.0


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
            # The lines that confirm a deployment, and that `make status` and `make logs` show, are of this level.
            quoted("KDTREE_LOG_LEVEL", "info"),
            "",
        )
    )


def is_drop_in(text: str, place: Place) -> bool:
    """Whether this is, to the letter, what `drop_in_text` writes for a release of this PREFIX."""
    try:
        found = environment_of([text])
        entry, _, python_path = found["PYTHONPATH"].partition(":")
        folder, user_id = Path(entry), Path(found["KDTREE_CACHE_DIR"]).name
    except (ValueError, KeyError):
        return False
    if folder.parent != place.releases or not user_id.isdecimal() or found["KDTREE_MODE"] not in MODES:
        return False
    return text == drop_in_text(folder, python_path, found["KDTREE_MODE"], int(user_id))


def cache_of(release: Path, user_id: int) -> Path:
    """A cache belongs to one user, and units with other users may share a release."""
    return release / "cache" / str(user_id)


def is_ours(folder: Path) -> bool:
    """Whether this is a whole release of ours: it carries our manifest."""
    try:
        manifest = None if folder.is_symlink() else read_json(folder / MANIFEST)
    except (OSError, Refused):
        return False
    return manifest is not None and "wheel_key" in manifest


def _is_half(folder: Path) -> bool:
    """Whether this is what an installation or a removal that was cut off has left of a release of ours."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    bare = re.fullmatch(_NAME, folder.name) is not None and not (folder / MANIFEST).exists()
    return folder.name.startswith(_HALF) or bare


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def foreign(place: Place) -> list[Path]:
    """What lies under PREFIX and has not been put there by a deployment: `releases` and `current` are common names."""
    found: list[Path] = []
    for path in _inside(place.prefix):
        if path in (place.current, place.prefix / _NEW_LINK):
            if not path.is_symlink() or Path(os.readlink(path)).parent != Path("releases"):
                found.append(path)
        elif path.is_symlink() or not path.is_dir():
            found.append(path)
        elif path == place.releases:
            found += [entry for entry in _inside(path) if not is_ours(entry) and not _is_half(entry)]
        elif path == place.units:
            found += [entry for entry in _inside(path) if {part.name for part in _inside(entry)} - _RECORDS]
            found += [entry for entry in _inside(path) if entry.is_symlink() or not entry.is_dir()]
        elif path == place.prefix / "incoming":
            found += [entry for entry in _inside(path) if not re.fullmatch(_ARCHIVE, entry.name)]
        elif path.name != "lost+found":
            found.append(path)
    return found


def foreign_problem(place: Place) -> str | None:
    """Why nothing may be deployed under PREFIX, if something there is not ours."""
    found = foreign(place)
    if not found:
        return None
    names = ", ".join(str(path) for path in found[:3]) + (" ..." if len(found) > 3 else "")
    return f"{place.prefix} has something in it that no deployment has put there ({names}): choose another PREFIX"


def manifests(place: Place) -> dict[str, Any]:
    """Of every whole release, by name; `has_vendor` says whether its wheels are still there."""
    found = {}
    for folder in _inside(place.releases):
        if is_ours(folder) and not folder.name.startswith(_HALF):
            found[folder.name] = {**(read_json(folder / MANIFEST) or {}), "has_vendor": (folder / "vendor").is_dir()}
    return found


def remove(folder: Path) -> None:
    """Removes a release. What a cut leaves of it has a name that says so, never that of a whole one."""
    half = folder.with_name(f"{_HALF}gone-{folder.name.removeprefix(_HALF)}")
    if folder != half:
        shutil.rmtree(half, ignore_errors=True)
        os.rename(folder, half)
    shutil.rmtree(half, ignore_errors=True)


def is_changed(release: Path) -> bool:
    """Whether a file of ours in a release is another than when it was put in place: `bundle.source` over again."""
    digest = hashlib.sha256()
    files = [path.relative_to(release) for path in release.rglob("*") if path.is_file()]
    sent = [path for path in files if path.parts[0] not in _NOT_SENT and "__pycache__" not in path.parts]
    for name in sorted(map(str, sent)):
        content = (release / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    found = digest.hexdigest()
    return found != (read_json(release / MANIFEST) or {}).get("digest", found)


def install(place: Place, name: str, archive: Path | None) -> bool:
    """Unpacks a release and puts it in place in one step. False if it is there already."""
    release = place.releases / name
    if is_ours(release):
        return False
    if archive is None or not archive.is_file():
        raise ReleaseError(f"release {name} is neither on the host nor has it been sent")
    try:
        _unpack(place, release, archive)
    except OSError as error:
        raise ReleaseError(f"{release} could not be put in place: {error}") from error
    return True


def _unpack(place: Place, release: Path, archive: Path) -> None:
    place.releases.mkdir(parents=True, exist_ok=True)
    half = place.releases / f"{_HALF}{release.name}"
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
    if release.is_dir() and not (release / MANIFEST).exists():
        remove(release)  # what a removal that was cut off has left
    os.rename(half, release)
    sync_folder(place.releases)


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
    """Flips `current`, the release that was last confirmed on this host, in one step. None removes it. Raises
    ReleaseError if `current` is somebody else's.
    """
    if os.path.lexists(place.current) and current(place) is None:
        if name is None:
            return
        raise ReleaseError(f"{place.current} has not been made by a deployment: choose another PREFIX")
    if name is None:
        place.current.unlink(missing_ok=True)
        return
    temporary = place.prefix / _NEW_LINK
    temporary.unlink(missing_ok=True)
    os.symlink(f"releases/{name}", temporary)
    os.replace(temporary, place.current)
    sync_folder(place.prefix)


def current(place: Place) -> str | None:
    """The release that `current` is linked to; None where there is no such link of ours."""
    target = Path(os.readlink(place.current)) if place.current.is_symlink() else Path()
    return target.name if target.parent == Path("releases") and target.name else None


def in_use(place: Place) -> set[str]:
    """What a unit runs, ran before, or would go back to."""
    used = {current(place) or "", *_in_drop_ins(place)}
    for name in ("state.json", "pending.json"):
        for path in place.units.glob(f"*/{name}"):
            used |= set(re.findall(r"releases/([^/\":\\]+)", path.read_text()))
            record = read_json(path) or {}
            used |= {record.get("release") or "", (record.get("previous") or {}).get("release") or ""}
    return used


def _in_drop_ins(place: Place) -> list[str]:
    """The releases that units have on their PYTHONPATH, whatever the records say."""
    texts = [read_text(path) for path in systemd.UNITS.glob(f"*.d/{DROP_IN}")]
    return [name for text in texts if (name := release_of(text, place))]


def prune(place: Place) -> list[str]:
    """Removes what is older than the last five releases and in nobody's use, and what was left half done."""
    releases = [place.releases / name for name in manifests(place)]
    releases.sort(key=lambda path: (path / MANIFEST).stat().st_mtime, reverse=True)
    used = in_use(place)
    gone = [path for path in releases[KEEP:] if path.name not in used]
    for path in [*gone, *filter(_is_half, _inside(place.releases))]:
        if path.name not in used:
            remove(path)
    for path in _archives(place):
        if path.stat().st_mtime < time.time() - _STALE_SECONDS:
            path.unlink(missing_ok=True)
    return [path.name for path in gone]


def _archives(place: Place) -> list[Path]:
    return [path for path in _inside(place.prefix / "incoming") if re.fullmatch(_ARCHIVE, path.name)]


def remove_everything(place: Place, keep_archives: bool = False) -> None:
    """What this unit had here, and the rest of what is ours too if no other unit has anything. What is not ours stays,
    and a PREFIX in which nothing is ours is not touched at all. `keep_archives`: one may be on its way for another
    unit.
    """
    had_records = place.records.is_dir() and not place.records.is_symlink()
    for name in _RECORDS if had_records else ():
        (place.records / name).unlink(missing_ok=True)
    _remove_empty(place.records)
    if is_used(place):
        return
    ours = [folder for folder in _inside(place.releases) if is_ours(folder) or _is_half(folder)]
    sent = _archives(place)
    if not (had_records or ours or sent or (place.prefix / "incoming").is_dir() and not foreign(place)):
        return
    target = current(place)
    if target is not None and (place.releases / target in ours or not (place.releases / target).exists()):
        place.current.unlink()
    for folder in ours:
        remove(folder)
    for path in () if keep_archives else sent:
        path.unlink(missing_ok=True)
    for folder in (place.units, place.releases, place.prefix / "incoming", place.prefix):
        _remove_empty(folder)


def is_used(place: Place) -> bool:
    """Whether a unit has a deployment here, or a change that is under way."""
    records = [folder for folder in _inside(place.units) if {path.name for path in _inside(folder)} & _RECORDS]
    return bool(records or _in_drop_ins(place))


def left_over(place: Place) -> list[str]:
    """What lies here although no unit uses anything: of deployments that were cut off while they were sent."""
    if is_used(place):
        return []
    return [str(path) for path in (*filter(is_ours, _inside(place.releases)), *_archives(place))]


def being_sent(place: Place) -> list[str]:
    """The archives that have grown within the last minute."""
    since = time.time() - _SENDING_SECONDS
    with contextlib.suppress(FileNotFoundError):  # taken by its transaction, in this moment
        return [str(path) for path in _archives(place) if path.stat().st_mtime > since]
    return []


def _remove_empty(folder: Path) -> None:
    """But not /opt or the like, which was there before us, nor a file system of its own."""
    at_top = folder.parent.parent == folder.parent
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()) and not at_top:
        with contextlib.suppress(OSError):
            folder.rmdir()
