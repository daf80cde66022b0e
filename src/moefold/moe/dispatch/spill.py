"""Who computes what when ranks are unevenly loaded: least-loaded expert parallelism (arXiv:2601.17111).

Integers alone, so that every rank comes to the same answer from the same counts.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class RebalanceRule:
    """When copies leave the rank of their expert, and how they are cut."""

    threshold: float
    """Nothing moves unless the busiest rank has more than this many times the mean load."""
    capacity: float
    """Load that a rank should not exceed, in mean loads; at least 1."""
    min_tokens: int
    """Fewest copies of one expert that are worth sending its weights along; at least 1."""

    def max_tokens_per_rank(self, total: int, num_ranks: int) -> int:
        """Copies that a rank should not exceed when there are `total`."""
        return math.ceil(self.capacity * total / num_ranks)


def plan_rebalance(load_E: Sequence[int] | Counts, num_ranks: int, rule: RebalanceRule) -> Counts:
    """Decide how many copies of each expert each rank computes.

    Rank r owns experts r*E/P .. (r+1)*E/P - 1. Below the threshold it computes all of their copies. Above it, each
    rank over the limit gives copies to the least-loaded rank until it is at the limit: its largest expert first, so
    that few weights travel. No rank gets over the limit by what it is given, and nobody is given fewer than
    `min_tokens` copies of an expert. A rank stays over the limit only if no such move is left; with min_tokens=1
    there always is one.

    Args:
        load_E: copies of each expert, from all ranks.
        num_ranks: P, which divides E.
        rule: when and how to move copies.

    Returns:
        Copies, int64 [P, E]; the columns sum to `load_E`.
    """
    shares_PE = home_assignment(load_E, num_ranks)
    loads = [int(load) for load in shares_PE.sum(1)]
    total = sum(loads)
    if max(loads) * num_ranks <= rule.threshold * total:
        return shares_PE
    limit = rule.max_tokens_per_rank(total, num_ranks)
    helpers = [(load, rank) for rank, load in enumerate(loads) if load < limit]
    heapq.heapify(helpers)
    busy = sorted((rank for rank in range(num_ranks) if loads[rank] > limit), key=lambda rank: (-loads[rank], rank))
    for rank in busy:
        while loads[rank] > limit and _move_chunk(shares_PE, loads, rank, helpers, limit, rule.min_tokens):
            pass
    return shares_PE


def home_assignment(load_E: Sequence[int] | Counts, num_ranks: int) -> Counts:
    """The shares of plain expert parallelism, int64 [P, E]: each rank computes its own experts."""
    load_PE = np.asarray(load_E, dtype=np.int64).reshape(num_ranks, -1)
    shares_PPE = np.zeros((num_ranks, *load_PE.shape), dtype=np.int64)
    shares_PPE[np.arange(num_ranks), np.arange(num_ranks)] = load_PE
    return shares_PPE.reshape(num_ranks, -1)


class TokenAssignment:
    """Which copies go where: those of an expert, in the order of their sources, are dealt out in the order of ranks.

    Sources and ranks are the same processes in the same order, so many copies of a widely shared expert stay at home.

    Args:
        counts_SE: copies of each expert from each of S sources.
        assignment_PE: copies that each rank computes; the columns sum to those of `counts_SE`.
    """

    def __init__(self, counts_SE: Counts, assignment_PE: Counts) -> None:
        self._source_ends, self._rank_ends = counts_SE.cumsum(0), assignment_PE.cumsum(0)
        self._source_starts, self._rank_starts = self._source_ends - counts_SE, self._rank_ends - assignment_PE

    def from_source(self, source: int) -> Counts:
        """Copies of each expert that a source sends to each rank, int64 [P, E]."""
        starts = np.maximum(self._rank_starts, self._source_starts[source])
        return np.maximum(np.minimum(self._rank_ends, self._source_ends[source]) - starts, 0)

    def to_rank(self, rank: int) -> Counts:
        """Copies of each expert that a rank gets from each source, int64 [S, E]."""
        starts = np.maximum(self._source_starts, self._rank_starts[rank])
        return np.maximum(np.minimum(self._source_ends, self._rank_ends[rank]) - starts, 0)


def order_by_rank(sent_PE: Counts) -> Counts:
    """How a source sorts its rows, which are sorted by expert, for the exchange.

    They go by rank; for one rank, its own experts come first, then those that it borrows.

    Args:
        sent_PE: copies of each expert that this source sends to each rank.

    Returns:
        int64 [R]: the place of each row among the rows sorted by expert.
    """
    before_E = sent_PE.sum(0).cumsum() - sent_PE.sum(0)
    starts_PE = before_E + sent_PE.cumsum(0) - sent_PE
    ranks, experts = sent_PE.nonzero()
    is_borrowed = owner_ranks(*sent_PE.shape)[experts] != ranks
    pieces = np.lexsort((experts, is_borrowed, ranks))
    ranks, experts = ranks[pieces], experts[pieces]
    counts, starts = sent_PE[ranks, experts], starts_PE[ranks, experts]
    order: Counts = np.repeat(starts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
    return order


def owner_ranks(num_ranks: int, num_experts: int) -> Counts:
    """The rank that owns each expert, int64 [E]."""
    return np.arange(num_experts, dtype=np.int64) // (num_experts // num_ranks)


def _move_chunk(
    assignment_PE: Counts,
    loads: list[int],
    overloaded_rank: int,
    underloaded_ranks: list[tuple[int, int]],
    limit: int,
    min_tokens: int,
) -> bool:
    """Move one chunk from a rank over the limit to the least-loaded one; False if none may move.

    A rank that is relieved of more than its excess has room for less than a chunk: it is never a helper.
    """
    experts_per_rank = assignment_PE.shape[1] // len(loads)
    first = overloaded_rank * experts_per_rank
    expert = first + int(assignment_PE[overloaded_rank, first : first + experts_per_rank].argmax())
    room = limit - underloaded_ranks[0][0] if underloaded_ranks else 0
    chunk = min(max(loads[overloaded_rank] - limit, min_tokens), int(assignment_PE[overloaded_rank, expert]), room)
    if chunk < min_tokens:
        return False
    _, helper = heapq.heappop(underloaded_ranks)
    assignment_PE[overloaded_rank, expert] -= chunk
    assignment_PE[helper, expert] += chunk
    loads[overloaded_rank] -= chunk
    loads[helper] += chunk
    heapq.heappush(underloaded_ranks, (loads[helper], helper))
    return True
