"""Lock of a folder that one job at a time may write to, with the name of the process that holds it.

The first rank of a job locks its folders until its process ends, as two jobs in one folder would destroy each other's
metrics and half-written checkpoints. This happens when a user starts a job twice, or when torchrun restarts a job while
the old node still trains.
"""

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from moefold.errors import ConfigError
from moefold.file_lock import FileLock, is_locked, open_lock_file
from moefold.host.processes import GONE, ProcessId

LOCK_FILE = ".lock"
MAX_LOCK_WAIT_S = 100.0
"""A cancelled job may take this long to end. NFS keeps the locks of a lost host for 90 s (its lease)."""
_POLL_INTERVAL_S = 0.2
_GLANCES = 3
"""Tries before a lock counts as held: `is_locked` of another process holds it for an instant."""
_GLANCE_INTERVAL_S = 0.01

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Process that owns a folder, as a file in the folder names it."""

    host: str
    process: int
    since: str
    machine: str = ""
    """See `ProcessId.machine`, or "" in files of earlier versions."""
    started: str = ""
    """See `ProcessId.started`."""

    @classmethod
    def current(cls) -> "Owner":
        """Return the owner record of this process, with the time now."""
        this = ProcessId.current()
        return cls(this.host, this.number, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}", this.machine, this.started)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Owner | None":
        """Parse the text of a lock file. Return None if it names no process."""
        try:
            fields = json.loads(text)
            owner = cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (owner.host, owner.since, owner.machine, owner.started)
        return owner if type(owner.process) is int and all(isinstance(text, str) for text in texts) else None

    def to_json(self) -> str:
        """Return the text of a lock file."""
        return json.dumps(asdict(self)) + "\n"

    def is_running_here(self) -> bool:
        """Return whether the id is of another process of this machine that has not ended. False if that is unknown."""
        this = ProcessId.current()
        if not self.machine or self.machine != this.machine or self.process == this.number:
            return False
        return ProcessId(self.machine, self.host, self.process, self.started).state() != GONE

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


def is_in_use(folder: Path) -> bool:
    """Return whether a job holds the lock of a folder, also if it is this process."""
    return is_locked(folder / LOCK_FILE)


class FolderLock:
    """Context manager that locks `folder` for this process. It waits up to `wait_s` for another job to end.

    No child process keeps the lock, so it ends with this process. On a file system without locks, the folder is refused
    if the process that its lock file names still runs on this machine. Otherwise it is used unlocked, with a warning. A
    job that is refused before it writes anything removes the folders that it created.

    Args:
        folder: folder that only one job at a time may write to. It is created if needed.
    """

    def __init__(self, folder: Path, key: str, wait_s: float) -> None:
        self._folder = folder
        self._key = key
        self._wait_s = wait_s
        self._lock: FileLock | None = None
        self._created_folders: list[Path] = []

    def __enter__(self) -> Self:
        """Acquire the lock.

        Raises:
            ConfigError: another process still holds the lock after the wait, or the folder cannot be written.
        """
        path = self._folder / LOCK_FILE
        self._created_folders = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        try:
            self._lock = self._open(path)
            self._acquire(path)
            self._write_owner(self._lock.descriptor)
        except OSError as error:
            self._close()
            raise ConfigError(
                f"{self._key}={str(self._folder)!r} cannot be written: {error.strerror}; choose another folder, "
                "or free disk space"
            ) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock."""
        if self._lock is None:
            return
        # The folder may be gone: its loss must not hide an error.
        with suppress(OSError):
            os.truncate(self._lock.descriptor, 0)
        with suppress(OSError):
            if kind is not None and self._created_folders:
                self._remove_if_unused()
        self._close()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def _remove_if_unused(self) -> None:
        if [entry.name for entry in self._folder.iterdir()] == [LOCK_FILE]:
            (self._folder / LOCK_FILE).unlink()
            # Remove the parents that are still empty, up to the first that is not.
            for folder in self._created_folders:
                folder.rmdir()

    def _open(self, path: Path) -> FileLock:
        self._folder.mkdir(parents=True, exist_ok=True)
        return FileLock(open_lock_file(path, os.O_APPEND))

    def _acquire(self, path: Path) -> None:
        """Wait until this process holds the lock."""
        deadline_s = time.monotonic() + self._wait_s
        is_first_try = True
        while True:
            assert self._lock is not None
            if self._try_acquire(self._lock):
                if _is_file_of(self._lock, path):
                    return
                # The previous owner wrote nothing and removed the folder that it had created: our file is unlinked.
                self._close()
                self._lock = self._open(path)
                continue
            owner = _read_owner(self._lock)
            text = "owner unknown" if owner is None else str(owner)
            if time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"{self._key}={str(self._folder)!r} is in use by another job ({text}), which did not end within "
                    f"{self._wait_s:g} s; wait for it or end it, or set another {self._key} (if its host is lost for "
                    f"good, remove {str(path)!r})"
                )
            if is_first_try:
                logger.warning("%s=%r is in use (%s): waiting", self._key, str(self._folder), text)
            is_first_try = False
            time.sleep(_POLL_INTERVAL_S)

    def _try_acquire(self, lock: FileLock) -> bool:
        """Try to lock, more than once: a question by another process (`is_in_use`) holds the lock for an instant."""
        for glance in range(_GLANCES):
            time.sleep(glance * _GLANCE_INTERVAL_S)
            try:
                if lock.try_acquire():
                    return True
            except OSError as error:
                owner = _read_owner(lock)
                if owner is not None and owner.is_running_here():
                    return False
                logger.warning(
                    "%s cannot be locked (%s): make sure that no other job writes there",
                    self._folder / LOCK_FILE,
                    error.strerror,
                )
                return True
        return False

    def _write_owner(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size:
            os.truncate(descriptor, 0)
        os.write(descriptor, Owner.current().to_json().encode())


def _is_file_of(lock: FileLock, path: Path) -> bool:
    """Return whether a path still leads to the file of a lock."""
    try:
        return os.path.samestat(path.stat(), os.fstat(lock.descriptor))
    except FileNotFoundError:
        return False


def _read_owner(lock: FileLock) -> Owner | None:
    """Return the process that holds the lock, if it has written its name."""
    return Owner.from_json(os.pread(lock.descriptor, 4096, 0))
