"""Cross-entropy over a vocabulary that may be sharded by rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.cross_entropy import (
    TORCH_CROSS_ENTROPY_OPS,
    CrossEntropyOps,
    RowStatistics,
    exponential_dot,
    exponential_gradient_out,
    exponentiate_,
    log_exponential_dot,
)
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
        """Return the local row of each label, int64 [N], out of `num_rows`, or -1 for a label of another rank."""
        row_N = labels.flatten() - self.start
        return row_N.where((row_N >= 0) & (row_N < num_rows), -1)


FULL_VOCAB = VocabRange()


@dataclass(frozen=True)
class SoftmaxOptions:
    """Distribution whose log-probabilities are computed, and whether its entropy is computed."""

    temperature: float = 1.0
    """Divisor of the logits, which are float32 at least, before the softmax."""
    has_entropy: bool = False
    """Compute the entropy of the distribution too, without a gradient: one more pass over the logits, no GEMM."""


PLAIN_SOFTMAX = SoftmaxOptions()


class TokenLosses(NamedTuple):
    """Values of each token over the whole vocabulary that losses combine, in nats, float32 at least, [...]."""

    loss: Tensor
    """Cross-entropy of the label."""
    log_normalizer: Tensor
    """Log-sum-exp of the logits. A loss may use both values: their gradients add up in the logits."""
    entropy: Tensor | None
    """Entropy of the predicted distribution, without a gradient, or None unless `SoftmaxOptions.has_entropy`."""


def token_losses(
    logits: Tensor,
    labels: Tensor,
    vocab_range: VocabRange = FULL_VOCAB,
    ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS,
    softmax: SoftmaxOptions = PLAIN_SOFTMAX,
) -> TokenLosses:
    """Compute the numbers of each token, in float32 (float64 for float64). It saves the logits.

    Args:
        logits: [..., rows of this rank].
        labels: int64 [...], rows of the whole vocabulary.
        softmax: temperature (the logits are saved divided by it, in float32 at least), and whether there is an entropy.

    Returns:
        [...]: the same on each rank that shares the vocabulary. The gradient into `logits` is of one such loss.
    """
    return TokenLosses(*_CrossEntropy.apply(logits, labels, vocab_range, ops, softmax))


def token_log_probs(
    logits_NV: Tensor, tokens_N: Tensor, vocab_range: VocabRange, ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS
) -> Tensor:
    """Compute the log-probabilities of tokens without autograd, with the bits of -`token_losses`, [N].

    Args:
        logits_NV: [N, rows of this rank], contiguous.
        tokens_N: int64, rows of the whole vocabulary.
    """
    if vocab_range is not FULL_VOCAB:
        return -token_losses(logits_NV, tokens_N, vocab_range, ops).loss
    statistics = ops.statistics(logits_NV, tokens_N)
    return statistics.target_C - statistics.top_C - statistics.sum_C.log()


@dataclass(frozen=True)
class ChunkOptions:
    """Non-tensor arguments of the chunked loss."""

    chunk: int
    """Tokens."""
    vocab_range: VocabRange = FULL_VOCAB
    """Rows of this rank, with one reduction of each kind for all tokens."""
    saves_exponentials: bool = False
    """Recompute nothing, by torch operations: the exponentials of all logits are saved in float32 at least, and no
    other tensor of their size is allocated.
    """
    gemm: Gemm = TORCH_GEMM
    """GEMM backend."""
    ops: CrossEntropyOps = TORCH_CROSS_ENTROPY_OPS
    """Operations on the logits of a chunk."""
    softmax: SoftmaxOptions = PLAIN_SOFTMAX
    """Temperature and entropy."""


def chunked_token_losses(
    x: Tensor, weight: Tensor, labels: Tensor, options: ChunkOptions, bias: Tensor | None = None
) -> TokenLosses:
    """Compute `token_losses` of the logits x @ weight.T + bias, a chunk of tokens at a time.

    The backward pass recomputes the logits of a chunk: one GEMM more than the three without chunks. The forward pass
    saves x and two numbers for each token. Each reduction is called once, for all tokens together.

    Args:
        x: hidden states, [..., H].
        weight: rows of this rank, [V/tp, H].
        labels: int64 [...].
        bias: bias of the same rows, [V/tp], or None.

    Returns:
        [...]: see `token_losses`. The gradients of `weight` and `bias` are summed over chunks in float32 at least.
    """
    # Saved exponentials are useful only for a backward pass.
    options = replace(options, saves_exponentials=options.saves_exponentials and torch.is_grad_enabled())
    return TokenLosses(*_ChunkedCrossEntropy.apply(x, weight, bias, labels, options))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_range: VocabRange, ops: CrossEntropyOps, softmax: SoftmaxOptions
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits_NV = logits.reshape(-1, logits.shape[-1]).contiguous()
        if softmax.temperature != 1:
            logits_NV = logits_NV.to(torch.promote_types(logits.dtype, torch.float32)) / softmax.temperature
        row_N = vocab_range.local_rows(labels, logits.shape[-1])
        local = ops.statistics(logits_NV, row_N)
        dot_N = exponential_dot(logits_NV, local.top_C) if softmax.has_entropy else None
        merged = _merge_over_ranks(local, row_N, vocab_range, dot_N)
        ctx.save_for_backward(logits_NV, row_N, merged.normalizer_N)
        ctx.logits_like = logits.shape, logits.dtype
        ctx.args = ops, softmax.temperature
        return _outputs(ctx, merged, labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits_NV, row_N, normalizer_N = ctx.saved_tensors
        shape, dtype = ctx.logits_like
        ops, temperature = ctx.args
        grad_NV = torch.empty_like(logits_NV, dtype=dtype)
        ops.gradient_out(grad_NV, logits_NV, row_N, normalizer_N, _row_gradients(grads, temperature))
        return grad_NV.view(shape), None, None, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: ChunkOptions
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        row_N = options.vocab_range.local_rows(labels, len(weight))
        softmax = options.softmax
        statistics: list[RowStatistics] = []
        dots: list[Tensor] = []
        exps: list[Tensor] = []
        for x_CH, row_C in zip(x.flatten(0, -2).split(options.chunk), row_N.split(options.chunk), strict=True):
            logits_CV = _chunk_logits(x_CH, weight, bias, options)
            if options.saves_exponentials:
                statistics.append(exponentiate_(logits_CV, row_C))
                exps.append(logits_CV)
                dots += [log_exponential_dot(logits_CV)] if softmax.has_entropy else []
            else:
                statistics.append(options.ops.statistics(logits_CV, row_C))
                dots += [exponential_dot(logits_CV, statistics[-1].top_C)] if softmax.has_entropy else []
            # Freed before the logits of the next chunk are allocated.
            del logits_CV
        local = RowStatistics(*(torch.cat(values) for values in zip(*statistics, strict=True)))
        merged = _merge_over_ranks(local, row_N, options.vocab_range, torch.cat(dots) if dots else None)
        # The factor of the saved exponentials, or the log-normaliser to subtract from the logits.
        normalizer_N = merged.share_N / merged.total_N if options.saves_exponentials else merged.normalizer_N
        ctx.save_for_backward(x, weight, bias, row_N, normalizer_N, *exps)
        ctx.options = options
        return _outputs(ctx, merged, labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, row_N, normalizer_N, *exps = ctx.saved_tensors
        options = ctx.options
        gemm = options.gemm
        x_NH = x.flatten(0, -2)
        grads_KN = _row_gradients(grads, options.softmax.temperature)
        grad_x_NH = torch.empty_like(x_NH)
        weight_VH = gemm.upcast(weight)
        grad_VH = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        grad_bias_V = None if bias is None else torch.zeros_like(bias, dtype=grad_VH.dtype)
        # One buffer for all chunks: the page faults of a new allocation cost more than the multiplication.
        buffer = torch.empty_like(exps[0]) if exps else grad_VH[:0]
        for i, start in enumerate(range(0, len(x_NH), options.chunk)):
            chunk = slice(start, start + options.chunk)
            if exps:
                scaled_CV = buffer[: len(exps[i])]
                exponential_gradient_out(scaled_CV, exps[i], row_N[chunk], normalizer_N[chunk], grads_KN[:, chunk])
                if not gemm.accepts_fp32_weight(weight):
                    scaled_CV = scaled_CV.to(weight.dtype)
            else:
                logits_CV = _chunk_logits(x_NH[chunk], weight, bias, options)
                is_in_place = gemm.accepts_fp32_weight(weight) or logits_CV.dtype == weight.dtype
                scaled_CV = logits_CV if is_in_place else torch.empty_like(logits_CV, dtype=weight.dtype)
                options.ops.gradient_out(scaled_CV, logits_CV, row_N[chunk], normalizer_N[chunk], grads_KN[:, chunk])
                del logits_CV
            gemm.matmul_out(grad_x_NH[chunk], scaled_CV, weight_VH.t())
            gemm.add_weight_gradient(grad_VH, scaled_CV, gemm.upcast(x_NH[chunk]))
            if grad_bias_V is not None:
                grad_bias_V += scaled_CV.sum(0, dtype=grad_bias_V.dtype)
            # Freed before the logits of the next chunk are allocated.
            del scaled_CV
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(weight.dtype)
        return grad_x_NH.view_as(x), grad_VH.to(weight.dtype), grad_bias, None, None


def _chunk_logits(x_CH: Tensor, weight: Tensor, bias: Tensor | None, options: ChunkOptions) -> Tensor:
    """Compute the logits of a chunk over the temperature, in float32 at least, [C, V/tp]."""
    logits_CV = options.gemm.matmul_fp32(x_CH, weight)
    if bias is not None:
        logits_CV += bias
    return logits_CV if options.softmax.temperature == 1 else logits_CV.div_(options.softmax.temperature)


def _row_gradients(grads: tuple[Tensor | None, ...], temperature: float) -> Tensor:
    """Return the gradients of each token's loss and normalizer, for logits over the temperature.

    Returns:
        [2, N], or [1, N] if the normalizer has no gradient of its own.
    """
    grad_loss, grad_normalizer = grads[:2]
    if grad_normalizer is None:
        assert grad_loss is not None, "a backward pass has a gradient"
        grads_KN = grad_loss.flatten().contiguous().unsqueeze(0)
    else:
        grad_loss = torch.zeros_like(grad_normalizer) if grad_loss is None else grad_loss
        grads_KN = torch.stack((grad_loss.flatten(), grad_normalizer.flatten()))
    return grads_KN if temperature == 1 else grads_KN / temperature


def _outputs(ctx: Any, merged: "_MergedStatistics", shape: torch.Size) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the fields of `TokenLosses` in the shape of the labels. The entropy has no gradient."""
    ctx.set_materialize_grads(False)
    entropy = None if merged.entropy_N is None else merged.entropy_N.view(shape)
    if entropy is not None:
        ctx.mark_non_differentiable(entropy)
    return merged.loss_N.view(shape), merged.normalizer_N.view(shape), entropy


class _MergedStatistics(NamedTuple):
    """Statistics of each token over the whole vocabulary, [N]."""

    loss_N: Tensor
    total_N: Tensor
    """Sum of the exponentials relative to the maximum over the whole vocabulary."""
    share_N: Tensor
    """Factor of this rank's exponentials, which are relative to its own maximum."""
    normalizer_N: Tensor
    """Log-sum-exp."""
    entropy_N: Tensor | None
    """Entropy, if asked for."""


def _merge_over_ranks(
    local: RowStatistics, row_N: Tensor, vocab_range: VocabRange, dot_N: Tensor | None
) -> _MergedStatistics:
    """Merge the statistics of all ranks that share the vocabulary. One all-reduce (max) and one (sum).

    Args:
        row_N: row of each label on this rank.
        dot_N: `exponential_dot` of this rank's rows, or None if there is no entropy.
    """
    top_N = vocab_range.reduce_max(local.top_C)
    share_N = (local.top_C - top_N).exp()
    target_N = (local.target_C - top_N).where(row_N >= 0, 0.0)
    summands = [local.sum_C * share_N, target_N]
    if dot_N is not None:
        summands.append(share_N * (dot_N + local.sum_C * (local.top_C - top_N)))
    total_N, target_N, *dots = vocab_range.reduce_sum(torch.stack(summands)).unbind(0)
    log_total_N = total_N.log()
    entropy_N = log_total_N - dots[0] / total_N if dots else None
    return _MergedStatistics(log_total_N - target_N, total_N, share_N, log_total_N + top_N, entropy_N)
