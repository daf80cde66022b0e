"""Timeline of a simulated step: events and metrics."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from moefold.config.base.pipeline_actions import Action

COMPUTE = "compute"
COMMUNICATION = "communication"
SEND = "send"
STREAMS = (COMPUTE, COMMUNICATION, SEND)

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Event:
    """One interval of work on a stream of a rank."""

    rank: int
    """Pipeline rank."""
    stream: str
    """One of STREAMS."""
    part: str
    """Part of the step, as the cost model names it."""
    start_s: float
    end_s: float
    action: Action | None
    """The event's action, or None at the end of the step."""
    peer: int = -1
    """The pipeline rank that receives."""


@dataclass(frozen=True)
class Timeline:
    """Simulated step. A rank works while its compute or communication stream runs. Sending does not count."""

    events: tuple[Event, ...]
    num_ranks: int
    span_s: float
    """End of the last action of all ranks, in seconds."""
    total_s: float
    """End of the step, in seconds."""

    def events_of(self, rank: int, *streams: str) -> tuple[Event, ...]:
        """Return the events of some streams of a rank, by start."""
        return tuple(event for event in self._by_rank[rank] if event.stream in streams)

    @cached_property
    def _by_rank(self) -> list[list[Event]]:
        ranks: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in sorted(self.events, key=lambda event: (event.start_s, event.end_s)):
            ranks[event.rank].append(event)
        return ranks

    def work_s(self, rank: int) -> float:
        """Return the seconds that a rank works on micro-batches."""
        return sum(end - start for start, end in self._work(rank))

    def wait_s(self, rank: int) -> float:
        """Return the idle seconds between the first and the last work of a rank."""
        spans = self._work(rank)
        return spans[-1][1] - spans[0][0] - self.work_s(rank) if spans else 0.0

    def idle_s(self, rank: int) -> float:
        """Return the idle seconds of a rank within the pipeline's span."""
        return self.span_s - self.work_s(rank)

    @property
    def bubble(self) -> float:
        """Pipeline bubble: waiting over work of the rank with the largest ratio, as in docs/pipeline.md."""
        works = [(self.wait_s(rank), self.work_s(rank)) for rank in range(self.num_ranks)]
        return max((wait / work for wait, work in works if work > 0), default=0.0)

    @property
    def idle_share(self) -> float:
        """Mean idle fraction of the ranks within the pipeline's span."""
        if self.span_s == 0.0:
            return 0.0
        return sum(self.idle_s(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.span_s)

    def exposed(self, rank: int) -> list[Span]:
        """Return the spans of a rank's exposed collectives, which run without compute, the end of the step included."""
        return subtract_spans(self.spans(rank, COMMUNICATION), self.spans(rank, COMPUTE))

    def exposed_s(self, rank: int) -> float:
        """Return the seconds of a rank's exposed collectives, the end of the step included."""
        return sum(end - start for start, end in self.exposed(rank))

    def spans(self, rank: int, stream: str) -> list[Span]:
        """Return the busy spans of a stream of a rank, in order."""
        return merge_spans((event.start_s, event.end_s) for event in self.events_of(rank, stream))

    def max_in_flight(self, rank: int) -> int:
        """Return the maximum number of forward passes that wait for a backward pass, including the weights' pass."""
        steps: list[tuple[float, int]] = []
        for action, (start, end) in self.actions(rank):
            if action.kind == "F":
                steps.append((start, 1))
            elif action.kind in "BW":
                steps.append((end, -1))
        in_flight = peak = 0
        for _, change in sorted(steps):
            in_flight += change
            peak = max(peak, in_flight)
        return peak

    @property
    def has_overlapping_passes(self) -> bool:
        """True if some rank runs two actions concurrently."""
        return any(
            after < end * (1 - 1e-12)
            for rank in range(self.num_ranks)
            for (_, (_, end)), (_, (after, _)) in pairwise(self.actions(rank))
        )

    def actions(self, rank: int) -> Iterator[tuple[Action, Span]]:
        """Yield the actions of a rank with their first start and last end, by start."""
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
    """Return the union of some spans, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def subtract_spans(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the parts of a union of spans that lie outside of another one, both in order."""
    found: list[Span] = []
    first = 0
    for start, end in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        at = start
        i = first
        while i < len(right) and right[i][0] < end:
            if right[i][0] > at:
                found.append((at, right[i][0]))
            at = right[i][1]
            i += 1
        if at < end:
            found.append((at, end))
    return found
