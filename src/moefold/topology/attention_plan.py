"""Plan of the attention of a micro-batch set: the rows that each rank computes, and the rows that are sent for it.

Only visible (query, key) pairs are computed: a task is a run of rows of one document, computed whole on one rank.
Tasks start where their tokens are placed. If the work of the ranks differs, rows leave the ranks that have too much
(core attention disaggregation, arXiv:2510.18121). Rows of queries are sent to the rank that computes them if it does
not hold them, rows of keys and values once to each rank that needs them. Where EP folds over dp x cp, every layer waits
for the slowest rank of the micro-batch set, so work is balanced inside each micro-batch set.

The plan has only integers from the lengths of the documents: every rank computes the same, without communication.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.topology.token_placement import Integers, Placement, repeat_indices

TOLERANCE_UNIT = 1_000_000
"""Tolerances are rounded to this fraction, so that every rank computes with the same integers."""


class TokenRanges(NamedTuple):
    """Disjoint ranges of tokens, ascending, with a gap between any two. Their rows are in this order in a buffer."""

    firsts: Integers
    """Number of the first token of each range."""
    stops: Integers

    @property
    def num_rows(self) -> int:
        """Tokens of all ranges."""
        return int((self.stops - self.firsts).sum())

    def rows_of(self, tokens: Integers) -> Integers:
        """Return the rows of tokens in the buffer. -1: the token is in no range."""
        if not len(self.firsts):
            return np.full(len(tokens), -1)
        lengths = self.stops - self.firsts
        i = np.searchsorted(self.firsts, tokens, "right") - 1
        rows = np.cumsum(lengths)[i] - lengths[i] + tokens - self.firsts[i]
        return np.where((i >= 0) & (tokens < self.stops[i]), rows, -1)


class Transfers(NamedTuple):
    """Runs of consecutive tokens that are sent between ranks, by destination, then source, then number of the token."""

    sources_X: Integers
    destinations_X: Integers
    firsts_X: Integers
    """Number of the first token of each run."""
    lengths_X: Integers

    @property
    def num_rows(self) -> int:
        """Rows of all runs."""
        return int(self.lengths_X.sum())

    def sent_by(self, rank: int, num_ranks: int) -> tuple[Integers, list[int]]:
        """Return the tokens whose rows a rank sends, by destination, and the number for each destination."""
        return self._tokens(self.sources_X == rank, self.destinations_X, num_ranks)

    def received_by(self, rank: int, num_ranks: int) -> tuple[Integers, list[int]]:
        """Return the tokens whose rows a rank receives, by source, and the number from each source."""
        return self._tokens(self.destinations_X == rank, self.sources_X, num_ranks)

    def _tokens(self, is_chosen: NDArray[np.bool_], peers: Integers, num_ranks: int) -> tuple[Integers, list[int]]:
        run, offset = repeat_indices(self.lengths_X[is_chosen])
        counts = sum_by(peers[is_chosen], self.lengths_X[is_chosen], num_ranks)
        return self.firsts_X[is_chosen][run] + offset, counts.tolist()

    def between(self, members: Integers) -> "Transfers":
        """Return the transfers between the members of a group, given the member of each rank of the micro-batch set."""
        sources = members[self.sources_X]
        destinations = members[self.destinations_X]
        order = np.lexsort((self.firsts_X, sources, destinations))
        return Transfers(sources[order], destinations[order], self.firsts_X[order], self.lengths_X[order])

    def received(self, num_ranks: int) -> Integers:
        """Return the rows that each rank receives, int64 [num_ranks]."""
        return sum_by(self.destinations_X, self.lengths_X, num_ranks)

    def sent(self, num_ranks: int) -> Integers:
        """Return the rows that each rank sends, int64 [num_ranks]."""
        return sum_by(self.sources_X, self.lengths_X, num_ranks)


@dataclass(frozen=True)
class Exchange:
    """Rows that are sent for the attention of a micro-batch set.

    The rows of the output return on the way of the queries. No row is sent to the rank that holds it, or twice to the
    same rank.
    """

    queries: Transfers
    keys: Transfers
    """Rows of keys and values, which are sent together."""


@dataclass(frozen=True)
class AttentionPlan:
    """Tasks of a micro-batch set, in columns, by the rank that computes, then number of the first token.

    A task is rows of one document. Each attends to the keys of the document up to its own.

    Args:
        window: sliding window: maximum number of keys of a query, its own included. 0: no limit.
        documents_K: index of the document of each task.
        firsts_K: number of the first token of each task.
        stops_K: number of the last token of each task, plus 1.
        compute_ranks_K: rank that computes each task.
    """

    placement: Placement
    window: int
    documents_K: Integers
    firsts_K: Integers
    stops_K: Integers
    compute_ranks_K: Integers

    @cached_property
    def document_starts(self) -> Integers:
        """Number of the first token of the document of each task."""
        return self.placement.bounds_N[self.documents_K]

    @cached_property
    def first_keys(self) -> Integers:
        """Number of the first token that the rows of each task attend to."""
        if not self.window:
            return self.document_starts
        return np.maximum(self.document_starts, self.firsts_K - self.window + 1)

    @cached_property
    def pairs(self) -> Integers:
        """Visible (query, key) pairs of each task."""
        starts = self.document_starts
        return pairs_before(self.stops_K - starts, self.window) - pairs_before(self.firsts_K - starts, self.window)

    @cached_property
    def tasks_by_document(self) -> tuple[Integers, Integers]:
        """Indices of the tasks sorted by document, and the documents in that order."""
        order = np.argsort(self.documents_K, kind="stable")
        return order, self.documents_K[order]

    @cached_property
    def pairs_of_ranks(self) -> Integers:
        """Visible pairs that each rank computes, int64 [dp * cp]."""
        return sum_by(self.compute_ranks_K, self.pairs, self.placement.shape.num_ranks)

    def exchange(self, rank: int | None = None) -> Exchange:
        """Compute the rows that are sent.

        Args:
            rank: compute only the rows that this rank sends or receives, which is faster. None means all rows.
        """
        tasks = np.arange(len(self.compute_ranks_K)) if rank is None else self._tasks_of(rank)
        compute_ranks = self.compute_ranks_K[tasks]
        stops = self.stops_K[tasks]
        queries = self._transfers(compute_ranks, self.firsts_K[tasks], stops, rank)
        return Exchange(queries, self._transfers(compute_ranks, self.first_keys[tasks], stops, rank))

    def needed_tokens(self, rank: int) -> tuple[TokenRanges, TokenRanges]:
        """Return the tokens whose queries a rank computes, and the tokens whose keys and values it needs for them."""
        is_own = self.compute_ranks_K == rank
        compute_ranks = self.compute_ranks_K[is_own]
        stops = self.stops_K[is_own]
        queries, keys = (
            TokenRanges(*_union(compute_ranks, firsts[is_own], stops, self.placement.shape.num_tokens)[1:])
            for firsts in (self.firsts_K, self.first_keys)
        )
        return queries, keys

    def _tasks_of(self, rank: int) -> Integers:
        """Return the indices of the tasks of the documents that a rank computes or holds a part of."""
        placement = self.placement
        is_own = np.zeros(len(placement.bounds_N), bool)
        is_own[self.documents_K[self.compute_ranks_K == rank]] = True
        runs = placement.ranks_M == rank
        first = np.searchsorted(placement.bounds_N, placement.firsts_M[runs], "right") - 1
        last = np.searchsorted(placement.bounds_N, (placement.firsts_M + placement.lengths_M)[runs] - 1, "right") - 1
        run, offset = repeat_indices(last - first + 1)
        is_own[first[run] + offset] = True
        return np.flatnonzero(is_own[self.documents_K])

    def _transfers(self, compute_ranks: Integers, firsts: Integers, stops: Integers, rank: int | None) -> Transfers:
        """Return the runs of tokens of some ranges that another rank holds than the rank that needs the range."""
        placement = self.placement
        compute_ranks, firsts, stops = _union(compute_ranks, firsts, stops, placement.shape.num_tokens)
        order = placement.runs_by_token
        run_firsts = placement.firsts_M[order]
        first_run = np.searchsorted(run_firsts, firsts, "right") - 1
        last_run = np.searchsorted(run_firsts, stops - 1, "right") - 1
        need, offset = repeat_indices(last_run - first_run + 1)
        run = first_run[need] + offset
        sources = placement.ranks_M[order[run]]
        begins = np.maximum(firsts[need], run_firsts[run])
        ends = np.minimum(stops[need], run_firsts[run] + placement.lengths_M[order[run]])
        destinations = compute_ranks[need]
        is_sent = sources != destinations
        if rank is not None:
            is_sent &= (sources == rank) | (destinations == rank)
        sent_ids = np.flatnonzero(is_sent)
        sent_ids = sent_ids[np.lexsort((begins[sent_ids], sources[sent_ids], destinations[sent_ids]))]
        return Transfers(sources[sent_ids], destinations[sent_ids], begins[sent_ids], (ends - begins)[sent_ids])


def pairs_before(rows: Integers, window: int) -> Integers:
    """Return the visible (query, key) pairs of the first rows of a document."""
    full: Integers = np.minimum(rows, window) if window else rows
    return full * (full + 1) // 2 + (rows - full) * window


def sum_by(keys: Integers, values: Integers, count: int) -> Integers:
    """Return the exact sum of the values of each key, int64 [count]."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, keys, values)
    return sums


def plan_attention(
    placement: Placement,
    *,
    window: int = 0,
    tolerance: float | None = None,
    block: int = 128,
    pool: int = 0,
    nodes: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plan the attention of a micro-batch set. It is deterministic: every rank computes the same plan.

    With a tolerance, no rank of a pool has more than (1 + tolerance) times the mean work of the pool, plus the work of
    one block at the end of the longest document. A rank with more work gives rows from the ends of its tasks to a rank
    with less, rows with the most work for their bytes first. It prefers a rank that needs the keys of the document
    anyway, then a rank of its node, then the rank with the least work.

    Args:
        window: sliding window: maximum number of keys of a query, its own included. 0: no limit.
        tolerance: see above, at least 0, or None if every rank computes the rows that it holds.
        block: documents are cut between ranks at multiples of this, in tokens from their start.
        pool: number of ranks that share work, a divisor of the number of ranks. 0: all.
        nodes: node of each rank, or None if all ranks are in one node.
    """
    documents, firsts, stops, compute_ranks = _tasks_at_home(placement)
    plan = AttentionPlan(placement, window, documents, firsts, stops, compute_ranks)
    num_ranks = placement.shape.num_ranks
    pool = pool or num_ranks
    if tolerance is None or pool == 1:
        return plan
    moves = [
        move
        for first in range(0, num_ranks, pool)
        for move in _Balancer(plan, range(first, first + pool), tolerance, block, nodes).moves()
    ]
    return _with_moves(plan, moves)


def _tasks_at_home(placement: Placement) -> tuple[Integers, Integers, Integers, Integers]:
    """Return document, first and stop token, and rank of each part of a document that a rank holds."""
    run_stops = placement.firsts_M + placement.lengths_M
    bounds = placement.bounds_N
    first = np.searchsorted(bounds, placement.firsts_M, "right") - 1
    last = np.searchsorted(bounds, run_stops - 1, "right") - 1
    run, offset = repeat_indices(last - first + 1)
    document = first[run] + offset
    begins = np.maximum(placement.firsts_M[run], bounds[document])
    ends = np.minimum(run_stops[run], bounds[document + 1])
    return _joined(document, begins, ends, placement.ranks_M[run])


def _joined(
    documents: Integers, firsts: Integers, stops: Integers, compute_ranks: Integers
) -> tuple[Integers, Integers, Integers, Integers]:
    """Sort tasks by rank and token. Join tasks of one document that follow each other on a rank."""
    order = np.lexsort((firsts, compute_ranks))
    documents, firsts, stops, compute_ranks = documents[order], firsts[order], stops[order], compute_ranks[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(compute_ranks) != 0) | (np.diff(documents) != 0) | (firsts[1:] != stops[:-1])
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(order)) - 1
    return documents[starts], firsts[starts], stops[ends], compute_ranks[starts]


def _union(
    compute_ranks: Integers, firsts: Integers, stops: Integers, num_tokens: int
) -> tuple[Integers, Integers, Integers]:
    """Join the ranges of tokens that overlap or touch, for each rank."""
    if not len(compute_ranks):
        return compute_ranks, firsts, stops
    # Ranges of different ranks lie in different parts of one line, with a gap.
    shift = compute_ranks * (num_tokens + 1)
    order = np.argsort(firsts + shift, kind="stable")
    begins = (firsts + shift)[order]
    reached = np.maximum.accumulate((stops + shift)[order])
    is_new = np.ones(len(order), bool)
    is_new[1:] = begins[1:] > reached[:-1]
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(order)) - 1
    compute_rank = compute_ranks[order][starts]
    return (
        compute_rank,
        begins[starts] - compute_rank * (num_tokens + 1),
        reached[ends] - compute_rank * (num_tokens + 1),
    )


class _Move(NamedTuple):
    """Rows from a number on leave a task: they are cut off its end."""

    task: int
    first: int
    stop: int
    compute_rank: int


class _Balancer:
    """Greedy moves of rows from ranks with too much work to ranks with less, inside one pool.

    Every step empties a task, brings its rank down to the limit, or brings the destination up to it.
    """

    def __init__(
        self, plan: AttentionPlan, ranks: range, tolerance: float, block: int, nodes: Sequence[int] | None
    ) -> None:
        self._plan = plan
        self._block = block
        self._ranks = ranks
        self._nodes = nodes
        self._pairs = {rank: int(plan.pairs_of_ranks[rank]) for rank in ranks}
        total = sum(self._pairs.values()) * (TOLERANCE_UNIT + round(tolerance * TOLERANCE_UNIT))
        self._limit = -(-total // (len(ranks) * TOLERANCE_UNIT))
        self._ranks_of_document: dict[int, list[int]] = {}
        self._stops: dict[int, int] = {}
        """End of the remaining rows of each task that has given rows."""
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        """Ranks below the limit with their pairs, by node and, under -1, for all nodes. Old entries are skipped."""

    def moves(self) -> Iterable[_Move]:
        """Yield the moves of attention rows from ranks above the limit to ranks below it."""
        sources = [rank for rank in self._ranks if self._pairs[rank] > self._limit]
        if not sources:
            return
        for rank in self._ranks:
            self._push(rank)
        for source in sorted(sources, key=lambda rank: (-self._pairs[rank], rank)):
            tasks = self._movable_tasks(source)
            # Work that is too coarse for the remaining room waits for tasks of shorter documents with finer blocks.
            for may_overfill in (False, True):
                for task in tasks:
                    if self._pairs[source] > self._limit:
                        yield from self._move_rows(source, task, may_overfill=may_overfill)

    def _movable_tasks(self, source: int) -> list[int]:
        """Return the tasks of a rank, in descending order of their pairs for each row that would be sent."""
        plan = self._plan
        first, stop = np.searchsorted(plan.compute_ranks_K, (source, source + 1))
        tasks = slice(first, stop)
        rows = 2 * plan.stops_K[tasks] - plan.firsts_K[tasks] - plan.first_keys[tasks]
        return [int(first + i) for i in np.argsort(-(plan.pairs[tasks] // rows), kind="stable")]

    def _move_rows(self, source: int, task: int, *, may_overfill: bool) -> Iterable[_Move]:
        """Give rows from the end of a task until it is empty or less than half a block of its rows is too much.

        Args:
            may_overfill: whether a destination may have up to a block more than the limit.
        """
        plan = self._plan
        document = int(plan.documents_K[task])
        start = int(plan.document_starts[task])
        first = int(plan.firsts_K[task]) - start
        stop = self._stops.get(task, int(plan.stops_K[task])) - start
        while stop > first:
            surplus = self._pairs[source] - self._limit
            last_cut = max(first, (stop - 1) // self._block * self._block)
            block_pairs = self._pairs_before(stop) - self._pairs_before(last_cut)
            if 2 * surplus < block_pairs:
                return
            compute_rank = self._receiving_rank(source, document, block_pairs)
            room = self._limit - self._pairs[compute_rank]
            if room < block_pairs and not may_overfill:
                return
            cut = self._split_row(first, stop, min(surplus, room), rounds_down=room < surplus)
            pairs = self._pairs_before(stop) - self._pairs_before(cut)
            self._pairs[source] -= pairs
            self._pairs[compute_rank] += pairs
            self._push(compute_rank)
            self._push(source)
            if compute_rank not in (compute_ranks := self._compute_ranks(document)):
                compute_ranks.append(compute_rank)
            yield _Move(task, start + cut, start + stop, compute_rank)
            stop = cut
            self._stops[task] = start + stop

    def _split_row(self, first: int, stop: int, needed: int, *, rounds_down: bool) -> int:
        """Return the place for a cut after which the rows of a task have about this many pairs, at least one block.

        Args:
            first: first row of the task, from the start of its document.
            stop: row after its last.
            needed: pairs of the rows after the cut.
            rounds_down: take at most this many pairs, unless it is one block. Otherwise the nearest number.
        """
        before = self._pairs_before(stop) - needed
        if before <= self._pairs_before(first):
            return first
        window = self._plan.window
        if window and before > window * (window + 1) // 2:
            rows = window + (before - window * (window + 1) // 2) // window
        else:
            rows = (isqrt(8 * before + 1) - 1) // 2
        low = max(first, rows // self._block * self._block)
        high = (rows // self._block + 1) * self._block
        is_exact = self._pairs_before(low) == before
        is_high_nearer = self._pairs_before(high) - before < before - self._pairs_before(low)
        return high if high < stop and not is_exact and (rounds_down or is_high_nearer) else low

    def _pairs_before(self, rows: int) -> int:
        window = self._plan.window or rows
        full = min(rows, window)
        return full * (full + 1) // 2 + (rows - full) * window

    def _receiving_rank(self, source: int, document: int, needed: int) -> int:
        """Return the rank that takes rows. It always has less work than the limit."""
        room = {rank: self._limit - self._pairs.get(rank, self._limit) for rank in self._compute_ranks(document)}
        holder = max(room, key=lambda rank: (room[rank], -rank))
        if room[holder] >= needed:
            return holder
        near = None if self._nodes is None else self._lightest(self._nodes[source])
        if near is not None and self._limit - self._pairs[near] >= needed:
            return near
        compute_rank = self._lightest(-1)
        assert compute_rank is not None, "the mean of all ranks is at most the limit"
        return compute_rank

    def _compute_ranks(self, document: int) -> list[int]:
        """Return the ranks that compute rows of a document. They hold or receive keys of it."""
        if document not in self._ranks_of_document:
            order, documents = self._plan.tasks_by_document
            first, stop = np.searchsorted(documents, (document, document + 1))
            compute_ranks = self._plan.compute_ranks_K[order[first:stop]]
            self._ranks_of_document[document] = list(dict.fromkeys(compute_ranks.tolist()))
        return self._ranks_of_document[document]

    def _lightest(self, heap: int) -> int | None:
        entries = self._heaps.get(heap, [])
        while entries:
            pairs, rank = entries[0]
            if pairs == self._pairs[rank] and pairs < self._limit:
                return rank
            heapq.heappop(entries)
        return None

    def _push(self, rank: int) -> None:
        if self._pairs[rank] >= self._limit:
            return
        for heap in (-1,) if self._nodes is None else (-1, self._nodes[rank]):
            heapq.heappush(self._heaps.setdefault(heap, []), (self._pairs[rank], rank))


def _with_moves(plan: AttentionPlan, moves: Sequence[_Move]) -> AttentionPlan:
    """Return the plan after the moves. A task's moves are in order, each ends where the next move begins, backwards."""
    if not moves:
        return plan
    tasks, firsts, stops, compute_ranks = (np.array(column, np.int64) for column in zip(*moves, strict=True))
    rest_stops = plan.stops_K.copy()
    np.minimum.at(rest_stops, tasks, firsts)
    keeps = rest_stops > plan.firsts_K
    documents, firsts, stops, compute_ranks = _joined(
        np.concatenate((plan.documents_K[keeps], plan.documents_K[tasks])),
        np.concatenate((plan.firsts_K[keeps], firsts)),
        np.concatenate((rest_stops[keeps], stops)),
        np.concatenate((plan.compute_ranks_K[keeps], compute_ranks)),
    )
    return AttentionPlan(plan.placement, plan.window, documents, firsts, stops, compute_ranks)
