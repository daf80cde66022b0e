"""Memory snapshots: candidate memory peaks of a pipeline rank in a step, as counts of what is in memory. Torch-free.

The counts depend on the schedule and on the layers of the stages, not on any size: a search finds them once and
multiplies them with the bytes of each mapping. They follow the runtime's own order of work, as `cost/peak_memory.py`
does for one recipe, and, within an overlapped forward and backward pass, `cost/overlap_memory.py`; a test checks that
the bytes agree. Sizes decide which snapshot is the peak, so all candidates are kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from moefold.cost.overlap_memory import (
    SNAPSHOT_POINTS,
    SPLIT_BACKWARD_POINTS,
    LayerMemory,
    StageMemory,
    interleave,
    visit_backward,
    visit_forward,
)
from moefold.planner.memory.columns import Counts, MemoryColumns, drop_dominated
from moefold.planner.stages import ModelChunk
from moefold.topology.pipeline_action import SlotRow, split_pairs
from moefold.topology.schedule_tables import SCHEDULES, schedule_row

STEADY_MICRO_BATCHES_PER_RANK = 3
"""Micro-batches for each rank after which the steady phase only repeats; see `ScheduleSpec.shortest_equivalent`."""


RunningChunks = tuple[int, int]
"""Indices of the distinct chunks that run forward and backward; -1: none."""


@dataclass(frozen=True)
class MemorySnapshots:
    """Counts at each snapshot of some rank that no other snapshot dominates."""

    states: Counts
    """State counts of the rank, [snapshots, `MemoryColumns.state_size`]."""
    activations: Counts
    """Activation counts, [snapshots, `MemoryColumns.size`]."""
    occurrence: Counts
    """1 if the snapshot occurs without recomputed expert all-to-alls, and with them, [snapshots, 2]."""
    messages_per_micro_batch: Counts
    """Hidden states that each additional micro-batch adds, [snapshots]: sent and kept, or awaited."""

    def with_more_micro_batches(self, count: int, columns: MemoryColumns) -> "MemorySnapshots":
        """Return the snapshots with `count` more micro-batches in the steady phase."""
        activations = self.activations.copy()
        activations[:, columns.end_column("hidden")] += count * self.messages_per_micro_batch
        return replace(self, activations=activations)


@dataclass(frozen=True)
class ScheduleSpec:
    """The schedule of a step."""

    schedule: str
    pp: int
    vpp: int
    num_micro_batches: int
    overlap: bool = False
    keeps_sent_messages: bool = True
    """True if sent tensors stay until the step ends, and all receive buffers are allocated when it begins."""

    @property
    def shortest_equivalent(self) -> "ScheduleSpec":
        """The same schedule with the fewest micro-batches that have all its snapshots.

        More micro-batches only repeat the steady phase.
        """
        n = self.num_micro_batches
        limit = STEADY_MICRO_BATCHES_PER_RANK * self.pp
        spec = SCHEDULES[self.schedule]
        if n <= limit or not spec.repeats_steady_phase and self.pp > 1:
            return self
        # Rounds that are not pp long change with the number of micro-batches.
        per_round = n // max(1, n // self.pp)
        repeats = per_round == self.pp or not spec.runs_equal_rounds and self.vpp < 3
        return replace(self, num_micro_batches=limit) if repeats else self


def find_snapshots(
    schedule_spec: ScheduleSpec,
    chunks: Sequence[ModelChunk],
    stages_by_rank: Sequence[Sequence[int]],
    columns: MemoryColumns,
) -> MemorySnapshots:
    """Find all snapshots that may be the memory peak.

    Args:
        schedule_spec: the schedule.
        chunks: layers of each stage, in model order.
        stages_by_rank: stage indices of each pipeline rank.
        columns: columns of the model.
    """
    walk = _make_rank_walker(schedule_spec, chunks, stages_by_rank, columns, finds_all=True)
    found = []
    for rank, stages in enumerate(stages_by_rank):
        rows = walk.snapshots(_slots_of_rank(schedule_spec, rank), stages)
        found.append(np.hstack([np.tile(_state_counts(chunks, stages, columns), (len(rows), 1)), rows]))
    end = columns.state_size + columns.size
    rows = drop_dominated(np.concatenate(found))
    return MemorySnapshots(
        rows[:, : columns.state_size], rows[:, columns.state_size : end], rows[:, end:-1], rows[:, -1]
    )


def find_peak_candidates(
    schedule_spec: ScheduleSpec,
    chunks: Sequence[ModelChunk],
    stages_by_rank: Sequence[Sequence[int]],
    columns: MemoryColumns,
) -> MemorySnapshots:
    """Find a cheap lower bound of the peak: the snapshots of the first and last rank with most layers in flight.

    In overlapped pairs it is the snapshot before they begin, which does not depend on recomputation.

    Args:
        schedule_spec: as in `find_snapshots`.
        chunks: as in `find_snapshots`.
        stages_by_rank: as in `find_snapshots`.
        columns: as in `find_snapshots`.
    """
    walk = _make_rank_walker(schedule_spec, chunks, stages_by_rank, columns, finds_all=False)
    held = []
    found = []
    for rank in (0, len(stages_by_rank) - 1):
        rows = walk.snapshots(_slots_of_rank(schedule_spec, rank), stages_by_rank[rank])
        # Most layers in flight; among these the most other activations.
        layers = rows[:, : columns.num_kinds].sum(axis=1)
        others = rows[:, columns.num_kinds : columns.size].sum(axis=1)
        found.append(rows[np.lexsort((others, layers))[-1]])
        held.append(_state_counts(chunks, stages_by_rank[rank], columns))
    rows = np.array(found)
    return MemorySnapshots(np.array(held), rows[:, : columns.size], np.ones((len(held), 2)), rows[:, -1])


@lru_cache(maxsize=16384)
def _slots_of_rank(schedule_spec: ScheduleSpec, rank: int) -> SlotRow:
    """Return the slots of a pipeline rank; only with overlap are two micro-batches in one slot."""
    s = schedule_spec
    row = schedule_row(s.schedule, rank, s.pp, s.vpp, s.num_micro_batches, overlap=s.overlap)
    return row if s.overlap else split_pairs(row)


def _make_rank_walker(
    schedule_spec: ScheduleSpec,
    chunks: Sequence[ModelChunk],
    stages_by_rank: Sequence[Sequence[int]],
    columns: MemoryColumns,
    *,
    finds_all: bool,
) -> "_RankWalker":
    rank_of = {stage: rank for rank, stages in enumerate(stages_by_rank) for stage in stages}
    return _RankWalker(schedule_spec, chunks, rank_of, columns, finds_all=finds_all)


class _RankWalker:
    """Walks through the slots of one rank.

    Args:
        schedule_spec: the schedule.
        chunks: layers of each stage.
        rank_of: rank of each stage.
        columns: columns of the model.
        finds_all: whether to find all snapshots of overlapped pairs, or only the one before they begin.
    """

    def __init__(
        self,
        schedule_spec: ScheduleSpec,
        chunks: Sequence[ModelChunk],
        rank_of: dict[int, int],
        columns: MemoryColumns,
        *,
        finds_all: bool,
    ) -> None:
        self.schedule_spec = schedule_spec
        self.chunks = chunks
        self.rank_of = rank_of
        self.columns = columns
        self.splits_backward = schedule_spec.pp > 1 and SCHEDULES[schedule_spec.schedule].splits_backward
        # Stages with equal chunks share a class.
        known: dict[ModelChunk, int] = {}
        self._chunk_class = [known.setdefault(chunk, len(known)) for chunk in chunks]
        self._distinct_chunks = list(known)
        self._saved_by_class = np.array([self._saved(chunk) for chunk in known])
        self._delayed_wgrad_by_class = np.array([self._delayed_wgrad(chunk) for chunk in known])
        self._finds_all = finds_all
        self._running_cache: dict[RunningChunks, Counts] = {}

    def snapshots(self, row: SlotRow, stages: Sequence[int]) -> Counts:
        """Return the distinct counts at the start of the slots.

        Returns:
            [snapshots, `MemoryColumns.size` + 3]: the counts, `MemorySnapshots.occurrence` (2 columns) and
            `MemorySnapshots.messages_per_micro_batch`.
        """
        order = self.schedule_spec
        columns = self.columns
        awaited = self._num_recv_buffers(stages) if order.keeps_sent_messages else 0
        sent = {stage: self._num_sent(stage) for stage in stages}
        states = self._slot_states(row, sent)
        in_flight, delayed, running = zip(*states, strict=True)
        base = np.zeros((len(states), columns.size + 3))
        base[:, : columns.size] = (
            np.array(in_flight) @ self._saved_by_class + np.array(delayed) @ self._delayed_wgrad_by_class
        )
        messages, is_steady = np.array(list(states.values())).T
        base[:, columns.end_column("hidden")] += messages + awaited * order.num_micro_batches
        base[:, -1] = is_steady * sum(sent.values()) + awaited
        runs = [self._running_snapshots(which) for which in running]
        found: Counts = np.repeat(base, [len(run) for run in runs], axis=0)
        found[:, :-1] += np.concatenate(runs)
        return found

    def _slot_states(
        self, row: SlotRow, sent: dict[int, int]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...], RunningChunks], tuple[int, bool]]:
        """Return the chunks in flight and with delayed weight gradients as a slot begins, and what runs.

        The values are the most messages sent by then, and whether each steady-phase micro-batch adds to them.
        """
        in_flight = [0] * len(self._distinct_chunks)
        delayed = [0] * len(self._distinct_chunks)
        messages = 0
        is_steady = not self.schedule_spec.overlap
        found: dict[tuple[tuple[int, ...], tuple[int, ...], RunningChunks], tuple[int, bool]] = {}
        for slot in row:
            forward = backward = -1
            if len(slot) > 1:
                # The steady phase begins; states before it, such as a first backward pass alone, have fewer messages.
                is_steady = True
            for action in slot:
                own = self._chunk_class[action.stage]
                kind = action.kind
                if kind == "F":
                    forward = own
                elif kind == "W":
                    delayed[own] -= 1
                else:
                    backward = own
                    in_flight[own] -= 1
            if forward < 0 and backward < 0:
                continue
            # The number of messages only grows.
            found[tuple(in_flight), tuple(delayed), (forward, backward)] = messages, is_steady
            if forward >= 0:
                in_flight[forward] += 1
            if backward >= 0:
                messages += sent[slot[-1].stage]
                delayed[backward] += slot[-1].kind == "I"
        return found

    def _running_snapshots(self, running: RunningChunks) -> Counts:
        """Return the snapshots of concurrently running chunks, [snapshots, `MemoryColumns.size` + 2].

        The last two columns are `MemorySnapshots.occurrence`.
        """
        if running not in self._running_cache:
            forward, backward = (None if own < 0 else self._distinct_chunks[own] for own in running)
            if forward and backward:
                self._running_cache[running] = self._overlap_snapshots(forward, backward)
            else:
                run = np.array(
                    list(
                        self._forward_snapshots(forward)
                        if forward
                        else self._backward_snapshots(backward)
                        if backward
                        else ()
                    )
                )
                # With two micro-batches at a time, one is being offloaded and the other prefetched.
                run[:, self.columns.end_column("in_transit")] += 2.0 if self.schedule_spec.overlap else 1.0
                self._running_cache[running] = _with_occurrence(run, 1.0, 1.0)
        return self._running_cache[running]

    def _overlap_snapshots(self, forward_chunk: ModelChunk, backward_chunk: ModelChunk) -> Counts:
        if not self._finds_all:
            before = self._saved(backward_chunk)
            before[self.columns.end_column("in_transit")] += 2.0
            return _with_occurrence(before[None], 1.0, 1.0)
        plain, paused = (
            OverlapSpec(self.columns, self.splits_backward, recomputes, self._keeps_sent_messages())
            for recomputes in (False, True)
        )
        runs = (
            overlap_snapshots(plain, forward_chunk, backward_chunk),
            overlap_snapshots(paused, forward_chunk, backward_chunk),
        )
        return np.concatenate([_with_occurrence(runs[0], 1.0, 0.0), _with_occurrence(runs[1], 0.0, 1.0)])

    def _forward_snapshots(self, chunk: ModelChunk) -> Iterator[Counts]:
        """Yield the end of the forward pass, and the last layer of each kind while it runs."""
        whole = self._saved(chunk)
        if chunk.has_loss:
            whole[self.columns.end_column("logits")] += 1
        yield whole
        for i in _last_layer_of_each_kind(chunk.kinds):
            now = self._saved_before(chunk, i + 1)
            now[self.columns.transient + chunk.kinds[i]] += 1
            yield now

    def _backward_snapshots(self, chunk: ModelChunk) -> Iterator[Counts]:
        """Yield the last layer of each kind while it runs, and the first of each if weight gradients are delayed."""
        now = self._saved_before(chunk, 0)
        yield now + (self._delayed_wgrad(chunk) if self.splits_backward else 0)
        last = _last_layer_of_each_kind(chunk.kinds)
        first = [chunk.kinds.index(kind) for kind in set(chunk.kinds)] if self.splits_backward else []
        for i in sorted({*last, *first}):
            now = self._saved_before(chunk, i + 1)
            now[self.columns.transient + chunk.kinds[i]] += 1
            now[self.columns.recompute_peak + chunk.kinds[i]] += 1
            now[self.columns.at_snapshot_point("concurrent_wgrad") + chunk.kinds[i]] += self.splits_backward
            yield now + (self._delayed_wgrad(chunk, i + 1) if self.splits_backward else 0)

    def _saved_before(self, chunk: ModelChunk, num_layers: int) -> Counts:
        """Return the counts of the embedding and the first `num_layers` layers."""
        row = np.zeros(self.columns.size)
        row[self.columns.end_column("embedding")] += chunk.has_embedding
        for kind in chunk.kinds[:num_layers]:
            row[self.columns.saved + kind] += 1
        return row

    def _saved(self, chunk: ModelChunk) -> Counts:
        row = self._saved_before(chunk, len(chunk.kinds))
        if chunk.has_loss:
            row[self.columns.end_column("head")] += 1
            row[self.columns.end_column("further")] += chunk.num_mtp_layers
        return row

    def _delayed_wgrad(self, chunk: ModelChunk, first_layer: int = 0) -> Counts:
        row = np.zeros(self.columns.size)
        for kind in chunk.kinds[first_layer:]:
            row[self.columns.delayed_wgrad + kind] += 1
        if chunk.has_loss:
            row[self.columns.end_column("postponed_head")] += 1 + chunk.num_mtp_layers
            row[self.columns.end_column("postponed_further")] += chunk.num_mtp_layers
        return row

    def _num_sent(self, stage: int) -> int:
        """Return the hidden states and gradients that a micro-batch sends and keeps."""
        return (stage > 0) + (stage + 1 < len(self.chunks)) if self._keeps_sent_messages() else 0

    def _keeps_sent_messages(self) -> bool:
        order = self.schedule_spec
        frees_sent = SCHEDULES[order.schedule].frees_sent_messages and order.vpp == 1 and not order.overlap
        return order.keeps_sent_messages and order.pp > 1 and not frees_sent

    def _num_recv_buffers(self, stages: Iterable[int]) -> int:
        """Return the receive buffers for each micro-batch: one for each neighbour of a stage on another rank."""
        return sum(
            neighbour in self.rank_of and self.rank_of[neighbour] != self.rank_of[stage]
            for stage in stages
            for neighbour in (stage - 1, stage + 1)
        )


def _with_occurrence(rows: Counts, without_recompute: float, with_recompute: float) -> Counts:
    return np.hstack([rows, np.tile([without_recompute, with_recompute], (len(rows), 1))])


def _last_layer_of_each_kind(kinds: Sequence[int]) -> list[int]:
    return sorted({kind: i for i, kind in enumerate(kinds)}.values())


def _state_counts(chunks: Sequence[ModelChunk], stages: Sequence[int], columns: MemoryColumns) -> Counts:
    row = np.zeros(columns.state_size)
    own = [chunks[stage] for stage in stages]
    row[columns.state_column("stage")] = len(own)
    for chunk in own:
        row[columns.state_column("embedding")] += chunk.has_embedding
        row[columns.state_column("head")] += chunk.has_loss
        row[columns.state_column("further")] += chunk.num_mtp_layers
        for kind in chunk.kinds:
            row[kind] += 1
        bits = sum(1 << kind for kind in set(chunk.kinds)) | (1 << columns.num_kinds if chunk.num_mtp_layers else 0)
        row[columns.first_kind_set + bits] += 1
    if own and own[-1].has_loss and not own[-1].has_embedding:
        # The last stage's copy of the embedding, if the model needs one; "following" if the rank has the first as well.
        name = "following_embedding" if own[0].has_embedding else "second_embedding"
        row[columns.state_column(name)] += 1
    return row


@dataclass(frozen=True)
class OverlapSpec:
    """Options of an overlapped forward and backward pass."""

    columns: MemoryColumns
    splits_backward: bool
    """True if the schedule splits backward passes."""
    recomputes_comm: bool
    """True if all-to-alls are recomputed before the gradients."""
    keeps_sent_messages: bool
    """True if the tensors that a backward pass has sent stay in memory."""


@dataclass(frozen=True, slots=True)
class _SnapshotInterval:
    peak: Counts
    """Counts of all candidates for the peak, [snapshots, columns]."""
    during_comm: Counts
    """Counts during the all-to-all, [1, columns]."""


class _SnapshotIntervalBuilder:
    """Builder of the intervals of a pass."""

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
    """Return the snapshots of an overlapped pair that no other one dominates, [snapshots, columns].

    Args:
        spec: options of the pair.
        forward_chunk: the chunk that runs forward.
        backward_chunk: the chunk that runs backward.
    """
    columns = spec.columns
    nothing = _UnitRows(columns).row(in_transit=1.0)
    sent = nothing.copy()
    if spec.keeps_sent_messages:
        sent[columns.end_column("hidden")] += (not backward_chunk.has_embedding) + (not backward_chunk.has_loss)
    forward = _forward_intervals(spec, forward_chunk)
    backward = _backward_intervals(spec, backward_chunk)
    found = [one + other for one, other in interleave(forward, backward, nothing[None], sent[None])]
    return drop_dominated(np.unique(np.concatenate(found), axis=0))


@lru_cache(maxsize=1024)
def _forward_intervals(spec: OverlapSpec, chunk: ModelChunk) -> tuple[_SnapshotInterval, ...]:
    builder = _SnapshotIntervalBuilder()
    visit_forward(builder, _stage_rows(spec, chunk))
    return tuple(builder.intervals)


@lru_cache(maxsize=1024)
def _backward_intervals(spec: OverlapSpec, chunk: ModelChunk) -> tuple[_SnapshotInterval, ...]:
    builder = _SnapshotIntervalBuilder()
    visit_backward(builder, _stage_rows(spec, chunk))
    return tuple(builder.intervals)


class _UnitRows:
    """Builder of count rows with one unit in a column."""

    def __init__(self, columns: MemoryColumns) -> None:
        self._columns = columns

    def row(self, **ends: float) -> Counts:
        """Return a row with the given counts in end columns."""
        found = np.zeros(self._columns.size)
        for name, count in ends.items():
            found[self._columns.end_column(name)] = count
        return found

    def layer(self, first: int, kind: int, in_transit: float = 0.0) -> Counts:
        """Return a row with a layer of a kind in the columns from `first` on."""
        found = self.row(in_transit=in_transit)
        found[first + kind] = 1.0
        return found

    def layer_rows(self, kind: int, delayed_wgrad: Counts) -> LayerMemory[Counts]:
        """Return the rows of a layer; while it runs, it holds one offloaded part less in transit, half of its two."""
        columns = self._columns
        at = {
            name: self.layer(columns.at_snapshot_point(name), kind, 0.0 if name in SPLIT_BACKWARD_POINTS else -0.5)
            for name in SNAPSHOT_POINTS
        }
        return LayerMemory(self.layer(columns.saved, kind), at, delayed_wgrad, kind in columns.moe_kinds)


def _stage_rows(spec: OverlapSpec, chunk: ModelChunk) -> StageMemory[Counts]:
    columns = spec.columns
    units = _UnitRows(spec.columns)
    nothing = units.row()
    splits = spec.splits_backward
    known = {
        kind: units.layer_rows(kind, units.layer(columns.delayed_wgrad, kind) if splits else nothing)
        for kind in set(chunk.kinds)
    }
    mtp_layers = []
    if chunk.num_mtp_layers:
        postponed = units.row(postponed_further=1.0) if splits else nothing
        mtp_layers = [units.layer_rows(chunk.mtp_layer_kind, postponed)] * chunk.num_mtp_layers
    postponed_heads = chunk.has_loss * splits * (1.0 + chunk.num_mtp_layers)
    return StageMemory(
        embedding=units.row(embedding=float(chunk.has_embedding), in_transit=1.0),
        layers=[known[kind] for kind in chunk.kinds],
        mtp_layers=mtp_layers,
        mtp_layer_saved=units.row(further=1.0),
        head=units.row(head=float(chunk.has_loss)),
        logits=units.row(logits=1.0),
        delayed_wgrad_head=units.row(postponed_head=postponed_heads),
        is_last=chunk.has_loss,
        splits_backward=splits,
        recomputes_comm=spec.recomputes_comm,
    )
