"""Cross-entropy over a vocabulary that may be sharded by rows."""

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
    """Vocabulary rows of this rank."""

    start: int = 0
    reduce_max: Reduction = _identity
    """All-reduce (max) over the ranks that share the vocabulary."""
    reduce_sum: Reduction = _identity
    """All-reduce (sum) over the ranks that share the vocabulary."""


FULL_VOCAB = VocabRange()


def cross_entropy(logits: Tensor, labels: Tensor, vocab_range: VocabRange = FULL_VOCAB) -> Tensor:
    """Compute the loss of each token in nats, in float32 (float64 for float64).

    Args:
        logits: [..., rows of this rank].
        labels: int64 [...], rows of the whole vocabulary.
        vocab_range: rows of this rank.

    Returns:
        [...]: the same value on each rank that shares the vocabulary; the gradient into `logits` is that of one such
        loss.
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
    """Compute `cross_entropy` of the logits x @ weight.T, `chunk` tokens at a time.

    The backward pass recomputes the logits of a chunk: one GEMM more than the three without chunks. It saves x and two
    numbers a token. Each reduction is called once, for all tokens together.

    Args:
        x: hidden states, [..., H].
        weight: rows of this rank, [V/tp, H].
        labels: int64 [...].
        chunk: tokens.
        vocab_range: rows of this rank, with one reduction of each kind for all tokens.
        saves_exponentials: recompute nothing: the exponentials of all logits are saved, as by `cross_entropy`, but no
            other tensor of their size is allocated.
        gemm: GEMM backend.

    Returns:
        [...]: as of `cross_entropy`; the gradient of `weight` is summed over chunks in float32 at least.
    """
    # Without a backward pass there is no use for saved exponentials.
    options = _ChunkOptions(chunk, vocab_range, saves_exponentials and torch.is_grad_enabled(), gemm)
    return _ChunkedCrossEntropy.apply(x, weight, labels, options)


@dataclass(frozen=True)
class _ChunkOptions:
    """Non-tensor arguments of the chunked loss."""

    chunk: int
    vocab_range: VocabRange
    saves_exponentials: bool
    gemm: Gemm


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_range: VocabRange) -> Tensor:
        logits_fp32 = logits if logits.dtype == torch.float64 else logits.float()
        top = vocab_range.reduce_max(logits_fp32.amax(-1))
        row = labels - vocab_range.start
        is_local = (row >= 0) & (row < logits.shape[-1])
        row = row.where(is_local, 0).unsqueeze(-1)
        target = (logits_fp32.gather(-1, row).squeeze(-1) - top).where(is_local, 0.0)
        shifted = logits_fp32 - top.unsqueeze(-1) if logits_fp32 is logits else logits_fp32.sub_(top.unsqueeze(-1))
        # Not normalised here: the backward pass scales them anyway.
        exps = shifted.exp_()
        total, target = vocab_range.reduce_sum(torch.stack((exps.sum(-1), target))).unbind(0)
        ctx.save_for_backward(exps, total, row, is_local)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exps, total, row, is_local = ctx.saved_tensors
        scaled = exps * (grad / total).unsqueeze(-1)
        scaled.scatter_add_(-1, row, -(grad * is_local).unsqueeze(-1))
        return scaled.to(ctx.dtype), None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, options: _ChunkOptions) -> Tensor:
        x_NH = x.flatten(0, -2)
        row_N = labels.flatten() - options.vocab_range.start
        is_local_N = (row_N >= 0) & (row_N < len(weight))
        row_N = row_N.where(is_local_N, 0)
        tops = []
        sums = []
        targets = []
        exps = []
        for x_CH, row_C in zip(x_NH.split(options.chunk), row_N.split(options.chunk), strict=True):
            logits_CV = options.gemm.matmul_fp32(x_CH, weight)
            targets.append(logits_CV.gather(1, row_C.unsqueeze(1)).squeeze(1))
            tops.append(logits_CV.amax(1))
            exps_CV = logits_CV.sub_(tops[-1].unsqueeze(1)).exp_()
            sums.append(exps_CV.sum(1))
            if options.saves_exponentials:
                exps.append(exps_CV)
        rank_top_N = torch.cat(tops)
        top_N = options.vocab_range.reduce_max(rank_top_N)
        rank_share_N = (rank_top_N - top_N).exp()
        rank_target_N = (torch.cat(targets) - top_N).where(is_local_N, 0.0)
        total_N, target_N = options.vocab_range.reduce_sum(
            torch.stack((torch.cat(sums) * rank_share_N, rank_target_N))
        ).unbind(0)
        log_total_N = total_N.log()
        # The factor of the saved exponentials, or else the log-normaliser to subtract from the logits.
        normalizer_N = rank_share_N / total_N if options.saves_exponentials else log_total_N + top_N
        ctx.save_for_backward(x, weight, row_N, is_local_N, normalizer_N, *exps)
        ctx.options = options
        return (log_total_N - target_N).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row_N, is_local_N, normalizer_N, *exps = ctx.saved_tensors
        x_NH = x.flatten(0, -2)
        grad_N = grad.flatten()
        grad_x_NH = torch.empty_like(x_NH)
        gemm = ctx.options.gemm
        weight_VH = gemm.upcast(weight)
        grad_VH = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        # One buffer for all chunks: the page faults of a new allocation cost more than the multiplication.
        buffer = torch.empty_like(exps[0]) if exps else grad_VH[:0]
        for i, start in enumerate(range(0, len(x_NH), ctx.options.chunk)):
            chunk = slice(start, start + ctx.options.chunk)
            x_CH = gemm.upcast(x_NH[chunk])
            factor_C1 = grad_N[chunk].unsqueeze(1)
            if exps:
                scaled_CV = buffer[: len(x_CH)]
                torch.mul(exps[i], factor_C1 * normalizer_N[chunk].unsqueeze(1), out=scaled_CV)
            else:
                probs_CV = gemm.matmul_fp32(x_NH[chunk], weight).sub_(normalizer_N[chunk].unsqueeze(1)).exp_()
                scaled_CV = probs_CV.mul_(factor_C1)
            scaled_CV.scatter_add_(1, row_N[chunk].unsqueeze(1), -(factor_C1 * is_local_N[chunk].unsqueeze(1)))
            if not gemm.accepts_fp32_weight(weight):
                scaled_CV = scaled_CV.to(weight.dtype)
            gemm.matmul_out(grad_x_NH[chunk], scaled_CV, weight_VH.t())
            gemm.add_weight_gradient(grad_VH, scaled_CV, x_CH)
        return grad_x_NH.view_as(x), grad_VH.to(weight.dtype), None, None
