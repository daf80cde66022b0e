"""Memory snapshots: candidate memory peaks of a pipeline rank in a step, as counts of what is in memory. Torch-free.

The counts depend on the schedule and on the layers of the stages, not on any size. They follow the runtime's own order
of work, within an overlapped forward and backward pass as in `overlap_memory.py`. Sizes decide which snapshot is the
peak, so all candidates are kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from moefold.cost.memory_columns import Counts, MemoryColumns, ModelChunk, drop_dominated, state_counts
from moefold.cost.overlap_memory import OverlapSpec, overlap_snapshots
from moefold.topology.pipeline_action import SlotRow, split_pairs
from moefold.topology.schedules import SCHEDULES, schedule_row

STEADY_MICRO_BATCHES_PER_RANK = 3
"""Micro-batches for each rank after which the steady phase only repeats; see `StepSchedule.shortest_equivalent`."""


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
class RankSnapshots:
    """Counts at all snapshots of one pipeline rank."""

    stages: tuple[int, ...]
    """Stage indices of the rank."""
    activations: Counts
    """Activation counts, [snapshots, `MemoryColumns.size`]."""
    occurrence: Counts
    """See `MemorySnapshots.occurrence`."""
    in_flight: Counts
    """Micro-batches between their forward and the end of their backward pass, [snapshots, stages of the pipeline]."""
    num_awaited: int
    """Hidden states in receive buffers, which torch allocates for all micro-batches at once."""


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of a step."""

    schedule: str
    pp: int
    vpp: int
    num_micro_batches: int
    overlap: bool = False
    keeps_sent_messages: bool = True
    """True if sent tensors stay until the step ends, and all receive buffers are allocated when it begins."""

    @property
    def shortest_equivalent(self) -> "StepSchedule":
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
    schedule_spec: StepSchedule,
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
    walk = _RankWalker(schedule_spec, chunks, stages_by_rank, columns, finds_all=True)
    found = []
    for rank, stages in enumerate(stages_by_rank):
        rows, _ = walk.snapshots(_slots_of_rank(schedule_spec, rank), stages)
        found.append(np.hstack([np.tile(state_counts(chunks, stages, columns), (len(rows), 1)), rows]))
    end = columns.state_size + columns.size
    rows = drop_dominated(np.concatenate(found))
    return MemorySnapshots(
        rows[:, : columns.state_size], rows[:, columns.state_size : end], rows[:, end:-1], rows[:, -1]
    )


def find_peak_candidates(
    schedule_spec: StepSchedule,
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
    walk = _RankWalker(schedule_spec, chunks, stages_by_rank, columns, finds_all=False)
    held = []
    found = []
    for rank in (0, len(stages_by_rank) - 1):
        rows, _ = walk.snapshots(_slots_of_rank(schedule_spec, rank), stages_by_rank[rank])
        # Most layers in flight; among these the most other activations.
        layers = rows[:, : columns.num_kinds].sum(axis=1)
        others = rows[:, columns.num_kinds : columns.size].sum(axis=1)
        found.append(rows[np.lexsort((others, layers))[-1]])
        held.append(state_counts(chunks, stages_by_rank[rank], columns))
    rows = np.array(found)
    return MemorySnapshots(np.array(held), rows[:, : columns.size], np.ones((len(held), 2)), rows[:, -1])


def find_rank_snapshots(
    schedule_spec: StepSchedule,
    chunks: Sequence[ModelChunk],
    stages_by_rank: Sequence[Sequence[int]],
    rows: Sequence[SlotRow],
    columns: MemoryColumns,
) -> tuple[RankSnapshots, ...]:
    """Find all snapshots of each pipeline rank, with the micro-batches in flight on each stage.

    Args:
        schedule_spec: the schedule.
        chunks: layers of each stage, in model order.
        stages_by_rank: stage indices of each pipeline rank.
        rows: slots of each pipeline rank.
        columns: columns of the model.
    """
    walk = _RankWalker(schedule_spec, chunks, stages_by_rank, columns, finds_all=True, merges_equal_chunks=False)
    found = []
    for row, stages in zip(rows, stages_by_rank, strict=True):
        counts, in_flight = walk.snapshots(row, stages)
        num_awaited = walk.num_recv_buffers(stages) * schedule_spec.num_micro_batches
        end = columns.size
        found.append(RankSnapshots(tuple(stages), counts[:, :end], counts[:, end:-1], in_flight, num_awaited))
    return tuple(found)


@lru_cache(maxsize=16384)
def _slots_of_rank(schedule_spec: StepSchedule, rank: int) -> SlotRow:
    """Return the slots of a pipeline rank; only with overlap are two micro-batches in one slot."""
    s = schedule_spec
    row = schedule_row(s.schedule, rank, s.pp, s.vpp, s.num_micro_batches, overlap=s.overlap)
    return row if s.overlap else split_pairs(row)


class _RankWalker:
    """Walks through the slots of one rank.

    Args:
        schedule_spec: the schedule.
        chunks: layers of each stage.
        stages_by_rank: stage indices of each pipeline rank.
        columns: columns of the model.
        finds_all: whether to find all snapshots of overlapped pairs, or only the one before they begin.
        merges_equal_chunks: whether micro-batches are counted by distinct chunk, not by stage.
    """

    def __init__(
        self,
        schedule_spec: StepSchedule,
        chunks: Sequence[ModelChunk],
        stages_by_rank: Sequence[Sequence[int]],
        columns: MemoryColumns,
        *,
        finds_all: bool,
        merges_equal_chunks: bool = True,
    ) -> None:
        self.schedule_spec = schedule_spec
        self.chunks = chunks
        self.rank_of = {stage: rank for rank, stages in enumerate(stages_by_rank) for stage in stages}
        self.columns = columns
        self.splits_backward = schedule_spec.pp > 1 and SCHEDULES[schedule_spec.schedule].splits_backward
        # Stages with equal chunks share a class.
        known: dict[ModelChunk | int, int] = {}
        keys = chunks if merges_equal_chunks else range(len(chunks))
        self._chunk_class = [known.setdefault(key, len(known)) for key in keys]
        self._distinct_chunks = [chunks[self._chunk_class.index(i)] for i in range(len(known))]
        self._saved_by_class = np.array([self._saved(chunk) for chunk in self._distinct_chunks])
        self._delayed_wgrad_by_class = np.array([self._delayed_wgrad(chunk) for chunk in self._distinct_chunks])
        self._finds_all = finds_all
        self._running_cache: dict[RunningChunks, Counts] = {}

    def snapshots(self, row: SlotRow, stages: Sequence[int]) -> tuple[Counts, Counts]:
        """Return the distinct counts at the start of the slots.

        Returns:
            [snapshots, `MemoryColumns.size` + 3]: the counts, `MemorySnapshots.occurrence` (2 columns) and
            `MemorySnapshots.messages_per_micro_batch`.
            [snapshots, chunk classes]: the micro-batches in flight, those that run backward included.
        """
        order = self.schedule_spec
        columns = self.columns
        awaited = self.num_recv_buffers(stages) if order.keeps_sent_messages else 0
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
        num_rows = [len(run) for run in runs]
        found: Counts = np.repeat(base, num_rows, axis=0)
        found[:, :-1] += np.concatenate(runs)
        unfinished = np.array(in_flight, dtype=float)
        for counts, (_, backward) in zip(unfinished, running, strict=True):
            if backward >= 0:
                counts[backward] += 1
        return found, np.repeat(unfinished, num_rows, axis=0)

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
                elif kind != "W":
                    backward = own
                    in_flight[own] -= 1
            state = tuple(in_flight), tuple(delayed), (forward, backward)
            if state in found and messages > found[state][0]:
                # The number of messages only grows; states are in the order in which they have most.
                del found[state]
            found[state] = messages, is_steady
            if slot[-1].kind == "W":
                delayed[own] -= 1
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
                        else [np.zeros(self.columns.size)]
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
            now[self.columns.layer_column("transient") + chunk.kinds[i]] += 1
            yield now

    def _backward_snapshots(self, chunk: ModelChunk) -> Iterator[Counts]:
        """Yield the last layer of each kind while it runs, or the ends of runs of a kind if gradients are delayed."""
        now = self._saved_before(chunk, 0)
        yield now + (self._delayed_wgrad(chunk) if self.splits_backward else 0)
        for i in _ends_of_runs(chunk.kinds) if self.splits_backward else _last_layer_of_each_kind(chunk.kinds):
            now = self._saved_before(chunk, i + 1)
            now[self.columns.layer_column("transient") + chunk.kinds[i]] += 1
            now[self.columns.layer_column("recompute_peak") + chunk.kinds[i]] += 1
            now[self.columns.layer_column("concurrent_wgrad") + chunk.kinds[i]] += self.splits_backward
            yield now + (self._delayed_wgrad(chunk, i + 1) if self.splits_backward else 0)

    def _saved_before(self, chunk: ModelChunk, num_layers: int) -> Counts:
        """Return the counts of the embedding and the first `num_layers` layers."""
        row = np.zeros(self.columns.size)
        row[self.columns.end_column("embedding")] += chunk.has_embedding
        for kind in chunk.kinds[:num_layers]:
            row[self.columns.layer_column("saved") + kind] += 1
        return row

    def _saved(self, chunk: ModelChunk) -> Counts:
        row = self._saved_before(chunk, len(chunk.kinds))
        if chunk.has_loss:
            row[self.columns.end_column("head")] += 1
            row[self.columns.end_column("mtp")] += chunk.num_mtp_layers
        return row

    def _delayed_wgrad(self, chunk: ModelChunk, first_layer: int = 0) -> Counts:
        row = np.zeros(self.columns.size)
        for kind in chunk.kinds[first_layer:]:
            row[self.columns.layer_column("delayed_wgrad") + kind] += 1
        if chunk.has_loss:
            row[self.columns.end_column("delayed_head")] += 1 + chunk.num_mtp_layers
            row[self.columns.end_column("delayed_mtp")] += chunk.num_mtp_layers
        return row

    def _num_sent(self, stage: int) -> int:
        """Return the hidden states and gradients that a micro-batch sends and keeps."""
        return (stage > 0) + (stage + 1 < len(self.chunks)) if self._keeps_sent_messages() else 0

    def _keeps_sent_messages(self) -> bool:
        order = self.schedule_spec
        frees_sent = SCHEDULES[order.schedule].frees_sent_messages and order.vpp == 1 and not order.overlap
        return order.keeps_sent_messages and order.pp > 1 and not frees_sent

    def num_recv_buffers(self, stages: Iterable[int]) -> int:
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


def _ends_of_runs(kinds: Sequence[int]) -> list[int]:
    """Return the first and last layer of each run of a kind."""
    last = len(kinds) - 1
    return [i for i, kind in enumerate(kinds) if i in (0, last) or kind != kinds[i - 1] or kind != kinds[i + 1]]
