"""Ring attention (arXiv:2310.01889)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.context import ContextPart

if TYPE_CHECKING:
    from moefold.comm.groups import Group
    from moefold.model.attention import CoreAttention


@dataclass(frozen=True, kw_only=True)
class RingContext(ContextPart):
    """Keys and values pass round the ranks while each attends to the block that it has."""

    def build(self, cp: "Group", window: int, chunk_size: int) -> "CoreAttention":
        """Build the core attention of a rank. See the base class."""
        from moefold.parts.context.ring.module import RingAttention

        return RingAttention(cp, window, chunk_size)
