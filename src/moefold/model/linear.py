"""The dense linear layer, through the fastest product that the device has."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.gemm import has_fast_product, product, weight_gradient, widened
from moefold.model.later import Later, can_wait


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, later: Later | None = None) -> Tensor:
    """X @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        later: takes the gradient of the weight; None: it is computed with that of x.

    Returns:
        [..., N].
    """
    if can_wait(later, x, weight):
        y: Tensor = _LaterLinear.apply(x, weight.detach(), (weight,), later)
    elif has_fast_product(x):
        y = _Linear.apply(x, weight)
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = widened(grad)
        return _input_gradient(grad, weight, x), _weight_gradient(grad, x)


class _LaterLinear(torch.autograd.Function):
    """As `_Linear`; `held` has the differentiable weight, where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: tuple[Tensor], later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = held, later
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        held, later = ctx.args
        grad = widened(grad)
        later.postpone(held, lambda: (_weight_gradient(grad, x),))
        return _input_gradient(grad, weight, x), None, None, None


def _input_gradient(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return product(grad.flatten(0, -2), widened(weight).t()).to(x.dtype).view_as(x)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[N, K]."""
    x_MK = widened(x.flatten(0, -2))
    return weight_gradient(grad.flatten(0, -2), x_MK).to(x.dtype)
