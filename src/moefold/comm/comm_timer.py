"""Communication timer: time in collectives, by the host clock or, on CUDA, by device events.

A slow rank makes all other ranks wait in shared collectives, so the step time is the same on all ranks. The step time
minus the time in collectives is the rank's compute time, which identifies the slow rank (C4, arXiv:2406.04594, finds
stragglers in the same way).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

Timestamp = float | torch.cuda.Event
"""A point in time: seconds of the host clock, or an event on the current stream."""


@dataclass
class CommTimer:
    """Timer of all groups of a rank. Adds up the time in `waiting` between `start` and `read`.

    `working` inside `waiting` is compute time again: a pipeline schedule waits whenever it does not compute.

    On the CPU, `read` reports the current interval. On CUDA it reports the previous interval, whose events the device
    has passed, so that no synchronisation is needed.
    """

    is_on: bool = False
    is_cuda: bool = False
    is_waiting: bool = False
    host_clock: Callable[[], float] = time.perf_counter
    _spans: list[tuple[int, Timestamp, Timestamp]] = field(default_factory=list)
    _span_start: Timestamp | None = None
    _previous_span: tuple[list[tuple[int, Timestamp, Timestamp]], Timestamp, Timestamp] | None = None

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside this context as waiting for other ranks."""
        return self._counted(is_waiting=True)

    def working(self) -> AbstractContextManager[None]:
        """Count the time inside this context as computing."""
        return self._counted(is_waiting=False)

    @contextmanager
    def _counted(self, *, is_waiting: bool) -> Iterator[None]:
        before = self.enter(is_waiting=is_waiting)
        try:
            yield
        finally:
            self.leave(before)

    def enter(self, *, is_waiting: bool) -> Timestamp | None:
        """Switch to waiting or computing, inside an interval, and return the token for `leave`."""
        if self._span_start is None or self.is_waiting == is_waiting:
            return None
        self.is_waiting = is_waiting
        return self._now()

    def leave(self, entered_at: Timestamp | None) -> None:
        """Undo the `enter` that returned `entered_at`."""
        if entered_at is not None:
            self.is_waiting = not self.is_waiting
            self._spans.append((-1 if self.is_waiting else 1, entered_at, self._now()))

    def start(self) -> None:
        """Start an interval, unless one is running."""
        if self.is_on and self._span_start is None:
            self._spans.clear()
            self._span_start = self._now()

    def read(self) -> tuple[float, float]:
        """End the interval. Return its duration and its waiting time in seconds, zeros if they are not known yet."""
        if self._span_start is None:
            return 0.0, 0.0
        ended = (self._spans, self._span_start, self._now())
        self._span_start = None
        self._spans = []
        span, self._previous_span = (self._previous_span, ended) if self.is_cuda else (ended, None)
        if span is None:
            return 0.0, 0.0
        spans, first, last = span
        return _elapsed_s(first, last), sum(sign * _elapsed_s(start, end) for sign, start, end in spans)

    def _now(self) -> Timestamp:
        if not self.is_cuda:
            return self.host_clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed_s(first: Timestamp, last: Timestamp) -> float:
    if isinstance(first, float):
        assert isinstance(last, float)
        return last - first
    assert not isinstance(last, float)
    return float(first.elapsed_time(last)) / 1e3
