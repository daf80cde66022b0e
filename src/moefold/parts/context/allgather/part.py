"""All-gather attention (arXiv:2407.21783 sec. 3.3.2)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.context import ContextPart

if TYPE_CHECKING:
    from moefold.comm.groups import Group
    from moefold.model.attention import CoreAttention


@dataclass(frozen=True, kw_only=True)
class AllGatherContext(ContextPart):
    """Each rank gathers all keys and values, and attends from its own queries."""

    takes_selected_keys: ClassVar[bool] = True

    def build(self, cp: "Group", window: int, chunk_size: int) -> "CoreAttention":
        """Build the core attention of a rank. See the base class."""
        from moefold.parts.context.allgather.module import AllGatherAttention

        return AllGatherAttention(cp, window, chunk_size)
