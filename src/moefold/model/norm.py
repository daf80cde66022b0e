"""RMSNorm, root-mean-square normalisation (arXiv:1910.07467), and LayerNorm (arXiv:1607.06450)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.local_param import local_param
from moefold.ops.norm import cpu_rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last dim with a learned weight [size]. `parallelize` sets `kernels`.

    Args:
        zero_centered: whether values are multiplied by 1 + weight (Gemma, Qwen3-Next).
    """

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.kernels: Kernels = TORCH_KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size], without communication."""
        return self.normalize(x, *self.local_parameters(x))[0]

    def local_parameters(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of `normalize` after x."""
        return (self.local_weight(x),)

    def normalize(self, x: Tensor, weight: Tensor) -> tuple[Tensor]:
        """Normalise as a function of tensors only, for recomputation."""
        if x.device.type == "cpu":
            return (cpu_rms_norm(x, weight, self.eps, self.kernels.norm),)
        # F.rms_norm may use x several times. The view makes autograd sum these gradients here, so that the result is
        # bitwise the same with and without recomputation.
        return (F.rms_norm(x.view_as(x), x.shape[-1:], weight, self.eps),)

    def local_weight(self, x: Tensor) -> Tensor:
        """Return the factor of the normalised values in the dtype of x: the local weight, or 1 + weight."""
        weight = local_param(self.weight, x.dtype)
        return 1 + weight if self.zero_centered else weight


class FullWidthQKNorm(nn.Module):
    """QK norm: RMSNorm over all heads of a token together, weight [heads * D] (OLMoE, arXiv:2409.02060 sec. 4.2.5).

    `parallelize` replaces `sum_of_squares` where tensor parallelism shards the heads.
    """

    def __init__(self, size: int, eps: float, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.size = size
        self.eps = eps
        self.num_heads = num_heads
        self.sum_of_squares: Callable[[Tensor], Tensor] = _identity

    def forward(self, x: Tensor, weight_slice: slice) -> Tensor:
        """Normalise [S, B, heads of this rank, D]. It communicates through `sum_of_squares`.

        Args:
            weight_slice: rows of the local weight that belong to these heads.
        """
        x_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
        total = self.sum_of_squares(x_fp32.square().sum((-2, -1), keepdim=True))
        normed = (x_fp32 * torch.rsqrt(total / self.size + self.eps)).to(x.dtype)
        return normed * local_param(self.weight, x.dtype)[weight_slice].view(x.shape[-2:])


class HeadL2Norm(nn.Module):
    """QK norm without weights: divides each head by its root mean square (Llama 4). `parallelize` sets `kernels`."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.kernels: Kernels = TORCH_KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """Normalise queries or keys [S, B, heads, D], without communication."""
        if x.device.type == "cpu":
            return cpu_rms_norm(x, x.new_ones(x.shape[-1]), self.eps, self.kernels.norm)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)


class LayerNorm(nn.Module):
    """LayerNorm over the last dim with a learned weight and bias, [size] each (arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size], without communication."""
        return self.normalize(x, *self.local_parameters(x))[0]

    def local_parameters(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of `normalize` after x.

        On a CPU they are in float32 at least, as torch then computes and saves mean and deviation in that type.
        """
        dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
        return local_param(self.weight, dtype), local_param(self.bias, dtype)

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        """Normalise as a function of tensors only, for recomputation."""
        return (F.layer_norm(x, x.shape[-1:], weight, bias, self.eps),)


Norm = RMSNorm | LayerNorm
"""Norm of the residual stream."""


def _identity(squares: Tensor) -> Tensor:
    return squares
