"""Outer optimizer of rounds that are exchanged during the whole next one (CO2, arXiv:2401.16265).

A site sets theta to phi when it sends D. The outer step is then taken on phi and theta alike, so that phi - theta stays
what the site has moved since. As phi has taken an outer step since D was measured, g can be divided by
1 + |that step| / |g|.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefold.comm.groups import current_world
from moefold.comm.site_links import ExchangeResult
from moefold.model.local_param import local_tensor
from moefold.optim.outer import OuterOptimizer
from moefold.optim.outer_round import OuterNorms, PendingRound, SentVector
from moefold.optim.outer_weights import FragmentsDue
from moefold_experiments.co2.part import CO2

LAST_UPDATE = "last_update.bits"
"""Key of the state: the bits of the norm of the last outer step."""


class OuterOfWholeRounds(OuterOptimizer):
    """Outer weights that move while the site trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self._settings.method, CO2)
        self._method = self._settings.method
        self.last_update = 0.0
        """Norm of the last outer step over all ranks, if the method divides by it."""
        self.update_square = 0.0
        """Sum of squares of the last outer step over this rank's shards; the same bits on all sites."""
        self._moves_both = False
        self._penalty = 1.0

    def with_received_values(
        self, round_: PendingRound, sent: SentVector, exchanged: ExchangeResult, members: Sequence[int]
    ) -> PendingRound:
        """Return the round with corrections of buffers: what their means differ from those that were sent.

        Buffers have no outer weights, and go on from their own during the exchange.
        """
        if not round_.is_overlapped:
            return round_
        mean = round_.mean.clone()
        first = self.num_coded(round_.fragments)
        mean[first:] -= round_.delta[first:]
        return replace(round_, mean=mean)

    def begin_next(self) -> None:
        """Begin the next round at the outer weights; local."""
        self.take_weights(list(self.weights))

    @torch.no_grad()
    def cancel(self, fragments: Sequence[int], delta: Tensor) -> None:
        """Move the weights by their difference again; local."""
        names = self.names(fragments)
        for (name, residual), part in zip(
            self.visit(names, ["residual"]), self.vector_slices(names, delta), strict=True
        ):
            own_d = part.sub(residual[0], alpha=self._settings.residual) if residual else part
            local_tensor(self._parameters[name].data).sub_(own_d)

    def apply(self, round_: PendingRound, groups: Any, *, is_overlapped: bool) -> tuple[OuterNorms, dict[str, float]]:
        """Take the outer step with the divided mean; collective over the site."""
        penalty = 1.0
        if self._method.penalty:
            square = _same_sum_of_ranks(self.mean_square(round_))
            penalty = 1 + self.last_update / math.sqrt(square) if square else 1.0
        norms = self.step_both(round_, moves_both=is_overlapped, penalty=penalty)
        if not self._method.penalty:
            return norms, {}
        self.last_update = math.sqrt(_same_sum_of_ranks(self.update_square))
        return norms, {"gap": penalty - 1}

    def step_both(self, round_: PendingRound, *, moves_both: bool, penalty: float) -> OuterNorms:
        """Take the outer step of a round; local.

        Args:
            round_: the round.
            moves_both: move the weights as the outer weights are moved, and the buffers by what the mean has for them.
            penalty: divisor of the mean.
        """
        self._moves_both = moves_both
        self._penalty = penalty
        self.update_square = 0.0
        return self.step(round_.delta, round_.mean, round_.fragments)

    def update(self, name: str, mean_g: Tensor, momentum: Sequence[Tensor]) -> Tensor:
        """Return the update by the divided mean."""
        update = super().update(name, mean_g * (1 / self._penalty) if self._penalty != 1 else mean_g, momentum)
        if (share := self._replicas.get(name, 1)) and self._method.penalty:
            self.update_square += exact_square(self._settings.lr * update) / share
        return update

    def move_momentum(self, momentum: Tensor, mean_g: Tensor) -> None:
        """Add g to the momentum, within its limit."""
        super().move_momentum(momentum, mean_g)
        if self._method.clip:
            momentum.clamp_(-self._method.clip, self._method.clip)

    def move(self, name: str, theta: Tensor, weights: Tensor, update: Tensor, keep_local: float) -> None:
        """Move outer weights and weights, whose difference stays, where the site has trained since."""
        if not self._moves_both:
            super().move(name, theta, weights, update, keep_local)
            return
        drift = weights - theta
        weights.add_(update, alpha=-self._settings.lr)
        theta.copy_(weights - drift)

    def set_buffers(self, mean: Tensor, fragments: Sequence[int], keep_local: float = 0.0) -> None:
        """Correct the buffers where the site has trained since; else let their means replace them."""
        if not self._moves_both:
            super().set_buffers(mean, fragments, keep_local)
            return
        for buffer, part in self.buffer_slices(mean, fragments):
            buffer.add_(part)

    def mean_square(self, round_: PendingRound) -> float:
        """Return the sum of squares of g over the shards of this rank, with the same bits on all sites."""
        return sum(exact_square(g) / replicas for _, _, g, _, replicas in self.visit_round(round_) if replicas)

    def skip(self) -> None:
        """Note that the outer weights have not moved."""
        self.last_update = 0.0

    @property
    def transferred_state(self) -> int:
        """The bits of the norm of the last outer step."""
        return float_to_bits(self.last_update)

    @transferred_state.setter
    def transferred_state(self, number: int) -> None:
        self.last_update = bits_to_float(number)

    def state(self) -> dict[str, int]:
        """Return the numbers of the state, without its tensors."""
        return super().state() | ({LAST_UPDATE: self.transferred_state} if self._method.penalty else {})

    def restore(self, state: Mapping[str, int], load: Callable[[dict[str, Tensor]], None], due: FragmentsDue) -> None:
        """Restore the state of a checkpoint; see the base class."""
        super().restore(state, load, due)
        self.transferred_state = state.get(LAST_UPDATE, 0)


def _same_sum_of_ranks(number: float) -> float:
    """Return the sum of a number over the ranks of the site, with the same bits on all sites; collective."""
    return math.fsum(current_world().all_gather_object(number))


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
