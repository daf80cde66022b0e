"""Cache folders: a named or default folder, a temporary fallback, and entries of JSON."""

import hashlib
import json
import logging
import os
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/moefold`, or `~/.cache/moefold`."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):
        return Path(cache_home, "moefold")
    return Path(os.path.expanduser("~"), ".cache", "moefold")


def cache_folders(cache_dir: Path | None) -> tuple[Path, ...]:
    """Return the folders for cache entries in the order of search and creation.

    The named or default folder is first, then this user's temporary folder, unless another user created it.
    """
    chosen_folder = cache_dir if cache_dir is not None else default_cache_dir()
    temporary = _temporary_cache_dir()
    is_untrusted = os.path.lexists(temporary) and _is_untrusted_dir(temporary)
    return (chosen_folder,) if is_untrusted else (chosen_folder, temporary)


def entry_key(identity: Any) -> str:
    """Return the name of an entry: 32 hexadecimal digits that change with its identity, a JSON value."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def write_json_entry(folders: tuple[Path, ...], name: str, value: Any) -> Path | None:
    """Write an entry to the first folder that can be written, and return its path, or None after warnings."""
    for folder in folders:
        draft = folder / f"{name}.{uuid.uuid4().hex}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft.write_text(json.dumps(value), encoding="utf-8")
            os.replace(draft, folder / name)
        except OSError as error:
            logger.warning("The cache cannot be written in %s (%s)", folder, error.strerror or error)
        else:
            return folder / name
    return None


def _temporary_cache_dir() -> Path:
    return Path(tempfile.gettempdir(), f"moefold-{os.getuid()}")


def _is_untrusted_dir(folder: Path) -> bool:
    """Return whether the temporary cache folder, which any user can create, is not exclusively this user's."""
    if folder != _temporary_cache_dir():
        return False
    status = folder.lstat()
    is_own = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not is_own or stat.S_ISLNK(status.st_mode)
