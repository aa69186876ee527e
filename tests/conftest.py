"""Fixtures that more than one test module uses, and how the tests are shared out over pytest-xdist's workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdtree_patch import notice
from kdtree_patch.log import get_logger, set_level
from tests.support.env import RELEASES
from tests.support.lab import Lab

try:
    from hypothesis import settings
except ImportError:  # an interpreter of a service, for the GPU suite: what needs it is skipped
    pass
else:
    settings.register_profile("night", max_examples=1000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker for the tests of one file, or of one file and one SGLang release: what they share is built once.
    Mutants share nothing and take ten seconds each, the fuzz of a configuration a minute: any worker for any of them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFileAndRelease(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if file.endswith(("test_kernel_mutants.py", "tests/test_fuzz.py")):
                return nodeid
            return file + next((release for release in RELEASES if f"[{release}" in test), "")

    return ByFileAndRelease(config, log)


@pytest.fixture(scope="session")
def folder_of_notices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notices")


@pytest.fixture(autouse=True)
def notices(folder_of_notices: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which a guard that trips here tells others of it: one that no other test looks into."""
    monkeypatch.setattr(notice, "FOLDER", folder_of_notices)
    yield folder_of_notices
    for path in folder_of_notices.iterdir():
        path.unlink()


@pytest.fixture
def all_lines() -> Iterator[None]:
    """Whatever level the shell asks for, the test sees every line."""
    before = get_logger().level
    set_level("info")
    yield
    get_logger().setLevel(before)


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each SGLang release in turn."""
    return request.param


@pytest.fixture(scope="session")
def lab(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A child process with this release and the patch, installed through `sitecustomize` as on a service."""
    with Lab(release, tmp_path_factory.mktemp(f"lab-{release}")) as lab:
        yield lab
