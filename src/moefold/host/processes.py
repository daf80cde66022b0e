"""Signals of processes that this one starts: none before they can handle it, and one when this process dies.

Whether another process of this machine lives, as the kernel sees it: it need not answer for that. Torch-free.

Calls into torch that may wait without end: this process gives them a limit and keeps obeying signals. Torch-free.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

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


GONE, STOPPED, BLOCKED, ALIVE = "gone", "stopped", "blocked", "alive"
"""What `ProcessId.state` says. blocked: inside the kernel, where no signal reaches it (a disk, a network folder)."""

_STATES = {"T": STOPPED, "t": STOPPED, "D": BLOCKED, "Z": GONE, "X": GONE}


@dataclass(frozen=True)
class ProcessId:
    """One process, told apart from a later one that got its number."""

    machine: str
    """Processes with the same one can see each other."""
    host: str
    number: int
    started: str
    """When, in the kernel's own unit; empty where the kernel does not say."""

    @classmethod
    def current(cls) -> "ProcessId":
        """This process."""
        number = os.getpid()
        host = socket.gethostname()
        # Containers may share a host's name and not its processes.
        namespace = Path("/proc/self/ns/pid")
        seen = os.readlink(namespace) if namespace.exists() else ""
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(f"{host} {seen} {boot.read_text().strip() if boot.exists() else ''}", host, number, _stat(number)[1])

    def state(self) -> str:
        """One of GONE, STOPPED, BLOCKED, ALIVE; for a process of this machine."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return GONE
        except PermissionError:
            return GONE if self.started else ALIVE
        letter, started = _stat(self.number)
        if started != self.started:
            return GONE
        return _STATES.get(letter, ALIVE)


def _stat(number: int) -> tuple[str, str]:
    """State letter and start time of a process; both empty where there is no /proc, or no such process."""
    try:
        # The name in brackets may hold anything; the fields that count stand behind it.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


Result = TypeVar("Result")


class CallTimeoutError(Exception):
    """The call had not returned when its time was up."""


def run_with_timeout(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Return what `call` returns, or raise what it raises, within a limit.

    The call runs in a thread of its own. A client of torch's store that reaches a peer which never answers waits in
    C++ without any limit, and a thread that waits there runs no signal handler; the calling thread does. A call that
    is given up goes on waiting until the process ends, which it does not delay.

    Args:
        timeout_s: seconds to wait.
        call: releases the interpreter's lock while it waits.

    Raises:
        NoAnswerError: the time is up.
    """
    answers: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="bounded call", daemon=True)
    thread.start()
    # The longest time that a thread can be waited for is some 290 years.
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not answers:
        raise CallTimeoutError
    return answers[0]
