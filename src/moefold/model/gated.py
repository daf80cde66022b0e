"""SwiGLU's gate as one kernel, where there is one."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class SwiGLUKernel(Protocol):
    """silu(g) * u and its gradient, each in one pass over contiguous rows."""

    def swiglu(self, g_MF: Tensor, u_MF: Tensor) -> Tensor:
        """The hidden values."""
        ...

    def swiglu_backward(self, grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of g, gradient of u)."""
        ...


def swiglu(g: Tensor, u: Tensor, kernel: SwiGLUKernel | None) -> Tensor:
    """silu(g) * u; with a kernel, nothing but g and u is kept for the backward pass."""
    if kernel is None:
        return F.silu(g) * u
    y: Tensor = _SwiGLUFunction.apply(g, u, kernel)
    return y


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, kernel: SwiGLUKernel) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.kernel = kernel
        return kernel.swiglu(g.flatten(0, -2), u.flatten(0, -2)).view_as(g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows = [t.flatten(0, -2) for t in (grad, *ctx.saved_tensors)]
        grad_g, grad_u = ctx.kernel.swiglu_backward(*rows)
        return grad_g.view_as(grad), grad_u.view_as(grad), None
