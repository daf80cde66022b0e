"""Like the all-to-all, but overloaded ranks pass copies and weights on to idle ones (arXiv:2601.17111).

Weights of experts on loan: out before they compute, their gradients home and added up after.

Who computes what when ranks are unevenly loaded: least-loaded expert parallelism (arXiv:2601.17111).

Integers alone, so that every rank comes to the same answer from the same counts.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import all_to_all
from moefold.comm.groups import Group, MoEGroups
from moefold.model.moe.dispatch.alltoall import AllToAllDispatcher, AllToAllMetadata
from moefold.model.moe.dispatch.base import ExpertMigration, SplitSizes
from moefold.model.moe.permute import reorder_permutation
from moefold.ops.interface import Permutation

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
        self._source_ends = counts_SE.cumsum(0)
        self._rank_ends = assignment_PE.cumsum(0)
        self._source_starts = self._source_ends - counts_SE
        self._rank_starts = self._rank_ends - assignment_PE

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
    counts = sent_PE[ranks, experts]
    starts = starts_PE[ranks, experts]
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


class LeastLoadedDispatcher(AllToAllDispatcher):
    """Exact whatever the load: routing stays as it is, only the rank that computes a copy may be another one.

    The counts that the all-to-all exchanges anyway tell every rank the whole load, and so who computes what. While
    the load is within the threshold it does what the all-to-all does.

    Args:
        groups: of the MoE view. Under etp, ranks with the same etp coordinate lend each other the same part of F.
        num_experts: E, over all ranks.
        rule: when and how copies move.
        fp8_dispatch: whether rows travel to the experts in 8 bits.
    """

    def __init__(self, groups: MoEGroups, num_experts: int, rule: RebalanceRule, *, fp8_dispatch: bool = False) -> None:
        super().__init__(
            groups.ep, groups.etp, groups.experts, groups.expert_coordinates, num_experts, fp8_dispatch=fp8_dispatch
        )
        self._rule = rule

    def migration(self, metadata: AllToAllMetadata) -> ExpertMigration | None:
        """The experts that change ranks for this micro-batch."""
        return metadata.migration

    def _build_metadata(self, permutation: Permutation, probs_TK: Tensor, counts: Tensor) -> AllToAllMetadata:
        rank = self._ep.rank
        num_ranks = self._ep.size
        counts_SE = counts.view(self._experts.size, self._num_experts).numpy()
        load_E = counts_SE.sum(0)
        shares_PE = plan_rebalance(load_E, num_ranks, self._rule)
        if (shares_PE == home_assignment(load_E, num_ranks)).all():
            return super()._build_metadata(permutation, probs_TK, counts)
        deal = TokenAssignment(counts_SE, shares_PE)
        sent_PE = deal.from_source(rank * self._etp.size + self._etp.rank)
        order_R = torch.from_numpy(order_by_rank(sent_PE)).to(probs_TK.device, non_blocking=True)
        own = (owner_ranks(num_ranks, self._num_experts) == rank).nonzero()[0]
        here = np.concatenate((own, received_experts(shares_PE, rank)))
        arriving = torch.from_numpy(deal.to_rank(rank)[:, here]).view(num_ranks, self._etp.size, -1)
        loan = MigratedExperts.from_assignment(shares_PE, self._ep)
        return self._metadata_from_counts(
            reorder_permutation(permutation, order_R), probs_TK, torch.from_numpy(sent_PE), arriving, loan
        )


@dataclass(frozen=True)
class MigratedExperts:
    """Which experts each rank of the ep group lends to which other, seen from this rank.

    One exchange forth and one back for each micro-batch, of exactly the weights that are needed. Its autograd node
    stands between the weights and their use on every rank, so that the backward passes of all ranks meet in it.
    """

    ep: Group
    sent_experts: Sequence[int]
    """My experts to send, by their place among mine, in the order of the borrowers."""
    num_sent_to: Sequence[int]
    """How many of them each ep member borrows."""
    num_received_from: Sequence[int]
    """How many experts I borrow of each ep member; of each in ascending order."""

    @classmethod
    def from_assignment(cls, assignment_PE: Counts, ep: Group) -> "MigratedExperts":
        """The loan that lets each rank compute its share of copies, int64 [ep, E]."""
        num_ranks, num_experts = assignment_PE.shape
        owner_E = owner_ranks(num_ranks, num_experts)
        lent_PE = assignment_PE[:, owner_E == ep.rank] > 0
        lent_PE[ep.rank] = False
        borrowed_E = received_experts(assignment_PE, ep.rank)
        return cls(
            ep=ep,
            sent_experts=lent_PE.nonzero()[1].tolist(),
            num_sent_to=lent_PE.sum(1).tolist(),
            num_received_from=[int((owner_E[borrowed_E] == rank).sum()) for rank in range(num_ranks)],
        )

    def split_sizes(self) -> SplitSizes:
        """Experts lent and borrowed."""
        return SplitSizes("ep", self.num_sent_to, self.num_received_from)

    def migrate(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """See `Loan.exchange`; collective over ep."""
        both = _MigrateWeights.apply(self, *weights)
        return list(both[: len(weights)]), list(both[len(weights) :])


def received_experts(assignment_PE: Counts, rank: int) -> Counts:
    """The experts of others that a rank computes a share of, ascending."""
    is_borrowed_E = (assignment_PE[rank] > 0) & (owner_ranks(*assignment_PE.shape) != rank)
    return is_borrowed_E.nonzero()[0]


class _MigrateWeights(torch.autograd.Function):
    """(weights) -> (the same weights, borrowed weights)."""

    @staticmethod
    def forward(ctx: Any, migration: MigratedExperts, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.migration = migration
        ctx.shapes = [w.shape[1:] for w in weights]
        sent = weights[0].new_empty(len(migration.sent_experts), sum(shape.numel() for shape in ctx.shapes))
        for w, column in zip(weights, _split_matrices(sent, ctx.shapes), strict=True):
            for row, expert in enumerate(migration.sent_experts):
                column[row].copy_(w[expert])
        received = all_to_all(sent, migration.ep, migration.num_sent_to, migration.num_received_from)
        return *(w.view_as(w) for w in weights), *_split_matrices(received, ctx.shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        loan: MigratedExperts = ctx.migration
        own = grads[: len(ctx.shapes)]
        borrowed = grads[len(ctx.shapes) :]
        sent = torch.cat([grad.flatten(1) for grad in borrowed], 1)
        returned = all_to_all(sent, loan.ep, loan.num_received_from, loan.num_sent_to)
        if not loan.sent_experts:
            return None, *own
        # A copy of all my experts, also where one is lent: autograd may share what it passes in, so nothing is added in
        # place, and one gradient has to come out for each stack of experts.
        totals = [grad.clone() for grad in own]
        wide = torch.promote_types(own[0].dtype, torch.float32)
        for total, column in zip(totals, _split_matrices(returned, ctx.shapes), strict=True):
            for expert in sorted(set(loan.sent_experts)):
                # An expert may have several borrowers: round their sum once, as one product over all rows would.
                rows = [row for row, lent in enumerate(loan.sent_experts) if lent == expert]
                total[expert] = total[expert].to(wide) + column[rows].sum(0, dtype=wide)
        return None, *totals


def _split_matrices(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The matrices that lie behind each other in each row, as views."""
    parts = rows.split([shape.numel() for shape in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
