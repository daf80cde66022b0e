"""How fast one direction carries bytes, measured while it does."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STALE_GROWTH_FACTOR = 1.5
"""In a step that carried nothing an old measurement is believed less by this factor, so that it is tried again."""


class BandwidthMeter:
    """Bytes and busy time of one direction; for any number of threads.

    Several jobs at once share what the direction carries, so what counts is the time in which at least one ran.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self._bytes_per_s = math.inf

    @property
    def bytes_per_s(self) -> float:
        """Of this step, or, as long as it has carried nothing, of those before; infinite where nothing is known."""
        with self._lock:
            return self._bytes / self._busy_s if self._bytes and self._busy_s else self._bytes_per_s

    @contextmanager
    def measure_transfer(self, num_bytes: int) -> Iterator[None]:
        """Inside, one job carries so many bytes; they do not count if it fails."""
        with self._lock:
            if self._num_running == 0:
                self._busy_since_s = time.perf_counter()
            self._num_running += 1
        carried = 0
        try:
            yield
            carried = num_bytes
        finally:
            with self._lock:
                self._num_running -= 1
                self._bytes += carried
                if self._num_running == 0:
                    self._busy_s += time.perf_counter() - self._busy_since_s

    def end_step(self) -> tuple[int, float]:
        """Bytes and busy seconds since the last call; what follows belongs to the next step."""
        with self._lock:
            measured = self._bytes, self._busy_s
            if self._bytes and self._busy_s:
                self._bytes_per_s = self._bytes / self._busy_s
            else:
                self._bytes_per_s *= STALE_GROWTH_FACTOR
            self._bytes, self._busy_s = 0, 0.0
            return measured
