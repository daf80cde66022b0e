"""Weights of experts on loan: out before they compute, their gradients home and added up after."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.moe.dispatch.exchange import SplitSizes
from moefold.moe.dispatch.spill import Counts, owner_ranks
from moefold.parallel.collectives import all_to_all
from moefold.parallel.groups import Group


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
        own, borrowed = grads[: len(ctx.shapes)], grads[len(ctx.shapes) :]
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
