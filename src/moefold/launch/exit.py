"""Process exit: exit statuses, immediate exit, and one-line messages for out-of-memory errors.

torch is not imported: its out-of-memory errors are recognised by class name and message.
"""

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from moefold.file_lock import FileLock, open_lock_file
from moefold.host.memory import available_host_memory, available_process_memory
from moefold.host.rank_env import RankEnv
from moefold.terminal import MULTILINE_CHARS, printable
from moefold.units import format_bytes


def hard_exit(status: int) -> NoReturn:
    """Flush stdout and stderr and call `os._exit`, skipping interpreter shutdown.

    Ordinary shutdown kills threads that wait for the GIL. A gloo thread that still has to release the tensors of the
    last collective would then abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


OOM_ERROR_NAMES = ("OutOfMemoryError", "_ArrayMemoryError")
"""Class names of the out-of-memory errors of torch and numpy."""
OOM_MESSAGES = (
    "can't allocate memory",
    "bad_alloc",
    "bad allocation",
    "CUDA out of memory",
    "array is too big",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
    "Maximum allowed dimension exceeded",
)
"""Fragments of messages in which other error classes report failed allocations."""
_REQUESTED_SIZE = re.compile(r"allocate (\d+) bytes|[Aa]llocate (\d[\d.]* ?[KMGTP]?i?B)")
OOM_SUGGESTION = (
    "choose a smaller model, batch or sequence, or more ranks; for training `moefold memory RECIPE --dry` shows what "
    "takes the memory, and train.recompute, train.micro_batch_size, parallel.zero and train.offload save it"
)


def oom_reason(error: BaseException | None) -> str:
    """Return the first sentence of an out-of-memory error in the chain of `__cause__`, or "" for any other error."""
    while error is not None:
        if _is_oom_error(error):
            return str(error).strip().partition("\n")[0].partition(". GPU")[0] or type(error).__name__
        error = error.__cause__
    return ""


def oom_message(error: BaseException) -> str:
    """Return a one-line message for an out-of-memory error, with requested and available bytes, or "" for others."""
    reason = oom_reason(error)
    if not reason:
        return ""
    match = _REQUESTED_SIZE.search(reason)
    requested = ""
    if match is not None:
        requested = f": {format_bytes(int(match[1])) if match[1] else match[2]} were requested at once"
    return (
        f"out of memory{requested or f' ({reason})'}{'' if 'CUDA' in reason else _available_memory_text()}; "
        f"{OOM_SUGGESTION}"
    )


def _available_memory_text() -> str:
    limits = [limit for limit in (available_host_memory(), available_process_memory()) if limit is not None]
    smallest = min(limits, key=lambda limit: limit.size)
    return f", and {format_bytes(smallest.size)} are {smallest.description}"


def _is_oom_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ in OOM_ERROR_NAMES:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError | ValueError) and any(fragment in str(error) for fragment in OOM_MESSAGES)


LOCK_TIMEOUT_S = 10.0
"""Limit of the wait for the lock of another rank that is printing the message."""
_POLL_S = 0.02


class SingleReporter:
    """Prints the final message of a job once per machine, by the first rank that takes a file lock.

    The flock selects the rank, and one byte in the file marks the message as printed. A later rank therefore prints
    nothing, even if the store and the printing rank are gone. If a rank dies with the lock before printing, the next
    rank takes over. Under our own launcher the file is the last record file. Under other launchers it is an anonymous
    memfd of the lowest rank of the machine, which all of its ranks hold open.
    """

    def __init__(self, rank_env: RankEnv) -> None:
        self.shared_path = ""
        """Path by which other ranks of the machine can open this rank's file, or "" if there is none to share."""
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
        """Use the file at `path` from now on. It stays open even if the rank that created it exits."""
        with suppress(OSError):
            # Another thread may be using the previous file, which stays open.
            self._lock = FileLock(open_lock_file(Path(path)))
            self._opened.append(self._lock)

    def close(self) -> None:
        """Close the files. The reporter then prints without asking other ranks."""
        self._lock = None
        for lock in self._opened:
            lock.close()
        self._opened.clear()

    def report_once(self, message: str, should_report: Callable[[], bool] = lambda: True) -> None:
        """Print a message on stderr, unless a rank of this machine has printed it, and return once it is printed.

        Args:
            should_report: called while the lock is held. False: another machine prints the message.
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
        """Hold the file lock. Proceed without it after `LOCK_TIMEOUT_S`, as two messages are better than none."""
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
    """Return whether a rank of our own launcher has printed the final message, so that the launcher prints none."""
    return file.exists() and file.stat().st_size > 0
