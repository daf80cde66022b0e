"""Like the all-to-all, but overloaded ranks pass copies and weights on to idle ones (arXiv:2601.17111)."""

import numpy as np
import torch
from torch import Tensor

from moefold.moe.dispatch.alltoall import AllToAllDispatcher, AllToAllMetadata
from moefold.moe.dispatch.base import ExpertMigration
from moefold.moe.dispatch.loan import MigratedExperts, received_experts
from moefold.moe.dispatch.spill import (
    RebalanceRule,
    TokenAssignment,
    home_assignment,
    order_by_rank,
    owner_ranks,
    plan_rebalance,
)
from moefold.moe.permute import Permutation, reorder_permutation
from moefold.parallel.groups import MoEGroups


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
        rank, num_ranks = self._ep.rank, self._ep.size
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
