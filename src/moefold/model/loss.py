"""Cross-entropy over a vocabulary that may be sharded by rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.cross_entropy import TORCH_CROSS_ENTROPY_OPS, CrossEntropyOps, RowStatistics, exponentiate_
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

    def local_rows(self, labels: Tensor, num_rows: int) -> Tensor:
        """Return the local row of each label, int64 [N], out of `num_rows`; -1 for a label of another rank."""
        row_N = labels.flatten() - self.start
        return row_N.where((row_N >= 0) & (row_N < num_rows), -1)


FULL_VOCAB = VocabRange()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_range: VocabRange = FULL_VOCAB,
    ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS,
) -> Tensor:
    """Compute the loss of each token in nats, in float32 (float64 for float64); saves the logits.

    Args:
        logits: [..., rows of this rank].
        labels: int64 [...], rows of the whole vocabulary.
        vocab_range: rows of this rank.
        ops: operations on the logits.

    Returns:
        [...]: the same value on each rank that shares the vocabulary; the gradient into `logits` is that of one such
        loss.
    """
    return _CrossEntropy.apply(logits, labels, vocab_range, ops)


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    vocab_range: VocabRange = FULL_VOCAB,
    *,
    saves_exponentials: bool = False,
    gemm: Gemm = TORCH_GEMM,
    ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS,
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
        saves_exponentials: recompute nothing: the exponentials of all logits are saved in float32 at least, and no
            other tensor of their size is allocated; by torch operations.
        gemm: GEMM backend.
        ops: operations on the logits of a chunk.

    Returns:
        [...]: as of `cross_entropy`; the gradient of `weight` is summed over chunks in float32 at least.
    """
    # Without a backward pass there is no use for saved exponentials.
    options = _ChunkOptions(chunk, vocab_range, saves_exponentials and torch.is_grad_enabled(), gemm, ops)
    return _ChunkedCrossEntropy.apply(x, weight, labels, options)


@dataclass(frozen=True)
class _ChunkOptions:
    """Non-tensor arguments of the chunked loss."""

    chunk: int
    vocab_range: VocabRange
    saves_exponentials: bool
    gemm: Gemm
    ops: CrossEntropyOps


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_range: VocabRange, ops: CrossEntropyOps) -> Tensor:
        logits_NV = logits.reshape(-1, logits.shape[-1]).contiguous()
        row_N = vocab_range.local_rows(labels, logits.shape[-1])
        merged = _merge_over_ranks(ops.statistics(logits_NV, row_N), row_N, vocab_range)
        ctx.save_for_backward(logits_NV, row_N, merged.normalizer_N)
        ctx.shape = logits.shape
        ctx.ops = ops
        return merged.loss_N.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, row_N, normalizer_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        ctx.ops.gradient_out(grad_NV, logits_NV, row_N, normalizer_N, grad.flatten())
        return grad_NV.view(ctx.shape), None, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, options: _ChunkOptions) -> Tensor:
        row_N = options.vocab_range.local_rows(labels, len(weight))
        statistics: list[RowStatistics] = []
        exps: list[Tensor] = []
        for x_CH, row_C in zip(x.flatten(0, -2).split(options.chunk), row_N.split(options.chunk), strict=True):
            logits_CV = options.gemm.matmul_fp32(x_CH, weight)
            if options.saves_exponentials:
                statistics.append(exponentiate_(logits_CV, row_C))
                exps.append(logits_CV)
            else:
                statistics.append(options.ops.statistics(logits_CV, row_C))
            # Freed before the logits of the next chunk are allocated.
            del logits_CV
        merged = _merge_over_ranks(
            RowStatistics(*(torch.cat(values) for values in zip(*statistics, strict=True))), row_N, options.vocab_range
        )
        # The factor of the saved exponentials, or else the log-normaliser to subtract from the logits.
        normalizer_N = merged.share_N / merged.total_N if options.saves_exponentials else merged.normalizer_N
        ctx.save_for_backward(x, weight, row_N, normalizer_N, *exps)
        ctx.options = options
        return merged.loss_N.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row_N, normalizer_N, *exps = ctx.saved_tensors
        options = ctx.options
        gemm = options.gemm
        x_NH = x.flatten(0, -2)
        grad_N = grad.flatten()
        grad_x_NH = torch.empty_like(x_NH)
        weight_VH = gemm.upcast(weight)
        grad_VH = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        # One buffer for all chunks: the page faults of a new allocation cost more than the multiplication.
        buffer = torch.empty_like(exps[0]) if exps else grad_VH[:0]
        for i, start in enumerate(range(0, len(x_NH), options.chunk)):
            chunk = slice(start, start + options.chunk)
            if exps:
                scaled_CV = buffer[: len(exps[i])]
                _scale_exponentials_out(scaled_CV, exps[i], row_N[chunk], normalizer_N[chunk], grad_N[chunk])
                if not gemm.accepts_fp32_weight(weight):
                    scaled_CV = scaled_CV.to(weight.dtype)
            else:
                logits_CV = gemm.matmul_fp32(x_NH[chunk], weight)
                is_in_place = gemm.accepts_fp32_weight(weight) or logits_CV.dtype == weight.dtype
                scaled_CV = logits_CV if is_in_place else torch.empty_like(logits_CV, dtype=weight.dtype)
                options.ops.gradient_out(scaled_CV, logits_CV, row_N[chunk], normalizer_N[chunk], grad_N[chunk])
                del logits_CV
            gemm.matmul_out(grad_x_NH[chunk], scaled_CV, weight_VH.t())
            gemm.add_weight_gradient(grad_VH, scaled_CV, gemm.upcast(x_NH[chunk]))
            # Freed before the logits of the next chunk are allocated.
            del scaled_CV
        return grad_x_NH.view_as(x), grad_VH.to(weight.dtype), None, None


class _MergedStatistics(NamedTuple):
    """Statistics of each token over the whole vocabulary, [N]."""

    loss_N: Tensor
    total_N: Tensor
    """Sum of the exponentials relative to the maximum over the whole vocabulary."""
    share_N: Tensor
    """Factor of this rank's exponentials, which are relative to its own maximum."""
    normalizer_N: Tensor
    """Log-sum-exp."""


def _merge_over_ranks(local: RowStatistics, row_N: Tensor, vocab_range: VocabRange) -> _MergedStatistics:
    """Merge the statistics of all ranks that share the vocabulary; one all-reduce (max) and one (sum)."""
    top_N = vocab_range.reduce_max(local.top_C)
    share_N = (local.top_C - top_N).exp()
    target_N = (local.target_C - top_N).where(row_N >= 0, 0.0)
    total_N, target_N = vocab_range.reduce_sum(torch.stack((local.sum_C * share_N, target_N))).unbind(0)
    log_total_N = total_N.log()
    return _MergedStatistics(log_total_N - target_N, total_N, share_N, log_total_N + top_N)


def _scale_exponentials_out(out_CV: Tensor, exps_CV: Tensor, row_C: Tensor, factor_C: Tensor, grad_C: Tensor) -> None:
    """Write grad * (factor * exps - one_hot(row)) into `out`."""
    torch.mul(exps_CV, (grad_C * factor_C).unsqueeze(1), out=out_CV)
    out_CV.scatter_add_(1, row_C.clamp(min=0).unsqueeze(1), -grad_C.where(row_C >= 0, 0.0).unsqueeze(1))
