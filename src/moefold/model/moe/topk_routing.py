"""Choice of experts from per-expert values: top-k, group-limited, balanced or forced.

Nothing here is differentiable. A choice that depends on other tokens considers the whole micro-batch, so that no
choice depends on the parallel mapping.
"""

import math

import torch
from torch import Tensor

from moefold.model.moe.token_group import MicroBatchGroup


def topk_experts(values_TE: Tensor, top_k: int) -> Tensor:
    """Return the experts of the K largest values of each token, descending; ties go to the lower expert. int64 [T, K].

    torch.topk leaves the order of equal values open, which would make routing depend on the shape of the shard; argmax
    returns the first one, and K passes are faster than a stable sort.
    """
    # The clamp distinguishes a value of -inf, which may still be chosen, from an expert chosen already.
    candidates_TE = values_TE.clamp(min=torch.finfo(values_TE.dtype).min)
    chosen = []
    for _ in range(top_k):
        best_T1 = candidates_TE.argmax(1, keepdim=True)
        candidates_TE.scatter_(1, best_T1, float("-inf"))
        chosen.append(best_T1)
    return torch.cat(chosen, 1)


def mask_to_top_groups(values_TE: Tensor, num_groups: int, top_groups: int, *, sums_top2: bool) -> Tensor:
    """Mask all experts but those of a token's best groups (group-limited routing).

    Args:
        values_TE: values by which experts are chosen.
        num_groups: groups of E/num_groups neighbouring experts each.
        top_groups: groups that stay unmasked.
        sums_top2: the value of a group is the sum of its two best experts, as in the code that DeepSeek-V3 was released
            with and in transformers (arXiv:2412.19437 sec. 2.1.2 sums the K/top_groups best: two for V3, with 8 experts
            of 4 nodes); else its best one (DeepSeek-V2, arXiv:2405.04434 sec. 2.2.2).

    Returns:
        values_TE with -inf in masked groups.
    """
    values_TGX = values_TE.unflatten(1, (num_groups, -1))
    group_TG = values_TGX.topk(2, -1).values.sum(-1) if sums_top2 else values_TGX.amax(-1)
    masked_TG = torch.ones_like(group_TG, dtype=torch.bool)
    masked_TG.scatter_(1, topk_experts(group_TG, top_groups), False)
    return values_TGX.masked_fill(masked_TG.unsqueeze(-1), float("-inf")).flatten(1)


def sinkhorn_offsets(logits_TE: Tensor, iterations: int, group: MicroBatchGroup) -> Tensor:
    """Compute the Sinkhorn offsets of each expert's logits that balance the load.

    Runs the iterations of Sinkhorn and Knopp on the matrix exp(logits) of the micro-batch, in logarithms: rows first,
    then columns. The scale of a row does not change its token's choice, so only the offsets of the columns are needed.
    All-gathers the logits of the micro-batch.

    Returns:
        [E].
    """
    whole_TE = group.gather(logits_TE)
    offsets_E = torch.zeros_like(whole_TE[0])
    for _ in range(iterations):
        rows_T1 = (whole_TE + offsets_E).logsumexp(1, keepdim=True)
        offsets_E = -(whole_TE - rows_T1).logsumexp(0)
    return offsets_E


def quantile_thresholds(scores_TE: Tensor, top_k: int, group: MicroBatchGroup) -> Tensor:
    """Compute the (1 - K/E) quantile of each expert's scores: a share K/E of the micro-batch's tokens exceeds it.

    Interpolates linearly between neighbouring scores. All-gathers the scores of the micro-batch.

    Returns:
        [E].
    """
    sorted_TE = group.gather(scores_TE).sort(0).values
    num_tokens, num_experts = sorted_TE.shape
    position = (1 - top_k / num_experts) * (num_tokens - 1)
    below = math.floor(position)
    above = min(below + 1, num_tokens - 1)
    return sorted_TE[below].lerp(sorted_TE[above], position - below)


def assign_round_robin(index_T: Tensor, top_k: int, num_experts: int, *, first: int = 0) -> Tensor:
    """Assign the experts from `first` on to the tokens in turn: perfectly even load. int64 [T, K]."""
    counter_TK = index_T.unsqueeze(1) * top_k + torch.arange(top_k, device=index_T.device)
    return first + counter_TK % (num_experts - first)


def assign_skewed(index_T: Tensor, top_k: int, num_experts: int, skew: float) -> Tensor:
    """Assign expert 0 to an evenly spread share `skew` of the tokens, and the other experts round-robin.

    Returns:
        int64 [T, K].
    """
    ids_TK = assign_round_robin(index_T, top_k, num_experts, first=1)
    index_T = index_T.double()
    ids_TK[:, 0].masked_fill_(((index_T + 1) * skew).floor() > (index_T * skew).floor(), 0)
    return ids_TK
