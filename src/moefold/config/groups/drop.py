"""Token dropping: the tokens that share a capacity, and the order of the tokens that an expert keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.base.part import Part

if TYPE_CHECKING:
    from torch import Tensor


QueueEntry = tuple[float, int, tuple[int, int, int]]
"""Routed token of an expert: probability, index of the token in the micro-batch, sample, position and choice."""


@dataclass(frozen=True, kw_only=True)
class DropPart(Part):
    """Order in which an expert keeps tokens up to its capacity."""

    group: ClassVar[str] = "drop"
    key: ClassVar[str] = "moe.drop_policy"

    def order(self, ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
        """Return the routed tokens sorted by expert, and for each expert in the order in which it keeps them.

        Args:
            ids: expert of each routed token, int64 [T*K].
            probs: their routing probabilities, [T*K].
            by_index: their order by the index of their tokens, int64 [T*K].
        """
        raise NotImplementedError

    def formula(self) -> Callable[[list[QueueEntry]], list[QueueEntry]] | None:
        """Return a function that sorts the queue of an expert, or None if it has no formula."""
        return None


Positions = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class DropScopePart(Part):
    """Tokens that share the capacity of an expert. The default is all tokens of a micro-batch."""

    group: ClassVar[str] = "drop_scope"
    key: ClassVar[str] = "moe.drop_scope"
    is_shared: ClassVar[bool] = True
    """True if the ranks of a micro-batch share a capacity. Otherwise each rank drops only its own tokens."""

    def formula(self) -> Callable[[int, Positions], Positions] | None:
        """Return the positions of each capacity, from the length of a sample and the positions of each rank."""
        return None
