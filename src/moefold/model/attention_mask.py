"""Attention masks: causal, limited to the document and to a sliding window."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moefold.ops.block_attention import BlockedWindow


@dataclass(frozen=True)
class AttentionMaskSpec:
    """Limits of a query's context in addition to causality. Positions are those of the whole sample.

    A query at position p attends to the keys at f .. p, f = max(start of its document, p - window + 1). Documents are
    contiguous, so the start of the query's document suffices, and no mask data is sent with the keys.
    """

    window: int = 0
    """Sliding window: most keys that a query attends to, its own included; 0: no limit."""
    document_starts: Tensor | None = None
    """Position at which the document of each token begins, int64 [S, B] for the whole sample; None: one document."""

    def needs_mask(self, seq_len: int) -> bool:
        """Return whether a query of a sample of this length may attend to less than its causal context."""
        return self.document_starts is not None or 0 < self.window < seq_len

    def local_mask(self, first: int, length: int, device: torch.device) -> "Literal['causal'] | Tensor | BlockedWindow":
        """Return the mask between queries and keys of the same contiguous tokens, for `attention_block`.

        Args:
            first: position of the first token.
            length: number of tokens.
            device: of a mask.
        """
        if not self.needs_mask(length):
            return "causal"
        if BlockedWindow.is_worthwhile(self.window, length):
            starts = None if self.document_starts is None else self.document_starts[first : first + length] - first
            return BlockedWindow(self.window, starts)
        positions = torch.arange(first, first + length, device=device)
        return self.mask(positions, positions)

    def in_window(self, distance: int) -> bool:
        """Return whether a key this many positions before a query is in its window, regardless of documents."""
        return not self.window or distance < self.window

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the boolean attention mask, True where a query attends to a key.

        Args:
            queries: positions of the queries, int64 [Sq], on the device of `document_starts`.
            keys: positions of the keys, int64 [Sk].

        Returns:
            bool [B, Sq, Sk]; [1, Sq, Sk] where all samples are alike. A row may be empty.
        """
        first_SB = queries[:, None] if self.document_starts is None else self.document_starts[queries]
        if self.window:
            window_start_S1 = queries[:, None] - (self.window - 1)
            first_SB = window_start_S1 if self.document_starts is None else torch.maximum(first_SB, window_start_S1)
        elif self.document_starts is None:
            first_SB = torch.zeros_like(first_SB)
        return (keys >= first_SB.t()[:, :, None]) & (keys <= queries[:, None])
