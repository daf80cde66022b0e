"""Async tensor parallelism: overlap the collectives of tensor parallelism with its GEMMs, one rank's tokens at a time.

An all-gather before a GEMM becomes a ring: while the tokens of one rank are multiplied, the next rank's arrive. A
reduce-scatter after a GEMM becomes a ring of partial sums: while one rank's part is computed, the sum for another rank
is in flight (arXiv:2302.05442, "asynchronous parallel linear operations"). Each is the backward pass of the other. As
many bytes are sent as by the collectives; the GEMMs have S/(cp*tp) tokens instead of S/cp.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.groups import Group
from moefold.comm.ring import ring_pass, ring_reduce_scatter
from moefold.model.delayed_wgrad import WeightGradStoreProtocol, should_delay
from moefold.model.linear import UNQUANTIZED_LINEAR, LinearBackend, UnquantizedLinear
from moefold.ops.gemm import Gemm
from moefold.parallel.tensor_parallel import SequenceParallelTokens


class AsyncTensorParallel(SequenceParallelTokens):
    """Sequence parallelism whose collectives overlap with adjacent GEMMs; only for unquantized GEMMs.

    Results differ from those of `SequenceParallelTokens` by rounding: sums over tp are added in ring order.
    """

    def all_gather_linear(
        self,
        x: Tensor,
        weights_and_biases: Sequence[tuple[Tensor, Tensor | None]],
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
    ) -> list[Tensor]:
        """See base class."""
        weights = [weight for weight, _ in weights_and_biases]
        wgrad_store, inputs = _delay_weight_grads(wgrad_store, x, weights)
        outs = _AllGatherLinear.apply(x, self._tp, wgrad_store, weights, _gemm(linear_backend), *inputs)
        return [out if bias is None else out + bias for out, (_, bias) in zip(outs, weights_and_biases, strict=True)]

    def linear_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        wgrad_store: WeightGradStoreProtocol | None = None,
        linear_backend: LinearBackend | None = None,
    ) -> Tensor:
        """See base class."""
        wgrad_store, inputs = _delay_weight_grads(wgrad_store, x, [weight])
        out: Tensor = _LinearReduceScatter.apply(x, self._tp, wgrad_store, [weight], _gemm(linear_backend), *inputs)
        return out


def _gemm(linear_backend: LinearBackend | None) -> Gemm:
    """Return the GEMM of an unquantized linear backend."""
    linear_backend = linear_backend or UNQUANTIZED_LINEAR
    assert isinstance(linear_backend, UnquantizedLinear), "a config check rejects low-precision GEMMs"
    return linear_backend.gemm


def _delay_weight_grads(
    wgrad_store: WeightGradStoreProtocol | None, x: Tensor, weights: Sequence[Tensor]
) -> tuple[WeightGradStoreProtocol | None, list[Tensor]]:
    """Return the store of delayed weight gradients, if any, and the weights for autograd, detached if delayed."""
    if any(should_delay(wgrad_store, x, weight) for weight in weights):
        return wgrad_store, [weight.detach() for weight in weights]
    return None, list(weights)


class _AllGatherLinear(torch.autograd.Function):
    """(x [S/n, B, K], weights [N, K]) -> [S, B, N] of each, n = tp."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Group,
        wgrad_store: WeightGradStoreProtocol | None,
        tracked_weights: list[Tensor],
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
        ctx.args = tp, wgrad_store, tracked_weights, gemm
        return tuple(out.view(tp.size * x.shape[0], *x.shape[1:-1], -1) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        tp, wgrad_store, tracked_weights, gemm = ctx.args
        x_MK = gathered.flatten(0, -2)
        grads_MN = [grad.flatten(0, -2) for grad in grads]
        upcast_grads = [gemm.upcast(grad) for grad in grads_MN]
        parts = [grad.unflatten(0, (tp.size, -1)) for grad in upcast_grads]

        def partial_sum(member: int) -> Tensor:
            terms = (gemm.matmul(part[member], w.t()) for part, w in zip(parts, weights, strict=True))
            return reduce(Tensor.add_, terms)

        grad_x = ring_reduce_scatter(partial_sum, tp).view(len(gathered) // tp.size, *gathered.shape[1:])
        if wgrad_store is not None:
            wgrad_store.put(tracked_weights, lambda: [gemm.weight_gradient(grad, x_MK) for grad in grads_MN])
            return grad_x, None, None, None, None, *[None] * len(weights)
        return grad_x, None, None, None, None, *(gemm.weight_gradient(grad, x_MK) for grad in upcast_grads)


class _LinearReduceScatter(torch.autograd.Function):
    """(x [S, B, K], weight [N, K]) -> [S/n, B, N], n = tp."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Group,
        wgrad_store: WeightGradStoreProtocol | None,
        tracked_weights: list[Tensor],
        gemm: Gemm,
        weight: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = tp, wgrad_store, tracked_weights, gemm
        parts = x.flatten(0, -2).unflatten(0, (tp.size, -1))
        total = ring_reduce_scatter(lambda member: gemm.matmul(parts[member], weight), tp)
        return total.view(len(x) // tp.size, *x.shape[1:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp, wgrad_store, tracked_weights, gemm = ctx.args
        x_MK = x.flatten(0, -2)
        gathered = grad.new_empty((tp.size, *grad.shape))
        gathered[tp.rank] = grad
        grad_x = x.new_empty(tp.size, len(x_MK) // tp.size, x.shape[-1])
        for source, block in ring_pass(gathered[tp.rank], tp, gathered.unbind()):
            gemm.matmul_out(grad_x[source], block.flatten(0, -2), weight.t())
        grad_MN = gathered.flatten(0, -2)
        if wgrad_store is not None:
            wgrad_store.put(tracked_weights, lambda: [gemm.weight_gradient(grad_MN, x_MK)])
            return grad_x.view_as(x), None, None, None, None, None
        return grad_x.view_as(x), None, None, None, None, gemm.weight_gradient(grad_MN, x_MK)
