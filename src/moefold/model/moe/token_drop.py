"""Token dropping: which routed tokens an expert of limited capacity keeps.

Expert capacity is as in arXiv:2006.16668 sec. 2.2; deciding over a rank's own tokens is the default of
arXiv:2504.14960.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moefold.model.moe.token_group import MicroBatchGroup

TIE_TOLERANCE = {torch.float64: 2.0**-36, torch.float32: 2.0**-19}
"""Relative difference up to which probabilities of a dtype count as equal: far above the rounding error of that dtype,
far below the differences between tokens.
"""


@dataclass(frozen=True)
class CapacityPolicy:
    """Capacity of an expert, and the order in which it keeps tokens."""

    capacity_factor: float
    policy: Literal["probs", "position"]
    scope: Literal["full_sequence", "sub_sequence"]

    def capacity(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the routed tokens that one expert keeps of `num_tokens` tokens, at least 1."""
        return max(1, math.ceil(num_tokens * top_k / num_experts * self.capacity_factor))

    def padded_capacity(self, num_tokens: int, top_k: int, num_experts: int, group: MicroBatchGroup) -> int:
        """Return the most tokens that an expert can keep from one rank's `num_tokens` tokens: the length to pad to.

        Only where each rank drops by itself: with a shared capacity one rank could need all of it.
        """
        assert self.scope == "sub_sequence" or group.size == 1, "rejected by validate/moe.py"
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

        `full_sequence` decides over the micro-batch, so the mask does not depend on the mapping; it all-gathers the
        routing (not the tokens) over the group. `sub_sequence` decides over this rank's tokens, without communication.

        Args:
            ids_TK: chosen experts, [T, K].
            probs_TK: routing probabilities, [T, K].
            index_T: index of each token in the micro-batch, int64 [T], all different.
            num_experts: E.
            group: the ranks that share the micro-batch.
            is_token_T: rows that are no padding, bool [T]; None: all. Padding is not kept, and does not count in the
                capacity.

        Returns:
            bool [T, K].
        """
        num_tokens, top_k = ids_TK.shape
        if is_token_T is not None:
            # An expert that does not exist, whose queue no capacity limits.
            ids_TK = ids_TK.masked_fill(~is_token_T.unsqueeze(1), num_experts)
        if self.scope == "sub_sequence":
            capacity = self._capacity_of(ids_TK, num_experts, is_token_T is not None)
            kept = keep_within_capacity(ids_TK, probs_TK.detach(), index_T, num_experts, capacity, self.policy)
        else:
            # One all-gather: float64 represents ids, float32 probabilities and indices below 2**53 exactly.
            packed = torch.cat([part.detach().double() for part in (ids_TK, probs_TK, index_T.unsqueeze(1))], 1)
            ids, probs, indices = group.gather(packed).split([top_k, top_k, 1], 1)
            capacity = self._capacity_of(ids, num_experts, is_token_T is not None)
            kept = keep_within_capacity(
                ids.long(), probs.to(probs_TK.dtype), indices.squeeze(1), num_experts, capacity, self.policy
            )[group.rank * num_tokens : (group.rank + 1) * num_tokens]
        return kept if is_token_T is None else kept & is_token_T.unsqueeze(1)

    def _capacity_of(self, ids_TK: Tensor, num_experts: int, has_padding: bool) -> int | Tensor:
        """Return `capacity` for the rows with experts below `num_experts`, which may be known to the device alone."""
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
    policy: Literal["probs", "position"],
) -> Tensor:
    """Keep `capacity` tokens for each expert: the most probable (ties by index), or the tokens of the smallest index.

    Probabilities are tied if neighbours in their order differ by no more than `TIE_TOLERANCE`. Tokens with equal
    context, such as the first tokens of samples, have equal probabilities in exact arithmetic, and each mapping rounds
    them differently: without the tolerance each mapping would keep different tokens. Ids of `num_experts` mark
    padding; what is returned for them has no meaning.

    Returns:
        bool [T, K].
    """
    ids = ids_TK.flatten()
    top_k = ids_TK.shape[1]
    by_index = index_T.repeat_interleave(top_k).argsort(stable=True)
    order = by_index
    if policy == "probs":
        order = order[probs_TK.flatten()[order].argsort(descending=True, stable=True)]
    order = order[ids[order].argsort(stable=True)]
    if policy == "probs":
        order = _break_ties_by_index(order, ids, probs_TK.flatten(), by_index)
    sorted_ids = ids[order]
    # Index in the expert's queue = index in the sorted list - index of the expert's first entry.
    first_E = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=ids.device))
    queue = torch.arange(len(ids), device=ids.device) - first_E[sorted_ids]
    kept = torch.empty_like(ids, dtype=torch.bool)
    kept[order] = queue < capacity
    return kept.view_as(ids_TK)


def _break_ties_by_index(order: Tensor, ids: Tensor, probs: Tensor, by_index: Tensor) -> Tensor:
    """Sort tied entries by token index.

    Args:
        order: of the routed tokens, by expert and descending probability.
        ids: expert of each routed token.
        probs: their probabilities.
        by_index: their order by token index.
    """
    sorted_ids = ids[order]
    sorted_probs = probs[order]
    gaps = sorted_probs[:-1] - sorted_probs[1:]
    is_apart = (gaps > TIE_TOLERANCE[probs.dtype] * sorted_probs[:-1].abs()) | (sorted_ids[1:] != sorted_ids[:-1])
    tie = nn.functional.pad(is_apart.long().cumsum(0), (1, 0))
    rank = torch.empty_like(by_index)
    rank[by_index] = torch.arange(len(by_index), device=by_index.device)
    return order[(tie * len(by_index) + rank[order]).argsort()]
