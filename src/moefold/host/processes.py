"""Process utilities: signals of child processes, state of other processes, calls with a timeout."""

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
from types import FrameType
from typing import Any, TypeVar

_PR_SET_PDEATHSIG = 1


@contextmanager
def block_signals(signals: Collection[signal.Signals], *, starts_python: bool) -> Iterator[None]:
    """Block signals of this thread inside the context. Child processes inherit the mask until they unblock them.

    Without it, Ctrl-C during a child's imports prints a traceback.

    Args:
        starts_python: whether the child is a new interpreter, not a fork of this process. Then no handler interrupts
            the main thread inside the context: the signals are handled at its end.
    """
    received: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if starts_python:
        # multiprocessing would start its resource tracker inside the context, and unblock the signals afterwards.
        resource_tracker.ensure_running()
        if threading.current_thread() is threading.main_thread():
            # Another thread may receive a signal that this thread blocks, and Python handles it in this thread.
            handlers = {number: handler for number in signals if callable(handler := signal.getsignal(number))}
            for number in handlers:
                signal.signal(number, lambda number, frame: received.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signal_number in dict.fromkeys(received):
            signal.raise_signal(signal_number)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a job in an orderly way. A terminal that closes sends SIGHUP."""


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Install a handler for the stop signals and return the previous handlers. An ignored SIGHUP (nohup) stays so.

    Only the main thread receives signals: in another thread, nothing is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not is_nohup]
    return {number: signal.signal(number, handler) for number in handled}


def signal_on_parent_death(signal_number: signal.Signals, parent_pid: int | None = None) -> None:
    """Ask the kernel to send this process a signal when its parent dies (Linux only).

    Args:
        parent_pid: the parent's process id. If the parent has died already, the signal is raised immediately.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if parent_pid is not None and os.getppid() != parent_pid:
        signal.raise_signal(signal_number)


GONE = "gone"
STOPPED = "stopped"
BLOCKED = "blocked"
"""In uninterruptible sleep inside the kernel (a disk, a network folder), where no signal reaches it."""
ALIVE = "alive"


_STATES = {"T": STOPPED, "t": STOPPED, "D": BLOCKED, "Z": GONE, "X": GONE}


@dataclass(frozen=True)
class ProcessId:
    """Identity of a process, distinct from a later process with the same number."""

    machine: str
    """Machine and process namespace: processes in the same namespace can see each other."""
    host: str
    number: int
    started: str
    """Start time in the kernel's unit. Return "" if the kernel does not report it."""

    @classmethod
    def current(cls) -> "ProcessId":
        """Return the identity of this process."""
        number = os.getpid()
        host = socket.gethostname()
        # Containers may share a host name but not its processes.
        namespace = Path("/proc/self/ns/pid")
        namespace_id = os.readlink(namespace) if namespace.exists() else ""
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(
            f"{host} {namespace_id} {boot.read_text().strip() if boot.exists() else ''}", host, number, _stat(number)[1]
        )

    def state(self) -> str:
        """Return GONE, STOPPED, BLOCKED or ALIVE for a process of this machine."""
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


def _stat(pid: int) -> tuple[str, str]:
    """Return state letter and start time of a process, both "" without /proc or such a process."""
    try:
        # The command name in brackets may contain anything; parse the fields after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


Result = TypeVar("Result")


class CallTimeoutError(Exception):
    """The call did not return within the timeout."""


def run_with_timeout(timeout_s: float, call: Callable[[], Result]) -> Result:
    """Call a function with a timeout: return its result, or raise its error.

    The call runs in a separate thread, and must release the GIL while it waits. A client of torch's store whose peer
    never answers waits in C++ without a limit, and a thread that waits there runs no signal handler. The calling thread
    does. A call that timed out keeps waiting in its daemon thread, which does not delay the end of the process.

    Raises:
        CallTimeoutError: the call did not return in time.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="bounded call", daemon=True)
    thread.start()
    # Thread.join raises OverflowError for longer timeouts.
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not results:
        raise CallTimeoutError
    return results[0]
