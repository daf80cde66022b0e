"""Signals of processes that this one starts: none before they can handle it, and one when this process dies."""

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_PR_SET_PDEATHSIG = 1


@contextmanager
def block_signals(signals: Collection[signal.Signals], *, starts_python: bool) -> Iterator[None]:
    """Block signals of this thread inside; a process that starts inherits that, until it unblocks them.

    A Python process that is still importing would answer Ctrl-C with a traceback.

    Args:
        signals: the signals.
        starts_python: whether the process is a new interpreter, not a fork of this one.
    """
    if starts_python:
        # multiprocessing would start this helper inside, and unblock the signals behind it.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_on_parent_death(number: signal.Signals, parent_pid: int | None = None) -> None:
    """Let the kernel send this process a signal when its parent dies, where the system can (Linux).

    Args:
        number: the signal.
        parent_pid: the process id that the parent should have; if it has died already, the signal is sent at once.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent_pid is not None and os.getppid() != parent_pid:
        signal.raise_signal(number)
