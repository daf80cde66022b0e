"""The one message with which a job ends: of the ranks of a machine one says it, by no clock's leave. Torch-free."""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moefold.host.rank_env import RankEnv
from moefold.terminal import MULTILINE_CHARS, printable

LOCK_TIMEOUT_S = 10.0
"""So long a rank waits for another one that is saying it."""
_POLL_S = 0.02


class SingleReporter:
    """The right to say why the job ends. The first rank of a machine that takes it has it, for good.

    The kernel's lock on a file decides who is first, and a byte in the file says that the message is out. So a rank
    that comes late finds all said, though the store is gone and the one who said it too; and one that dies with the
    lock before it has said anything leaves it to the next. It is the last of the records of our own launcher.
    Elsewhere it is one without a name, which leaves nothing behind: that of the first rank of the machine, held open
    by all.

    Args:
        rank_env: of this rank.
    """

    def __init__(self, rank_env: RankEnv) -> None:
        self.shared_path = ""
        """Where other ranks of the machine find the file of this one; empty where there is none to share."""
        self._descriptor = -1
        self._thread_lock = threading.Lock()
        self._has_reported = False
        if rank_env.record_paths:
            self.use_file(rank_env.record_paths[-1])
        elif hasattr(os, "memfd_create"):
            self.shared_path = f"/proc/{os.getpid()}/fd/{os.memfd_create('moefold-word')}"
            self.use_file(self.shared_path)

    def use_file(self, path: str) -> None:
        """From now on the word is that of another rank's file; for good, also when that rank is gone."""
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def report_once(self, message: str, should_report: Callable[[], bool] = lambda: True) -> None:
        """Print the message on stderr, unless the machine has had one; returns once it is out, whoever says it.

        Args:
            message: the message, without its last line end.
            should_report: asked once this rank has the word: another machine may have said it.
        """
        with self._thread_lock, self._hold_lock():
            if self.was_reported():
                return
            if should_report():
                # A pipe that nobody reads any more must not keep the job from its end.
                with suppress(OSError):
                    sys.stderr.write(printable(message, MULTILINE_CHARS) + "\n")
                    sys.stderr.flush()
            self._has_reported = True
            if self._descriptor >= 0:
                os.pwrite(self._descriptor, b"1", 0)

    def was_reported(self) -> bool:
        """Whether the machine has had its message."""
        return self._has_reported or (self._descriptor >= 0 and os.fstat(self._descriptor).st_size > 0)

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Inside, no other rank says anything, unless one has the lock for too long: better a message too many."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not self.was_reported() and not self._try_lock() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            if self._descriptor >= 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        if self._descriptor < 0:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def has_report(file: Path) -> bool:
    """Whether a rank of our own launcher has said why the job ends; the launcher then adds no message of its own."""
    return file.exists() and file.stat().st_size > 0
