"""Order of routed tokens by probability, which rounding does not change."""

import torch
from torch import Tensor, nn

TIE_TOLERANCE = {torch.float64: 2.0**-36, torch.float32: 2.0**-19}
"""Relative difference up to which probabilities of a dtype count as equal: far above the rounding error of that dtype,
far below the differences between tokens.
"""


def order_by_probability(ids: Tensor, probs: Tensor, by_index: Tensor) -> Tensor:
    """Return the order by expert, then descending probability, ties by index; for arguments see `DropPart.order`.

    Probabilities are tied if neighbours in their order differ by no more than `TIE_TOLERANCE`. Tokens with equal
    context, such as the first tokens of samples, have equal probabilities in exact arithmetic, and each mapping rounds
    them differently: without the tolerance each mapping would keep different tokens.
    """
    order = by_index[probs[by_index].argsort(descending=True, stable=True)]
    order = order[ids[order].argsort(stable=True)]
    sorted_ids = ids[order]
    sorted_probs = probs[order]
    gaps = sorted_probs[:-1] - sorted_probs[1:]
    is_apart = (gaps > TIE_TOLERANCE[probs.dtype] * sorted_probs[:-1].abs()) | (sorted_ids[1:] != sorted_ids[:-1])
    tie = nn.functional.pad(is_apart.long().cumsum(0), (1, 0))
    rank = torch.empty_like(by_index)
    rank[by_index] = torch.arange(len(by_index), device=by_index.device)
    return order[(tie * len(by_index) + rank[order]).argsort()]
