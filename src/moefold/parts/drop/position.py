"""The first tokens by position are kept: later tokens do not change which tokens are dropped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.drop import DropPart, QueueEntry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DropByPosition(DropPart):
    """Keep the first tokens."""

    def order(self, ids: "Tensor", probs: "Tensor", by_index: "Tensor") -> "Tensor":
        """Return the order by expert and index; see base class."""
        return by_index[ids[by_index].argsort(stable=True)]

    def formula(self) -> Callable[[list[QueueEntry]], list[QueueEntry]]:
        """Return the order by index."""
        return lambda queue: sorted(queue, key=lambda entry: entry[1:])
