"""The moments of a step at which a pipeline rank may have most in memory, as counts of what is there. Torch-free.

The counts depend on the schedule and on what the stages hold, not on any size: a search finds them once and multiplies
them with the bytes of each mapping. They are read off the runtime's own order of work, as `metrics/memory_formula.py`
does for one recipe; a test holds the two to the same bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from moefold.config.action import SlotRow
from moefold.config.paired_schedule import paired_row, slots
from moefold.config.schedule_order import rank_row
from moefold.config.schedule_walk import alone
from moefold.config.schedules import SCHEDULES
from moefold.metrics.memory_formula import WAITS_FOR_SENDS
from moefold.plan.columns import Columns, Counts, undominated
from moefold.plan.pair_counts import Pairing, pair_rows
from moefold.plan.stage_split import Chunk

STEADY_ROUNDS = 3
"""Micro-batches for each rank behind which nothing new happens until the way out; see `Order.shortest`."""


Running = tuple[int, int]
"""Numbers of what the stages hold that run forward and backward; -1: none does."""


@dataclass(frozen=True)
class Moments:
    """Rows of counts, one for each moment of some rank that no other one outdoes."""

    held: Counts
    """What of the model the rank has, [moments, `Columns.state_size`]."""
    active: Counts
    """What is there of activations, [moments, `Columns.size`]."""
    occurs: Counts
    """1 where there is such a moment if no exchange of experts runs again, and if some do, [moments, 2]."""
    messages: Counts
    """Hidden states that each further micro-batch adds, [moments]: sent and kept, or awaited."""

    def with_further(self, count: int, columns: Columns) -> "Moments":
        """The same with so many more micro-batches in the steady phase."""
        active = self.active.copy()
        active[:, columns.end("hidden")] += count * self.messages
        return replace(self, active=active)


@dataclass(frozen=True)
class Order:
    """How a step is ordered."""

    schedule: str
    pp: int
    vpp: int
    micro_batches: int
    overlap: bool = False
    keeps_messages: bool = True
    """Whether what is sent stays until the step ends, and room for all that comes is made when it begins."""

    @property
    def shortest(self) -> "Order":
        """With as many micro-batches as have all moments of a step: more only repeat the steady phase, and send."""
        n, most = self.micro_batches, STEADY_ROUNDS * self.pp
        if n <= most or self.schedule == "gpipe" and self.pp > 1:
            return self
        # Rounds of another length than pp would change with their number.
        per_round = n // max(1, n // self.pp)
        repeats = per_round == self.pp or self.schedule in ("1f1b", "zbv", "dualpipev") and self.vpp < 3
        return replace(self, micro_batches=most) if repeats else self


def moments_of(
    order: Order,
    chunks: Sequence[Chunk],
    placed: Sequence[Sequence[int]],
    columns: Columns,
) -> Moments:
    """The moments that count.

    Args:
        order: of the step.
        chunks: what each stage holds, in the order of the model.
        placed: for each pipeline rank the numbers of its stages.
        columns: for the kinds of the model.
    """
    walk = _walk(order, chunks, placed, columns, is_whole=True)
    found = []
    for rank, stages in enumerate(placed):
        rows = walk.moments(row_of(order, rank), stages)
        found.append(np.hstack([np.tile(_held(chunks, stages, columns), (len(rows), 1)), rows]))
    active = columns.state_size + columns.size
    rows = undominated(np.concatenate(found))
    return Moments(rows[:, : columns.state_size], rows[:, columns.state_size : active], rows[:, active:-1], rows[:, -1])


def heaviest_of(order: Order, chunks: Sequence[Chunk], placed: Sequence[Sequence[int]], columns: Columns) -> Moments:
    """One moment of the first rank and one of the last, with most layers in flight: cheap, and below what is needed.

    Of pairs it is the one before they begin, which does not depend on what runs again.

    Args:
        order: as for `moments_of`.
        chunks: the same.
        placed: the same.
        columns: the same.
    """
    walk = _walk(order, chunks, placed, columns, is_whole=False)
    held, found = [], []
    for rank in (0, len(placed) - 1):
        rows = walk.moments(row_of(order, rank), placed[rank])
        # Of those with as many layers in flight the one with most beside them.
        layers, beside = rows[:, : columns.kinds].sum(axis=1), rows[:, columns.kinds : columns.size].sum(axis=1)
        found.append(rows[np.lexsort((beside, layers))[-1]])
        held.append(_held(chunks, placed[rank], columns))
    rows = np.array(found)
    return Moments(np.array(held), rows[:, : columns.size], np.ones((len(held), 2)), rows[:, -1])


@lru_cache(maxsize=16384)
def row_of(order: Order, rank: int) -> SlotRow:
    """The work of a pipeline rank."""
    count = order.micro_batches
    if order.overlap:
        return slots(paired_row(order.schedule, rank, order.pp, order.vpp, count))
    if order.pp == 1:
        return alone(rank_row("1f1b", 0, 1, 1, count))
    name = "interleaved" if order.schedule == "1f1b" and order.vpp > 1 else order.schedule
    return alone(rank_row(name, rank, order.pp, order.vpp, count))


def _walk(
    order: Order,
    chunks: Sequence[Chunk],
    placed: Sequence[Sequence[int]],
    columns: Columns,
    *,
    is_whole: bool,
) -> "_RankWalk":
    rank_of = {stage: rank for rank, stages in enumerate(placed) for stage in stages}
    return _RankWalk(order, chunks, rank_of, columns, is_whole=is_whole)


class _RankWalk:
    """Follows one rank through its step.

    Args:
        order: of the step.
        chunks: what each stage holds.
        rank_of: of each stage.
        columns: for the kinds of the model.
        is_whole: whether all moments of pairs count, or only that before they begin.
    """

    def __init__(
        self,
        order: Order,
        chunks: Sequence[Chunk],
        rank_of: dict[int, int],
        columns: Columns,
        *,
        is_whole: bool,
    ) -> None:
        self.order, self.chunks, self.rank_of, self.columns = order, chunks, rank_of, columns
        self.splits = order.pp > 1 and SCHEDULES[order.schedule].splits_backward
        # Stages that hold the same are counted together.
        known: dict[Chunk, int] = {}
        self._class_of = [known.setdefault(chunk, len(known)) for chunk in chunks]
        self._classes = list(known)
        self._whole = np.array([self._kept(chunk) for chunk in known])
        self._late = np.array([self._postponed(chunk) for chunk in known])
        self._is_whole = is_whole
        self._runs: dict[Running, Counts] = {}

    def moments(self, row: SlotRow, stages: Sequence[int]) -> Counts:
        """The counts at the start of every slot that differs from those before.

        Returns:
            [moments, `Columns.size` + 3]: behind the counts `Moments.occurs` and `Moments.messages` of them.
        """
        order, columns = self.order, self.columns
        awaited = self._awaited(stages) if order.keeps_messages else 0
        sent = {stage: self._sent(stage) for stage in stages}
        states = self._states(row, sent)
        flying, left, running = zip(*states, strict=True)
        base = np.zeros((len(states), columns.size + 3))
        base[:, : columns.size] = np.array(flying) @ self._whole + np.array(left) @ self._late
        messages, is_steady = np.array(list(states.values())).T
        base[:, columns.end("hidden")] += messages + awaited * order.micro_batches
        base[:, -1] = is_steady * sum(sent.values()) + awaited
        runs = [self._run(which) for which in running]
        found: Counts = np.repeat(base, [len(run) for run in runs], axis=0)
        found[:, :-1] += np.concatenate(runs)
        return found

    def _states(
        self, row: SlotRow, sent: dict[int, int]
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...], Running], tuple[int, bool]]:
        """What is in flight and postponed as a slot begins, with what runs.

        Of each, the most that was sent by then, and whether what is left out of the steady phase was sent before it.
        """
        flying, left, messages = [0] * len(self._classes), [0] * len(self._classes), 0
        is_steady = not self.order.overlap
        found: dict[tuple[tuple[int, ...], tuple[int, ...], Running], tuple[int, bool]] = {}
        for slot in row:
            ahead = behind = -1
            if len(slot) > 1:
                # The steady phase begins: what was there only before it, as a first backward pass alone, was sent less.
                is_steady = True
            for action in slot:
                own, kind = self._class_of[action.stage], action.kind
                if kind == "F":
                    ahead = own
                elif kind == "W":
                    left[own] -= 1
                else:
                    behind = own
                    flying[own] -= 1
            if ahead < 0 and behind < 0:
                continue
            # What was sent only grows.
            found[tuple(flying), tuple(left), (ahead, behind)] = messages, is_steady
            if ahead >= 0:
                flying[ahead] += 1
            if behind >= 0:
                messages += sent[slot[-1].stage]
                left[behind] += slot[-1].kind == "I"
        return found

    def _run(self, running: Running) -> Counts:
        """The moments of what runs at once, with `Moments.occurs` behind them, [moments, `Columns.size` + 2]."""
        if running not in self._runs:
            ahead, behind = (None if own < 0 else self._classes[own] for own in running)
            if ahead and behind:
                self._runs[running] = self._pair(ahead, behind)
            else:
                run = np.array(list(self._forward(ahead) if ahead else self._backward(behind) if behind else ()))
                # Of two micro-batches at a time, one is on its way out and the other on its way back.
                run[:, self.columns.end("in_transit")] += 2.0 if self.order.overlap else 1.0
                self._runs[running] = _with_occurs(run, 1.0, 1.0)
        return self._runs[running]

    def _pair(self, ahead: Chunk, behind: Chunk) -> Counts:
        if not self._is_whole:
            before = self._kept(behind)
            before[self.columns.end("in_transit")] += 2.0
            return _with_occurs(before[None], 1.0, 1.0)
        plain, paused = (Pairing(self.columns, self.splits, again, self._keeps_sent()) for again in (False, True))
        runs = (pair_rows(plain, ahead, behind), pair_rows(paused, ahead, behind))
        return np.concatenate([_with_occurs(runs[0], 1.0, 0.0), _with_occurs(runs[1], 0.0, 1.0)])

    def _forward(self, chunk: Chunk) -> Iterator[Counts]:
        """The end of the forward pass, and the last layer of each kind at work."""
        whole = self._kept(chunk)
        if chunk.has_loss:
            whole[self.columns.end("logits")] += 1
        yield whole
        for i in _last_of_each(chunk.kinds):
            now = self._before(chunk, i + 1)
            now[self.columns.passing + chunk.kinds[i]] += 1
            yield now

    def _backward(self, chunk: Chunk) -> Iterator[Counts]:
        """The last layer of each kind at work, and, where those behind have postponed something, the first of each."""
        now = self._before(chunk, 0)
        yield now + (self._postponed(chunk) if self.splits else 0)
        last = _last_of_each(chunk.kinds)
        first = [chunk.kinds.index(kind) for kind in set(chunk.kinds)] if self.splits else []
        for i in sorted({*last, *first}):
            now = self._before(chunk, i + 1)
            now[self.columns.passing + chunk.kinds[i]] += 1
            now[self.columns.again + chunk.kinds[i]] += 1
            now[self.columns.at("beside") + chunk.kinds[i]] += self.splits
            yield now + (self._postponed(chunk, i + 1) if self.splits else 0)

    def _before(self, chunk: Chunk, layers: int) -> Counts:
        """The embedding and the first so many layers."""
        row = np.zeros(self.columns.size)
        row[self.columns.end("embedding")] += chunk.has_embedding
        for kind in chunk.kinds[:layers]:
            row[self.columns.kept + kind] += 1
        return row

    def _kept(self, chunk: Chunk) -> Counts:
        row = self._before(chunk, len(chunk.kinds))
        if chunk.has_loss:
            row[self.columns.end("head")] += 1
            row[self.columns.end("further")] += chunk.num_further
        return row

    def _postponed(self, chunk: Chunk, behind: int = 0) -> Counts:
        row = np.zeros(self.columns.size)
        for kind in chunk.kinds[behind:]:
            row[self.columns.postponed + kind] += 1
        if chunk.has_loss:
            row[self.columns.end("postponed_head")] += 1 + chunk.num_further
            row[self.columns.end("postponed_further")] += chunk.num_further
        return row

    def _sent(self, stage: int) -> int:
        """Hidden states and gradients that a micro-batch leaves behind."""
        return (stage > 0) + (stage + 1 < len(self.chunks)) if self._keeps_sent() else 0

    def _keeps_sent(self) -> bool:
        order = self.order
        lets_go = order.schedule in WAITS_FOR_SENDS and order.vpp == 1 and not order.overlap
        return order.keeps_messages and order.pp > 1 and not lets_go

    def _awaited(self, stages: Iterable[int]) -> int:
        """Buffers for each micro-batch: one for each neighbour of a stage on another rank."""
        return sum(
            neighbour in self.rank_of and self.rank_of[neighbour] != self.rank_of[stage]
            for stage in stages
            for neighbour in (stage - 1, stage + 1)
        )


def _with_occurs(rows: Counts, plain: float, again: float) -> Counts:
    return np.hstack([rows, np.tile([plain, again], (len(rows), 1))])


def _last_of_each(kinds: Sequence[int]) -> list[int]:
    return sorted({kind: i for i, kind in enumerate(kinds)}.values())


def _held(chunks: Sequence[Chunk], stages: Sequence[int], columns: Columns) -> Counts:
    row = np.zeros(columns.state_size)
    own = [chunks[stage] for stage in stages]
    row[columns.state("stage")] = len(own)
    for chunk in own:
        row[columns.state("embedding")] += chunk.has_embedding
        row[columns.state("head")] += chunk.has_loss
        row[columns.state("further")] += chunk.num_further
        for kind in chunk.kinds:
            row[kind] += 1
        bits = sum(1 << kind for kind in set(chunk.kinds)) | (1 << columns.kinds if chunk.num_further else 0)
        row[columns.sets + bits] += 1
    if own and own[-1].has_loss and not own[-1].has_embedding:
        # The second copy of the embedding, if the model needs one, follows a first one on the same rank.
        name = "following_embedding" if own[0].has_embedding else "second_embedding"
        row[columns.state(name)] += 1
    return row
