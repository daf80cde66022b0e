"""Cross-entropy over a vocabulary that may be cut into row ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.gemm import TORCH_GEMM, Gemm

Reduction = Callable[[Tensor], Tensor]


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class VocabRange:
    """The rows of the vocabulary that this rank holds."""

    start: int = 0
    reduce_max: Reduction = _identity
    """Maximum over the ranks that hold the other rows."""
    reduce_sum: Reduction = _identity
    """Sum over those ranks."""


FULL_VOCAB = VocabRange()


def cross_entropy(logits: Tensor, labels: Tensor, vocab_range: VocabRange = FULL_VOCAB) -> Tensor:
    """Loss of each token in nats, computed in float32 (float64 for float64).

    Args:
        logits: [..., rows of this rank].
        labels: int64 [...], rows of the whole vocabulary.
        vocab_range: those of this rank.

    Returns:
        [...]: the same value on each of the ranks with rows; the gradient into `logits` is that of one such loss.
    """
    return _CrossEntropy.apply(logits, labels, vocab_range)


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    vocab_range: VocabRange = FULL_VOCAB,
    *,
    saves_exponentials: bool = False,
    gemm: Gemm = TORCH_GEMM,
) -> Tensor:
    """`cross_entropy` of the logits x @ weight.T, which are made for `chunk` tokens at a time.

    The backward pass makes the logits of a chunk again: one matrix product more, beside three. What is kept for it is x
    and two numbers a token. The reductions are called once each, for all tokens together.

    Args:
        x: hidden states, [..., H].
        weight: rows of this rank, [V/tp, H].
        labels: int64 [...].
        chunk: tokens.
        vocab_range: those of this rank, with one reduction of each kind for all tokens.
        saves_exponentials: nothing is made again: the exponentials of all logits are kept, as by `cross_entropy`, and nothing else
            of their size is ever in memory.
        gemm: who multiplies.

    Returns:
        [...]: as of `cross_entropy`; the gradient of `weight` is summed over chunks in float32 at least.
    """
    # Without gradients nobody comes back for what would be kept.
    how = _ChunkOptions(chunk, vocab_range, saves_exponentials and torch.is_grad_enabled(), gemm)
    return _ChunkedCrossEntropy.apply(x, weight, labels, how)


@dataclass(frozen=True)
class _ChunkOptions:
    """The loss in chunks, beside its tensors."""

    chunk: int
    vocab_range: VocabRange
    saves_exponentials: bool
    gemm: Gemm


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_range: VocabRange) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = vocab_range.reduce_max(wide.amax(-1))
        row = labels - vocab_range.start
        is_mine = (row >= 0) & (row < logits.shape[-1])
        row = row.where(is_mine, 0).unsqueeze(-1)
        target = (wide.gather(-1, row).squeeze(-1) - top).where(is_mine, 0.0)
        shifted = wide - top.unsqueeze(-1) if wide is logits else wide.sub_(top.unsqueeze(-1))
        # Not divided by their sum yet: the backward pass scales them anyway.
        exps = shifted.exp_()
        total, target = vocab_range.reduce_sum(torch.stack((exps.sum(-1), target))).unbind(0)
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, options: _ChunkOptions) -> Tensor:
        x_NH = x.flatten(0, -2)
        row_N = labels.flatten() - options.vocab_range.start
        is_mine_N = (row_N >= 0) & (row_N < len(weight))
        row_N = row_N.where(is_mine_N, 0)
        tops = []
        sums = []
        targets = []
        exps = []
        for x_CH, row_C in zip(x_NH.split(options.chunk), row_N.split(options.chunk), strict=True):
            wide = options.gemm.matmul_fp32(x_CH, weight)
            targets.append(wide.gather(1, row_C.unsqueeze(1)).squeeze(1))
            tops.append(wide.amax(1))
            exps_CV = wide.sub_(tops[-1].unsqueeze(1)).exp_()
            sums.append(exps_CV.sum(1))
            if options.saves_exponentials:
                exps.append(exps_CV)
        my_top_N = torch.cat(tops)
        top_N = options.vocab_range.reduce_max(my_top_N)
        my_share_N = (my_top_N - top_N).exp()
        my_target_N = (torch.cat(targets) - top_N).where(is_mine_N, 0.0)
        total_N, target_N = options.vocab_range.reduce_sum(
            torch.stack((torch.cat(sums) * my_share_N, my_target_N))
        ).unbind(0)
        log_total_N = total_N.log()
        # With the exponentials their factor, else what the logits are to be reduced by.
        known_N = my_share_N / total_N if options.saves_exponentials else log_total_N + top_N
        ctx.save_for_backward(x, weight, row_N, is_mine_N, known_N, *exps)
        ctx.options = options
        return (log_total_N - target_N).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row_N, is_mine_N, known_N, *exps = ctx.saved_tensors
        x_NH = x.flatten(0, -2)
        grad_N = grad.flatten()
        grad_x_NH = torch.empty_like(x_NH)
        gemm = ctx.options.gemm
        wide_VH = gemm.upcast(weight)
        grad_VH = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        # The same for all chunks: the first touch of new memory costs more than the product.
        room = torch.empty_like(exps[0]) if exps else grad_VH[:0]
        for i, start in enumerate(range(0, len(x_NH), ctx.options.chunk)):
            here = slice(start, start + ctx.options.chunk)
            x_CH = gemm.upcast(x_NH[here])
            factor_C1 = grad_N[here].unsqueeze(1)
            if exps:
                scaled_CV = room[: len(x_CH)]
                torch.mul(exps[i], factor_C1 * known_N[here].unsqueeze(1), out=scaled_CV)
            else:
                probs_CV = gemm.matmul_fp32(x_NH[here], weight).sub_(known_N[here].unsqueeze(1)).exp_()
                scaled_CV = probs_CV.mul_(factor_C1)
            scaled_CV.scatter_add_(1, row_N[here].unsqueeze(1), -(factor_C1 * is_mine_N[here].unsqueeze(1)))
            if not gemm.accepts_fp32_weight(weight):
                scaled_CV = scaled_CV.to(weight.dtype)
            gemm.matmul_out(grad_x_NH[here], scaled_CV, wide_VH.t())
            gemm.add_weight_gradient(grad_VH, scaled_CV, x_CH)
        return grad_x_NH.view_as(x), grad_VH.to(weight.dtype), None, None
