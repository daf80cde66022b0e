"""Limits of the context of a query: windows and chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.attention import SpanPart
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class _TokenSpan(SpanPart):
    """Limit in tokens."""

    tokens: int = 0

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with few tokens."""
        return replace(self, tokens=min(self.tokens, small.span))


@dataclass(frozen=True, kw_only=True)
class WindowSpan(_TokenSpan, kind="window"):
    """Each token attends to itself and the tokens right before it."""

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


@dataclass(frozen=True, kw_only=True)
class ChunkSpan(_TokenSpan, kind="chunk"):
    """A document is divided from its start on, and each token attends within its chunk (Llama 4)."""

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for a chunk without tokens, and for an indexer."""
        key, pattern, topk = "model.layers", model.layers, model.selected_keys
        if not self.tokens:
            yield Problem(
                key,
                pattern,
                "has layers 'chunk', which attend within model.attention_chunk_size=0 tokens",
                "set model.attention_chunk_size, or choose 'full'",
            )
        if topk:
            rule = f"has layers 'chunk', and model.attention.indexer.top_k={topk} selects keys of the whole document"
            yield Problem(key, pattern, rule, "choose 'full' or 'window', or indexer='none'")

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.tokens

    def formula(self) -> Callable[[Any], Any]:
        """Return the keys of other chunks."""
        return lambda positions: positions[:, :, None] // self.tokens != positions[:, None, :] // self.tokens
