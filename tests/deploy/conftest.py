"""A booted host for each module of deploy tests, an operator beside it, and a unit on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.deploy.machine import Checkout, Machine, Operator, machine, why_not


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    reason = why_not()
    if reason is not None and "CI" in os.environ:
        pytest.fail(reason)  # a green run must mean that this has run
    if reason is not None:
        pytest.skip(reason)
    with machine(tmp_path_factory.mktemp("machine")) as booted:
        yield booted


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def operator(host: Machine, checkout: Checkout) -> Operator:
    return Operator(host, checkout)


def lines_of(output: str, word: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if word in line]
