"""Tokens over which a capacity is counted, and dropped tokens are chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moefold.config.part import Part

Positions = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class DropScopePart(Part):
    """Tokens that share the capacity of an expert. The default is all tokens of a micro-batch."""

    group: ClassVar[str] = "drop_scope"
    key: ClassVar[str] = "moe.drop_scope"
    is_shared: ClassVar[bool] = True
    """Whether the ranks that share a micro-batch share a capacity; else each drops among its own tokens."""

    def formula(self) -> Callable[[int, Positions], Positions] | None:
        """Return the positions of each capacity, from the length of a sample and the positions of each rank."""
        return None
