"""Lock of an open file (flock): the only kind of lock in this package, for folders, caches and temporary files.

A lock of `fcntl` or `lockf` belongs to the process: closing any other descriptor of the same file drops it. A flock
belongs to the open file, and on NFS other machines also see it.
"""

import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self


class FileLock:
    """Exclusive lock of an open file, held only by this process until `close` or the end of the process.

    A forked process closes its copy of the descriptor immediately, and an executed program does not inherit it, so that
    no child keeps the lock of an ended process.

    Args:
        descriptor: the open file. `close` closes it. On NFS it must be writable.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=_dropper(weakref.ref(self)))

    def try_acquire(self) -> bool:
        """Lock the file unless another open file holds the lock, and return whether it is locked now.

        Raises:
            OSError: the file system has no locks.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def acquire(self) -> None:
        """Lock the file. Wait for another holder.

        Raises:
            OSError: the file system has no locks.
        """
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Unlock the file, which stays open."""
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unlock and close the file."""
        if self.descriptor >= 0:
            self.release()
            self.drop()

    def drop(self) -> None:
        """Close the descriptor without unlocking, such as in a forked child, whose parent keeps the lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _dropper(lock: "weakref.ref[FileLock]") -> Callable[[], None]:
    """Return a hook that drops a lock in a forked child. It has no reference, because it can never be unregistered."""

    def drop() -> None:
        if (target := lock()) is not None:
            target.drop()

    return drop


def open_lock_file(path: Path, flags: int = 0) -> int:
    """Open or create a lock file for reading and writing, without waiting for a pipe, and return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o666)


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, created if missing. Wait for another holder.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    with FileLock(open_lock_file(path)) as lock:
        lock.acquire()
        yield


def is_locked(path: Path) -> bool:
    """Return whether a file is locked, even by this process, or False if it is absent, or cannot be locked.

    The check briefly takes a shared lock, so a job that starts at the same time has to try again.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
