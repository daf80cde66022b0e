"""The seam at which a pipeline schedule splits the backward pass: gradients of weights that can wait.

A backward pass makes the gradient of a layer's input, which the stage before waits for, and those of its weights, which
nobody waits for until the optimizer (arXiv:2401.10241). Where a module has a `wgrad_store`, its large products hand the
second part over instead of computing it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], Sequence[Tensor]]


class WeightGradStoreProtocol(Protocol):
    """Takes work that is to be done after the backward pass that gives it."""

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Once it is time, call `compute` and send what it gives backward from `weights`, to their parameters.

        Args:
            weights: what a module computed with, differentiable; the parameters themselves, or views and casts of them.
            compute: gives the gradient of each.
        """
        ...


def should_delay(wgrad_store: WeightGradStoreProtocol | None, x: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of a weight is to be postponed: there will be a backward pass, and it passes by here."""
    return wgrad_store is not None and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
