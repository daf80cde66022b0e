"""SwiGLU's gate as one kernel, where there is one."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class GateKernel(Protocol):
    """silu(g) * u and its gradient, each in one pass over contiguous rows."""

    def silu(self, g_MF: Tensor, u_MF: Tensor) -> Tensor:
        """The hidden values."""
        ...

    def silu_backward(self, grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of g, gradient of u)."""
        ...


def gated(g: Tensor, u: Tensor, kernel: GateKernel | None) -> Tensor:
    """silu(g) * u; with a kernel, nothing but g and u is kept for the backward pass."""
    if kernel is None:
        return F.silu(g) * u
    y: Tensor = _Gated.apply(g, u, kernel)
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, kernel: GateKernel) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.kernel = kernel
        return kernel.silu(g.flatten(0, -2), u.flatten(0, -2)).view_as(g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows = [t.flatten(0, -2) for t in (grad, *ctx.saved_tensors)]
        grad_g, grad_u = ctx.kernel.silu_backward(*rows)
        return grad_g.view_as(grad), grad_u.view_as(grad), None
