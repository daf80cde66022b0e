"""What a forward and a backward pass that take turns at exchanges have in memory, as counts. Torch-free.

The runtime's formula (`metrics/pass_memory.py`) adds up bytes on the same course (`metrics/pass_turns.py`). Which
moment is the fullest depends on sizes; here all stay that may be.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moefold.metrics.pass_turns import (
    SNAPSHOT_POINTS,
    SPLIT_BACKWARD_POINTS,
    LayerMemory,
    StageMemory,
    interleave,
    visit_backward,
    visit_forward,
)
from moefold.plan.columns import Counts, MemoryColumns, drop_dominated
from moefold.plan.stage_split import ModelChunk


@dataclass(frozen=True)
class OverlapSpec:
    """How the passes of a pair run."""

    columns: MemoryColumns
    splits_backward: bool
    """Whether the schedule splits backward passes."""
    recomputes_comm: bool
    """Whether exchanges run again before the gradients."""
    keeps_sent_messages: bool
    """Whether what a backward pass has sent stays."""


@dataclass(frozen=True, slots=True)
class _SnapshotInterval:
    peak: Counts
    """All that may be most, [moments, columns]."""
    during_comm: Counts
    """[1, columns]"""


class _SnapshotIntervalBuilder:
    """A pass under construction."""

    def __init__(self) -> None:
        self.intervals: list[_SnapshotInterval] = []
        self._snapshots: list[Counts] = []

    def observe(self, live: Counts) -> None:
        self._snapshots.append(live)

    def close_interval(self, during_comm: Counts) -> None:
        self.intervals.append(_SnapshotInterval(np.array(self._snapshots), during_comm[None]))
        self._snapshots = []


@lru_cache(maxsize=4096)
def overlap_snapshots(spec: OverlapSpec, forward_chunk: ModelChunk, backward_chunk: ModelChunk) -> Counts:
    """The moments of a pair that no other one outdoes, [moments, columns].

    Args:
        spec: how they run.
        forward_chunk: what runs forward.
        backward_chunk: what runs backward.
    """
    columns = spec.columns
    nothing = _UnitRows(columns).row(in_transit=1.0)
    sent = nothing.copy()
    if spec.keeps_sent_messages:
        sent[columns.end_column("hidden")] += (not backward_chunk.has_embedding) + (not backward_chunk.has_loss)
    forward, backward = _forward_intervals(spec, forward_chunk), _backward_intervals(spec, backward_chunk)
    found = [one + other for one, other in interleave(forward, backward, nothing[None], sent[None])]
    return drop_dominated(np.unique(np.concatenate(found), axis=0))


@lru_cache(maxsize=1024)
def _forward_intervals(spec: OverlapSpec, chunk: ModelChunk) -> tuple[_SnapshotInterval, ...]:
    drawn = _SnapshotIntervalBuilder()
    visit_forward(drawn, _stage_rows(spec, chunk))
    return tuple(drawn.intervals)


@lru_cache(maxsize=1024)
def _backward_intervals(spec: OverlapSpec, chunk: ModelChunk) -> tuple[_SnapshotInterval, ...]:
    drawn = _SnapshotIntervalBuilder()
    visit_backward(drawn, _stage_rows(spec, chunk))
    return tuple(drawn.intervals)


class _UnitRows:
    """Rows with one of something."""

    def __init__(self, columns: MemoryColumns) -> None:
        self._columns = columns

    def row(self, **ends: float) -> Counts:
        """So many of some end columns."""
        found = np.zeros(self._columns.size)
        for name, count in ends.items():
            found[self._columns.end_column(name)] = count
        return found

    def layer(self, first: int, kind: int, in_transit: float = 0.0) -> Counts:
        """A layer of a kind in the columns from `first` on."""
        found = self.row(in_transit=in_transit)
        found[first + kind] = 1.0
        return found

    def layer_rows(self, kind: int, delayed_wgrad: Counts) -> LayerMemory[Counts]:
        """A layer. At work it is there as a whole: of offloaded parts one run less is in transit, half of its two."""
        columns = self._columns
        at = {
            name: self.layer(columns.at_snapshot_point(name), kind, 0.0 if name in SPLIT_BACKWARD_POINTS else -0.5)
            for name in SNAPSHOT_POINTS
        }
        return LayerMemory(self.layer(columns.saved, kind), at, delayed_wgrad, kind in columns.moe_kinds)


def _stage_rows(spec: OverlapSpec, chunk: ModelChunk) -> StageMemory[Counts]:
    columns, units = spec.columns, _UnitRows(spec.columns)
    nothing, splits = units.row(), spec.splits_backward
    known = {
        kind: units.layer_rows(kind, units.layer(columns.delayed_wgrad, kind) if splits else nothing)
        for kind in set(chunk.kinds)
    }
    further = []
    if chunk.num_mtp_layers:
        postponed = units.row(postponed_further=1.0) if splits else nothing
        further = [units.layer_rows(chunk.mtp_layer_kind, postponed)] * chunk.num_mtp_layers
    postponed_heads = chunk.has_loss * splits * (1.0 + chunk.num_mtp_layers)
    return StageMemory(
        embedding=units.row(embedding=float(chunk.has_embedding), in_transit=1.0),
        layers=[known[kind] for kind in chunk.kinds],
        mtp_layers=further,
        mtp_layer_saved=units.row(further=1.0),
        head=units.row(head=float(chunk.has_loss)),
        logits=units.row(logits=1.0),
        delayed_wgrad_head=units.row(postponed_head=postponed_heads),
        is_last=chunk.has_loss,
        splits_backward=splits,
        recomputes_comm=spec.recomputes_comm,
    )
