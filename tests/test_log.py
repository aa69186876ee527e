"""The form of the lines, which operators grep for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator

import pytest

from kdtree_patch import log
from kdtree_patch.settings import LOG_LEVELS


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = log.get_logger().level
    yield
    log.get_logger().setLevel(before)


def test_every_line_has_the_prefix_and_only_bad_news_has_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_level("info")
    logger = log.get_logger()
    logger.debug("nothing")
    logger.info("shapes q=%s", (9, 8, 576))
    logger.warning("hm")
    logger.error("oh")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["[kdtree] shapes q=(9, 8, 576)", "[kdtree] WARNING hm", "[kdtree] ERROR oh"]


def test_installed_and_declined(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_level("info")
    log.installed(version="0.1.0", gpu="NVIDIA H200", cupy=None, tp_rank=0)
    log.stays_stock("contract", "this SGLang differs", sglang="0.6.0", cupy=None)
    log.declined("kv_dtype", "such calls run stock", layer=0)
    log.declined("cupy_missing")
    assert capsys.readouterr().err.splitlines() == [
        '[kdtree] installed version=0.1.0 gpu="NVIDIA H200" tp_rank=0',
        "[kdtree] declined reason=contract sglang=0.6.0 this SGLang differs; please report it: a later version may "
        "know this one; the service runs stock",
        "[kdtree] declined reason=kv_dtype layer=0 such calls run stock",
        "[kdtree] declined reason=cupy_missing",
    ]


ALWAYS = [
    "installed v=1",
    "declined reason=contract no; please report it: a later version may know this one; the service runs stock",
    "ERROR oh",
]
SAID = {
    "info": [*ALWAYS, "declined reason=dtype", "calls served=10"],
    "warning": [*ALWAYS, "declined reason=dtype"],
    "error": ALWAYS,
}


@pytest.mark.parametrize("said_at", SAID)
def test_what_a_process_says_about_itself_is_said_at_every_level(
    said_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same form. What it says about a kind of call may be turned off."""
    log.set_level(said_at)
    log.installed(v=1)
    log.stays_stock("contract", "no")
    log.get_logger().error("oh")
    log.declined("dtype")
    log.get_logger().info("calls served=10")
    assert capsys.readouterr().err.splitlines() == [f"[kdtree] {line}" for line in SAID[said_at]]


def test_every_level_that_can_be_set_is_one() -> None:
    assert set(SAID) == set(LOG_LEVELS)


def test_a_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.get_logger().error("%s", ValueError("first\n  second\r\nthird"))
    log.declined("compile_failed", "error:\nline 3", log="a\nb")
    err = capsys.readouterr().err
    assert err == '[kdtree] ERROR first second third\n[kdtree] declined reason=compile_failed log="a b" error: line 3\n'


def test_a_reload_adds_no_second_handler_and_nothing_propagates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.get_logger()
    importlib.reload(log)
    # What SGLang's own logging configuration does to the root logger.
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler()])
    log.get_logger().info("once")
    assert capsys.readouterr().err == "[kdtree] once\n"


def test_a_closed_stderr_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise ValueError("I/O operation on closed file")

        flush = write

    monkeypatch.setattr("sys.stderr", Closed())
    log.declined("contract")
