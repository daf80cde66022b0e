"""Outer optimizer of DiLoCo (arXiv:2311.08105) on this rank's shards, without communication.

The outer weights phi are the weights after the last round, equal on all sites. A site trains its own weights theta from
them. In a round the sites exchange their differences D = phi - theta. With g, the weighted mean of the differences,

    m = momentum * m + g;  phi = phi - lr * (g + momentum * m if nesterov else m)
    theta = keep_local * theta + (1 - keep_local) * phi.

With lr 1 and momentum 0, phi becomes the mean of the sites' weights. A residual e (error feedback) adds the coding
error of earlier rounds: a site sends code(residual * e + D), and e becomes the difference to the decoded values. Each
fragment of the model has its own rounds (Streaming DiLoCo, arXiv:2501.18512).

A method of sites may derive from `OuterOptimizer`, and replace the sent, received and applied values.

Every operation except the coding of blocks is element by element, so that shards of any mapping give the same result.
Each parameter begins a block, so that ranks with the same shard of a parameter decode the same values, whichever other
parameters they hold.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.model.local_param import local_tensor
from moefold.optim.outer_round import OuterNorms, PendingRound, SentVector, dot, mix
from moefold.optim.outer_weights import OuterWeights

if TYPE_CHECKING:
    from moefold.comm.groups import ParallelGroups
    from moefold.comm.site_links import ExchangeResult


class OuterOptimizer(OuterWeights):
    """Outer weights, momentum and residual, and their updates in a round. For the arguments see the base class."""

    def vector_to_send(self, fragments: Sequence[int], delta: Tensor, *, is_last: bool) -> SentVector:
        """Return the vector that this site sends in a round.

        Args:
            delta: result of `difference`.
            is_last: the round follows the last step.
        """
        return SentVector(delta, self.num_coded(fragments))

    def with_received_values(
        self, round_: PendingRound, sent: SentVector, exchanged: "ExchangeResult", members: Sequence[int]
    ) -> PendingRound:
        """Return a certain round with the values that its members have exchanged. It changes nothing.

        Args:
            round_: the round, with the weighted mean of the members' vectors.
            sent: result of `vector_to_send`.
            exchanged: the result of the exchange.
            members: the sites of the round.
        """
        return round_

    def begin_next(self) -> None:
        """Begin the training of the next round, while the exchange of this round runs. It does not communicate."""

    def cancel(self, fragments: Sequence[int], delta: Tensor) -> None:
        """Undo `begin_next` after a failed exchange, whose round is not applied. It does not communicate.

        Args:
            delta: result of `difference`. The residual has not changed since.
        """

    def apply(
        self, round_: PendingRound, groups: "ParallelGroups", *, is_overlapped: bool
    ) -> tuple[OuterNorms, dict[str, float]]:
        """Take the outer step of a round. It may be collective over the site.

        Args:
            groups: the process groups of this rank.
            is_overlapped: the site has trained since the differences were taken.

        Returns:
            The norms, and further metrics of the round by name.
        """
        keep_local = self._settings.keep_local if is_overlapped else 0.0
        return self.step(round_.delta, round_.mean, round_.fragments, keep_local=keep_local), {}

    def skip(self) -> None:
        """Record that a due outer step does not take place. It does not communicate."""

    @property
    def transferred_state(self) -> int:
        """64-bit integer of the method, copied to a site that joins. 0: unused."""
        return 0

    @transferred_state.setter
    def transferred_state(self, number: int) -> None:
        assert number == 0

    @torch.no_grad()
    def difference(self, fragments: Sequence[int] = (0,)) -> Tensor:
        """Return the vector that this site sends in a round of fragments, on the host. It changes nothing.

        Returns:
            D = phi - theta of the parameters plus the decayed residual, each padded with zeros to a whole block of the
            code, then the buffers, [elements of this rank]. If sites own experts, D has only the site's own experts.
        """
        num_coded = self.num_coded(fragments)
        buffers = [buffer for _, buffer in self._buffers_of(fragments)]
        flat = torch.zeros(num_coded + sum(buffer.numel() for buffer in buffers), dtype=self.dtype)
        first = 0
        for name, (weights, *residual) in self.visit(self.names(fragments), ["weights", "residual"]):
            value = self.select(name, weights) - self.select(name, local_tensor(self._parameters[name].data))
            if residual:
                value.add_(residual[0], alpha=self._settings.residual)
            flat[first : first + value.numel()].copy_(value.flatten())
            first += self.width(name)
        for buffer in buffers:
            flat[first : first + buffer.numel()].copy_(buffer.flatten())
            first += buffer.numel()
        return flat

    @torch.no_grad()
    def keep_residual(self, fragments: Sequence[int], sent: Tensor, decoded: Tensor) -> None:
        """Set the residual to the coding error of a round, once the round is certain. It does not communicate.

        Args:
            sent: result of `difference`.
            decoded: `sent` as the sites decoded it.
        """
        rounding = sent - decoded
        # Weights that are not finite, which the sites do not read, leave no residual for the next round.
        rounding = torch.where(rounding.isfinite(), rounding, 0.0)
        names = self.names(fragments)
        for (_, (residual,)), values in zip(
            self.visit(names, ["residual"]), self.vector_slices(names, rounding), strict=True
        ):
            residual.copy_(values)

    @torch.no_grad()
    def step(
        self,
        delta: Tensor,
        mean: Tensor,
        fragments: Sequence[int] = (0,),
        *,
        keep_local: float = 0.0,
    ) -> OuterNorms:
        """Take the outer step of a round. It does not communicate.

        Args:
            delta: result of `difference` for the round.
            mean: the mean of a round, or `delta` itself in a round of one site.
            keep_local: share of the present weights that stays. The rest becomes the outer weights.
        """
        is_single_site = mean is delta and not keep_local and not self._settings.residual
        norms = OuterNorms()
        names = self.names(fragments)
        visits = self.visit(names, ["weights", "momentum"])
        vectors = (self.vector_slices(names, delta), self.vector_slices(names, mean, is_mean=True))
        for (name, (weights, *momentum)), own_d, mean_g in zip(visits, *vectors, strict=True):
            theta = local_tensor(self._parameters[name].data)
            self.add_norms(norms, name, weights, own_d, mean_g)
            if is_single_site and not self._settings.has_outer_step:
                # phi - (phi - theta) would round: the mean of one site is its weights.
                weights.copy_(theta)
                continue
            update = self.update(name, mean_g, momentum)
            self.move(name, theta, weights, update, keep_local)
        self.set_buffers(mean, fragments, keep_local)
        return norms

    def move(self, name: str, theta: Tensor, weights: Tensor, update: Tensor, keep_local: float) -> None:
        """Move the outer weights of a parameter by an update, and let them replace a share of its weights theta."""
        weights.add_(update, alpha=-self._settings.lr)
        mix(theta, weights, keep_local)

    def update(self, name: str, mean_g: Tensor, momentum: Sequence[Tensor]) -> Tensor:
        """Return the update of the outer weights of a parameter before the learning rate, and move their momentum.

        Args:
            mean_g: g.
            momentum: one tensor, or none without momentum.
        """
        settings = self._settings
        if not momentum:
            return mean_g
        self.move_momentum(momentum[0], mean_g)
        return mean_g.add(momentum[0], alpha=settings.momentum) if settings.nesterov else momentum[0]

    def move_momentum(self, momentum: Tensor, mean_g: Tensor) -> None:
        """Add g to the momentum of a parameter."""
        momentum.mul_(self._settings.momentum).add_(mean_g)

    def visit_round(self, pending: PendingRound) -> Iterator[tuple[str, Tensor, Tensor, Tensor, int]]:
        """Yield the values of a round for each parameter, before its outer step.

        Yields:
            Name, D of this site, g and phi of the rows that this site sends, and the number of ranks with the same
            shard, or 0 if another rank counts it.
        """
        names = self.names(pending.fragments)
        visits = self.visit(names, ["weights"])
        vectors = (self.vector_slices(names, pending.delta), self.vector_slices(names, pending.mean, is_mean=True))
        for (name, (weights,)), own_d, mean_g in zip(visits, *vectors, strict=True):
            yield name, own_d, self.select(name, mean_g), self.select(name, weights), self._replicas.get(name, 1)

    def add_norms(self, norms: OuterNorms, name: str, weights: Tensor, delta: Tensor, mean: Tensor) -> None:
        """Add the part of a parameter to the sums of a round."""
        if share := self._replicas.get(name, 1):
            d, g = (delta, mean) if self.is_averaged(name) else (delta.new_zeros(1),) * 2
            selected = self.select(name, weights)
            norms.difference += dot(delta, delta) / share
            norms.mean += dot(g, g) / share
            norms.product += dot(d, g) / share
            norms.weights += dot(selected, selected) / share
            norms.averaged += dot(d, d) / share

    def is_averaged(self, name: str) -> bool:
        """Return whether the sites take a mean of a parameter."""
        return True

    def set_buffers(self, mean: Tensor, fragments: Sequence[int], keep_local: float = 0.0) -> None:
        """Mix means of buffers, which follow the parameters in `mean`, into the buffers. It does not communicate."""
        for buffer, values in self.buffer_slices(mean, fragments):
            mix(buffer, values, keep_local)
