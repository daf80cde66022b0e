"""The one message with which a job ends: of the ranks of a machine one says it, by no clock's leave. Torch-free."""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moefold.launch.place import Place
from moefold.printable import LINES, printable

PATIENCE_S = 10.0
"""So long a rank waits for another one that is saying it."""
_LOOK_S = 0.02


class Word:
    """The right to say why the job ends. The first rank of a machine that takes it has it, for good.

    The kernel's lock on a file decides who is first, and a byte in the file says that the message is out. So a rank
    that comes late finds all said, though the store is gone and the one who said it too; and one that dies with the
    lock before it has said anything leaves it to the next. It is the last of the records of our own launcher.
    Elsewhere it is one without a name, which leaves nothing behind: that of the first rank of the machine, held open
    by all.

    Args:
        place: of this rank.
    """

    def __init__(self, place: Place) -> None:
        self.address = ""
        """Where other ranks of the machine find the file of this one; empty where there is none to share."""
        self._file = -1
        self._turn = threading.Lock()
        self._has_spoken = False
        if place.records:
            self.use(place.records[-1])
        elif hasattr(os, "memfd_create"):
            self.address = f"/proc/{os.getpid()}/fd/{os.memfd_create('moefold-word')}"
            self.use(self.address)

    def use(self, address: str) -> None:
        """From now on the word is that of another rank's file; for good, also when that rank is gone."""
        with suppress(OSError):
            self._file = os.open(address, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def say(self, text: str, is_to_be_said: Callable[[], bool] = lambda: True) -> None:
        """Print the message on stderr, unless the machine has had one; returns once it is out, whoever says it.

        Args:
            text: the message, without its last line end.
            is_to_be_said: asked once this rank has the word: another machine may have said it.
        """
        with self._turn, self._locked():
            if self.is_said():
                return
            if is_to_be_said():
                # A pipe that nobody reads any more must not keep the job from its end.
                with suppress(OSError):
                    sys.stderr.write(printable(text, LINES) + "\n")
                    sys.stderr.flush()
            self._has_spoken = True
            if self._file >= 0:
                os.pwrite(self._file, b"1", 0)

    def is_said(self) -> bool:
        """Whether the machine has had its message."""
        return self._has_spoken or (self._file >= 0 and os.fstat(self._file).st_size > 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Inside, no other rank says anything, unless one has the lock for too long: better a message too many."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_said() and not self._takes_lock() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _takes_lock(self) -> bool:
        if self._file < 0:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def was_said(file: Path) -> bool:
    """Whether a rank of our own launcher has said why the job ends; the launcher then adds no message of its own."""
    return file.exists() and file.stat().st_size > 0
