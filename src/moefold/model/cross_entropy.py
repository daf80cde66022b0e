"""Cross-entropy over a vocabulary that may be cut into row ranges."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Reduction = Callable[[Tensor], Tensor]


def cross_entropy(
    logits: Tensor, labels: Tensor, first_row: int = 0, top_of: Reduction | None = None, sum_of: Reduction | None = None
) -> Tensor:
    """Loss of each token in nats, computed in float32 (float64 for float64).

    Args:
        logits: [..., rows of this rank].
        labels: int64 [...], rows of the whole vocabulary.
        first_row: first row of this rank.
        top_of: maximum over the ranks that hold the other rows; None where this rank holds all rows.
        sum_of: sum over those ranks.

    Returns:
        [...]: the same value on each of those ranks; the gradient into `logits` is that of one such loss.
    """
    return _CrossEntropy.apply(logits, labels, first_row, top_of or _alone, sum_of or _alone)


def _alone(x: Tensor) -> Tensor:
    return x


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first_row: int, top_of: Reduction, sum_of: Reduction
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = top_of(wide.amax(-1))
        row = labels - first_row
        is_mine = (row >= 0) & (row < logits.shape[-1])
        row = row.where(is_mine, 0).unsqueeze(-1)
        target = (wide.gather(-1, row).squeeze(-1) - top).where(is_mine, 0.0)
        shifted = wide - top.unsqueeze(-1) if wide is logits else wide.sub_(top.unsqueeze(-1))
        probs = shifted.exp_()
        total, target = sum_of(torch.stack((probs.sum(-1), target))).unbind(0)
        probs.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probs, row, is_mine)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probs, row, is_mine = ctx.saved_tensors
        scaled = probs * grad.unsqueeze(-1)
        scaled.scatter_add_(-1, row, -(grad * is_mine).unsqueeze(-1))
        return scaled.to(ctx.dtype), None, None, None, None
