"""Activations of gated feed-forward networks: SwiGLU and its clamped variant, with fused kernels."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.ops.elementwise import sigmoid, silu


class SwiGLUKernel(Protocol):
    """Kernel of silu(g) * u and its gradient, each in one pass over contiguous rows."""

    def swiglu(self, g_MF: Tensor, u_MF: Tensor) -> Tensor:
        """Compute silu(g) * u."""
        ...

    def swiglu_backward(self, grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
        """Return (gradient of g, gradient of u)."""
        ...


def swiglu(g: Tensor, u: Tensor, kernel: SwiGLUKernel | None) -> Tensor:
    """Compute silu(g) * u. With a kernel, only g and u are saved for backward."""
    if kernel is None:
        return silu(g) * u
    return _SwiGLUFunction.apply(g, u, kernel)


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


class ExpertActivation(Protocol):
    """Elementwise activation of an expert: hidden = f(g, u), with g = x w_gate and u = x w_up."""

    def forward(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the hidden values, into `out` if given. It is differentiable only without `out`."""
        ...

    def backward(
        self, grad: Tensor, g: Tensor, u: Tensor, outs: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (hidden values, gradient of g, gradient of u), from the gradient of the hidden values, no autograd.

        All have the dtype of `grad`. The tensors g and u may be of lower precision. `grad` and `outs`, buffers for two
        of the results, may be overwritten.
        """
        ...


@dataclass(frozen=True)
class SwiGLUActivation:
    """SwiGLU: silu(g) * u (arXiv:2002.05202)."""

    def forward(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """See `ExpertActivation`."""
        if out is not None:
            return torch.ops.aten.silu.out(g, out=out).mul_(u)
        gate = F.silu(g)
        return gate * u if gate.requires_grad else gate.mul_(u)

    def backward(
        self, grad: Tensor, g: Tensor, u: Tensor, outs: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertActivation`."""
        g, u = g.to(grad.dtype), u.to(grad.dtype)
        hidden, gate = outs or (torch.empty_like(g), torch.empty_like(g))
        torch.ops.aten.silu.out(g, out=gate)
        torch.mul(gate, u, out=hidden)
        grad_u = gate.mul_(grad)
        grad_g = torch.ops.aten.silu_backward.grad_input(grad.mul_(u), g, grad_input=grad)
        return hidden, grad_g, grad_u


SWIGLU = SwiGLUActivation()


@dataclass(frozen=True)
class ClampedSwiGLUActivation:
    """SwiGLU of gpt-oss (arXiv:2508.10925): (clamp(u, -limit, limit) + 1) * c * sigmoid(alpha * c), c = min(g, limit).

    Clamped values have no gradient.
    """

    alpha: float
    limit: float

    def forward(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """See `ExpertActivation`."""
        clamped = g.clamp(max=self.limit)
        return (u.clamp(-self.limit, self.limit) + 1) * clamped * sigmoid(self.alpha * clamped)

    def backward(
        self, grad: Tensor, g: Tensor, u: Tensor, outs: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertActivation`."""
        g, u = g.to(grad.dtype), u.to(grad.dtype)
        clamped = g.clamp(max=self.limit)
        factor = u.clamp(-self.limit, self.limit) + 1
        share = torch.sigmoid(self.alpha * clamped)
        swish = clamped * share
        grad_u = (grad * swish).masked_fill_(u.abs() > self.limit, 0.0)
        slope = share * (1 + self.alpha * clamped * (1 - share))
        grad_g = (grad * factor * slope).masked_fill_(g > self.limit, 0.0)
        return factor * swish, grad_g, grad_u
