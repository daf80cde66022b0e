"""How long a rank waits for others: the time in collectives, on the host's clock or, on CUDA, on the device's.

A rank that is slow makes all others wait in the collectives that they share, so the time of a step is the same on all
of them. What is left of it without the time in collectives is a rank's own, and there the slow one stands out
(C4, arXiv:2406.04594, finds stragglers in the same way).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Timestamp = float | torch.cuda.Event
"""A moment: seconds of the host's clock, or an event of the current stream."""


@dataclass
class CommTimer:
    """One for all groups of a rank. Between `start` and `read` it adds up what is spent in `waiting`.

    `working` inside of `waiting` is a rank's own time again: a pipeline schedule waits wherever it does not compute.

    On CPU numbers are those of the present span. On CUDA events are read once the device has passed them anyway, so
    that nothing waits for it: `read` tells of the span before.
    """

    is_on: bool = False
    is_cuda: bool = False
    is_waiting: bool = False
    _spans: list[tuple[int, Timestamp, Timestamp]] = field(default_factory=list)
    _span_start: Timestamp | None = None
    _previous_span: tuple[list[tuple[int, Timestamp, Timestamp]], Timestamp, Timestamp] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the rank waits for others."""
        before = self.enter(is_waiting=True)
        try:
            yield
        finally:
            self.leave(before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the rank computes."""
        before = self.enter(is_waiting=False)
        try:
            yield
        finally:
            self.leave(before)

    def enter(self, *, is_waiting: bool) -> Timestamp | None:
        """Begin to wait or to work; returns what `leave` wants."""
        if not self.is_on or self.is_waiting == is_waiting:
            return None
        self.is_waiting = is_waiting
        return self._now()

    def leave(self, entered_at: Timestamp | None) -> None:
        """Do again what was done before the `enter` that gave `entered_at`."""
        if entered_at is not None:
            self._spans.append((1 if self.is_waiting else -1, entered_at, self._now()))
            self.is_waiting = not self.is_waiting

    def start(self) -> None:
        """Begin a span; one that has begun goes on."""
        if self.is_on and self._span_start is None:
            self._spans.clear()
            self._span_start = self._now()

    def read(self) -> tuple[float, float]:
        """End the span; returns its whole time and that spent waiting, in seconds; zeros where none is known yet."""
        if self._span_start is None:
            return 0.0, 0.0
        ended = (list(self._spans), self._span_start, self._now())
        self._span_start = None
        self._spans.clear()
        known, self._previous_span = (self._previous_span, ended) if self.is_cuda else (ended, None)
        if known is None:
            return 0.0, 0.0
        spans, first, last = known
        return _elapsed_s(first, last), sum(sign * _elapsed_s(start, end) for sign, start, end in spans)

    def _now(self) -> Timestamp:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed_s(first: Timestamp, last: Timestamp) -> float:
    if isinstance(first, float):
        assert isinstance(last, float)
        return last - first
    assert not isinstance(last, float)
    return float(first.elapsed_time(last)) / 1e3
