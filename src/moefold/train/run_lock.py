"""One job at a time writes into a folder: its first rank holds a lock there, which ends with its process. Torch-free.

Two jobs in one folder take the lines of each other's metrics and the drafts of each other's checkpoints away. It comes
about by hand, and by an elastic launcher that takes a node for lost that trains on.
"""

import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from moefold.errors import ConfigError

LOCK_FILE = ".lock"
MAX_LOCK_WAIT_S = 100.0
"""A job that was given up may take so long to end; NFS keeps the locks of a host that is lost for 90 s (its lease)."""
_POLL_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


def is_in_use(folder: Path) -> bool:
    """Return whether another process holds the lock of a folder; not for a folder whose lock this process holds.

    Closing the file gives up every lock that the process has on it: that is how the locks of fcntl are.
    """
    try:
        file = (folder / LOCK_FILE).open("r+b", buffering=0)
    except OSError:
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            # A disk without locks: nothing tells.
            return False
    return False


class RunLock:
    """Context manager: holds `folder`, made if need be, for this process; it waits a while for another job to end.

    The lock is one of the process (fcntl), so that no child inherits it; a folder on a disk without such locks is used
    without one, with a warning. A job that is refused before it writes anything leaves no folder that it made.

    Args:
        folder: where one job at a time may write.
        key: of the recipe, that names it.
        wait_s: how long to wait for the one that holds it.
    """

    def __init__(self, folder: Path, key: str, wait_s: float) -> None:
        self._folder = folder
        self._key = key
        self._wait_s = wait_s
        self._file: FileIO | None = None
        self._created_folders: list[Path] = []

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: another process still holds it after the wait, or the folder cannot be written.
        """
        path = self._folder / LOCK_FILE
        self._created_folders = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        self._file = self._open(path)
        deadline_s = time.monotonic() + self._wait_s
        says_so = True
        while not self._try_acquire(path):
            if time.monotonic() >= deadline_s:
                holder = self._describe_owner()
                self._file.close()
                raise ConfigError(
                    f"{self._key}={str(self._folder)!r} is in use by another job ({holder}), which did not end within "
                    f"{self._wait_s:g} s; wait for it or end it, or set another {self._key} (if its host is lost for "
                    f"good, remove {str(path)!r})"
                )
            if says_so:
                logger.warning("%s=%r is in use (%s): waiting", self._key, str(self._folder), self._describe_owner())
            says_so = False
            time.sleep(_POLL_INTERVAL_S)
        try:
            self._write_owner()
        except OSError as error:
            self._file.close()
            raise self._unwritable_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let others in."""
        if self._file is None:
            return
        if (
            kind is not None
            and self._created_folders
            and [entry.name for entry in self._folder.iterdir()] == [LOCK_FILE]
        ):
            (self._folder / LOCK_FILE).unlink()
            # As far up as nobody else has put anything there.
            with suppress(OSError):
                for folder in self._created_folders:
                    folder.rmdir()
        self._file.close()

    def _open(self, path: Path) -> FileIO:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return path.open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable_error(error) from error

    def _try_acquire(self, path: Path) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                # The job that had it made the folder, wrote nothing and took it away: this is no longer its file.
                self._file.close()
                self._file = self._open(path)
                return False
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): see that no other job writes there", self._folder / LOCK_FILE, error.strerror
            )
        return True

    def _write_owner(self) -> None:
        assert self._file is not None
        word = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ}",
        }
        if os.fstat(self._file.fileno()).st_size:
            self._file.truncate(0)
        self._file.write(json.dumps(word).encode() + b"\n")

    def _unwritable_error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self._key}={str(self._folder)!r} cannot be written: {error.strerror}; choose another, or make room"
        )

    def _describe_owner(self) -> str:
        """Who holds it, as far as that has been written."""
        assert self._file is not None
        self._file.seek(0)
        try:
            word = json.loads(self._file.read())
            return f"process {word['process']} on {word['host']}, since {word['since']}"
        except (ValueError, KeyError, TypeError):
            return "which has not said its name"
