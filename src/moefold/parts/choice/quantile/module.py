"""Quantiles of the scores of a micro-batch."""

import math

import torch
from torch import Tensor

from moefold.config.groups.router import TokenGroup


def quantile_thresholds(scores_TE: Tensor, top_k: int, group: TokenGroup, is_token_T: Tensor | None = None) -> Tensor:
    """Compute the (1 - K/E) quantile of each expert's scores: a share K/E of the micro-batch's tokens exceeds it.

    Interpolates linearly between neighbouring scores. All-gathers the scores of the micro-batch.

    Args:
        scores_TE: scores of this rank's tokens.
        top_k: K.
        group: the ranks that share the micro-batch.
        is_token_T: rows that are not padding, bool [T]; None: all.

    Returns:
        [E]; 0 if the micro-batch has only padding.
    """
    if is_token_T is not None:
        return _masked_quantiles(group.gather(scores_TE.masked_fill(~is_token_T.unsqueeze(1), math.inf)), top_k)
    sorted_TE = group.gather(scores_TE).sort(0).values
    num_tokens, num_experts = sorted_TE.shape
    position = (1 - top_k / num_experts) * (num_tokens - 1)
    below = math.floor(position)
    above = min(below + 1, num_tokens - 1)
    return sorted_TE[below].lerp(sorted_TE[above], position - below)


def _masked_quantiles(scores_TE: Tensor, top_k: int) -> Tensor:
    """Compute `quantile_thresholds` of scores that are infinite for padding; the host does not wait."""
    sorted_TE = scores_TE.sort(0).values
    num_experts = sorted_TE.shape[1]
    last = sorted_TE[:, 0].isfinite().sum() - 1
    position = (1 - top_k / num_experts) * last.clamp(min=0).double()
    below = position.floor()
    rows = torch.stack((below, torch.minimum(below + 1, last.double()))).clamp(min=0).long()
    ends_2E = sorted_TE[rows]
    thresholds_E = ends_2E[0].lerp(ends_2E[1], (position - below).to(sorted_TE.dtype))
    return torch.where(last >= 0, thresholds_E, 0.0)
