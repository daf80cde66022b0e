"""Checks of a file that a command writes at its end, made before its work. Torch-free."""

import errno
import os
from pathlib import Path

from moefold.errors import ConfigError


def check_output_path(option: str, path: Path, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that cannot be written, before anything is worked out; nothing is created.

    Args:
        option: what names it.
        path: the file.
        suffixes: those that it may have, in small letters.

    Raises:
        ConfigError: it has another ending, its folder is not there, or the place may not be written to.
    """
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{option} {path} must end in {' or '.join(suffixes)}")
    check_writable(option, path)


def reject_existing(option: str, path: Path, *, force: bool) -> None:
    """Refuse a file that exists, unless it is to be replaced.

    Raises:
        ConfigError: it exists, and `force` is False.
    """
    if path.is_file() and not force:
        raise ConfigError(f"{option} {path} exists already; add --force to replace it, or name another file")


def check_writable(option: str, path: Path) -> None:
    """The same without the ending.

    Raises:
        ConfigError: the folder is not there, or the place may not be written to.
    """
    fault = _write_errno(path)
    if fault:
        raise ConfigError(f"{option} {path} cannot be written: {os.strerror(fault)}")


def _write_errno(path: Path) -> int:
    if path.is_dir():
        return errno.EISDIR
    if not path.parent.exists():
        return errno.ENOENT
    if not path.parent.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES
