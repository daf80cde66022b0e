"""Norms of a round of the sites, a mean that is not applied yet, and arithmetic of the outer step."""

import struct
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class OuterNorms:
    """Sums of squares of one round over this rank's shards; a tensor on n ranks counts 1/n of its own."""

    difference: float
    """Of what this site sent: its difference D, with the residual."""
    mean: float
    """Of the mean difference g."""
    product: float
    """Dot product of both."""
    weights: float
    """Of the outer weights before the step."""
    averaged: float
    """Of what this site sent without the experts that sites own, of which `mean` and `product` have nothing."""
    update: float
    """Of the change of the outer weights; the same bits on all sites. 0 unless the next round divides by it."""

    def to_tensor(self) -> Tensor:
        """Return the sums, without the sum of the update, float64 [5]."""
        sums = [self.difference, self.mean, self.product, self.weights, self.averaged]
        return torch.tensor(sums, dtype=torch.float64)


@dataclass(frozen=True)
class PendingRound:
    """A round that all its members voted for, to be applied after a later step."""

    step: int
    """Step after which the differences were taken."""
    due: int
    """Step after which it is applied."""
    fragments: tuple[int, ...]
    own: Tensor
    """What this site sent."""
    mean: Tensor
    """What `OuterOptimizer.assemble` returned."""

    def with_corrections(self, first: int) -> "PendingRound":
        """Return the round with the corrections of buffers: what their means differ from those that were sent.

        Buffers have no outer weights, and during the exchange of a whole round they go on from their own.

        Args:
            first: index of the first buffer in the vectors.
        """
        mean = self.mean.clone()
        mean[first:] -= self.own[first:]
        return replace(self, mean=mean)


def add_pull(mean: Tensor, outer: Tensor) -> Tensor:
    """Return what takes the place of the mean difference in a round of a pair: g + phi - mean(phi), then the buffers.

    Args:
        mean: mean of the pair's vectors: differences and buffers of `difference`, then outer weights of `outer_vector`.
        outer: the outer weights of this site, as they were sent.
    """
    size = len(mean) - len(outer)
    pulled = mean[:size].clone()
    pulled[: len(outer)] += outer - mean[size:]
    return pulled


def mix(tensor: Tensor, outer: Tensor, keep_local: float) -> None:
    """Let `outer` replace a tensor but for a share that stays, in place; all of what is not finite."""
    if keep_local:
        mixed = (keep_local * tensor).add_(outer, alpha=1 - keep_local)
        tensor.copy_(torch.where(mixed.isfinite(), mixed, outer))
    else:
        tensor.copy_(outer)


def float_to_bits(number: float) -> int:
    """Return the bits of a float64, for state that is kept as integers."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def bits_to_float(bits: int) -> float:
    """Return the float64 of what `float_to_bits` returned."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def exact_square(x: Tensor) -> float:
    """Return the sum of squares in float64, by halves: its bits do not depend on the machine."""
    total = x.flatten().double().square()
    while len(total) > 1:
        half = -(-len(total) // 2)
        total[: len(total) - half] += total[half:]
        total = total[:half]
    return float(total.sum())


def dot(x: Tensor, y: Tensor) -> float:
    """Return the dot product, in float64."""
    return float((x.double() * y.double()).sum())
