"""Cross-entropy over a vocabulary that may be cut into row ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.model.gemm import LIBRARY, Gemm

Reduction = Callable[[Tensor], Tensor]


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Rows:
    """The rows of the vocabulary that this rank holds."""

    first: int = 0
    top_of: Reduction = _alone
    """Maximum over the ranks that hold the other rows."""
    sum_of: Reduction = _alone
    """Sum over those ranks."""


ALL_ROWS = Rows()


def cross_entropy(logits: Tensor, labels: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
    """Loss of each token in nats, computed in float32 (float64 for float64).

    Args:
        logits: [..., rows of this rank].
        labels: int64 [...], rows of the whole vocabulary.
        rows: those of this rank.

    Returns:
        [...]: the same value on each of the ranks with rows; the gradient into `logits` is that of one such loss.
    """
    return _CrossEntropy.apply(logits, labels, rows)


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    rows: Rows = ALL_ROWS,
    *,
    keeps: bool = False,
    gemm: Gemm = LIBRARY,
) -> Tensor:
    """`cross_entropy` of the logits x @ weight.T, which are made for `chunk` tokens at a time.

    The backward pass makes the logits of a chunk again: one matrix product more, beside three. What is kept for it is x
    and two numbers a token. The reductions are called once each, for all tokens together.

    Args:
        x: hidden states, [..., H].
        weight: rows of this rank, [V/tp, H].
        labels: int64 [...].
        chunk: tokens.
        rows: those of this rank, with one reduction of each kind for all tokens.
        keeps: nothing is made again: the exponentials of all logits are kept, as by `cross_entropy`, and nothing else
            of their size is ever in memory.
        gemm: who multiplies.

    Returns:
        [...]: as of `cross_entropy`; the gradient of `weight` is summed over chunks in float32 at least.
    """
    # Without gradients nobody comes back for what would be kept.
    how = _How(chunk, rows, keeps and torch.is_grad_enabled(), gemm)
    return _ChunkedCrossEntropy.apply(x, weight, labels, how)


@dataclass(frozen=True)
class _How:
    """The loss in chunks, beside its tensors."""

    chunk: int
    rows: Rows
    keeps: bool
    gemm: Gemm


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Rows) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = rows.top_of(wide.amax(-1))
        row = labels - rows.first
        is_mine = (row >= 0) & (row < logits.shape[-1])
        row = row.where(is_mine, 0).unsqueeze(-1)
        target = (wide.gather(-1, row).squeeze(-1) - top).where(is_mine, 0.0)
        shifted = wide - top.unsqueeze(-1) if wide is logits else wide.sub_(top.unsqueeze(-1))
        # Not divided by their sum yet: the backward pass scales them anyway.
        exps = shifted.exp_()
        total, target = rows.sum_of(torch.stack((exps.sum(-1), target))).unbind(0)
        ctx.save_for_backward(exps, total, row, is_mine)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exps, total, row, is_mine = ctx.saved_tensors
        scaled = exps * (grad / total).unsqueeze(-1)
        scaled.scatter_add_(-1, row, -(grad * is_mine).unsqueeze(-1))
        return scaled.to(ctx.dtype), None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: _How) -> Tensor:
        x_NH, row_N = x.flatten(0, -2), labels.flatten() - how.rows.first
        is_mine_N = (row_N >= 0) & (row_N < len(weight))
        row_N = row_N.where(is_mine_N, 0)
        tops, sums, targets, exps = [], [], [], []
        for x_CH, row_C in zip(x_NH.split(how.chunk), row_N.split(how.chunk), strict=True):
            wide = how.gemm.wide_product(x_CH, weight)
            targets.append(wide.gather(1, row_C.unsqueeze(1)).squeeze(1))
            tops.append(wide.amax(1))
            exps_CV = wide.sub_(tops[-1].unsqueeze(1)).exp_()
            sums.append(exps_CV.sum(1))
            if how.keeps:
                exps.append(exps_CV)
        my_top_N = torch.cat(tops)
        top_N = how.rows.top_of(my_top_N)
        my_share_N = (my_top_N - top_N).exp()
        my_target_N = (torch.cat(targets) - top_N).where(is_mine_N, 0.0)
        total_N, target_N = how.rows.sum_of(torch.stack((torch.cat(sums) * my_share_N, my_target_N))).unbind(0)
        log_total_N = total_N.log()
        # With the exponentials their factor, else what the logits are to be reduced by.
        known_N = my_share_N / total_N if how.keeps else log_total_N + top_N
        ctx.save_for_backward(x, weight, row_N, is_mine_N, known_N, *exps)
        ctx.how = how
        return (log_total_N - target_N).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row_N, is_mine_N, known_N, *exps = ctx.saved_tensors
        x_NH, grad_N = x.flatten(0, -2), grad.flatten()
        grad_x_NH, gemm = torch.empty_like(x_NH), ctx.how.gemm
        wide_VH = gemm.widened(weight)
        grad_VH = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        # The same for all chunks: the first touch of new memory costs more than the product.
        room = torch.empty_like(exps[0]) if exps else grad_VH[:0]
        for i, start in enumerate(range(0, len(x_NH), ctx.how.chunk)):
            here = slice(start, start + ctx.how.chunk)
            x_CH, factor_C1 = gemm.widened(x_NH[here]), grad_N[here].unsqueeze(1)
            if exps:
                scaled_CV = room[: len(x_CH)]
                torch.mul(exps[i], factor_C1 * known_N[here].unsqueeze(1), out=scaled_CV)
            else:
                probs_CV = gemm.wide_product(x_NH[here], weight).sub_(known_N[here].unsqueeze(1)).exp_()
                scaled_CV = probs_CV.mul_(factor_C1)
            scaled_CV.scatter_add_(1, row_N[here].unsqueeze(1), -(factor_C1 * is_mine_N[here].unsqueeze(1)))
            if not gemm.reads_wide(weight):
                scaled_CV = scaled_CV.to(weight.dtype)
            gemm.product_into(grad_x_NH[here], scaled_CV, wide_VH.t())
            gemm.add_weight_gradient(grad_VH, scaled_CV, x_CH)
        return grad_x_NH.view_as(x), grad_VH.to(weight.dtype), None, None
