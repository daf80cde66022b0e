"""Sliding window: each token attends to itself and the tokens right before it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from moefold.config.groups.attention import SpanPart
from moefold.config.small_sizes import SmallSizes
from moefold.errors import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class WindowSpan(SpanPart):
    """Attend to the nearest tokens."""

    tokens: int = 0

    def shrink(self, to: SmallSizes) -> Self:
        """Return the part with few tokens."""
        return replace(self, tokens=min(self.tokens, to.span))

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield an error for a window without tokens."""
        if not self.tokens:
            yield Problem(
                "model.layers",
                model.layers,
                "has layers 'window', which attend to model.sliding_window=0 tokens",
                "set model.sliding_window, or choose 'full'",
            )

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.tokens

    def formula(self) -> Callable[[Any], Any]:
        """Return the keys that are too far back."""
        return lambda positions: positions[:, :, None] - positions[:, None, :] >= self.tokens
