"""The moments of a step at which a pipeline rank may have most in memory, as counts of what is there. Torch-free.

The counts depend on the schedule and on what the stages hold, not on any size: a search finds them once and multiplies
them with the bytes of each mapping. They are read off the runtime's own order of work, as `metrics/memory_formula.py`
does for one recipe; a test holds the two to the same bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.config.action import Row
from moefold.config.paired_schedule import actions, paired_row
from moefold.config.schedule_order import rank_row
from moefold.config.schedules import SCHEDULES
from moefold.metrics.memory_formula import WAITS_FOR_SENDS
from moefold.plan.stage_split import Chunk

Counts = NDArray[np.float64]
STEADY_ROUNDS = 3
"""Micro-batches for each rank behind which nothing new happens until the way out; see `_shortened`."""

AT_ONCE = 32
"""Rows that others are compared with at a time."""


@dataclass(frozen=True)
class Columns:
    """Places of what is counted, for a model of so many kinds of layers."""

    kinds: int

    @property
    def kept(self) -> int:
        """First of the columns of layers that keep their activations, by kind."""
        return 0

    @property
    def passing(self) -> int:
        """First of those of layers that run now."""
        return self.kinds

    @property
    def again(self) -> int:
        """First of those of layers that run again now."""
        return 2 * self.kinds

    @property
    def postponed(self) -> int:
        """First of those whose weights' gradients wait."""
        return 3 * self.kinds

    @property
    def ends(self) -> int:
        """First of `END_COLUMNS`."""
        return 4 * self.kinds

    def end(self, name: str) -> int:
        """Column of one of `END_COLUMNS`."""
        return self.ends + END_COLUMNS.index(name)

    @property
    def size(self) -> int:
        """Columns of activations."""
        return self.ends + len(END_COLUMNS)

    @property
    def state_size(self) -> int:
        """Columns of states: layers by kind, `STATE_COLUMNS`, and stages by the set of their layers."""
        return self.kinds + len(STATE_COLUMNS) + (2 << self.kinds)

    def state(self, name: str) -> int:
        """Column of one of `STATE_COLUMNS`."""
        return self.kinds + STATE_COLUMNS.index(name)

    @property
    def sets(self) -> int:
        """First of the columns of stages by the set of kinds of their layers, as bits; the last bit: further ones."""
        return self.kinds + len(STATE_COLUMNS)


END_COLUMNS = ("embedding", "head", "further", "logits", "postponed_head", "hidden", "in_transit")
"""What the ends of the model keep, and hidden states that are sent or awaited."""
STATE_COLUMNS = ("embedding", "head", "further", "second_embedding", "following_embedding", "stage")


@dataclass(frozen=True)
class Moments:
    """Rows of counts, one for each moment of some rank that no other one outdoes."""

    held: Counts
    """What of the model the rank has, [moments, `Columns.state_size`]."""
    active: Counts
    """What is there of activations, [moments, `Columns.size`]."""


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


def moments_of(order: Order, chunks: Sequence[Chunk], placed: Sequence[Sequence[int]], columns: Columns) -> Moments:
    """The moments that count.

    Args:
        order: of the step.
        chunks: what each stage holds, in the order of the model.
        placed: for each pipeline rank the numbers of its stages.
        columns: for the kinds of the model.
    """
    walk = _walk(order, chunks, placed, columns)
    held, active = [], []
    for rank, stages in enumerate(placed):
        found = walk.moments(row_of(order, rank, _shortened(order)), stages)
        active.append(found)
        held.append(np.broadcast_to(_held(chunks, stages, columns), (len(found), columns.state_size)))
    return Moments(*_undominated(np.concatenate(held), np.concatenate(active)))


def heaviest_of(order: Order, chunks: Sequence[Chunk], placed: Sequence[Sequence[int]], columns: Columns) -> Moments:
    """One moment of the first rank and one of the last, with most layers in flight: cheap, and below what is needed.

    Args:
        order: as for `moments_of`.
        chunks: the same.
        placed: the same.
        columns: the same.
    """
    walk = _walk(order, chunks, placed, columns)
    held, active = [], []
    for rank in (0, len(placed) - 1):
        found = walk.moments(row_of(order, rank, _shortened(order)), placed[rank])
        active.append(found[np.argmax(found[:, : columns.kinds].sum(axis=1))])
        held.append(_held(chunks, placed[rank], columns))
    return Moments(np.array(held), np.array(active))


@lru_cache(maxsize=16384)
def row_of(order: Order, rank: int, count: int) -> Row:
    """The work of a pipeline rank, with so many micro-batches."""
    if order.overlap:
        return tuple(
            action for work in paired_row(order.schedule, rank, order.pp, order.vpp, count) for action in actions(work)
        )
    if order.pp == 1:
        return rank_row("1f1b", 0, 1, 1, count)
    name = "interleaved" if order.schedule == "1f1b" and order.vpp > 1 else order.schedule
    return rank_row(name, rank, order.pp, order.vpp, count)


def _walk(order: Order, chunks: Sequence[Chunk], placed: Sequence[Sequence[int]], columns: Columns) -> "_RankWalk":
    rank_of = {stage: rank for rank, stages in enumerate(placed) for stage in stages}
    return _RankWalk(order, chunks, rank_of, columns)


class _RankWalk:
    """Follows one rank through its step."""

    def __init__(self, order: Order, chunks: Sequence[Chunk], rank_of: dict[int, int], columns: Columns) -> None:
        self.order, self.chunks, self.rank_of, self.columns = order, chunks, rank_of, columns
        self.splits = order.pp > 1 and SCHEDULES[order.schedule].splits_backward
        # Stages that hold the same are counted together.
        known: dict[Chunk, int] = {}
        self._class_of = [known.setdefault(chunk, len(known)) for chunk in chunks]
        self._classes = list(known)
        self._whole = np.array([self._kept(chunk) for chunk in known])
        self._late = np.array([self._postponed(chunk) for chunk in known])
        self._runs = {
            (i, kind): np.array(list(self._forward(chunk) if kind == "F" else self._backward(chunk)))
            for i, chunk in enumerate(known)
            for kind in "FB"
        }

    def moments(self, row: Row, stages: Sequence[int]) -> Counts:
        """The counts at the start of every action that differs from those before, [moments, columns]."""
        order, n = self.order, self.order.micro_batches
        sent = {stage: self._sent(stage) for stage in stages}
        # What is left out of the steady phase has sent what it sends.
        skipped = (n - _shortened(order)) * sum(sent.values())
        awaited = self._awaited(stages) * n if order.keeps_messages else 0
        states = self._states(row, sent)
        flying, left, running, kinds = zip(*states, strict=True)
        base = np.array(flying) @ self._whole + np.array(left) @ self._late
        base[:, self.columns.end("hidden")] += np.array(list(states.values())) + skipped + awaited
        # Of two micro-batches at a time, one is on its way out and the other on its way back.
        base[:, self.columns.end("in_transit")] = 2.0 if order.overlap else 1.0
        runs = [self._runs[which] for which in zip(running, kinds, strict=True)]
        found: Counts = np.repeat(base, [len(run) for run in runs], axis=0) + np.concatenate(runs)
        return found

    def _states(self, row: Row, sent: dict[int, int]) -> dict[tuple[Any, ...], int]:
        """What is in flight and postponed as an action begins, with its kind; and the most that was sent by then."""
        flying, left, messages = [0] * len(self._classes), [0] * len(self._classes), 0
        found: dict[tuple[Any, ...], int] = {}
        for action in row:
            kind, own = action.kind, self._class_of[action.stage]
            if kind == "W":
                left[own] -= 1
                continue
            if kind != "F":
                flying[own] -= 1
            # What was sent only grows.
            found[tuple(flying), tuple(left), own, "F" if kind == "F" else "B"] = messages
            if kind == "F":
                flying[own] += 1
            else:
                messages += sent[action.stage]
                left[own] += kind == "I"
        return found

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
        return row

    def _sent(self, stage: int) -> int:
        """Hidden states and gradients that a micro-batch leaves behind."""
        order = self.order
        if not order.keeps_messages or order.pp == 1 or order.schedule in WAITS_FOR_SENDS and order.vpp == 1:
            return 0
        return (stage > 0) + (stage + 1 < len(self.chunks))

    def _awaited(self, stages: Iterable[int]) -> int:
        """Buffers for each micro-batch: one for each neighbour of a stage on another rank."""
        return sum(
            neighbour in self.rank_of and self.rank_of[neighbour] != self.rank_of[stage]
            for stage in stages
            for neighbour in (stage - 1, stage + 1)
        )


def _shortened(order: Order) -> int:
    """As many micro-batches as have all moments of a step but for what is sent: more only repeat the steady phase."""
    n, most = order.micro_batches, STEADY_ROUNDS * order.pp
    if n <= most or order.schedule == "gpipe" and order.pp > 1:
        return n
    # Rounds of another length than pp would change with their number.
    per_round = n // max(1, n // order.pp)
    return most if per_round == order.pp or order.schedule in ("1f1b", "zbv", "dualpipev") and order.vpp < 3 else n


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


def _undominated(held: Counts, active: Counts) -> tuple[Counts, Counts]:
    """Leave out rows that nowhere have more than another one."""
    rows = np.hstack([held, active])
    # Those with most first: only one before it can outdo a row. Columns in which all have the same decide nothing.
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    left, at, start = rows.T[(rows != rows[0]).any(axis=0)], np.arange(len(rows)), 0
    while start < len(at):
        block, rest = left[:, start : start + AT_ONCE], left[:, start:]
        is_before = np.arange(rest.shape[1])[:, None] > np.arange(block.shape[1])
        stays = ~((rest[:, :, None] <= block[:, None, :]).all(axis=0) & is_before).any(axis=1)
        left = np.concatenate([left[:, :start], rest[:, stays]], axis=1)
        at = np.concatenate([at[:start], at[start:][stays]])
        start += int(stays[: block.shape[1]].sum())
    return rows[at, : held.shape[1]], rows[at, held.shape[1] :]
