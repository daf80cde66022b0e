"""."""

import os
import stat
import tempfile
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/moefold`, or `~/.cache/moefold`."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named, "moefold")
    return Path(os.path.expanduser("~"), ".cache", "moefold")


def cache_folders(cache_dir: Path | None) -> tuple[Path, ...]:
    """Where entries are looked for and made: the named or default folder, else that of this user among temporary ones.

    A temporary one that somebody else made is not among them.
    """
    named, temporary = cache_dir if cache_dir is not None else default_cache_dir(), _temporary_cache_dir()
    is_strangers = os.path.lexists(temporary) and _is_untrusted_dir(temporary)
    return (named,) if is_strangers else (named, temporary)


def _temporary_cache_dir() -> Path:
    return Path(tempfile.gettempdir(), f"moefold-{os.getuid()}")


def _is_untrusted_dir(folder: Path) -> bool:
    """Return whether the folder in the temporary one, where anybody can make some, is not this user's alone."""
    if folder != _temporary_cache_dir():
        return False
    status = folder.lstat()
    is_own = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not is_own or stat.S_ISLNK(status.st_mode)
