"""Checks of a file that a command will write, before its work begins."""

import errno
import os
from pathlib import Path

from moefold.errors import ConfigError
from moefold.message_text import Setting


def refuse_existing(option: str, path: Path, *, force: bool) -> None:
    """Refuse a file that exists, unless it may be replaced. Raise ConfigError if it exists, and `force` is False."""
    if path.is_file() and not force:
        raise ConfigError(
            f"{Setting(option)} {path} exists already; add {Setting('--force')} to replace it, or name another file"
        )


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written. Raise ConfigError if the folder does not exist or is not writable."""
    fault = _write_errno(path)
    if fault:
        raise ConfigError(f"{Setting(option)} {path} cannot be written: {os.strerror(fault)}")


PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
"""File endings of a picture, which name its format."""


def check_output_path(option: str, path: Path, suffixes: tuple[str, ...]) -> None:
    """Check early that a file can be written. Nothing is created.

    Raises:
        ConfigError: the suffix is not allowed, the folder does not exist, or the path is not writable.
    """
    if path.suffix.lower() not in suffixes:
        first = ", ".join(suffixes[:-1])
        raise ConfigError(f"{Setting(option)} {path} must end in {first}{' or ' if first else ''}{suffixes[-1]}")
    check_writable(option, path)


def _write_errno(path: Path) -> int:
    if path.is_dir():
        return errno.EISDIR
    if not path.parent.exists():
        return errno.ENOENT
    if not path.parent.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES
