"""Each rank drops among its own tokens, without communication (the default of arXiv:2504.14960)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.drop import DropScopePart, Positions


@dataclass(frozen=True, kw_only=True)
class DropOverRank(DropScopePart):
    """The tokens of a rank."""

    is_shared: ClassVar[bool] = False

    def formula(self) -> Callable[[int, Positions], Positions]:
        """Return the positions of each rank."""
        return lambda length, chunks: chunks
