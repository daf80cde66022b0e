"""Fused experts: one autograd function over `ExpertOps`, which compute forward and backward pass by hand."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.model.delayed_wgrad import WeightGradSink, WeightGradStoreProtocol, weight_grad_sink
from moefold.ops.expert_ops import ExpertOps, ExpertOptions, ExpertWeights

NUM_WEIGHTS = len(fields(ExpertWeights))


@dataclass(frozen=True)
class _Call:
    """Non-tensor arguments of the autograd function."""

    ops: ExpertOps
    options: ExpertOptions
    wgrad_sink: WeightGradSink


def fused_experts(
    x: Tensor,
    weights: ExpertWeights,
    options: ExpertOptions,
    ops: ExpertOps,
    probs_R: Tensor | None = None,
    wgrad_store: WeightGradStoreProtocol | None = None,
) -> Tensor:
    """Compute the routed experts with the given operations; local.

    Args:
        x: tokens sorted by expert [R, H], or with a `permute_map` the unsorted tokens [T, H].
        weights: weights of the experts.
        options: row counts, activation and saved tensors.
        ops: forward and backward pass.
        probs_R: factor of each output row, [R].
        wgrad_store: receives delayed weight gradients.

    Returns:
        Like `x`: an output for each row, or the sum for each token.
    """
    tensors = [getattr(weights, entry.name) for entry in fields(weights)]
    wgrad_sink, tensors = weight_grad_sink(wgrad_store, x, tensors)
    call = _Call(ops, replace(options, delays_wgrad=wgrad_sink.is_delayed), wgrad_sink)
    y: Tensor = _FusedExperts.apply(x, probs_R, call, *tensors)
    return y


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs_R: Tensor | None, call: _Call, *tensors: Any) -> Tensor:
        y, saved = call.ops.forward(x, ExpertWeights(*tensors), call.options, probs_R)
        ctx.save_for_backward(x, probs_R, *tensors, *saved)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs_R, *tensors = ctx.saved_tensors
        call: _Call = ctx.call
        weights = ExpertWeights(*tensors[:NUM_WEIGHTS])
        gradients = call.ops.backward(grad, x, weights, call.options, probs_R, tensors[NUM_WEIGHTS:])
        if not call.wgrad_sink.is_delayed and not any(ctx.needs_input_grad[3:]):
            return gradients.x, gradients.probs_R, None, *[None] * NUM_WEIGHTS
        return gradients.x, gradients.probs_R, None, *call.wgrad_sink.resolve(gradients.weights, NUM_WEIGHTS)
