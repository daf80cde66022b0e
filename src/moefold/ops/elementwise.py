"""Sigmoid, SiLU and softplus whose bits do not depend on the place of an element in its tensor.

torch evaluates most elements on a CPU with vectors, and the elements at the end of a thread's share with another
approximation (aten/src/ATen/cpu/vec). This module uses exp and log1p, which have one approximation for all elements. So
the values of a token do not depend on the other tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) of each element."""
    return _Sigmoid.apply(x) if x.is_cpu else torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """Compute x * sigmoid(x) of each element."""
    return _SiLU.apply(x) if x.is_cpu else F.silu(x)


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) of each element."""
    return _Softplus.apply(x) if x.is_cpu else F.softplus(x)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _wide_sigmoid(widened(x)).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.sigmoid_backward(grad, y)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = widened(x)
        return _wide_sigmoid(wide).mul_(wide).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = widened(x)
        return torch.exp(-wide.abs()).log1p_().add_(wide.clamp(min=0)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


def widened(x: Tensor) -> Tensor:
    """Return x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide_sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()
