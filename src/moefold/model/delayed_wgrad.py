"""Delayed weight gradients: interface through which a pipeline schedule splits the backward pass in two.

The input gradient of a layer is needed by the previous stage immediately, the weight gradients only by the optimizer
(arXiv:2401.10241). Modules with a `wgrad_store` pass their weight-gradient GEMMs to it instead of computing them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], Sequence[Tensor]]


class WeightGradStoreProtocol(Protocol):
    """Store of weight-gradient computations to be run after the backward pass."""

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Store `compute` for a later call, whose gradients are back-propagated from `weights` to the parameters.

        Args:
            weights: differentiable weights of the forward pass: the parameters, or views and casts of them.
            compute: returns the gradient of each.
        """


@dataclass(frozen=True)
class WeightGradSink:
    """Destination of the weight gradients of one call of an autograd function."""

    wgrad_store: WeightGradStoreProtocol | None = None
    """Store of the delayed weight gradients, or None if autograd gets all weight gradients."""
    tracked_weights: tuple[Tensor, ...] = ()
    """The differentiable weights. Autograd gets detached copies if their gradients are delayed."""

    @property
    def is_delayed(self) -> bool:
        """True if the weight gradients are computed after the backward pass."""
        return self.wgrad_store is not None

    def resolve(self, compute: Callable[[], Sequence[Tensor | None]], num_weights: int) -> Sequence[Tensor | None]:
        """Compute the weight gradients now, or store `compute` for later, and return the gradients for autograd.

        Args:
            compute: returns the gradient of each weight, None for an absent weight.
            num_weights: number of weights of the call, with absent weights.
        """
        if self.wgrad_store is None:
            return compute()
        self.wgrad_store.put(self.tracked_weights, lambda: [grad for grad in compute() if grad is not None])
        return [None] * num_weights


def weight_grad_sink(
    wgrad_store: WeightGradStoreProtocol | None, x: Tensor, weights: Sequence[Tensor | None]
) -> tuple[WeightGradSink, list[Tensor | None]]:
    """Return the destination of the weight gradients and the weights for autograd, which are detached if delayed.

    They are delayed if there is a store, and the input and a weight require grad.
    """
    present = tuple(weight for weight in weights if weight is not None)
    is_differentiated = torch.is_grad_enabled() and x.requires_grad and any(weight.requires_grad for weight in present)
    if wgrad_store is None or not is_differentiated:
        return WeightGradSink(), list(weights)
    return WeightGradSink(wgrad_store, present), [None if weight is None else weight.detach() for weight in weights]
