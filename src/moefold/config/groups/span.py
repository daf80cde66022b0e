"""Spans: limits of the context of a query in addition to causality."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.part import Part


@dataclass(frozen=True, kw_only=True)
class SpanPart(Part):
    """Limit of the context of a query."""

    group: ClassVar[str] = "span"

    @property
    def window(self) -> int:
        """Most keys that a query attends to, its own included; 0: no limit."""
        return 0

    @property
    def chunk(self) -> int:
        """Tokens of the part of a document in which a query attends; 0: the whole document."""
        return 0
