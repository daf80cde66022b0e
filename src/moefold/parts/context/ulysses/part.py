"""Ulysses attention (arXiv:2309.14509)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.context import ContextPart

if TYPE_CHECKING:
    from moefold.comm.groups import Group
    from moefold.model.attention import CoreAttention


@dataclass(frozen=True, kw_only=True)
class UlyssesContext(ContextPart):
    """Two all-to-alls exchange tokens for heads, so that each rank attends with some heads to all tokens."""

    splits_in_chunks: ClassVar[bool] = False
    shards_heads: ClassVar[bool] = True

    def build(self, cp: "Group", window: int, chunk_size: int) -> "CoreAttention":
        """Build the core attention of a rank. See the base class."""
        from moefold.parts.context.ulysses.module import UlyssesAttention

        return UlyssesAttention(cp, window, chunk_size)
