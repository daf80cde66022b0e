"""What a simulated step was: the events of every rank, and what is measured from them. Torch-free.

The parts of a simulated step that a picture shows where the whole of it would be slivers. Torch-free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from moefold.topology.pipeline_action import Action

COMPUTE = "compute"
COMMUNICATION = "communication"
SEND = "send"
STREAMS = (COMPUTE, COMMUNICATION, SEND)

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Event:
    """A rank does one thing from one moment to another."""

    rank: int
    """Pipeline rank."""
    stream: str
    """One of STREAMS."""
    part: str
    """What it is, in the words of the cost model."""
    start_s: float
    end_s: float
    action: Action | None
    """Of which action; None at the end of the step."""
    peer: int = -1
    """The pipeline rank that is sent to."""


@dataclass(frozen=True)
class Timeline:
    """A step. A rank works while one of its streams runs; sending is no work."""

    events: tuple[Event, ...]
    num_ranks: int
    span_s: float
    """Until the last action of all ranks has ended."""
    total_s: float
    """Until the end of the step."""

    def events_of(self, rank: int, *streams: str) -> tuple[Event, ...]:
        """The events of some streams of a rank, in the order of their start."""
        return tuple(event for event in self._by_rank[rank] if event.stream in streams)

    @cached_property
    def _by_rank(self) -> list[list[Event]]:
        ranks: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in sorted(self.events, key=lambda event: (event.start_s, event.end_s)):
            ranks[event.rank].append(event)
        return ranks

    def work_s(self, rank: int) -> float:
        """Seconds in which a rank works on micro-batches."""
        return sum(end - start for start, end in self._work(rank))

    def wait_s(self, rank: int) -> float:
        """Seconds between the first and the last work of a rank in which it does not work."""
        spans = self._work(rank)
        return spans[-1][1] - spans[0][0] - self.work_s(rank) if spans else 0.0

    def idle_s(self, rank: int) -> float:
        """Seconds of the pipeline's span in which a rank does not work."""
        return self.span_s - self.work_s(rank)

    @property
    def bubble(self) -> float:
        """The waiting of a rank over its work, of the rank that waits most: as docs/pipeline.md counts."""
        works = [(self.wait_s(rank), self.work_s(rank)) for rank in range(self.num_ranks)]
        return max((wait / work for wait, work in works if work > 0), default=0.0)

    @property
    def idle_share(self) -> float:
        """The mean part of the pipeline's span in which a rank does not work."""
        if self.span_s == 0.0:
            return 0.0
        return sum(self.idle_s(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.span_s)

    def exposed_s(self, rank: int) -> float:
        """Seconds in which a rank's collectives run and its compute does not, the end of the step included."""
        collectives = merge_spans((event.start_s, event.end_s) for event in self.events_of(rank, COMMUNICATION))
        compute = merge_spans((event.start_s, event.end_s) for event in self.events_of(rank, COMPUTE))
        return sum(end - start for start, end in collectives) - intersection_s(collectives, compute)

    def max_in_flight(self, rank: int) -> int:
        """The most forward passes of one stage that are kept for a backward pass, that of the weights included."""
        steps: list[tuple[float, int]] = []
        for action, (start, end) in self.actions(rank):
            if action.kind == "F":
                steps.append((start, 1))
            elif action.kind in "BW":
                steps.append((end, -1))
        held = most = 0
        for _, change in sorted(steps):
            held += change
            most = max(most, held)
        return most

    @property
    def has_overlapping_passes(self) -> bool:
        """Whether some rank works on two actions at a time."""
        return any(
            after < end * (1 - 1e-12)
            for rank in range(self.num_ranks)
            for (_, (_, end)), (_, (after, _)) in pairwise(self.actions(rank))
        )

    def actions(self, rank: int) -> Iterator[tuple[Action, Span]]:
        """The actions of a rank with their first start and last end, in the order of their start."""
        spans: dict[Action, Span] = {}
        for event in self.events_of(rank, COMPUTE, COMMUNICATION):
            if event.action is not None:
                start, end = spans.get(event.action, (event.start_s, event.end_s))
                spans[event.action] = min(start, event.start_s), max(end, event.end_s)
        yield from spans.items()

    def _work(self, rank: int) -> list[Span]:
        events = self.events_of(rank, COMPUTE, COMMUNICATION)
        return merge_spans((event.start_s, event.end_s) for event in events if event.action is not None)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The union of some spans, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def intersection_s(left: list[Span], right: list[Span]) -> float:
    """Seconds that lie in both of two unions."""
    total = 0.0
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total


MAX_PASSES = 160
"""Passes of a rank that one picture shows side by side."""
PASSES_PER_WINDOW = 20
"""Passes of a rank in each window of a longer step."""


def choose_windows(timeline: Timeline) -> tuple[Span, ...]:
    """Return the seconds that a picture shows: the whole step, or its start, a steady-state window and its end."""
    passes = max(sum(1 for _ in timeline.actions(rank)) for rank in range(timeline.num_ranks))
    if passes <= MAX_PASSES:
        return ((0.0, timeline.total_s),)
    seconds = timeline.span_s * PASSES_PER_WINDOW / passes
    middle = timeline.span_s / 2
    # Sums of gradients and the update follow the last pass; some passes are shown before them.
    closing = timeline.total_s - timeline.span_s
    return (
        (0.0, seconds),
        (middle - seconds / 2, middle + seconds / 2),
        (timeline.total_s - max(seconds, closing + seconds / 2), timeline.total_s),
    )


def intersects(span: Span, window: Span) -> bool:
    """Return True if some of a span lies within a window."""
    return span[0] < window[1] and span[1] > window[0]


def describe_windows(timeline: Timeline, windows: tuple[Span, ...]) -> str:
    """Say which parts are shown; empty where all of the step is."""
    if len(windows) == 1:
        return ""
    shown = ", ".join(
        f"{name} ({start:.3g} to {end:.3g} s)"
        for name, (start, end) in zip(("start", "steady state", "end"), windows, strict=True)
    )
    return f"windows of a step of {timeline.total_s:.3g} s: {shown}"
