"""Temporary folders of processes that were killed: marked when they are made, removed by the next start. Torch-free."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK_FILE = "moefold.lock"
"""The file in a folder whose lock its owner holds until it ends, however it ends."""


def claim_folder(folder: Path) -> None:
    """Mark a temporary folder as one of this process, for as long as it lives."""
    lock = folder / LOCK_FILE
    if lock.exists():
        return
    # The name appears when the lock is held: a process that looks for folders without an owner finds none unlocked.
    draft = folder / f"{LOCK_FILE}.{os.getpid()}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    draft.rename(lock)


def remove_stale_folders(parent: Path | None = None) -> None:
    """Remove the marked folders of this user whose owner has ended.

    Args:
        parent: they lie in it; by default the system's temporary folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for folder in parent.iterdir():
        # Other processes come and go, and other users' folders cannot be opened.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK_FILE).is_file():
                continue
            if _is_unlocked(folder / LOCK_FILE):
                shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
