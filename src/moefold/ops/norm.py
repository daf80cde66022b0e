"""RMSNorm on CPU, with fewer passes over memory than torch's RMSNorm, which is composed of single operations."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.elementwise import widened


class NormKernel(Protocol):
    """Implementation of RMSNorm's forward and backward, without autograd."""

    def forward(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (normalised x, reciprocal RMS of each row [N, 1], in float32 at least)."""
        ...

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale_N1: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight."""
        ...


class TorchRMSNorm:
    """RMSNorm in PyTorch operations, for every floating dtype."""

    def forward(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `NormKernel`."""
        size = x.shape[-1]
        x_NH = widened(x).reshape(-1, size)
        scale_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        # Not a view: FSDP warns of views that a module returns.
        y = x_NH.new_empty(x.shape)
        torch.mul(x_NH, scale_N1, out=y.view(-1, size)).mul_(widened(weight))
        return y.to(x.dtype), scale_N1

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale_N1: Tensor) -> tuple[Tensor, Tensor]:
        """See `NormKernel`."""
        size = x.shape[-1]
        x_NH = widened(x).reshape(-1, size)
        grad_NH = widened(grad).reshape(-1, size)
        weight_H = widened(weight)
        product_NH = x_NH * grad_NH
        grad_weight_H = scale_N1.squeeze(1) @ product_NH
        # The component of the gradient along x, which normalisation removes.
        along_N1 = (product_NH @ weight_H).unsqueeze(1).mul_(scale_N1.pow(3)).div_(size)
        grad_x_NH = torch.mul(grad_NH, weight_H, out=product_NH).mul_(scale_N1).addcmul_(x_NH, along_N1, value=-1)
        return grad_x_NH.to(x.dtype).view(x.shape), grad_weight_H.to(weight.dtype)


TORCH_RMS_NORM = TorchRMSNorm()


def cpu_rms_norm(x: Tensor, weight: Tensor, eps: float, kernel: NormKernel | None = None) -> Tensor:
    """Compute torch.nn.functional.rms_norm over the last dim. It saves x and one number for each row.

    Args:
        x: [..., H], computed in float32 at least.
        weight: [H], in the dtype of x.
        eps: added to the mean of squares.
        kernel: implementation. None: PyTorch operations.
    """
    kernel = kernel or TORCH_RMS_NORM
    if not torch.is_grad_enabled():
        return kernel.forward(x, weight, eps)[0]
    return _RMSNorm.apply(x, weight, eps, kernel)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernel: NormKernel) -> Tensor:
        y, scale_N1 = kernel.forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale_N1)
        ctx.kernel = kernel
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *ctx.kernel.backward(grad, *ctx.saved_tensors), None, None
