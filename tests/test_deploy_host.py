"""The parts of `deploy` that need no host: unit files, releases, journal lines, bundles, and sitecustomize."""

from __future__ import annotations

import errno
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle
from deploy.host import gpus, probe, release, service, systemd, wire
from deploy.host.look import Place, prefix_problem, release_of
from deploy.host.release import ReleaseError, drop_in_text
from deploy.host.service import Failed, Journal, Line, Start
from deploy.host.systemd import State, environment_of, quoted
from kdtree_patch import compile as compiling
from kdtree_patch.service_command import Command
from tests.support.env import REPO
from tests.support.owners import pretend_owners

# ----------------------------------------------------------------------------------------------------------- unit files


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[Service]\nEnvironment=A=1 B=2\n", {"A": "1", "B": "2"}),
        ("[Service]\nEnvironment=\"A=x y\" 'B=z'\n", {"A": "x y", "B": "z"}),
        ("[Service]\nEnvironment=A=1\nEnvironment=\nEnvironment=B=2\n", {"B": "2"}),
        ("[Service]\nEnvironment=A=1 \\\n  B=2\n", {"A": "1", "B": "2"}),
        ("[Service]\nEnvironment=A=1\nEnvironment=A=2\n", {"A": "2"}),
        ("[Unit]\nEnvironment=A=1\n[Service]\n# Environment=B=1\nEnvironment = C=100%%\n", {"C": "100%"}),
        ("[Service]\nEnvironmentFile=/x\nEnvironment=A=b=c\n", {"A": "b=c"}),
    ],
)
def test_environment_of_unit_files(text: str, found: dict[str, str]) -> None:
    assert environment_of([text]) == found


@pytest.mark.parametrize("value", ["plain", "a b", 'a"b', "a\\b", "100%", "50%%", "a'b", "%n $HOME ${X}", "ü"])
def test_drop_in_says_exactly_the_value(value: str) -> None:
    assert environment_of(["[Service]\n" + quoted("A", value)]) == {"A": value}


@pytest.mark.parametrize("moment", range(8))
def test_restart_while_a_unit_is_asked_for_its_state_is_not_taken_for_the_end_of_the_new_start(
    monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """busctl asks for one property after the other; before `moment` of them the old process has just ended."""
    old = {
        "ActiveState": "inactive",
        "SubState": "dead",
        "InvocationID": [1],
        "NRestarts": 0,
        "Result": "success",
        "Job": [0],
    }
    new = {
        "ActiveState": "active",
        "SubState": "running",
        "InvocationID": [2],
        "NRestarts": 0,
        "Result": "success",
        "Job": [0],
    }
    asked: list[str] = []

    def run(*words: str) -> str:
        answers = []
        for name in words[6:]:
            asked.append(name)
            answers.append({"data": {**(old if len(asked) <= moment else new), "MainPID": 1}[name]})
        return "\n".join(map(json.dumps, answers))

    monkeypatch.setattr(systemd, "run", run)
    unit = object.__new__(systemd.Unit)
    unit._path = "/x"
    state = unit.state()
    assert len(asked) == 7 and (state.invocation == "01" or state.active == "active")


def test_drop_in_prepends_to_the_python_path_of_the_unit() -> None:
    place = Place(Path("/opt/kdtree"), "x.service")
    text = drop_in_text(place.releases / "1-a", "/mine:/yours", "shadow", 1000)
    assert environment_of([text]) == {
        "PYTHONPATH": "/opt/kdtree/releases/1-a:/mine:/yours",
        "KDTREE_MODE": "shadow",
        "KDTREE_CACHE_DIR": "/opt/kdtree/releases/1-a/cache/1000",
        "KDTREE_LOG_LEVEL": "info",
    }
    alone = drop_in_text(place.releases / "1-a", "", "on", 0)
    assert environment_of([alone])["PYTHONPATH"] == "/opt/kdtree/releases/1-a"
    assert release_of(text, place) == release_of(alone, place) == "1-a"
    assert release_of(None, place) is None


# ------------------------------------------------------------------------------------------------------------- releases


def archive_with(folder: Path, name: str = "r.tar", **files: str) -> Path:
    path = folder / name
    with tarfile.open(path, "w") as tar:
        for member, text in files.items():
            info = tarfile.TarInfo(member.replace("__", "/"))
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def wheel(**files: str) -> str:
    """As text, to go into an archive: latin-1 keeps the bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return buffer.getvalue().decode("latin-1")


def put_together(folder: Path, manifest: dict[str, Any], wheels: dict[str, bytes] | None = None) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.tar"
    members = {"manifest.json": json.dumps(manifest).encode(), "sitecustomize.py": b"x = 1\n"}
    members |= {f"wheels/{name}": content for name, content in (wheels or {}).items()}
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def whole(folder: Path) -> Path:
    """The archive of a release with nothing in its one wheel."""
    return put_together(folder, {"wheel_key": 1}, {"x-1-py3-none-any.whl": wheel().encode("latin-1")})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(systemd, "UNITS", tmp_path / "etc")
    return Place(tmp_path / "kdtree", "x.service")


def test_release_is_put_in_place_whole_and_never_twice(place: Place, tmp_path: Path) -> None:
    package = wheel(wrapt____init__="", **{"wrapt-1.data__platlib__extra.py": "y = 2\n"}).encode("latin-1")
    archive = put_together(tmp_path, {"wheel_key": 1}, {"wrapt-1-py3-none-any.whl": package})
    assert release.install(place, "1-a", archive)
    folder = place.releases / "1-a"
    assert (folder / "vendor" / "extra.py").read_text() == "y = 2\n" and not (folder / "wheels").exists()
    assert (folder / "sitecustomize.py").stat().st_mode & 0o777 == 0o644
    assert list(release.manifests(place)) == ["1-a"]
    assert not release.install(place, "1-a", None)

    second = put_together(tmp_path, {"wheel_key": 1, "vendor_from": "1-a"})
    assert release.install(place, "2-b", second)
    shared = place.releases / "2-b" / "vendor" / "extra.py"
    assert os.path.samefile(shared, folder / "vendor" / "extra.py")


def test_release_that_somebody_has_changed_is_told_from_one_as_it_was_sent(place: Place, tmp_path: Path) -> None:
    made_from, key = bundle.source(), {"tag": "cp312"}
    archive = tmp_path / "sent.tar"
    package = tmp_path / "x-1-py3-none-any.whl"
    package.write_bytes(wheel(x="").encode("latin-1"))
    bundle.pack(made_from, key, [package], None, archive)
    assert release.install(place, "1-a", archive)
    folder = place.releases / "1-a"
    (folder / "kdtree_patch" / "__pycache__").mkdir()
    for path in ("cache/x", "vendor/y.py", "kdtree_patch/__pycache__/z.pyc"):
        (folder / path).touch()
    assert not release.is_changed(folder)
    with (folder / "kernels" / "verify_attn_flash.cu").open("a") as file:
        file.write("\n")
    assert release.is_changed(folder)


def test_disk_that_is_full_while_a_release_is_unpacked(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(release.shutil, "copyfileobj", full)
    with pytest.raises(ReleaseError, match="1-a could not be put in place: .Errno 28. No space left"):
        release.install(place, "1-a", whole(tmp_path))
    release.remove_everything(place)
    assert not place.prefix.exists()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_archive_that_reaches_out_is_refused(place: Place, tmp_path: Path, name: str) -> None:
    with pytest.raises(ReleaseError, match="no plain file"):
        release.install(place, "1-a", archive_with(tmp_path, **{name: "x"}))
    assert release.manifests(place) == {} and not (place.releases / "1-a").exists()


def test_archive_with_a_link_is_refused(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "r.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("vendor")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(info)
    with pytest.raises(ReleaseError, match="no plain file"):
        release.install(place, "1-a", path)


def test_release_that_was_not_sent_is_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="neither on the host nor"):
        release.install(place, "1-a", None)
    with pytest.raises(ReleaseError, match="is gone: run it again"):
        release.install(place, "1-a", put_together(tmp_path, {"vendor_from": "0-z"}))


def test_pruning_keeps_five_and_what_is_in_use(place: Place) -> None:
    for number in range(9):
        folder = place.releases / f"{number}-x"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"wheel_key": 0}')
        os.utime(folder / "manifest.json", (number, number))
    release.point_current(place, "0-x")
    other = Place(place.prefix, "other.service")
    other.records.mkdir(parents=True)
    other.state.write_text(json.dumps({"release": "1-x", "previous": {"release": "2-x"}}))
    place.records.mkdir(parents=True)
    place.pending.write_text(json.dumps({"drop_in": 'Environment="PYTHONPATH=/k/releases/3-x:/y"', "current": None}))
    assert release.prune(place) == []
    release.point_current(place, "8-x")
    place.pending.unlink()
    assert sorted(release.prune(place)) == ["0-x", "3-x"]
    assert release.current(place) == "8-x"


def test_removing_a_unit_keeps_what_another_one_has(place: Place) -> None:
    other = Place(place.prefix, "other.service")
    for records in (place.records, other.records, place.releases / "1-a"):
        records.mkdir(parents=True)
    (place.releases / "1-a" / "manifest.json").write_text('{"wheel_key": 0}')
    other.state.write_text("{}")
    release.point_current(place, "1-a")
    release.remove_everything(place)
    assert (place.releases / "1-a").is_dir() and not place.records.exists()
    release.remove_everything(other)
    assert not place.prefix.exists()


def test_release_in_a_drop_in_is_in_use_whatever_the_records_say(place: Place, tmp_path: Path) -> None:
    release.install(place, "1-a", whole(tmp_path))
    drop_in = systemd.UNITS / "other.service.d" / systemd.DROP_IN
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text(drop_in_text(place.releases / "1-a", "", "on", 0))
    release.remove_everything(place)
    assert release.manifests(place) and "1-a" in release.in_use(place)


def test_prefix_that_is_a_mount_or_a_folder_of_the_system_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.prefix / "releases").mkdir(parents=True)
    gone: list[str] = []

    def rmdir(path: Path) -> None:
        gone.append(path.name)
        raise OSError(errno.EBUSY, "it is a mount")

    monkeypatch.setattr(Path, "rmdir", rmdir)
    release._remove_empty(place.releases)
    for path in ("/opt", "/srv", "/mnt"):
        release._remove_empty(Path(path))
    assert gone == ["releases"]


@pytest.fixture
def theirs(place: Place) -> dict[str, str]:
    """Another application's PREFIX, laid out as ours is: its files, by name."""
    for number in range(8):
        folder = place.releases / f"{number}-x"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"name": "of another application"}')
    (place.prefix / "incoming").mkdir()
    (place.prefix / "incoming" / "upload.tar").touch()
    (place.units / "pump").mkdir(parents=True)
    (place.units / "pump" / "serial").touch()
    place.current.symlink_to("/srv/elsewhere")
    return tree(place.prefix)


def tree(folder: Path) -> dict[str, str]:
    return {str(path): os.readlink(path) if path.is_symlink() else "" for path in sorted(folder.rglob("*"))}


def test_prefix_of_another_application_is_refused_and_left_alone(place: Place, theirs: dict[str, str]) -> None:
    problem = release.foreign_problem(place) or ""
    assert "no deployment has put there" in problem and str(place.current) in problem
    assert release.manifests(place) == {} and release.prune(place) == []
    with pytest.raises(ReleaseError, match="not been made by a deployment"):
        release.point_current(place, "0-x")
    release.point_current(place, None)
    release.remove_everything(place)
    assert tree(place.prefix) == theirs


def test_undeploy_takes_ours_from_among_theirs(place: Place, theirs: dict[str, str], tmp_path: Path) -> None:
    release.install(place, "9-z", whole(tmp_path))
    place.records.mkdir()
    place.state.write_text("{}")
    release.remove_everything(place)
    assert tree(place.prefix) == theirs


def test_prefix_with_only_ours_is_not_refused(place: Place, tmp_path: Path) -> None:
    assert release.foreign_problem(place) is None
    release.install(place, "1-a", whole(tmp_path))
    place.records.mkdir(parents=True)
    place.pending.write_text("{}")
    release.point_current(place, "1-a")
    (place.prefix / "incoming").mkdir()
    (place.prefix / "incoming" / "0.1.0-0123456789ab-dirty-fedcba98-00c0ffee.tar").touch()
    (place.releases / "0.1.0-0123456789ab").mkdir()
    (place.prefix / "lost+found").mkdir()
    assert release.foreign_problem(place) is None


def test_half_removed_release_blocks_no_name(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.releases / "1-a").mkdir(parents=True)
    (place.releases / "1-a" / "rest").touch()
    assert release.install(place, "1-a", whole(tmp_path))
    assert release.manifests(place) and not (place.releases / "1-a" / "rest").exists()
    with monkeypatch.context() as patch:
        patch.setattr(release.shutil, "rmtree", lambda *_, **__: None)  # cut off at its start
        release.remove(place.releases / "1-a")
    assert release.manifests(place) == {} and not (place.releases / "1-a").exists()
    assert release.prune(place) == [] and list(place.releases.iterdir()) == []


def test_prefix_that_somebody_else_could_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, owners = tmp_path / "opt", pretend_owners(monkeypatch)
    top.mkdir()
    assert prefix_problem(top / "not" / "yet", 1000) is None
    owners[top] = (0, 0o777)
    assert "others may write" in (prefix_problem(top / "x", 1000) or "")
    owners[top] = (0, 0o700)
    assert "cannot enter" in (prefix_problem(top / "x", 1000) or "") and prefix_problem(top / "x", 0) is None
    owners[top] = (1000, 0o755)
    assert "belongs to uid 1000" in (prefix_problem(top / "x", 0) or "")
    (tmp_path / "link").symlink_to(top)
    (tmp_path / "file").touch()
    for path in (tmp_path / "link", tmp_path / "file" / "below"):
        assert "is not a folder" in (prefix_problem(path, 0) or "")


# ----------------------------------------------------------------------------------------------------- journal, confirm


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("api_key='sk-abc', x", "api_key='***', x"),
        ("HF_TOKEN=hf_abc y", "HF_TOKEN=*** y"),
        ("my-known-value here", "*** here"),
        ("Password: hunter2", "Password: ***"),
        ("tokens=12 max_new_tokens: 16", "tokens=*** max_new_tokens: ***"),
        ("[kdtree] shapes q=(9, 8, 576) bs=1", "[kdtree] shapes q=(9, 8, 576) bs=1"),
    ],
)
def test_secrets_are_not_repeated(text: str, clean: str) -> None:
    assert Journal("0" * 32, ["my-known-value"]).clean(text) == clean


class FakeUnit:
    name = "x.service"

    def state(self) -> State:
        return State("active", "running", "1" * 32, 0, "success", 1)


INSTALLED = "[kdtree] installed version=0.1.0 mode=on"
SHAPES = "[kdtree] shapes q=(9, 8, 576)"
LAYER = "[kdtree] L{0} max_abs_diff=1.0e+00 mean=1.0e-01 rel={1} tp_rank=0"


def confirm(
    monkeypatch: pytest.MonkeyPatch,
    *texts: str,
    workers: int = 2,
    mode: str = "on",
    validates: bool = False,
    late: str = "",
) -> list[str]:
    """What `confirm` says of a start with these lines, one a worker. `late` comes with a second request."""
    requests: list[str] = []

    def generate(url: str, command: Command) -> None:
        requests.append(url)
        if late and len(requests) > 1:
            start.journal.lines.append(Line("1", late))

    monkeypatch.setattr(service, "healthy", lambda url: True)
    monkeypatch.setattr(service, "generate", generate)
    monkeypatch.setattr(service, "_LINES_SECONDS", 0.0)
    monkeypatch.setattr(Journal, "read", lambda self: [])
    start = Start(FakeUnit(), "http://x", "0" * 32, invocation="1" * 32)  # type: ignore[arg-type]
    start.journal.lines = [Line(str(100 + index), text) for index, text in enumerate(texts)]
    said: list[str] = []
    start.confirm(workers, Command("p", frozenset(), []), mode, validates, said.append)
    return said


def test_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    said = confirm(monkeypatch, INSTALLED, INSTALLED, SHAPES, LAYER.format(0, "1.9e-03"), LAYER.format(1, "2.1e-03"))
    assert "validation: 2 layer lines, largest rel 2.10e-03" in said
    assert "nothing to confirm" in confirm(monkeypatch, mode="off")[0]


def test_with_an_fp8_pool_stock_itself_is_further_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = f"{INSTALLED} target=sm_120-fp8_e4m3"
    assert "validation: 1 layer lines, largest rel 1.40e-01" in confirm(
        monkeypatch, fp8, fp8, SHAPES, LAYER.format(0, "1.4e-01")
    )
    for kernel, rel in ((fp8, "1.0e+00"), (fp8, "nan"), (f"{INSTALLED} target=sm_120", "1.4e-01")):
        with pytest.raises(service.Failed, match="rel is above"):
            confirm(monkeypatch, kernel, kernel, SHAPES, LAYER.format(0, rel))


def test_layers_that_come_late_are_waited_for_and_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (INSTALLED, INSTALLED, SHAPES)
    said = confirm(monkeypatch, *lines, validates=True, late=LAYER.format(0, "1.9e-03"))
    assert said[-1] == "validation: 1 layer lines, largest rel 1.90e-03"
    assert "no layer has been compared yet" in confirm(monkeypatch, *lines, validates=True)[-1]
    with pytest.raises(Failed, match="rel is above"):
        confirm(monkeypatch, *lines, validates=True, late=LAYER.format(0, "1.9e-01"))


def test_health_that_takes_its_time_is_waited_for_after_a_restart_as_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(2.5)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(Journal, "read", lambda self: [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = Start(FakeUnit(), f"http://127.0.0.1:{server.server_port}", "0" * 32)  # type: ignore[arg-type]
        start.wait(1, lambda text: None, [], True)
        server.shutdown()


def test_unit_that_was_stopped_and_is_not_started_again_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that does not hold any more, or another unit that it needs and that fails: there is no new start."""
    states = [State("deactivating", "stop", "0" * 32, 0, "success", 1, True)]
    states.append(State("inactive", "dead", "0" * 32, 0, "success", 0, True))  # on its way up
    states.append(State("inactive", "dead", "0" * 32, 0, "success", 0, False))
    unit = FakeUnit()
    monkeypatch.setattr(unit, "state", lambda: states.pop(0), raising=False)
    monkeypatch.setattr(service, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(service, "last_word", lambda name: "Condition check resulted in it being skipped.")
    start = Start(unit, "http://x", "0" * 32)  # type: ignore[arg-type]
    with pytest.raises(Failed, match="stopped and systemd does not start it again .Condition check resulted"):
        start.wait(600, lambda text: None, [], True)
    assert states == []


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([INSTALLED, SHAPES], "1 of 2 workers logged `installed`"),
        ([INSTALLED, INSTALLED], "no verify call came to the patch"),
        ([INSTALLED, INSTALLED, SHAPES, LAYER.format(3, "1.0837e+00")], "rel is above 0.02: .kdtree. L3"),
        ([INSTALLED, INSTALLED, SHAPES, LAYER.format(3, "nan")], "rel is above"),
        ([INSTALLED, INSTALLED, SHAPES, "[kdtree] disabled reason=launch_failed"], "disabled reason=launch_failed"),
        ([INSTALLED, INSTALLED, SHAPES, "[kdtree] ERROR something"], "a worker says"),
        ([INSTALLED, "[kdtree] declined reason=contract x; the service runs stock"], "a worker declined"),
        (["[kdtree] ERROR declined reason=bad_setting x; the service runs stock", INSTALLED], "a worker declined"),
    ],
)
def test_not_confirmed(monkeypatch: pytest.MonkeyPatch, lines: list[str], reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        confirm(monkeypatch, *lines)


def test_declined_kind_of_call_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm(monkeypatch, INSTALLED, INSTALLED, SHAPES, "[kdtree] declined reason=forward_mode scope=call mode=EXTEND")


# --------------------------------------------------------------------------------------------------------------- bundle


PROBE = {"tag": "cp312", "machine": "x86_64", "libc": ["glibc", "2.31"], "numpy": "1.26.4", "cuda": "12.8"}


def test_wheels_are_those_of_the_services_interpreter() -> None:
    key = bundle.wheel_key(PROBE)
    assert [line.split(">")[0] for line in key["requirements"]] == ["wrapt", "cupy-cuda12x"]
    words = " ".join(bundle.pip_words(key))
    assert "--python-version 3.12 --abi cp312" in words and "--only-binary=:all:" in words
    assert "manylinux_2_31_x86_64" in words and "manylinux_2_32_x86_64" not in words and "manylinux2014_x86_64" in words
    assert "--abi cp313t" in " ".join(bundle.pip_words({**key, "tag": "cp313t"}))
    with pytest.raises(bundle.BundleError, match="cupy has wheels for glibc"):
        bundle.pip_words({**key, "libc": ["", ""]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cuda", "12x @ file:///tmp/theirs#.8"),
        ("cuda", None),
        ("numpy", "1.26.4 ; x"),
        ("tag", "cp312 --index-url"),
        ("machine", "../x86_64"),
        ("libc", ["glibc", "2.31 x"]),
        ("libc", "glibc"),
    ],
)
def test_what_no_python_says_of_itself_goes_into_no_command_line(name: str, value: Any) -> None:
    """The answer is the interpreter's, which belongs to the service's user: pip would fetch and run what it names."""
    with pytest.raises(bundle.BundleError, match=f"its {name} is .* which cannot be"):
        bundle.wheel_key({**PROBE, name: value})
    assert bundle.wheel_key({**PROBE, "numpy": None})["numpy"] is None
    assert bundle.wheel_key({**PROBE, "libc": ["", ""]})["libc"] == ["", ""]


def test_wheels_that_find_no_room_are_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundle, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(bundle, "_download", lambda folder, *_: (folder / "wrapt-1.whl").touch())
    monkeypatch.setattr(bundle.shutil, "copytree", full)
    with pytest.raises(bundle.BundleError, match="could not be kept in .*No space left on device"):
        bundle.wheels(bundle.wheel_key(PROBE))


def test_wheels_that_cannot_be_fetched_are_one_line_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "WHEELS", tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(bundle.BundleError) as caught:
        bundle.wheels(bundle.wheel_key(PROBE))
    text = str(caught.value)
    assert (
        text.startswith("pip on this machine could not fetch wrapt>=")
        and "numpy==1.26.4 for the service: ERROR" in text
    )
    assert text.endswith("the service has not been touched") and "\n" not in text
    assert list((tmp_path / "wheels").iterdir()) == []


def test_release_of_a_dirty_checkout_has_a_name_of_its_own() -> None:
    source = bundle.Source(("a",), "0123456789abcdef", "fedcba9876543210", ())
    assert source.release.endswith("-0123456789ab")
    dirty = bundle.Source(("a",), "0123456789abcdef", "fedcba9876543210", ("a",))
    assert dirty.release.endswith("-0123456789ab-dirty-fedcba98")


def test_code_for_the_host_needs_only_the_standard_library(tmp_path: Path) -> None:
    """-S: without site-packages. It answers, and writes nothing."""
    words = [sys.executable, "-I", "-S", "-c", wire.LOADER, "logs", wire.packed({"unit": "no-such.service"})]
    done = subprocess.run(
        words, input=wire.as_line(bundle.host_code()), capture_output=True, text=True, cwd=tmp_path, env={"PATH": ""}
    )
    assert "busctl is not on this host" in done.stderr and list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------------- doctor


@pytest.mark.parametrize(("sees", "status"), [(False, 1), (True, 0), (True, 1)])
def test_self_test_is_for_a_gpu_that_torch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool, status: int
) -> None:
    import torch

    (tmp_path / "kdtree_patch").mkdir()
    (tmp_path / "kdtree_patch" / "selftest.py").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    monkeypatch.setattr(probe, "_command", lambda *words: (status, "FAIL"))
    findings: list[str] = []
    done = probe._self_test(tmp_path, gpu("H200", 4), findings)
    if not sees:
        assert findings == [] and "warning: self-test left out" in done[0]
    elif status == 0:
        assert (done, findings) == (["self-test passed on H200, GPU-H200"], [])
    else:
        assert done == [] and "self-test on H200 ended with status 1: FAIL" in findings[0]
    assert "no GPU of the service has 2 GiB free" in probe._self_test(tmp_path, None, findings)[0]


def gpu(name: str, gib: float, compute_mode: str = "Default", capability: tuple[int, int] = (9, 0)) -> dict[str, Any]:
    free = int(gib * (1 << 30))
    return vars(gpus.Gpu(name, f"GPU-{name}", compute_mode, capability, "580.95.05", free))


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, "d"),
        ("0,1", "b"),
        ("GPU-a, GPU-b", "b"),
        ("0", None),
        ("2", None),
        ("", None),
        ("MIG-1234", None),
        ("7", None),
    ],
)
def test_self_test_has_a_gpu_with_room_that_the_service_may_use(visible: str | None, chosen: str | None) -> None:
    """And not torch's first one, which the service fills."""
    all_of_them = [gpu("a", 1.5), gpu("b", 3), gpu("c", 90, "Exclusive_Process"), gpu("d", 8)]
    found = probe._with_room(all_of_them, visible)
    assert (found and found["name"]) == chosen


class KdtreePackageFinder:
    """What the doctor takes for the sign that our sitecustomize was loaded."""

    def find_spec(self, *_: Any) -> None:
        return None


def test_doctor_shows_cuda_that_gpu_alone_before_anything_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def imports(release: Path) -> list[str]:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        raise RuntimeError("that is enough")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, KdtreePackageFinder()])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(probe, "_import_what_a_worker_needs", imports)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("KDTREE_MODE", "off")
    variables = {"KDTREE_MODE": "off", "KDTREE_LOG_LEVEL": "info"}
    found = probe.doctor(tmp_path, [gpu("a", 1.5), gpu("b", 3)], variables, False)
    assert seen == ["GPU-b"]
    assert "KDTREE_LOG_LEVEL is None and not info: an EnvironmentFile= of the unit sets it" in found["findings"]


@pytest.mark.parametrize(
    ("config", "pool", "targets"),
    [
        ("portable", None, ["sm_90", "sm_120"]),
        ("hopper", None, ["sm_90a"]),
        (None, None, ["sm_90a", "sm_120"]),
        (None, "fp8_e4m3", ["sm_90a-fp8_e4m3", "sm_120-fp8_e4m3"]),
    ],
)
def test_doctor_compiles_what_the_service_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str | None, pool: str | None, targets: list[str]
) -> None:
    compiled: list[str] = []

    def cached_binary(target: str, cache_dir: Path) -> Path:
        compiled.append(target)
        return cache_dir / target

    monkeypatch.setattr(compiling, "cached_binary", cached_binary)
    monkeypatch.setenv("KDTREE_CACHE_DIR", str(tmp_path))
    if config:
        monkeypatch.setenv("KDTREE_CONFIG", config)
    two = [gpu("a", 1), gpu("b", 1), gpu("c", 1, capability=(12, 0))]
    probe._compile(json.loads(json.dumps(two)), pool)
    assert compiled == targets


def test_doctor_of_a_release_that_knows_no_fp8_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback to it: such a service ran stock, and does so again."""
    monkeypatch.setattr(compiling, "cached_binary", lambda target, cache_dir: cache_dir / target)
    monkeypatch.delattr(compiling, "with_pool")
    monkeypatch.setenv("KDTREE_CACHE_DIR", str(tmp_path))
    assert probe._compile([gpu("a", 1)], "fp8_e4m3") == [f"kernel for sm_90a: {tmp_path / 'sm_90a'}"]


def test_gpu_on_which_the_configuration_does_not_run() -> None:
    part = gpus.Gpu("RTX PRO 6000", "GPU-1", "Default", (12, 0), "580", 0)
    assert part.problem("portable") is None
    said = "the hopper configuration needs compute capability 9.0, RTX PRO 6000 has 12.0: unset KDTREE_CONFIG"
    assert part.problem("hopper") == said
    assert "too old" in (gpus.Gpu("T4", "GPU-1", "Default", (7, 5), "580", 0).problem("hopper") or "")


# -------------------------------------------------------------------------------------------------------- sitecustomize


@pytest.mark.parametrize("own", [False, True], ids=["it has none", "it has its own"])
def test_bundled_packages_come_after_those_of_the_service(tmp_path: Path, own: bool) -> None:
    """A release has them in `vendor`; a process that never imports the backend does not get to see them."""
    deployed = tmp_path / "release"
    for name, text in {
        "sitecustomize.py": (REPO / "sitecustomize.py").read_text(),
        "kdtree_patch/__init__.py": "",
        "kdtree_patch/boot.py": "def arm(name):\n    import extra\n    print(extra.WHOSE)\n",
        "vendor/extra.py": "WHOSE = 'bundled'\n",
    }.items():
        (deployed / name).parent.mkdir(parents=True, exist_ok=True)
        (deployed / name).write_text(text)
    theirs = tmp_path / "theirs"
    backend = theirs / "sglang" / "srt" / "layers" / "attention"
    backend.mkdir(parents=True)
    (backend / "triton_backend.py").touch()
    if own:
        (theirs / "extra.py").write_text("WHOSE = 'the service'\n")
    program = (
        "import importlib.util, sys; early = any('vendor' in entry for entry in sys.path);"
        "import sglang.srt.layers.attention.triton_backend; print(early)"
    )
    env = {"PYTHONPATH": f"{deployed}:{theirs}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["the service" if own else "bundled", "False"] and done.stderr == ""


def test_worker_that_has_outlived_the_start_before_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = [sys.executable, "-c", "input()"]
    processes = []
    try:
        for _ in range(3):  # a worker of the start before, the main process of this one, a worker of it
            processes.append(subprocess.Popen(sleep, stdin=subprocess.PIPE))
            time.sleep(0.05)  # more than a tick
        old, main, worker = (process.pid for process in processes)
        journal = Journal("0" * 32)
        journal.lines = [Line(str(pid), "[kdtree] installed version=1") for pid in (old, worker)]
        assert service.installed(journal, main) == {str(worker)}
        # A main process that is not there any more says nothing about the others; nor does a worker that has ended.
        assert service.installed(journal, 0) == {str(old), str(worker)}
        processes[2].kill()
        processes[2].wait()
        assert service.installed(journal, main) == {str(worker)}
    finally:
        for process in processes:
            process.kill()
            process.wait()
