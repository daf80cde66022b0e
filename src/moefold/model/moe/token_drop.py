"""Token dropping: an expert of limited capacity keeps some of its routed tokens.

Expert capacity is as in arXiv:2006.16668 sec. 2.2. Deciding over a rank's own tokens is the default of
arXiv:2504.14960.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.groups.drop import DropPart, DropScopePart
from moefold.model.moe.token_group import MicroBatchGroup


@dataclass(frozen=True)
class CapacityPolicy:
    """Capacity of an expert, and the order of the tokens that it keeps."""

    capacity_factor: float
    policy: DropPart
    scope: DropScopePart

    def capacity(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the routed tokens that one expert keeps of `num_tokens` tokens, at least 1."""
        return max(1, math.ceil(num_tokens * top_k / num_experts * self.capacity_factor))

    def padded_capacity(self, num_tokens: int, top_k: int, num_experts: int, group: MicroBatchGroup) -> int:
        """Return the maximum that an expert can keep of one rank's `num_tokens` tokens: the length to pad to.

        This is valid only if each rank drops by itself: one rank could need the whole shared capacity.
        """
        assert not self.scope.is_shared or group.size == 1, "refused by parts/drop_scope.py"
        return min(self.capacity(num_tokens, top_k, num_experts), num_tokens)

    def keep_mask(
        self,
        ids_TK: Tensor,
        probs_TK: Tensor,
        index_T: Tensor,
        num_experts: int,
        group: MicroBatchGroup,
        is_token_T: Tensor | None = None,
    ) -> Tensor:
        """Return the mask of this rank's routed tokens that are kept.

        A shared capacity is decided over the micro-batch, so the mask does not depend on the mapping. The routing (not
        the tokens) is all-gathered over the group. Otherwise each rank decides over its tokens, without communication.

        Args:
            index_T: index of each token in the micro-batch, int64 [T], all different.
            is_token_T: rows that are not padding, bool [T]. None means all. Padding is not kept, and does not count in
                the capacity.

        Returns:
            bool [T, K].
        """
        num_tokens, top_k = ids_TK.shape
        if is_token_T is not None:
            # The number of an expert that does not exist. Its queue is not limited.
            ids_TK = ids_TK.masked_fill(~is_token_T.unsqueeze(1), num_experts)
        if not self.scope.is_shared:
            capacity = self._capacity_of(ids_TK, num_experts, is_token_T is not None)
            is_kept_TK = keep_within_capacity(ids_TK, probs_TK.detach(), index_T, num_experts, capacity, self.policy)
        else:
            # One all-gather: float64 represents ids, float32 probabilities and indices below 2**53 exactly.
            packed = torch.cat([column.detach().double() for column in (ids_TK, probs_TK, index_T.unsqueeze(1))], 1)
            ids, probs, indices = group.gather(packed).split([top_k, top_k, 1], 1)
            capacity = self._capacity_of(ids, num_experts, is_token_T is not None)
            is_kept_TK = keep_within_capacity(
                ids.long(), probs.to(probs_TK.dtype), indices.squeeze(1), num_experts, capacity, self.policy
            )[group.rank * num_tokens : (group.rank + 1) * num_tokens]
        return is_kept_TK if is_token_T is None else is_kept_TK & is_token_T.unsqueeze(1)

    def _capacity_of(self, ids_TK: Tensor, num_experts: int, has_padding: bool) -> int | Tensor:
        """Return `capacity` for the rows with experts below `num_experts`. Their number may be only on the device."""
        num_tokens, top_k = ids_TK.shape
        if not has_padding:
            return self.capacity(num_tokens, top_k, num_experts)
        count = (ids_TK[:, 0] < num_experts).sum().double()
        return (count * top_k / num_experts * self.capacity_factor).ceil().clamp(min=1).long()


def keep_within_capacity(
    ids_TK: Tensor,
    probs_TK: Tensor,
    index_T: Tensor,
    num_experts: int,
    capacity: int | Tensor,
    policy: DropPart,
) -> Tensor:
    """Keep the first `capacity` tokens of each expert in the order of the policy.

    Ids of `num_experts` mark padding. The values returned for padding have no meaning.

    Returns:
        bool [T, K].
    """
    ids = ids_TK.flatten()
    by_index = index_T.repeat_interleave(ids_TK.shape[1]).argsort(stable=True)
    order = policy.order(ids, probs_TK.flatten(), by_index)
    sorted_ids = ids[order]
    # Index in the expert's queue = index in the sorted list - index of the expert's first entry.
    first_E = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    queue = torch.arange(len(ids), device=ids.device) - first_E[sorted_ids]
    is_kept = torch.empty_like(ids, dtype=torch.bool)
    is_kept[order] = queue < capacity
    return is_kept.view_as(ids_TK)
