"""Which keys a query sees: its own, and those before it in the same document and within the window."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moefold.ops.block_attention import BlockedWindow


@dataclass(frozen=True)
class AttentionMaskSpec:
    """What limits a query beside the order of the tokens. Positions are those of the whole sample.

    A query at position p sees the keys at f .. p, with f the greater of the start of its document and p - window + 1.
    As documents are runs of tokens, the start of the query's is all there is to know: nothing travels with the keys.
    """

    window: int = 0
    """Keys that a query sees at most, its own included; 0: no limit."""
    document_starts: Tensor | None = None
    """Position at which the document of each token begins, int64 [S, B] for the whole sample; None: one document."""

    def needs_mask(self, seq_len: int) -> bool:
        """Whether any query of a sample of this length may see less than all that is before it."""
        return self.document_starts is not None or 0 < self.window < seq_len

    def local_mask(self, first: int, length: int, device: torch.device) -> "Literal['causal'] | Tensor | BlockedWindow":
        """What the queries of a run of tokens see of the keys of that run, for `attention_block`.

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
        """Whether a query sees the key so many positions before it, documents aside."""
        return not self.window or distance < self.window

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which query sees which key.

        Args:
            queries: positions of the queries, int64 [Sq], on the device of `document_starts`.
            keys: positions of the keys, int64 [Sk].

        Returns:
            bool [B, Sq, Sk]; [1, Sq, Sk] where all samples are alike. A row may be empty.
        """
        first_SB = queries[:, None] if self.document_starts is None else self.document_starts[queries]
        if self.window:
            reach = queries[:, None] - (self.window - 1)
            first_SB = reach if self.document_starts is None else torch.maximum(first_SB, reach)
        elif self.document_starts is None:
            first_SB = torch.zeros_like(first_SB)
        return (keys >= first_SB.t()[:, :, None]) & (keys <= queries[:, None])
