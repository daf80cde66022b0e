"""Sliding window: each token attends to itself and the tokens right before it."""

from dataclasses import dataclass
from typing import Annotated

from moefold.config.groups.span import SpanPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class WindowSpan(SpanPart):
    """Attend to the nearest tokens."""

    tokens: Annotated[int, FlatKey("model.sliding_window")]

    @property
    def window(self) -> int:
        """The tokens."""
        return self.tokens
