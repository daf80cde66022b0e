"""Norms of a round of the sites, a mean that is not applied yet, and arithmetic of the outer step."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class OuterNorms:
    """Sums of squares of one round over this rank's shards. A tensor on n ranks counts 1/n of its sum on each."""

    difference: float = 0.0
    """Sum for the sent difference D, with the residual."""
    mean: float = 0.0
    """Sum for the mean difference g."""
    product: float = 0.0
    """Dot product of both."""
    weights: float = 0.0
    """Sum for the outer weights before the step."""
    averaged: float = 0.0
    """Sum for the sent values that the sites average. `mean` and `product` leave out all other values."""


@dataclass(frozen=True)
class PendingRound:
    """A round that all its members voted for, to be applied after a later step."""

    step: int
    """Step after which the differences were taken."""
    due: int
    """Step after which the round is applied."""
    fragments: tuple[int, ...]
    delta: Tensor
    """Vector that this site sent."""
    mean: Tensor
    """Vector that the members received: g of all parameters, then the means of the buffers."""
    is_mean_of_weights: bool = False
    """True if the mean is of weights, not of differences: it replaces weights and outer weights."""

    @property
    def is_overlapped(self) -> bool:
        """True if the site trains until the round is applied."""
        return self.due > self.step


class SentVector(NamedTuple):
    """Vector that a site sends in a round."""

    vector: Tensor
    """Values on the host, [elements of this rank]."""
    num_coded: int
    """Elements at the start that are sent as a code."""
    num_gathered: int = 0
    """The number of coded elements at the end that are not averaged: each site gets the values of all members."""


def mix(tensor: Tensor, outer: Tensor, keep_local: float) -> None:
    """Let `outer` replace a tensor in place, except for a share that stays. Replace all non-finite values."""
    if keep_local:
        mixed = (keep_local * tensor).add_(outer, alpha=1 - keep_local)
        tensor.copy_(torch.where(mixed.isfinite(), mixed, outer))
    else:
        tensor.copy_(outer)


def dot(x: Tensor, y: Tensor) -> float:
    """Return the dot product, in float64."""
    return float((x.double() * y.double()).sum())
