"""Sliding window: each token attends to itself and the tokens right before it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

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

    def formula(self) -> Callable[[Any], Any]:
        """Return the keys that are too far back."""
        return lambda positions: positions[:, :, None] - positions[:, None, :] >= self.tokens
