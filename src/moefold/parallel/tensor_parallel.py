"""Tensor parallelism with sequence parallelism (arXiv:1909.08053, arXiv:2205.05198), and its asynchronous form.

Async tensor parallelism overlaps the collectives with the GEMMs, one rank's tokens at a time (arXiv:2302.05442,
"asynchronous parallel linear operations"). An all-gather before a GEMM becomes a ring: while the tokens of one rank are
multiplied, the next rank's arrive. A reduce-scatter after a GEMM becomes a ring of partial sums: while one rank's part
is computed, the sum for another rank is in flight. Each ring is the backward pass of the other. The rings send as many
bytes as the collectives. The GEMMs have S/(cp*tp) tokens instead of S/cp.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.comm.collectives import (
    all_gather,
    all_gather_uneven,
    all_reduce_max,
    all_reduce_sum,
    differentiable_all_reduce,
    reduce_scatter,
    reduce_scatter_uneven,
    ring_pass,
    ring_reduce_scatter,
)
from moefold.comm.groups import Group
from moefold.config.base.param_spec import shard_rows
from moefold.model.attention import TokenMixer
from moefold.model.delayed_wgrad import WeightGradSink, WeightGradStoreProtocol, weight_grad_sink
from moefold.model.linear import UNQUANTIZED_LINEAR, LinearBackend, UnquantizedLinear
from moefold.model.loss import VocabRange
from moefold.model.module_wrapper import set_on_modules
from moefold.model.norm import FullWidthQKNorm
from moefold.model.tp_interface import SequenceParallel, VocabParallel
from moefold.model.transformer import Transformer
from moefold.ops.gemm import Gemm


def apply_tensor_parallel(stage: Transformer, tp: Group, *, overlaps: bool) -> None:
    """Shard tokens and vocabulary over the tp ranks. `shard_model_parallel` shards the weights."""
    if tp.size == 1:
        return
    sequence_parallel = AsyncTensorParallel(tp) if overlaps else SequenceParallelTokens(tp)
    set_on_modules(stage, "sequence_parallel", sequence_parallel)
    set_on_modules(stage, "vocab_parallel", TPVocabParallel(tp, stage.config.vocab_size))
    for module in stage.modules():
        if isinstance(module, TokenMixer):
            module.set_tp_rank(tp.rank, tp.size)
        if isinstance(module, FullWidthQKNorm):
            module.sum_of_squares = TPSumOfSquares(tp, module.num_heads)


class SequenceParallelTokens(SequenceParallel):
    """Sequence parallelism: S/(cp*tp) tokens per tp rank between the sub-layers, S/cp inside them."""

    def __init__(self, tp: Group) -> None:
        self._tp = tp
        self._split_sizes: list[int] | None = None

    def split_unevenly(self, num_tokens: int) -> int:
        """See base class."""
        base, extra = divmod(num_tokens, self._tp.size)
        self._split_sizes = [base + (member < extra) for member in range(self._tp.size)]
        return self._split_sizes[self._tp.rank]

    def split_evenly(self) -> None:
        """See base class."""
        self._split_sizes = None

    def gather(self, x: Tensor) -> Tensor:
        """Gather along the sequence (all-gather). The gradient is reduce-scattered."""
        sizes = self._split_sizes
        return all_gather(x, self._tp) if sizes is None else all_gather_uneven(x, self._tp, sizes)

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter along the sequence (reduce-scatter). The gradient is all-gathered."""
        sizes = self._split_sizes
        return reduce_scatter(x, self._tp) if sizes is None else reduce_scatter_uneven(x, self._tp, sizes)

    def local_rows(self, x: Tensor) -> Tensor:
        """Return this rank's part."""
        parts = x.chunk(self._tp.size) if self._split_sizes is None else x.split(self._split_sizes)
        return parts[self._tp.rank]


class TPVocabParallel(VocabParallel):
    """Vocab-parallel embedding and head: V/tp consecutive rows on each tp rank, rounded up. The last rank has fewer."""

    def __init__(self, tp: Group, vocab_size: int) -> None:
        self._tp = tp
        self._vocab_size = vocab_size
        start, self._num_rows = shard_rows(vocab_size, tp.size, tp.rank)
        max_over_tp = partial(all_reduce_max, group=tp)
        sum_over_tp = partial(all_reduce_sum, group=tp)
        self.vocab_range = VocabRange(start, max_over_tp, sum_over_tp)
        """Rows of this rank. The cross-entropy needs two all-reduces over tp, of one and two numbers for each token."""

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's summand of the token embeddings: zeros for tokens of other vocab shards."""
        row = tokens - self.vocab_range.start
        is_mine = (row >= 0) & (row < self._num_rows)
        return F.embedding(row.where(is_mine, 0), weight) * is_mine.unsqueeze(-1)

    def gather(self, logits: Tensor) -> Tensor:
        """Gather the vocab shards (all-gather). The gradient of a shard is its part of the gradient of the logits."""
        return _GatherVocab.apply(logits, self._tp, self._vocab_size)


class _GatherVocab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tp: Group, vocab_size: int) -> Tensor:
        ctx.shard = shard_rows(vocab_size, tp.size, tp.rank)
        # Shards are gathered at the size of the largest. The padding of the last shard comes after the vocabulary.
        _, max_rows = shard_rows(vocab_size, tp.size, 0)
        missing = max_rows - logits.shape[-1]
        padded = F.pad(logits, (0, missing)) if missing else logits
        return all_gather(padded.movedim(-1, 0), tp)[:vocab_size].movedim(0, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, *ctx.shard), None, None


class TPSumOfSquares:
    """Sum over tp of the squares of each token's heads. See `FullWidthQKNorm`."""

    def __init__(self, tp: Group, num_heads: int) -> None:
        self._tp = tp
        # If tp exceeds the number of heads, this many neighbouring ranks hold the same head.
        self._num_replicas = max(1, tp.size // num_heads)

    def __call__(self, squares: Tensor) -> Tensor:
        """Sum over tp, each head once."""
        return differentiable_all_reduce(squares, self._tp) / self._num_replicas


def local_positions(positions: Tensor, tp: Group) -> Tensor:
    """Return the positions of this rank's tokens between the sub-layers, [S/(cp*tp)] of [S/cp]."""
    return torch.chunk(positions, tp.size)[tp.rank]


class AsyncTensorParallel(SequenceParallelTokens):
    """Sequence parallelism whose collectives overlap with adjacent GEMMs, for unquantized GEMMs only.

    Results differ from the results of `SequenceParallelTokens` by rounding: sums over tp are added in ring order.
    """

    def all_gather_linear(
        self,
        x: Tensor,
        weights_and_biases: Sequence[tuple[Tensor, Tensor | None]],
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
        num_unquantized: int = 0,
    ) -> list[Tensor]:
        """See base class."""
        if self._split_sizes is not None:
            return super().all_gather_linear(x, weights_and_biases, wgrad_store, linear_backend, num_unquantized)
        weights = [weight for weight, _ in weights_and_biases]
        wgrad_sink, tracked_weights = weight_grad_sink(wgrad_store, x, weights)
        outs = _AllGatherLinear.apply(x, self._tp, wgrad_sink, _gemm(linear_backend), *tracked_weights)
        return [out if bias is None else out + bias for out, (_, bias) in zip(outs, weights_and_biases, strict=True)]

    def linear_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
    ) -> Tensor:
        """See base class."""
        if self._split_sizes is not None:
            return super().linear_reduce_scatter(x, weight, wgrad_store, linear_backend)
        wgrad_sink, (tracked_weight,) = weight_grad_sink(wgrad_store, x, [weight])
        return _LinearReduceScatter.apply(x, self._tp, wgrad_sink, _gemm(linear_backend), tracked_weight)


def _gemm(linear_backend: LinearBackend | None) -> Gemm:
    """Return the GEMM of an unquantized linear backend."""
    linear_backend = linear_backend or UNQUANTIZED_LINEAR
    assert isinstance(linear_backend, UnquantizedLinear), "a config check rejects low-precision GEMMs"
    return linear_backend.gemm


class _AllGatherLinear(torch.autograd.Function):
    """(x [S/n, B, K], weights [N, K]) -> [S, B, N] for each weight, n = tp."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Group,
        wgrad_sink: WeightGradSink,
        gemm: Gemm,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        gathered = x.new_empty((tp.size, *x.shape))
        gathered[tp.rank] = x
        rows = x.shape[:-1].numel()
        outs = [x.new_empty(tp.size, rows, len(weight)) for weight in weights]
        for source, block in ring_pass(gathered[tp.rank], tp, gathered.unbind()):
            for out, weight in zip(outs, weights, strict=True):
                gemm.matmul_out(out[source], block.flatten(0, -2), weight)
        ctx.save_for_backward(gathered.flatten(0, 1), *weights)
        ctx.args = tp, wgrad_sink, gemm
        return tuple(out.view(tp.size * x.shape[0], *x.shape[1:-1], -1).detach() for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        tp, wgrad_sink, gemm = ctx.args
        x_MK = gathered.flatten(0, -2)
        grads_MN = [grad.flatten(0, -2) for grad in grads]
        upcast_grads = [gemm.upcast(grad) for grad in grads_MN]
        shards = [grad.unflatten(0, (tp.size, -1)) for grad in upcast_grads]
        # Delayed GEMMs keep the gradients in their own precision.
        wgrad_operands = grads_MN if wgrad_sink.is_delayed else upcast_grads

        def partial_sum(member: int) -> Tensor:
            terms = (gemm.matmul(shard[member], w.t()) for shard, w in zip(shards, weights, strict=True))
            return reduce(Tensor.add_, terms)

        grad_x = ring_reduce_scatter(partial_sum, tp).view(len(gathered) // tp.size, *gathered.shape[1:])
        grad_weights = wgrad_sink.resolve(
            lambda: [gemm.weight_gradient(grad, x_MK) for grad in wgrad_operands], len(weights)
        )
        return grad_x, None, None, None, *grad_weights


class _LinearReduceScatter(torch.autograd.Function):
    """(x [S, B, K], weight [N, K]) -> [S/n, B, N], n = tp."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Group,
        wgrad_sink: WeightGradSink,
        gemm: Gemm,
        weight: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = tp, wgrad_sink, gemm
        shards = x.flatten(0, -2).unflatten(0, (tp.size, -1))
        total = ring_reduce_scatter(lambda member: gemm.matmul(shards[member], weight), tp)
        # Not a view, see `linear`.
        return total.view(len(x) // tp.size, *x.shape[1:-1], -1).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp, wgrad_sink, gemm = ctx.args
        x_MK = x.flatten(0, -2)
        gathered = grad.new_empty((tp.size, *grad.shape))
        gathered[tp.rank] = grad
        grad_x = x.new_empty(tp.size, len(x_MK) // tp.size, x.shape[-1])
        for source, block in ring_pass(gathered[tp.rank], tp, gathered.unbind()):
            gemm.matmul_out(grad_x[source], block.flatten(0, -2), weight.t())
        grad_MN = gathered.flatten(0, -2)
        grad_weight = wgrad_sink.resolve(lambda: [gemm.weight_gradient(grad_MN, x_MK)], 1)
        return grad_x.view_as(x), None, None, None, *grad_weight
