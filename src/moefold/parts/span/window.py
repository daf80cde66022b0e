"""Sliding window: each token attends to itself and the tokens right before it."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moefold.config.groups.attention import SpanPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class WindowSpan(SpanPart):
    """Attend to the nearest tokens."""

    chosen_by: ClassVar[str] = "a model.attention_pattern with W"
    tokens: Annotated[int, FlatKey("model.sliding_window")]

    @property
    def window(self) -> int:
        """The tokens."""
        return self.tokens
