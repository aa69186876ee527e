"""KDTREE_* variables: understood, or refused with a message that says which, what, and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdtree_patch import validate
from kdtree_patch.settings import SettingError, Settings


def test_an_empty_environment_means_the_defaults() -> None:
    settings = Settings.from_environ({"HOME": "/root", "PATH": "/bin"})
    assert settings == Settings(
        mode="on",
        validate=False,
        validate_every=1,
        forward_modes=frozenset({"verify"}),
        cache_dir=None,
        log_level="info",
        guard_rel=None,
        guard_dump=None,
        selftest=True,
    )
    assert not settings.compares


def test_every_variable_is_read(tmp_path: Path) -> None:
    settings = Settings.from_environ(
        {
            "KDTREE_MODE": "on",
            "KDTREE_VALIDATE": "1",
            "KDTREE_VALIDATE_EVERY": "50",
            "KDTREE_FORWARD_MODES": "verify, Extend",
            "KDTREE_CACHE_DIR": "/var/cache/kdtree",
            "KDTREE_LOG_LEVEL": "warning",
            "KDTREE_GUARD_REL": "5e-2",
            "KDTREE_GUARD_DUMP": str(tmp_path),
            "KDTREE_SELFTEST": "0",
            "KDTREE_CONFIG": "hopper",
        }
    )
    first = ("on", True, 50, frozenset({"verify", "extend"}), Path("/var/cache/kdtree"), "warning")
    assert settings == Settings(*first, guard_rel=0.05, guard_dump=tmp_path, selftest=False, config="hopper")


def test_a_guard_compares_without_validation() -> None:
    settings = Settings.from_environ({"KDTREE_GUARD_REL": "0.05"})
    assert settings.compares and not settings.validate


@pytest.mark.parametrize("name", ["dumps", "no-such-folder", "a-file"])
def test_a_dump_folder_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    folder = name if name == "dumps" else str(tmp_path / name)
    with pytest.raises(SettingError) as refused:
        Settings.from_environ({"KDTREE_GUARD_REL": "0.05", "KDTREE_GUARD_DUMP": folder})
    allowed = "an absolute path" if name == "dumps" else "a folder that exists and that the service can write to"
    assert refused.value.variable == "KDTREE_GUARD_DUMP" and allowed in str(refused.value)


def test_case_and_spaces_do_not_matter_and_empty_is_unset() -> None:
    settings = Settings.from_environ({"KDTREE_MODE": " Shadow ", "KDTREE_VALIDATE_EVERY": "", "KDTREE_CACHE_DIR": "  "})
    assert (settings.mode, settings.validate_every, settings.cache_dir) == ("shadow", 1, None)


def test_shadow_validates_whatever_the_flag_says() -> None:
    assert Settings.from_environ({"KDTREE_MODE": "shadow"}).validate
    assert Settings.from_environ({"KDTREE_MODE": "shadow", "KDTREE_VALIDATE": "0"}).validate


def test_a_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/sglang")
    assert Settings.from_environ({"KDTREE_CACHE_DIR": "~/kernels"}).cache_dir == Path("/home/sglang/kernels")


def test_the_largest_number_that_the_message_names_is_taken() -> None:
    assert Settings.from_environ({"KDTREE_VALIDATE_EVERY": "999999999"}).validate_every == 999_999_999


@pytest.mark.parametrize(
    ("value", "limit"), [("0.05", 0.05), (".5", 0.5), ("1.", 1.0), ("5E-2", 0.05), ("1e+6", 1e6), ("1e-9", 1e-9)]
)
def test_numbers_of_a_limit(value: str, limit: float) -> None:
    assert Settings.from_environ({"KDTREE_GUARD_REL": value}).guard_rel == limit
    validate.Comparison(torch.device("cpu"), limit)  # which has its square


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("KDTREE_MODE", "onn", "on, shadow, off"),
        ("KDTREE_VALIDATE", "yes", "0, 1"),
        ("KDTREE_VALIDATE_EVERY", "0", "a whole number from 1 to 999999999"),
        ("KDTREE_VALIDATE_EVERY", "-3", "a whole number from 1 to 999999999"),
        ("KDTREE_VALIDATE_EVERY", "1.5", "a whole number from 1 to 999999999"),
        ("KDTREE_VALIDATE_EVERY", "1000000000", "a whole number from 1 to 999999999"),
        ("KDTREE_VALIDATE_EVERY", "9" * 5000, "a whole number from 1 to 999999999"),
        ("KDTREE_VALIDATE_EVERY", "²", "a whole number from 1 to 999999999"),
        ("KDTREE_FORWARD_MODES", "verify,decode", "verify, draft_extend, extend"),
        ("KDTREE_FORWARD_MODES", ",", "verify, draft_extend, extend"),
        ("KDTREE_CACHE_DIR", "cache", "an absolute path"),
        ("KDTREE_CACHE_DIR", "~nobody-of-that-name/x", "an absolute path"),
        ("KDTREE_LOG_LEVEL", "loud", "info, warning, error"),
        ("KDTREE_LOG_LEVEL", "debug", "info, warning, error"),
        ("KDTREE_GUARD_REL", "0", "a number above 0"),
        ("KDTREE_GUARD_REL", "-1", "a number above 0"),
        ("KDTREE_GUARD_REL", "nan", "a number above 0"),
        ("KDTREE_GUARD_REL", "inf", "a number above 0"),
        ("KDTREE_GUARD_REL", "5%", "a number above 0"),
        ("KDTREE_GUARD_REL", "1e-400", "a number above 0"),
        ("KDTREE_GUARD_REL", "1000001", "a number above 0 and up to 1000000"),
        ("KDTREE_GUARD_REL", "1e200", "a number above 0 and up to 1000000"),
        ("KDTREE_GUARD_REL", "1_0", "a number above 0"),
        ("KDTREE_GUARD_REL", "\N{ARABIC-INDIC DIGIT FIVE}", "a number above 0"),
        ("KDTREE_GUARD_REL", ".", "a number above 0"),
        ("KDTREE_GUARD_DUMP", "/tmp", "it needs KDTREE_GUARD_REL"),
        ("KDTREE_SELFTEST", "no", "1, 0"),
        ("KDTREE_CONFIG", "sm_90", "auto, portable, hopper"),
    ],
)
def test_what_is_not_understood_is_refused(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.from_environ({variable: value})
    assert (refused.value.variable, refused.value.value) == (variable, value)
    message = str(refused.value)
    assert variable in message and repr(value) in message and allowed in message
    assert message.endswith("; the service runs stock")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("KDTREE_MOD", "KDTREE_MODE"), ("KDTREE_VALIDATE_EVRY", "KDTREE_VALIDATE_EVERY"), ("KDTREE_X", "KDTREE_")],
)
def test_a_misspelt_name_is_refused_with_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(SettingError, match=f"nearest is {nearest}"):
        Settings.from_environ({name: "shadow"})
