"""Token dropping: what an expert with a limited capacity keeps.

Capacity is that of arXiv:2006.16668 sec. 2.2; to decide on a rank's own tokens is the default of arXiv:2504.14960.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moefold.model.moe.token_group import MicroBatchGroup

TIE_TOLERANCE = {torch.float64: 2.0**-36, torch.float32: 2.0**-19}
"""Relative difference up to which probabilities of each type are equal: far above what maths in that type rounds off,
and far below what tells tokens apart."""


@dataclass(frozen=True)
class CapacityPolicy:
    """How much an expert takes, and what it keeps."""

    capacity_factor: float
    policy: Literal["probs", "position"]
    scope: Literal["full_sequence", "sub_sequence"]

    def capacity(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Copies that one expert takes of `num_tokens` tokens, at least 1."""
        return max(1, math.ceil(num_tokens * top_k / num_experts * self.capacity_factor))

    def padded_capacity(self, num_tokens: int, top_k: int, num_experts: int, group: MicroBatchGroup) -> int:
        """Most copies that an expert can keep from the `num_tokens` tokens of one rank: the length to pad to.

        Only where each rank decides by itself: of a capacity that ranks share, every one could need all of it.
        """
        assert self.scope == "sub_sequence" or group.size == 1, "validate/moe.py refuses it"
        return min(self.capacity(num_tokens, top_k, num_experts), num_tokens)

    def keep_mask(
        self, ids_TK: Tensor, probs_TK: Tensor, index_T: Tensor, num_experts: int, group: MicroBatchGroup
    ) -> Tensor:
        """Which copies of my tokens stay.

        `full_sequence` decides over the micro-batch, so the answer is the same for every mapping; it gathers the
        routing (not the tokens) of all ranks of the scope. `sub_sequence` decides over my tokens and sends nothing.

        Args:
            ids_TK: chosen experts, [T, K].
            probs_TK: their weights, [T, K].
            index_T: place of each token in the order of the micro-batch, int64 [T], no two equal.
            num_experts: E.
            group: the ranks that share the micro-batch.

        Returns:
            bool [T, K].
        """
        num_tokens, top_k = ids_TK.shape
        if self.scope == "sub_sequence":
            capacity = self.capacity(num_tokens, top_k, num_experts)
            return keep_within_capacity(ids_TK, probs_TK.detach(), index_T, num_experts, capacity, self.policy)
        # One exchange: float64 holds ids, float32 weights and keys below 2**53 exactly.
        packed = torch.cat([part.detach().double() for part in (ids_TK, probs_TK, index_T.unsqueeze(1))], 1)
        ids, probs, keys = group.gather(packed).split([top_k, top_k, 1], 1)
        capacity = self.capacity(len(ids), top_k, num_experts)
        kept = keep_within_capacity(
            ids.long(), probs.to(probs_TK.dtype), keys.squeeze(1), num_experts, capacity, self.policy
        )
        return kept[group.rank * num_tokens : (group.rank + 1) * num_tokens]


def keep_within_capacity(
    ids_TK: Tensor,
    probs_TK: Tensor,
    index_T: Tensor,
    num_experts: int,
    capacity: int,
    policy: Literal["probs", "position"],
) -> Tensor:
    """Keep `capacity` copies for each expert: the most probable (ties by key), or those with the smallest keys.

    Probabilities are tied if neighbours in their order differ by no more than `TIE_TOLERANCE`. Tokens that see the same, such as
    padding, or the first tokens of samples, have equal probabilities in exact maths, and each mapping rounds them
    otherwise: without the bound each would keep others of them.

    Returns:
        bool [T, K].
    """
    ids = ids_TK.flatten()
    top_k = ids_TK.shape[1]
    by_key = index_T.repeat_interleave(top_k).argsort(stable=True)
    order = by_key
    if policy == "probs":
        order = order[probs_TK.flatten()[order].argsort(descending=True, stable=True)]
    order = order[ids[order].argsort(stable=True)]
    if policy == "probs":
        order = _break_ties_by_index(order, ids, probs_TK.flatten(), by_key)
    sorted_ids = ids[order]
    # Place in its expert's queue = place in the sorted list - where the expert begins in it.
    first_E = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=ids.device))
    queue = torch.arange(len(ids), device=ids.device) - first_E[sorted_ids]
    kept = torch.empty_like(ids, dtype=torch.bool)
    kept[order] = queue < capacity
    return kept.view_as(ids_TK)


def _break_ties_by_index(order: Tensor, ids: Tensor, probs: Tensor, by_index: Tensor) -> Tensor:
    """Sort tied copies by key.

    Args:
        order: of the copies, by expert and falling probability.
        ids: of all copies, as `probs`.
        probs: their weights.
        by_index: their order by key.
    """
    sorted_ids = ids[order]
    sorted_probs = probs[order]
    gaps = sorted_probs[:-1] - sorted_probs[1:]
    is_apart = (gaps > TIE_TOLERANCE[probs.dtype] * sorted_probs[:-1].abs()) | (sorted_ids[1:] != sorted_ids[:-1])
    tie = nn.functional.pad(is_apart.long().cumsum(0), (1, 0))
    place = torch.empty_like(by_index)
    place[by_index] = torch.arange(len(by_index), device=by_index.device)
    return order[(tie * len(by_index) + place[order]).argsort()]
