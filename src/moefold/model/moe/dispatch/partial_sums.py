"""Base of dispatchers that sum the outputs of a token's experts on the rank of the experts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from moefold.model.moe.dispatch.base import Dispatcher
from moefold.model.moe.permute import permute, permute_probs, unpermute
from moefold.ops.expert_ops import Permutation, PermuteMap


@dataclass(frozen=True)
class ReceivedTokens:
    """Tokens on the rank of their experts."""

    permutation: Permutation
    """Permutation by local expert, one row for each choice of an expert of this rank."""
    probs_NK: Tensor | None
    """Differentiable routing probabilities, or None where the experts have applied them."""
    tokens_per_expert: Sequence[int]


@dataclass
class DispatchState:
    """Dispatch state of one micro-batch."""

    arrived: ReceivedTokens | None = field(default=None, kw_only=True)
    """None until the tokens have arrived."""

    @property
    def received(self) -> ReceivedTokens:
        """The tokens that this rank has received."""
        assert self.arrived is not None, "the tokens have not arrived"
        return self.arrived

    @property
    def tokens_per_expert(self) -> Sequence[int]:
        """Tokens of each expert of this rank."""
        return self.received.tokens_per_expert


StateT = TypeVar("StateT", bound=DispatchState)


class PartialSumDispatcher(Dispatcher[StateT]):
    """Dispatcher whose ranks permute received tokens by local expert, and sum the experts' outputs of each token."""

    combines_locally = True

    def dispatch_postprocess(self, rows: Tensor, metadata: StateT) -> Tensor:
        """Permute the received tokens by local expert, one row for each choice."""
        return permute(rows, metadata.received.permutation, self.permute_ops)

    def permute_map(self, metadata: StateT) -> PermuteMap:
        """Return the permutation of the received tokens by local expert."""
        return PermuteMap.from_permutation(metadata.received.permutation)

    def combine_preprocess(self, y_RH: Tensor, metadata: StateT) -> Tensor:
        """Compute the weighted sum of the local expert outputs for each received token, [N, H]."""
        received = metadata.received
        return unpermute(y_RH, received.permutation, received.probs_NK, self.permute_ops)

    def combine_postprocess(self, rows: Tensor, metadata: StateT) -> Tensor:
        """Return the rows, which are summed, unchanged."""
        return rows

    def dispatch_probs(self, metadata: StateT) -> tuple[Tensor, StateT]:
        """Permute the routing probabilities, which this rank has."""
        received = metadata.received
        assert received.probs_NK is not None
        probs_R = permute_probs(received.probs_NK, received.permutation)
        return probs_R, replace(metadata, arrived=replace(received, probs_NK=None))
