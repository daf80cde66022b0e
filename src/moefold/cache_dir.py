"""Cache folders: the named or default one, and a temporary fallback."""

import os
import stat
import tempfile
from pathlib import Path


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/moefold`, or `~/.cache/moefold`."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named, "moefold")
    return Path(os.path.expanduser("~"), ".cache", "moefold")


def cache_folders(cache_dir: Path | None) -> tuple[Path, ...]:
    """Return the folders to search for cache entries and to create them in, in order.

    The named or default folder comes first, then this user's temporary one, unless another user created that.
    """
    named = cache_dir if cache_dir is not None else default_cache_dir()
    temporary = _temporary_cache_dir()
    is_untrusted = os.path.lexists(temporary) and _is_untrusted_dir(temporary)
    return (named,) if is_untrusted else (named, temporary)


def _temporary_cache_dir() -> Path:
    return Path(tempfile.gettempdir(), f"moefold-{os.getuid()}")


def _is_untrusted_dir(folder: Path) -> bool:
    """Return whether the temporary cache folder, which anybody can create, is not exclusively this user's."""
    if folder != _temporary_cache_dir():
        return False
    status = folder.lstat()
    is_own = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not is_own or stat.S_ISLNK(status.st_mode)
