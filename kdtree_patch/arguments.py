"""What the commands read, their words and the environment, said to be wrong before anything has run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from kdtree_patch.exits import NotDone
from kdtree_patch.log import set_level
from kdtree_patch.settings import SettingError, Settings

PLOT_FORMATS = (".png", ".svg", ".pdf")


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {allowed}")
        return number

    return parse


def output_file(text: str) -> Path:
    """A file that can be written; it is not touched yet."""
    path = Path(text)
    try:
        folder = path.absolute().parent
        if not folder.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {folder}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{path} is a folder")
    except OSError as error:  # a folder that is gone or cannot be entered, a name that is too long
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def plot_file(text: str) -> Path:
    """A file that a picture can be written to."""
    path = output_file(text)
    if path.suffix.lower() not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{path} must end in one of {', '.join(PLOT_FORMATS)}")
    return path


def need(package: str, purpose: str = "", otherwise: str = "") -> None:
    """Raises NotDone where a package is not installed."""
    if find_spec(package) is None:
        raise NotDone(
            f"the package {package} is needed{purpose and ' ' + purpose} and not installed in {sys.prefix}",
            otherwise or f"pip install {package}, or `make setup`, which installs requirements-dev.txt",
        )


def settings_of_environment() -> Settings:
    """The settings that a service with this environment has, its log level set. Raises NotDone if a variable is not
    understood.
    """
    try:
        settings = Settings.from_environ(os.environ)
    except SettingError as error:
        # Not str(error), which tells what a service does.
        raise NotDone(f"{error.variable}={error.value!r} is not understood", error.allowed) from error
    set_level(settings.log_level)
    return settings
