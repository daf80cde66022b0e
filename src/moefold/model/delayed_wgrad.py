"""Delayed weight gradients: interface through which a pipeline schedule splits the backward pass in two.

The input gradient of a layer is needed by the previous stage at once, the weight gradients only by the optimizer
(arXiv:2401.10241). Modules with a `wgrad_store` pass their weight-gradient GEMMs to it instead of computing them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], Sequence[Tensor]]


class WeightGradStoreProtocol(Protocol):
    """Store of weight-gradient computations to be run after the backward pass."""

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Store `compute`, to be called later; its gradients are then back-propagated from `weights` to the parameters.

        Args:
            weights: differentiable weights of the forward pass: the parameters, or views and casts of them.
            compute: returns the gradient of each.
        """
        ...


def should_delay(wgrad_store: WeightGradStoreProtocol | None, x: Tensor, weight: Tensor) -> bool:
    """Return whether a weight gradient should be delayed (there is a store, and input and weight require grad)."""
    return wgrad_store is not None and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
