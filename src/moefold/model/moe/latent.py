"""Projections of latent experts: tokens are dispatched and computed in a narrower space (arXiv:2502.16927, BigMac)."""

import torch
from torch import Tensor, nn

from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.linear import linear
from moefold.model.local_param import local_param


class LatentProjection(nn.Module):
    """Linear map of tokens into the space of the routed experts, or out of it; replicated over tp, weight [out, in].

    `parallelize` sets `wgrad_store` (backward pass split in two) and `kernels`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.kernels: Kernels = TORCH_KERNELS

    def forward(self, x_TH: Tensor) -> Tensor:
        """Project the tokens of this rank, [T, in] -> [T, out]; local."""
        return linear(
            x_TH,
            local_param(self.weight, x_TH.dtype),
            wgrad_store=self.wgrad_store,
            linear_backend=self.kernels.linear_backend,
        )
