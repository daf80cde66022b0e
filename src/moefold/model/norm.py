"""Root-mean-square normalisation (arXiv:1910.07467)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.model.parameter import local


class RMSNorm(nn.Module):
    """Scale the last dim to unit root mean square, then by a learned weight [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; no communication."""
        return F.rms_norm(x, x.shape[-1:], local(self.weight, x.dtype), self.eps)
