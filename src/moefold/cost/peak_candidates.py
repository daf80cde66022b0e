"""Memory snapshots: candidate memory peaks of a pipeline rank in a step, as counts of the tensors in memory.

The counts depend on the schedule and on the layers of the stages, not on any size. They follow the runtime's own order
of work, within an overlapped forward and backward pass as in `overlap_memory.py`. Sizes decide which snapshot is the
peak, so all candidates are kept.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from moefold.config.base.part import Part
from moefold.config.base.pipeline_actions import SlotRow, split_pairs
from moefold.cost.memoised import all_arguments, memoised
from moefold.cost.memory_columns import Counts, MemoryColumns, ModelChunk, drop_dominated, state_counts
from moefold.topology.message_plan import live_messages, plan_messages
from moefold.topology.schedules import schedule_named, schedule_row

STEADY_MICRO_BATCHES_PER_RANK = 3
"""Micro-batches for each rank after which the steady phase only repeats (`StepSchedule.shortest_equivalent`)."""
FILLING_MICRO_BATCHES_PER_RANK = 2
"""Micro-batches for each rank after which no more layers are in flight, where passes do not run in pairs."""


RunningChunks = tuple[int, int]
"""Indices of the distinct chunks that run forward and backward. -1: none."""


@dataclass(frozen=True)
class MemorySnapshots:
    """Counts at each snapshot of some rank that no other snapshot dominates."""

    states: Counts
    """State counts of the rank, [snapshots, `MemoryColumns.state_size`]."""
    activations: Counts
    """Activation counts, [snapshots, `MemoryColumns.size`]."""
    occurrence: Counts
    """1 if the snapshot occurs without recomputed expert all-to-alls, and with them, [snapshots, 2]."""


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


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of a step."""

    schedule: str | Part
    pp: int
    vpp: int
    num_micro_batches: int
    overlap: bool = False
    saves_outputs: bool = True
    """True if each layer saves its output, the next one's input. In the warm-up of indexers none does."""

    def shortest_equivalent(self, *, finds_all: bool = True) -> "StepSchedule":
        """Return the same schedule with the fewest micro-batches that have all its snapshots, or its heaviest ones.

        More micro-batches only repeat the steady phase.
        """
        n = self.num_micro_batches
        per_rank = STEADY_MICRO_BATCHES_PER_RANK if finds_all or self.overlap else FILLING_MICRO_BATCHES_PER_RANK
        limit = per_rank * self.pp
        spec = schedule_named(self.schedule)
        if n <= limit or not spec.repeats_steady_phase and self.pp > 1:
            return self
        # Rounds that are not pp long change with the number of micro-batches.
        per_round = n // max(1, n // self.pp)
        repeats = per_round == self.pp or not spec.runs_equal_rounds and self.vpp < 3
        return replace(self, num_micro_batches=limit) if repeats else self

    def row(self, rank: int) -> SlotRow:
        """Return the slots of a pipeline rank."""
        return schedule_row(self.schedule, rank, self.pp, self.vpp, self.num_micro_batches, overlap=self.overlap)


@dataclass(frozen=True, eq=False)
class PipelineStages:
    """The stages of a pipeline, whatever its schedule and its micro-batches."""

    chunks: Sequence[ModelChunk]
    """Layers of each stage, in model order."""
    by_rank: Sequence[Sequence[int]]
    """Stage indices of each pipeline rank."""
    columns: MemoryColumns

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Pipeline rank of each stage."""
        return {stage: rank for rank, stages in enumerate(self.by_rank) for stage in stages}

    @memoised(all_arguments)
    def state_counts(self, rank: int) -> Counts:
        """Return the state counts of a rank, [`MemoryColumns.state_size`]."""
        return state_counts(self.chunks, self.by_rank[rank], self.columns)

    @cached_property
    def three_ranks(self) -> tuple[int, int, int]:
        """The first rank, one with the most layers, and the last rank.

        Among equal ones it is the rank with the most layers of the model's most frequent kind.
        """
        kinds = [[kind for stage in stages for kind in self.chunks[stage].kinds] for stages in self.by_rank]
        frequent = Counter(chain.from_iterable(kinds)).most_common(1)
        sizes = [(len(own), *(own.count(kind) for kind, _ in frequent)) for own in kinds]
        return 0, sizes.index(max(sizes)), len(kinds) - 1


class StepSnapshots:
    """Snapshots of the ranks of a pipeline in a step.

    Args:
        finds_all: whether to find all snapshots of overlapped pairs, or only the one before they begin.
        merges_equal_chunks: whether micro-batches are counted by distinct chunk, not by stage.
        running_cache: snapshots of running chunks, shared by the schedules of a model. None: of this schedule only.
    """

    def __init__(
        self,
        schedule_spec: StepSchedule,
        stages: PipelineStages,
        *,
        finds_all: bool = True,
        merges_equal_chunks: bool = True,
        running_cache: dict[tuple[Hashable, ...], Counts] | None = None,
    ) -> None:
        self.schedule_spec = schedule_spec
        self.stages = stages
        self.columns = stages.columns
        self.splits_backward = schedule_spec.pp > 1 and schedule_named(schedule_spec.schedule).splits_backward
        # Stages with equal chunks share a class.
        chunks = stages.chunks
        known: dict[ModelChunk | int, int] = {}
        keys = chunks if merges_equal_chunks else range(len(chunks))
        self._chunk_class = [known.setdefault(key, len(known)) for key in keys]
        self._distinct_chunks = [chunks[self._chunk_class.index(i)] for i in range(len(known))]
        self._in_flight_by_class = np.array([self._in_flight(chunk) for chunk in self._distinct_chunks])
        self._delayed_wgrad_by_class = np.array([self._delayed_wgrad(chunk) for chunk in self._distinct_chunks])
        self._finds_all = finds_all
        self._running_cache = {} if running_cache is None else running_cache

    def candidates(self) -> MemorySnapshots:
        """Return all snapshots that may be the memory peak."""
        rows = [self.schedule_spec.row(rank) for rank in range(self.schedule_spec.pp)]
        found = [
            np.hstack([np.tile(self.stages.state_counts(rank), (len(counts), 1)), counts])
            for rank, (counts, _) in enumerate(self._ranks(rows))
        ]
        states = self.columns.state_size
        kept = drop_dominated(np.concatenate(found))
        return MemorySnapshots(*np.split(kept, (states, states + self.columns.size), axis=1))

    def few_candidates(self) -> MemorySnapshots:
        """Return a cheap lower bound of the peak: the snapshots of three ranks with the most layers in flight.

        Where passes run in overlapped pairs, the snapshot before a pair is taken, which does not depend on
        recomputation. Messages are left out: they need the rows of all ranks.
        """
        ranks = self.stages.three_ranks
        found: dict[int, Counts] = {}
        for rank in set(ranks):
            rows, _ = self._snapshots(self._slots(self.schedule_spec.row(rank)))
            # The snapshots with most layers in flight; among equal ones, those with most other activations.
            layers = rows[:, : self.columns.num_kinds].sum(axis=1)
            others = rows[:, self.columns.num_kinds : self.columns.size].sum(axis=1)
            found[rank] = rows[np.lexsort((others, layers))[-1], : self.columns.size]
        states = np.array([self.stages.state_counts(rank) for rank in ranks])
        return MemorySnapshots(states, np.array([found[rank] for rank in ranks]), np.ones((len(ranks), 2)))

    def by_rank(self, rows: Sequence[SlotRow]) -> tuple[RankSnapshots, ...]:
        """Return all snapshots of each pipeline rank, given its slots as the runtime executes them."""
        size = self.columns.size
        return tuple(
            RankSnapshots(tuple(stages), counts[:, :size], counts[:, size:], in_flight)
            for stages, (counts, in_flight) in zip(self.stages.by_rank, self._ranks(rows), strict=True)
        )

    def _ranks(self, rows: Sequence[SlotRow]) -> Iterator[tuple[Counts, Counts]]:
        """Yield the `_snapshots` of each rank, given its slots as the runtime executes them."""
        messages: list[list[int]] = [[] for _ in rows]
        if len(rows) > 1:
            rank_of = self.stages.rank_of
            plans = plan_messages(rows, [rank_of[stage] for stage in sorted(rank_of)])
            messages = [live_messages(p, len(rank_of), overlaps=self.schedule_spec.overlap) for p in plans]
        for row, counts in zip(rows, messages, strict=True):
            yield self._snapshots(self._slots(row), counts)

    def _slots(self, row: SlotRow) -> SlotRow:
        """Return the row with a slot for each action, unless two micro-batches are computed at a time."""
        return row if self.schedule_spec.overlap else split_pairs(row)

    def _snapshots(self, row: SlotRow, messages: Sequence[int] = ()) -> tuple[Counts, Counts]:
        """Return the distinct counts at the start of the slots.

        Args:
            messages: messages in memory at each slot. Empty: they are not counted.

        Returns:
            [snapshots, `MemoryColumns.size` + 2]: the counts and `MemorySnapshots.occurrence`.
            [snapshots, chunk classes]: the micro-batches in flight, those that run backward included.
        """
        columns = self.columns
        states = self._slot_states(row, messages or [0] * len(row))
        in_flight, delayed, running = zip(*states, strict=True)
        base = np.zeros((len(states), columns.size + 2))
        base[:, : columns.size] = (
            np.array(in_flight) @ self._in_flight_by_class + np.array(delayed) @ self._delayed_wgrad_by_class
        )
        base[:, columns.end_column("hidden")] += list(states.values())
        known = {which: self._running_snapshots(which) for which in set(running)}
        runs = [known[which] for which in running]
        num_rows = [len(run) for run in runs]
        found: Counts = np.repeat(base, num_rows, axis=0)
        found += np.concatenate(runs)
        backward = np.array(running)[:, 1]
        unfinished = np.array(in_flight, dtype=float)
        unfinished[np.arange(len(backward)), backward] += backward >= 0
        return found, np.repeat(unfinished, num_rows, axis=0)

    def _slot_states(
        self, row: SlotRow, messages: Sequence[int]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...], RunningChunks], int]:
        """Return the chunks in flight and with delayed weight gradients as a slot begins, and what runs.

        The values are the most messages in memory.
        """
        in_flight = [0] * len(self._distinct_chunks)
        delayed = [0] * len(self._distinct_chunks)
        found: dict[tuple[tuple[int, ...], tuple[int, ...], RunningChunks], int] = {}
        for slot, num_messages in zip(row, messages, strict=True):
            forward = backward = -1
            for action in slot:
                own = self._chunk_class[action.stage]
                kind = action.kind
                if kind == "F":
                    forward = own
                elif kind != "W":
                    backward = own
                    in_flight[own] -= 1
            state = tuple(in_flight), tuple(delayed), (forward, backward)
            found[state] = max(found.get(state, 0), num_messages)
            if slot[-1].kind == "W":
                delayed[self._chunk_class[slot[-1].stage]] -= 1
            if forward >= 0:
                in_flight[forward] += 1
            if backward >= 0:
                delayed[backward] += slot[-1].kind == "I"
        return found

    def _running_snapshots(self, running: RunningChunks) -> Counts:
        """Return the snapshots of concurrently running chunks, [snapshots, `MemoryColumns.size` + 2].

        The last two columns are `MemorySnapshots.occurrence`.
        """
        forward, backward = (None if own < 0 else self._distinct_chunks[own] for own in running)
        key = (self.splits_backward, self.schedule_spec.overlap, self._finds_all, forward, backward)
        if key not in self._running_cache:
            if forward and backward:
                self._running_cache[key] = self._overlap_snapshots(forward, backward)
            else:
                found: Iterable[Counts] = [np.zeros(self.columns.size)]
                if forward:
                    found = self._forward_snapshots(forward)
                elif backward:
                    found = self._backward_snapshots(backward)
                run = np.array(list(found))
                # With two micro-batches at a time, one is being offloaded and the other prefetched.
                run[:, self.columns.end_column("in_transit")] += 2.0 if self.schedule_spec.overlap else 1.0
                self._running_cache[key] = _with_occurrence(run, 1.0, 1.0)
        return self._running_cache[key]

    def _overlap_snapshots(self, forward_chunk: ModelChunk, backward_chunk: ModelChunk) -> Counts:
        if not self._finds_all:
            before = self._saved(backward_chunk)
            before[self.columns.end_column("in_transit")] += 2.0
            return _with_occurrence(before[None], 1.0, 1.0)
        # Only schedules that compute two micro-batches at a time need it.
        from moefold.cost.overlap_memory import OverlapSpec, overlap_snapshots

        plain, paused = (
            overlap_snapshots(
                OverlapSpec(self.columns, self.splits_backward, recomputes), forward_chunk, backward_chunk
            )
            for recomputes in (False, True)
        )
        return np.concatenate([_with_occurrence(plain, 1.0, 0.0), _with_occurrence(paused, 0.0, 1.0)])

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
        """Return the counts of the first `num_layers` layers of a running chunk, and of the first one's input."""
        row = np.zeros(self.columns.size)
        row[self.columns.end_column("embedding" if chunk.has_embedding else "hidden")] += 1
        for kind in chunk.kinds[:num_layers]:
            row[self.columns.layer_column("saved") + kind] += 1
        return row

    def _saved(self, chunk: ModelChunk) -> Counts:
        row = self._saved_before(chunk, len(chunk.kinds))
        if chunk.has_loss:
            row[self.columns.end_column("head")] += 1
            row[self.columns.end_column("mtp")] += chunk.num_mtp_layers
        return row

    def _in_flight(self, chunk: ModelChunk) -> Counts:
        """Return the counts of a chunk between its passes.

        A chunk keeps its input. Its output belongs to the next stage, except where the head reads it. Where layers save
        their outputs, a chunk therefore keeps one hidden state less.
        """
        row = self._saved(chunk)
        is_empty = not (chunk.has_embedding or chunk.kinds)
        if self.schedule_spec.saves_outputs and not chunk.has_loss and not is_empty:
            row[self.columns.end_column("embedding" if chunk.has_embedding else "hidden")] -= 1
        return row

    def _delayed_wgrad(self, chunk: ModelChunk, first_layer: int = 0) -> Counts:
        row = np.zeros(self.columns.size)
        for kind in chunk.kinds[first_layer:]:
            row[self.columns.layer_column("delayed_wgrad") + kind] += 1
        if chunk.has_loss:
            row[self.columns.end_column("delayed_head")] += 1 + chunk.num_mtp_layers
            row[self.columns.end_column("delayed_mtp")] += chunk.num_mtp_layers
        return row


def _with_occurrence(rows: Counts, without_recompute: float, with_recompute: float) -> Counts:
    return np.hstack([rows, np.tile([without_recompute, with_recompute], (len(rows), 1))])


def _last_layer_of_each_kind(kinds: Sequence[int]) -> list[int]:
    return sorted({kind: i for i, kind in enumerate(kinds)}.values())


def _ends_of_runs(kinds: Sequence[int]) -> list[int]:
    """Return the first and last layer of each run of a kind."""
    last = len(kinds) - 1
    return [i for i, kind in enumerate(kinds) if i in (0, last) or kind != kinds[i - 1] or kind != kinds[i + 1]]
