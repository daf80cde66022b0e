"""Print the fatal error once per host; a file lock, not timing, selects the rank that prints it. Torch-free."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moefold.file_lock import FileLock, open_lock_file
from moefold.host.rank_env import RankEnv
from moefold.terminal import MULTILINE_CHARS, printable

LOCK_TIMEOUT_S = 10.0
"""Limit of the wait for the lock of another rank that is printing the message."""
_POLL_S = 0.02


class SingleReporter:
    """Prints the final message of a job once per machine, by the first rank that takes a file lock.

    The flock selects the rank, and one byte in the file marks the message as printed. A later rank therefore prints
    nothing, even if the store and the printing rank are gone, and if a rank dies with the lock before printing, the
    next rank takes over. Under our own launcher the file is the last record file; under other launchers it is an
    anonymous memfd of the lowest rank of the machine, which all of its ranks hold open.
    """

    def __init__(self, rank_env: RankEnv) -> None:
        self.shared_path = ""
        """Path by which other ranks of the machine can open this rank's file; "" if there is none to share."""
        self._lock: FileLock | None = None
        self._opened: list[FileLock] = []
        self._thread_lock = threading.Lock()
        self._has_reported = False
        if rank_env.record_paths:
            self.use_file(rank_env.record_paths[-1])
        elif hasattr(os, "memfd_create"):
            own_file = os.memfd_create("moefold-report")
            self._opened.append(FileLock(own_file))
            self.shared_path = f"/proc/{os.getpid()}/fd/{own_file}"
            self.use_file(self.shared_path)

    def use_file(self, path: str) -> None:
        """Use the file at `path` from now on; it stays open even if the rank that created it exits."""
        with suppress(OSError):
            # Another thread may be using the file before it, which stays open.
            self._lock = FileLock(open_lock_file(Path(path)))
            self._opened.append(self._lock)

    def close(self) -> None:
        """Close the files; the reporter then prints without asking other ranks."""
        self._lock = None
        for lock in self._opened:
            lock.close()
        self._opened.clear()

    def report_once(self, message: str, should_report: Callable[[], bool] = lambda: True) -> None:
        """Print a message on stderr, unless a rank of this machine has; return once a message is printed.

        Args:
            message: the message, without its final newline.
            should_report: called while the lock is held; False if another machine prints the message.
        """
        with self._thread_lock, self._hold_lock():
            if self.was_reported():
                return
            if should_report():
                # A closed pipe must not prevent the exit.
                with suppress(OSError):
                    sys.stderr.write(printable(message, MULTILINE_CHARS) + "\n")
                    sys.stderr.flush()
            self._has_reported = True
            if self._lock is not None:
                os.pwrite(self._lock.descriptor, b"1", 0)

    def was_reported(self) -> bool:
        """Return whether a rank of this machine has printed the message."""
        return self._has_reported or (self._lock is not None and os.fstat(self._lock.descriptor).st_size > 0)

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the file lock; proceed without it after `LOCK_TIMEOUT_S`, as two messages are better than none."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not self.was_reported() and not self._try_lock() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            if self._lock is not None:
                self._lock.release()

    def _try_lock(self) -> bool:
        if self._lock is None:
            return True
        try:
            return self._lock.try_acquire()
        except OSError:
            return False


def has_report(file: Path) -> bool:
    """Return whether a rank of our own launcher has printed the final message; the launcher then prints none."""
    return file.exists() and file.stat().st_size > 0
