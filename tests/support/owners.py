"""Owners and modes for the tests of `make deploy`, which must run as anybody. Knows `deploy.host.look` alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deploy.host import look


def pretend_owners(monkeypatch: pytest.MonkeyPatch) -> dict[Path, tuple[int, int]]:
    """From here on everything that exists is root's and nobody else's to write, but for what is put into the result:
    path to user id and mode.
    """
    owners: dict[Path, tuple[int, int]] = {}
    real = look.info_of

    def info_of(path: Path) -> os.stat_result | None:
        info = real(path)
        if info is None:
            return None
        user_id, mode = owners.get(path, (0, 0o755))
        return os.stat_result((stat.S_IFMT(info.st_mode) | mode, *info[1:4], user_id, *info[5:]))

    monkeypatch.setattr(look, "info_of", info_of)
    return owners
