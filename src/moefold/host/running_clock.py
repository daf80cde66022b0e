"""Clock that stops while this process is stopped: by SIGSTOP, a scheduler's suspend, a frozen container."""

import threading
import time
from contextlib import suppress
from pathlib import Path

BEAT_S = 0.2
"""Interval of the beats, and about the largest error of a stop."""
MIN_STOP_S = 3.0
"""A beat that is late by less counts as running time: the machine may be busy."""


class RunningClock:
    """Monotonic clock of the time that this process runs.

    Between `start` and `end` a thread wakes up in short intervals. If it wakes up late, the process was stopped. Time
    in which the thread waited for a core does not count as stopped. The same holds for time in which the thread that
    called `start` computed or waited for a core, as it may hold the interpreter's lock. Before `start` the clock is
    `time.monotonic`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beat_s: float | None = None
        self._computing_thread = self._own_thread = 0
        self._beat_busy_s = (0.0, 0.0)
        self._beat_boot_s = 0.0
        self._stopped_s = 0.0
        self._unreported_s = 0.0

    def __call__(self) -> float:
        """Return the seconds that this process has run, from an arbitrary start."""
        now_s = time.monotonic()
        # The thread may not have run yet since the process was continued.
        if self._beat_s is not None and now_s - self._beat_s > BEAT_S + MIN_STOP_S:
            self.beat()
        return now_s - self._stopped_s

    def start(self) -> None:
        """Start the thread. The calling thread is the thread that computes."""
        self._computing_thread = threading.get_native_id()
        self._ended.clear()
        self.beat()
        threading.Thread(target=self._run, name="running clock", daemon=True).start()

    def end(self) -> None:
        """End the thread. From now on all time counts."""
        self._ended.set()
        with self._lock:
            self._beat_s = None

    def pop_stopped_s(self) -> float:
        """Return the seconds that the process was stopped, or the machine suspended, since the last call."""
        self()
        with self._lock:
            stopped_s, self._unreported_s = self._unreported_s, 0.0
        return stopped_s

    def beat(self) -> None:
        """Record that the process runs now."""
        with self._lock:
            if self._ended.is_set():
                return
            now_s, boot_s = time.monotonic(), _boot_s()
            busy_s = _busy_s(self._computing_thread), _busy_s(self._own_thread)
            if self._beat_s is not None:
                elapsed_s = now_s - self._beat_s
                computed_s, own_s = (busy - last for busy, last in zip(busy_s, self._beat_busy_s, strict=True))
                stopped_s = elapsed_s - BEAT_S - max(0.0, computed_s - BEAT_S) - max(0.0, own_s)
                if stopped_s >= MIN_STOP_S:
                    self._stopped_s += stopped_s
                    self._unreported_s += stopped_s
                # The monotonic clock of Linux stops while the machine is suspended.
                if (suspended_s := boot_s - self._beat_boot_s - elapsed_s) >= MIN_STOP_S:
                    self._unreported_s += suspended_s
            self._beat_s, self._beat_boot_s, self._beat_busy_s = now_s, boot_s, busy_s

    def _run(self) -> None:
        self._own_thread = threading.get_native_id()
        self._beat_busy_s = self._beat_busy_s[0], _busy_s(self._own_thread)
        while not self._ended.wait(BEAT_S):
            self.beat()


def _busy_s(thread: int) -> float:
    """Return the time that a thread ran or waited for a core, or 0 if the kernel does not report it."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return (int(fields[0]) + int(fields[1])) / 1e9
    return 0.0


def _boot_s() -> float:
    """Return the time since the machine started, suspended time included where the kernel reports it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
