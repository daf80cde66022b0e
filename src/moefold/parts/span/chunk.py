"""Attention chunks (Llama 4): a document is divided from its start on, and each token attends within its chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from moefold.config.groups.attention import SpanPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class ChunkSpan(SpanPart):
    """Attend within a chunk of the document."""

    chosen_by: ClassVar[str] = "a model.attention_pattern with C"
    tokens: Annotated[int, FlatKey("model.attention_chunk_size")]

    @property
    def chunk(self) -> int:
        """The tokens."""
        return self.tokens

    def formula(self) -> Callable[[Any], Any]:
        """Return the keys of other chunks."""
        return lambda positions: positions[:, :, None] // self.tokens != positions[:, None, :] // self.tokens
