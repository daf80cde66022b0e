"""Sinkhorn offsets of the logits of a micro-batch."""

import math

import torch
from torch import Tensor

from moefold.config.groups.router import TokenGroup


def sinkhorn_offsets(logits_TE: Tensor, iterations: int, group: TokenGroup, is_token_T: Tensor | None = None) -> Tensor:
    """Compute the Sinkhorn offsets of each expert's logits that balance the load.

    Runs the iterations of Sinkhorn and Knopp on the matrix exp(logits) of the micro-batch, in logarithms: rows first,
    then columns. The scale of a row does not change its token's choice, so only the offsets of the columns are needed.
    All-gathers the logits of the micro-batch.

    Args:
        logits_TE: logits of this rank's tokens.
        group: the ranks that share the micro-batch.
        is_token_T: rows that are not padding, bool [T]; None: all. Padding has no row in the matrix.

    Returns:
        [E]; 0 if the micro-batch has only padding.
    """
    whole_TE = group.gather(
        logits_TE if is_token_T is None else logits_TE.masked_fill(~is_token_T.unsqueeze(1), -math.inf)
    )
    is_absent_T1 = None
    if is_token_T is not None:
        is_absent_T1 = whole_TE[:, :1].isneginf()
        whole_TE = whole_TE.masked_fill(is_absent_T1, 0.0)
    offsets_E = torch.zeros_like(whole_TE[0])
    for _ in range(iterations):
        rows_T1 = (whole_TE + offsets_E).logsumexp(1, keepdim=True)
        balanced_TE = whole_TE - rows_T1
        if is_absent_T1 is not None:
            balanced_TE.masked_fill_(is_absent_T1, -math.inf)
        offsets_E = -balanced_TE.logsumexp(0)
    return offsets_E if is_absent_T1 is None else torch.where(is_absent_T1.all(), 0.0, offsets_E)
