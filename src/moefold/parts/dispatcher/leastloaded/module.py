"""Least-loaded expert parallelism (arXiv:2601.17111): an all-to-all that rebalances overloaded ranks.

Overloaded ranks pass tokens and expert weights to underloaded ranks. The gradients of these weights are returned and
added by their owner. The assignment is computed from integers only, so that all ranks compute the same assignment from
the same counts.
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
from moefold.model.moe.dispatch.base import ExpertMigration, SplitSizes
from moefold.model.moe.permute import reorder_permutation
from moefold.ops.expert_ops import Permutation
from moefold.parts.dispatcher.alltoall.module import AllToAllDispatcher, AllToAllMetadata

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class RebalanceRule:
    """Conditions under which tokens are computed on another rank than the owner of their expert."""

    threshold: float
    """Rebalance only if the busiest rank has more than this many times the mean load."""
    capacity: float
    """Load that a rank should not exceed, in mean loads, at least 1."""
    min_tokens: int
    """Minimum tokens of one expert to migrate together with its weights, at least 1."""

    def max_tokens_per_rank(self, total: int, num_ranks: int) -> int:
        """Return the maximum number of tokens of a rank if there are `total` tokens."""
        return math.ceil(self.capacity * total / num_ranks)


def plan_rebalance(load_E: Sequence[int] | Counts, num_ranks: int, rule: RebalanceRule) -> Counts:
    """Compute the number of tokens of each expert that each rank computes.

    Rank r owns experts r*E/P .. (r+1)*E/P - 1. Below the threshold it computes all of their tokens. Above it, each rank
    over the limit gives tokens to the least-loaded rank until it is at the limit: its largest expert first, so that few
    weights are sent. Received tokens bring no rank over the limit, and no rank receives fewer than `min_tokens` tokens
    of an expert. A rank stays over the limit only if no such move is left. With min_tokens=1 there is always a move.

    Args:
        load_E: tokens of each expert, over all ranks.
        num_ranks: P, which divides E.

    Returns:
        Tokens, int64 [P, E]. The columns sum to `load_E`.
    """
    assignment_PE = home_assignment(load_E, num_ranks)
    loads = [int(load) for load in assignment_PE.sum(1)]
    total = sum(loads)
    if max(loads) * num_ranks <= rule.threshold * total:
        return assignment_PE
    limit = rule.max_tokens_per_rank(total, num_ranks)
    underloaded = [(load, rank) for rank, load in enumerate(loads) if load < limit]
    heapq.heapify(underloaded)
    overloaded = sorted(
        (rank for rank in range(num_ranks) if loads[rank] > limit), key=lambda rank: (-loads[rank], rank)
    )
    for rank in overloaded:
        while loads[rank] > limit and _move_chunk(assignment_PE, loads, rank, underloaded, limit, rule.min_tokens):
            pass
    return assignment_PE


def home_assignment(load_E: Sequence[int] | Counts, num_ranks: int) -> Counts:
    """Return the assignment of plain expert parallelism, int64 [P, E]: each rank computes its own experts."""
    load_PE = np.asarray(load_E, dtype=np.int64).reshape(num_ranks, -1)
    assignment_PPE = np.zeros((num_ranks, *load_PE.shape), dtype=np.int64)
    assignment_PPE[np.arange(num_ranks), np.arange(num_ranks)] = load_PE
    return assignment_PPE.reshape(num_ranks, -1)


class TokenAssignment:
    """Assignment of tokens to ranks: an expert's tokens, in the order of sources, fill its ranks in rank order.

    Sources and ranks are the same processes in the same order, which keeps many tokens of a widely shared expert local.

    Args:
        counts_SE: tokens of each expert from each of S sources.
        assignment_PE: tokens that each rank computes. Its columns have the same sums as the columns of `counts_SE`.
    """

    def __init__(self, counts_SE: Counts, assignment_PE: Counts) -> None:
        self._source_ends = counts_SE.cumsum(0)
        self._rank_ends = assignment_PE.cumsum(0)
        self._source_starts = self._source_ends - counts_SE
        self._rank_starts = self._rank_ends - assignment_PE

    def from_source(self, source: int) -> Counts:
        """Return the tokens of each expert that a source sends to each rank, int64 [P, E]."""
        starts = np.maximum(self._rank_starts, self._source_starts[source])
        return np.maximum(np.minimum(self._rank_ends, self._source_ends[source]) - starts, 0)

    def to_rank(self, rank: int) -> Counts:
        """Return the tokens of each expert that a rank receives from each source, int64 [S, E]."""
        starts = np.maximum(self._source_starts, self._rank_starts[rank])
        return np.maximum(np.minimum(self._source_ends, self._rank_ends[rank]) - starts, 0)


def order_by_rank(sent_PE: Counts) -> Counts:
    """Compute the order of a source's rows, which are sorted by expert, for the all-to-all.

    Rows are sorted by destination rank. For one rank, its own experts come first, then received experts.

    Args:
        sent_PE: tokens of each expert that this source sends to each rank.

    Returns:
        int64 [R]: the index of each row among the rows sorted by expert.
    """
    before_E = sent_PE.sum(0).cumsum() - sent_PE.sum(0)
    starts_PE = before_E + sent_PE.cumsum(0) - sent_PE
    ranks, experts = sent_PE.nonzero()
    is_received = owner_ranks(*sent_PE.shape)[experts] != ranks
    chunk_order = np.lexsort((experts, is_received, ranks))
    ranks, experts = ranks[chunk_order], experts[chunk_order]
    counts = sent_PE[ranks, experts]
    starts = starts_PE[ranks, experts]
    return np.repeat(starts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())


def owner_ranks(num_ranks: int, num_experts: int) -> Counts:
    """Return the rank that owns each expert, int64 [E]."""
    return np.arange(num_experts, dtype=np.int64) // (num_experts // num_ranks)


def _move_chunk(
    assignment_PE: Counts,
    loads: list[int],
    overloaded_rank: int,
    underloaded_ranks: list[tuple[int, int]],
    limit: int,
    min_tokens: int,
) -> bool:
    """Move one chunk from a rank over the limit to the least-loaded rank, and return False if no move is possible.

    A rank that gave more than its excess has headroom for less than a chunk: it never receives a chunk.
    """
    experts_per_rank = assignment_PE.shape[1] // len(loads)
    first = overloaded_rank * experts_per_rank
    expert = first + int(assignment_PE[overloaded_rank, first : first + experts_per_rank].argmax())
    headroom = limit - underloaded_ranks[0][0] if underloaded_ranks else 0
    chunk = min(max(loads[overloaded_rank] - limit, min_tokens), int(assignment_PE[overloaded_rank, expert]), headroom)
    if chunk < min_tokens:
        return False
    _, receiver = heapq.heappop(underloaded_ranks)
    assignment_PE[overloaded_rank, expert] -= chunk
    assignment_PE[receiver, expert] += chunk
    loads[overloaded_rank] -= chunk
    loads[receiver] += chunk
    heapq.heappush(underloaded_ranks, (loads[receiver], receiver))
    return True


class LeastLoadedDispatcher(AllToAllDispatcher):
    """All-to-all dispatcher that rebalances load exactly: routing is unchanged, only the computing rank may differ.

    The all-gathered counts of the all-to-all give every rank the whole load, and so the same assignment. Below the
    threshold this is the plain all-to-all.

    Args:
        groups: groups of the MoE view. Under etp, ranks of the same etp coordinate exchange the same shard of F.
        num_experts: E, over all ranks.
    """

    takes_any_tokens = False
    _permutes_before_wait = False
    """False: the assignment decides the order of the rows."""

    def __init__(self, groups: MoEGroups, num_experts: int, rule: RebalanceRule, *, fp8_dispatch: bool = False) -> None:
        super().__init__(
            groups.ep, groups.etp, groups.experts, groups.expert_coordinates, num_experts, fp8_dispatch=fp8_dispatch
        )
        self._rule = rule

    def migration(self, metadata: AllToAllMetadata) -> ExpertMigration | None:
        """Return the experts that change ranks for this micro-batch."""
        return metadata.migration

    def _host_sizes(self, counts: Tensor) -> Tensor:
        """Return all counts: the host plans the assignment."""
        return counts

    def _build_metadata(
        self, permutation: Permutation, probs_TK: Tensor, counts: Tensor, host_sizes: Tensor
    ) -> AllToAllMetadata:
        rank = self._ep.rank
        num_ranks = self._ep.size
        counts_SE = host_sizes.reshape(self._experts.size, self._num_experts).numpy()
        load_E = counts_SE.sum(0)
        assignment_PE = plan_rebalance(load_E, num_ranks, self._rule)
        if (assignment_PE == home_assignment(load_E, num_ranks)).all():
            return super()._build_metadata(permutation, probs_TK, counts, super()._host_sizes(host_sizes))
        assignment = TokenAssignment(counts_SE, assignment_PE)
        sent_PE = assignment.from_source(rank * self._etp.size + self._etp.rank)
        order_R = torch.from_numpy(order_by_rank(sent_PE)).to(probs_TK.device, non_blocking=True)
        own_experts = (owner_ranks(num_ranks, self._num_experts) == rank).nonzero()[0]
        computed_experts = np.concatenate((own_experts, received_experts(assignment_PE, rank)))
        to_rank = torch.from_numpy(assignment.to_rank(rank)[:, computed_experts])
        received = to_rank.view(num_ranks, self._etp.size, -1).transpose(0, 1)
        return self._metadata_from_sizes(
            reorder_permutation(permutation, order_R),
            probs_TK,
            received.to(probs_TK.device, non_blocking=True),
            self._sizes(torch.from_numpy(sent_PE), received),
            MigratedExperts.from_assignment(assignment_PE, self._ep),
        )


@dataclass(frozen=True)
class MigratedExperts:
    """Experts that each ep rank sends to each other rank, from the view of this rank.

    It uses one all-to-all in each direction for each micro-batch, which sends exactly the needed weights. Its autograd
    node lies between the weights and their use on every rank, so that all ranks reach it in their backward passes.
    """

    ep: Group
    sent_experts: Sequence[int]
    """Local indices of this rank's experts to send, in the order of the receivers."""
    num_sent_to: Sequence[int]
    """Experts sent to each ep member."""
    num_received_from: Sequence[int]
    """Experts received from each ep member, in ascending order each."""

    @classmethod
    def from_assignment(cls, assignment_PE: Counts, ep: Group) -> "MigratedExperts":
        """Build the migration for an assignment of tokens, int64 [ep, E]."""
        num_ranks, num_experts = assignment_PE.shape
        owner_E = owner_ranks(num_ranks, num_experts)
        is_sent_PE = assignment_PE[:, owner_E == ep.rank] > 0
        is_sent_PE[ep.rank] = False
        received_E = received_experts(assignment_PE, ep.rank)
        return cls(
            ep=ep,
            sent_experts=is_sent_PE.nonzero()[1].tolist(),
            num_sent_to=is_sent_PE.sum(1).tolist(),
            num_received_from=[int((owner_E[received_E] == rank).sum()) for rank in range(num_ranks)],
        )

    def split_sizes(self) -> SplitSizes:
        """Return the split sizes in experts."""
        return SplitSizes("ep", self.num_sent_to, self.num_received_from)

    def migrate(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """See `ExpertMigration.migrate`. It is collective over ep."""
        migrated = _MigrateWeights.apply(self, *weights)
        return list(migrated[: len(weights)]), list(migrated[len(weights) :])


def received_experts(assignment_PE: Counts, rank: int) -> Counts:
    """Return the experts of other ranks whose tokens a rank computes, ascending."""
    is_received_E = (assignment_PE[rank] > 0) & (owner_ranks(*assignment_PE.shape) != rank)
    return is_received_E.nonzero()[0]


class _MigrateWeights(torch.autograd.Function):
    """Exchange of expert weights: (weights) -> (the same weights, received weights)."""

    @staticmethod
    def forward(ctx: Any, migration: MigratedExperts, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.migration = migration
        ctx.shapes = [w.shape[1:] for w in weights]
        sent_weights = weights[0].new_empty(len(migration.sent_experts), sum(shape.numel() for shape in ctx.shapes))
        for w, column in zip(weights, _split_matrices(sent_weights, ctx.shapes), strict=True):
            for row, expert in enumerate(migration.sent_experts):
                column[row].copy_(w[expert])
        received = all_to_all(sent_weights, migration.ep, migration.num_sent_to, migration.num_received_from)
        return *(w.view_as(w) for w in weights), *_split_matrices(received, ctx.shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        migration: MigratedExperts = ctx.migration
        local = grads[: len(ctx.shapes)]
        received = grads[len(ctx.shapes) :]
        sent_grads = torch.cat([grad.flatten(1) for grad in received], 1)
        returned = all_to_all(sent_grads, migration.ep, migration.num_received_from, migration.num_sent_to)
        if not migration.sent_experts:
            return None, *local
        # Clone all of this rank's experts, even if only one is migrated. autograd may share its inputs, so they must
        # not be changed in place. Each stack of experts needs one gradient.
        totals = [grad.clone() for grad in local]
        accum_dtype = torch.promote_types(local[0].dtype, torch.float32)
        for total, column in zip(totals, _split_matrices(returned, ctx.shapes), strict=True):
            for expert in sorted(set(migration.sent_experts)):
                # An expert may have several receivers: round their sum once, as one GEMM over all rows would.
                rows = [row for row, sent_expert in enumerate(migration.sent_experts) if sent_expert == expert]
                total[expert] = total[expert].to(accum_dtype) + column[rows].sum(0, dtype=accum_dtype)
        return None, *totals


def _split_matrices(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Split rows of concatenated matrices into views of the matrices."""
    parts = rows.split([shape.numel() for shape in shapes], 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
