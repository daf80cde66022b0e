"""The dense linear layer, through the fastest product that the device has."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.gemm import has_fast_product, product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].

    Returns:
        [..., N].
    """
    if not has_fast_product(x):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight)
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
        grad_MN, x_MK = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = product(grad_MN, weight.t()).view_as(x)
        # The product wants its first operand contiguous: transpose the smaller of the two.
        if grad_MN.shape[1] <= x_MK.shape[1]:
            grad_weight = product(grad_MN.t().contiguous(), x_MK.t())
        else:
            grad_weight = product(x_MK.t().contiguous(), grad_MN.t()).t()
        return grad_x, grad_weight
