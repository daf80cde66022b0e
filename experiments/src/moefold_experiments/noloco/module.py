"""Outer optimizer of random pairs of sites (NoLoCo, arXiv:2506.10911, eq. 2 with the signs of its code).

g is the mean of two sites, and the outer weights phi differ between sites: g + phi - mean(phi) takes the place of g,
with the mean over the pair. The last round takes the mean of the weights theta of all sites.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefold.comm.site_links import ExchangeResult
from moefold.model.local_param import local_tensor
from moefold.optim.outer import OuterOptimizer
from moefold.optim.outer_round import OuterNorms, PendingRound, SentVector


class OuterOfPairs(OuterOptimizer):
    """Outer weights and momentum that the sites do not share."""

    def vector_to_send(self, fragments: Sequence[int], delta: Tensor, *, is_last: bool) -> SentVector:
        """Return the differences and, as they are, the outer weights; in the last round the weights."""
        if is_last:
            return SentVector(self.local_vector(fragments), 0)
        return SentVector(torch.cat([delta, self.outer_vector(fragments)]), self.num_coded(fragments))

    def with_received_values(
        self, round_: PendingRound, sent: SentVector, exchanged: ExchangeResult, members: Sequence[int]
    ) -> PendingRound:
        """Return the round with the pull between the outer weights of the pair."""
        size = len(round_.delta)
        if len(sent.vector) == size:
            return replace(round_, is_mean_of_weights=True)
        return replace(round_, mean=add_pull(exchanged.mean, sent.vector[size:]))

    def apply(self, round_: PendingRound, groups: Any, *, is_overlapped: bool) -> tuple[OuterNorms, dict[str, float]]:
        """Take the outer step of a pair, or the mean of all sites; local."""
        if round_.is_mean_of_weights:
            return self.merge(round_.delta, round_.mean, round_.fragments), {}
        return super().apply(round_, groups, is_overlapped=is_overlapped)

    @torch.no_grad()
    def outer_vector(self, fragments: Sequence[int]) -> Tensor:
        """Return the outer weights, placed as the differences of `difference`, on the host [num_coded]."""
        flat = torch.zeros(self.num_coded(fragments), dtype=self.dtype)
        first = 0
        for name, weights in self.visit_weights(self.names(fragments)):
            flat[first : first + weights.numel()].copy_(weights.flatten())
            first += self.width(name)
        return flat

    @torch.no_grad()
    def local_vector(self, fragments: Sequence[int]) -> Tensor:
        """Return the weights theta and the buffers, placed as in `difference`, on the host."""
        flat = self.difference(fragments)
        first = 0
        for name in self.names(fragments):
            theta = local_tensor(self._parameters[name].data)
            flat[first : first + theta.numel()].copy_(theta.flatten())
            first += self.width(name)
        return flat

    @torch.no_grad()
    def merge(self, delta: Tensor, mean: Tensor, fragments: Sequence[int]) -> OuterNorms:
        """Set outer weights and weights to a mean of the sites' weights, and the buffers to theirs; local.

        Args:
            delta: what `difference` returned for the round.
            mean: the weighted mean of what `local_vector` returned on the sites.
            fragments: the fragments of the round.
        """
        norms = OuterNorms()
        names = self.names(fragments)
        parts = zip(self.vector_slices(names, delta), self.vector_slices(names, mean), strict=True)
        for (name, weights), (own_d, merged) in zip(self.visit_weights(names), parts, strict=True):
            self.add_norms(norms, name, weights, own_d, weights - merged)
            weights.copy_(merged)
            local_tensor(self._parameters[name].data).copy_(merged)
        self.set_buffers(mean, fragments)
        return norms


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
