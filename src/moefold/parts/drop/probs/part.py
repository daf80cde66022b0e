"""The most probable tokens are kept: a later token may displace an earlier token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.drop import DropPart, QueueEntry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DropByProbability(DropPart):
    """Keep the most probable tokens, ties by position."""

    def order(self, ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
        """Return the order by expert, probability and index; see base class."""
        from moefold.parts.drop.probs.module import order_by_probability

        return order_by_probability(ids, probs, by_index)

    def formula(self) -> Callable[[list[QueueEntry]], list[QueueEntry]]:
        """Return the order by probability, ties by index."""
        from moefold.parts.drop.probs.oracle import by_probability

        return by_probability
