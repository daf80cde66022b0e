"""Exact top-k of rows of scores, each within its own range of positions."""

import torch
from torch import Tensor


def exact_topk(
    scores: Tensor,
    k: int,
    *,
    starts: Tensor | None = None,
    stops: Tensor | None = None,
    guess: Tensor | None = None,
) -> Tensor:
    """Return the positions of the k largest scores of each row; the lowest position wins ties.

    Args:
        scores: [R, N], floating point; infinities are legal.
        k: positions of a row.
        starts: first position that each row may choose, int32 [R]; None: 0.
        stops: end of the positions that each row may choose, int32 [R]; None: N.
        guess: positions that probably are in the result, int32 [R, g]; any content is legal and changes nothing.

    Returns:
        Chosen positions in ascending order, then -1 where a row has fewer than k, int32 [R, k].

    Raises:
        ValueError: a score is NaN.
    """
    if bool(scores.isnan().any()):
        raise ValueError("scores must not be NaN")
    num_rows, length = scores.shape
    positions = torch.arange(length, device=scores.device)
    is_legal = torch.ones_like(scores, dtype=torch.bool)
    if starts is not None:
        is_legal &= positions >= starts.unsqueeze(1)
    if stops is not None:
        is_legal &= positions < stops.unsqueeze(1)
    order = scores.argsort(dim=1, descending=True, stable=True)
    # Illegal positions last, the others in the order of their scores.
    order = order.gather(1, (~is_legal.gather(1, order)).to(torch.int8).argsort(dim=1, stable=True))
    chosen = order[:, :k].masked_fill(~is_legal.gather(1, order[:, :k]), length).sort(1).values
    result = chosen.masked_fill(chosen == length, -1).to(torch.int32)
    if result.shape[1] == k:
        return result
    return torch.cat((result, result.new_full((num_rows, k - result.shape[1]), -1)), 1)
