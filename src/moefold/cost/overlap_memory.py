"""Memory of overlapped passes: a forward and a backward pass that interleave at expert collectives.

With `parallel.overlap_experts` a forward pass advances by one expert collective whenever the backward pass of another
micro-batch has started one. The peak follows from the live memory of both between their collectives, in counts of
`memory_columns.py`. A collective over ep and one over etp count as one: both passes of a pair have the same number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from moefold.cost.memory_columns import (
    FORWARD_POINTS,
    RECOMPUTE_POINTS,
    WGRAD_POINTS,
    Counts,
    MemoryColumns,
    ModelChunk,
    drop_dominated,
)


@dataclass(frozen=True)
class OverlapSpec:
    """Options of an overlapped forward and backward pass."""

    columns: MemoryColumns
    splits_backward: bool
    """True if the schedule splits backward passes. Then an unsplit backward pass also computes weight gradients
    last."""
    recomputes_comm: bool
    """True if all-to-alls are recomputed before the gradients."""


@dataclass(frozen=True, slots=True)
class CommInterval:
    """Interval of a pass from one expert collective to the next, or to its end."""

    peak: Counts
    """Counts of all candidates for the peak, [snapshots, columns]."""
    during_comm: Counts
    """Counts during the collective at the end of the interval, [1, columns]."""


@lru_cache(maxsize=4096)
def overlap_snapshots(spec: OverlapSpec, forward_chunk: ModelChunk, backward_chunk: ModelChunk) -> Counts:
    """Return the snapshots of an overlapped pair that no other one dominates, [snapshots, columns]."""
    columns = spec.columns
    nothing = np.zeros((1, columns.size))
    nothing[0, columns.end_column("in_transit")] = 1.0
    passed = nothing.copy()
    # The gradient of its input is sent when both passes are done.
    passed[0, columns.end_column("hidden")] = not backward_chunk.has_embedding
    forward = forward_intervals(spec, forward_chunk)
    backward = backward_intervals(spec, backward_chunk)
    found = [one + other for one, other in interleave(forward, backward, nothing, passed)]
    return drop_dominated(np.unique(np.concatenate(found), axis=0))


def interleave(
    forward: Sequence[CommInterval], backward: Sequence[CommInterval], empty: Counts, passed: Counts
) -> Iterator[tuple[Counts, Counts]]:
    """Yield the joint states of a pair: memory of the forward pass, and of the backward pass.

    Args:
        forward: intervals of one micro-batch. It starts at the first collective of the backward pass.
        backward: intervals of another one. At each of its collectives the forward pass advances to its own next one.
        empty: memory of a pass that has not started.
        passed: memory of the backward pass once it is done.
    """
    forward_state = empty
    remaining = iter(forward)
    for interval in backward[:-1]:
        yield forward_state, interval.peak
        if next_forward := next(remaining, None):
            yield next_forward.peak, interval.during_comm
            forward_state = next_forward.during_comm
    yield forward_state, backward[-1].peak
    for next_forward in remaining:
        yield next_forward.peak, passed


@lru_cache(maxsize=1024)
def forward_intervals(spec: OverlapSpec, chunk: ModelChunk) -> tuple[CommInterval, ...]:
    """Return the intervals of a chunk's forward pass."""
    return _PassWalker(spec, chunk).forward()


@lru_cache(maxsize=1024)
def backward_intervals(spec: OverlapSpec, chunk: ModelChunk) -> tuple[CommInterval, ...]:
    """Return the intervals of a chunk's backward pass, recomputation included."""
    return _PassWalker(spec, chunk).backward()


class _PassWalker:
    """Walks through one pass of a chunk and collects its intervals."""

    def __init__(self, spec: OverlapSpec, chunk: ModelChunk) -> None:
        self._spec = spec
        self._chunk = chunk
        self._intervals: list[CommInterval] = []
        self._snapshots: list[Counts] = []
        self._layer_row = cache(self._make_layer_row)

    def forward(self) -> tuple[CommInterval, ...]:
        """Walk through the forward pass."""
        chunk = self._chunk
        current = self._input()
        self._observe(current)
        for kind in chunk.kinds:
            self._layer_forward(kind, current, FORWARD_POINTS)
            current = current + self._layer_row("saved", kind)
        if chunk.has_loss:
            logits = self._row(logits=1.0)
            current = current + self._row(head=1.0)
            self._observe(current + logits)
            for _ in range(chunk.num_mtp_layers):
                self._layer_forward(chunk.mtp_layer_kind, current, FORWARD_POINTS)
                current = current + self._row(mtp=1.0)
                self._observe(current + logits)
        self._observe(current)
        return self._close_interval(current)

    def backward(self) -> tuple[CommInterval, ...]:
        """Walk through the backward pass."""
        chunk = self._chunk
        splits = self._spec.splits_backward
        num_mtp_layers = chunk.num_mtp_layers
        first_input = self._input()
        # Kind of each layer, with the tensors that it leaves for the weight-gradient pass.
        layers = [(kind, self._layer_row("delayed_wgrad", kind) * splits) for kind in chunk.kinds]
        if num_mtp_layers:
            layers += [(chunk.mtp_layer_kind, self._row(delayed_mtp=1.0) * splits)] * num_mtp_layers
        saved_before = [first_input]
        for kind, _ in layers:
            saved_before.append(saved_before[-1] + self._layer_row("saved", kind))
        saved_by_layers = saved_before[len(chunk.kinds)]
        self._observe(saved_by_layers + self._row(head=float(chunk.has_loss), mtp=float(num_mtp_layers)))
        delayed = self._row(delayed_head=float(chunk.has_loss * splits * (1 + num_mtp_layers)))
        for (kind, delayed_layer), saved in zip(reversed(layers), reversed(saved_before[:-1]), strict=True):
            self._layer_backward(kind, saved + delayed)
            delayed = delayed + delayed_layer
        self._observe(first_input + delayed)
        return self._close_interval(first_input + delayed)

    def _layer_forward(self, kind: int, live: Counts, points: Sequence[str]) -> None:
        """Walk through the forward pass of a layer, on top of the memory of earlier layers."""
        self._observe(live + self._layer_row(points[0], kind))
        if kind not in self._spec.columns.moe_kinds:
            return
        self._close_interval(live + self._layer_row(points[1], kind))
        self._observe(live + self._layer_row(points[2], kind))
        self._close_interval(live + self._layer_row(points[3], kind))
        for name in points[4:]:
            self._observe(live + self._layer_row(name, kind))

    def _layer_backward(self, kind: int, live: Counts) -> None:
        """Walk through the backward pass of a layer, on top of the memory of earlier layers."""
        is_moe = kind in self._spec.columns.moe_kinds
        if self._spec.recomputes_comm and is_moe:
            self._layer_forward(kind, live, RECOMPUTE_POINTS)
        self._observe(live + self._layer_row("gradients", kind))
        if not is_moe:
            return
        self._close_interval(live + self._layer_row("combine_backward", kind))
        peak = live + self._layer_row("experts_backward", kind)
        during_comm = live + self._layer_row("dispatch_backward", kind)
        if self._spec.splits_backward:
            peak = peak + self._layer_row("concurrent_wgrad", kind)
            during_comm = during_comm + self._layer_row("experts_wgrad", kind)
            self._observe(during_comm)
        self._observe(peak)
        self._close_interval(during_comm)

    def _observe(self, live: Counts) -> None:
        """Record the live memory at some time between two collectives."""
        self._snapshots.append(live)

    def _close_interval(self, during_comm: Counts) -> tuple[CommInterval, ...]:
        """Close an interval with the memory during its collective or at the end, and return all so far."""
        self._intervals.append(CommInterval(np.array(self._snapshots), during_comm[None]))
        self._snapshots = []
        return tuple(self._intervals)

    def _input(self) -> Counts:
        """Return a row with the input of the first layer. Backward, the last one's gradient replaces its output."""
        has_embedding = self._chunk.has_embedding
        return self._row(embedding=float(has_embedding), hidden=float(not has_embedding), in_transit=1.0)

    def _row(self, **ends: float) -> Counts:
        """Return a row with the given counts in end columns."""
        found = np.zeros(self._spec.columns.size)
        for name, count in ends.items():
            found[self._spec.columns.end_column(name)] = count
        return found

    def _make_layer_row(self, name: str, kind: int) -> Counts:
        """Return a row with one layer. While it runs, it holds one of the two offloaded parts in transit."""
        is_running = name not in ("saved", "delayed_wgrad", *WGRAD_POINTS)
        found = self._row(in_transit=-0.5 if is_running else 0.0)
        found[self._spec.columns.layer_column(name) + kind] = 1.0
        return found
