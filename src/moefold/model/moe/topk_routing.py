"""Which experts a token chooses, once every expert has a value for it: plain, group-limited, balanced or forced.

Nothing here has a gradient. What depends on other tokens than the own looks at the whole micro-batch, so that no choice
depends on the mapping.
"""

import math

import torch
from torch import Tensor

from moefold.model.moe.token_group import MicroBatchGroup


def topk_experts(values_TE: Tensor, top_k: int) -> Tensor:
    """The K largest values of each token, largest first; of equal ones the lower expert. int64 [T, K].

    torch.topk leaves the order of equal values open, which would make routing depend on the shape of the shard; argmax
    names the first one, and K passes are faster than a stable sort.
    """
    # The clamp tells a value of -inf, which may still be chosen, from a chosen one.
    open_TE = values_TE.clamp(min=torch.finfo(values_TE.dtype).min)
    chosen = []
    for _ in range(top_k):
        best_T1 = open_TE.argmax(1, keepdim=True)
        open_TE.scatter_(1, best_T1, float("-inf"))
        chosen.append(best_T1)
    return torch.cat(chosen, 1)


def mask_to_top_groups(values_TE: Tensor, num_groups: int, top_groups: int, *, sums_top2: bool) -> Tensor:
    """Close all experts to a token but those of its best groups.

    Args:
        values_TE: what experts are chosen by.
        num_groups: groups of E/num_groups neighbouring experts each.
        top_groups: groups that stay open.
        sums_top2: a group is as good as its two best experts together, as in the code that DeepSeek-V3 was released with
            and in transformers (arXiv:2412.19437 sec. 2.1.2 sums the K/top_groups best: two for V3, with 8 experts of 4
            nodes); else as its best one (DeepSeek-V2, arXiv:2405.04434 sec. 2.2.2).

    Returns:
        values_TE with -inf in closed groups.
    """
    values_TGX = values_TE.unflatten(1, (num_groups, -1))
    group_TG = values_TGX.topk(2, -1).values.sum(-1) if sums_top2 else values_TGX.amax(-1)
    closed_TG = torch.ones_like(group_TG, dtype=torch.bool)
    closed_TG.scatter_(1, topk_experts(group_TG, top_groups), False)
    return values_TGX.masked_fill(closed_TG.unsqueeze(-1), float("-inf")).flatten(1)


def sinkhorn_offsets(logits_TE: Tensor, iterations: int, group: MicroBatchGroup) -> Tensor:
    """What to add to each expert's logits so that exp(logits), scaled by rows and columns, loads experts evenly.

    The rounds of Sinkhorn and Knopp on the matrix exp(logits) of the micro-batch, in logarithms: rows first, then
    columns. The scale of a row does not change what its token likes best, so the offsets of the columns are all that
    the choice needs. Gathers the logits of the micro-batch.

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
    """Of each expert the score that a share K/E of the tokens of the micro-batch exceed: its (1 - K/E) quantile.

    Interpolates linearly between neighbouring scores. Gathers the scores of the micro-batch.

    Returns:
        [E].
    """
    sorted_TE = group.gather(scores_TE).sort(0).values
    num_tokens, num_experts = sorted_TE.shape
    place = (1 - top_k / num_experts) * (num_tokens - 1)
    below = math.floor(place)
    above = min(below + 1, num_tokens - 1)
    return sorted_TE[below].lerp(sorted_TE[above], place - below)


def round_robin(index_T: Tensor, top_k: int, num_experts: int, *, first: int = 0) -> Tensor:
    """Deal the experts from `first` on out to the tokens in turn: perfectly even load. int64 [T, K]."""
    copies_TK = index_T.unsqueeze(1) * top_k + torch.arange(top_k, device=index_T.device)
    return first + copies_TK % (num_experts - first)


def skewed(index_T: Tensor, top_k: int, num_experts: int, skew: float) -> Tensor:
    """A share `skew` of the tokens, evenly spread, has expert 0 first; all else is dealt out to the other experts.

    Returns:
        int64 [T, K].
    """
    ids_TK = round_robin(index_T, top_k, num_experts, first=1)
    index_T = index_T.double()
    ids_TK[:, 0].masked_fill_(((index_T + 1) * skew).floor() > (index_T * skew).floor(), 0)
    return ids_TK
