"""Attention within a window, tile by tile: the keys that nobody sees are not multiplied.

A run of tokens is cut into tiles at least as long as the reach of the window. The queries of a tile then see keys of
their own tile and of the one before it alone, so the run becomes a batch of small blocks of T queries and 2T keys, and
the work grows with S * T instead of S * S.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_BLOCK_TOKENS = 64
"""Shorter tiles leave kernels idle."""
MIN_BLOCKS = 4
"""Of fewer tiles, the keys that are left out are no gain."""


@dataclass(frozen=True)
class BlockedWindow:
    """Queries and keys of one run of S tokens; query i sees keys max(i - window + 1, starts[i]) .. i."""

    window: int
    document_starts: Tensor | None = None
    """Place in the run at which the document of each token begins, int64 [S, B]; may be negative. None: no limit."""

    @property
    def block_size(self) -> int:
        """Tokens of a tile, T."""
        return max(self.window - 1, MIN_BLOCK_TOKENS)

    @staticmethod
    def is_worthwhile(window: int, length: int) -> bool:
        """Whether tiles save work on a run of this length."""
        return window > 0 and length >= MIN_BLOCKS * max(window - 1, MIN_BLOCK_TOKENS)

    def to_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The run as a batch of n tiles.

        Args:
            q: queries, [S, B, A, D].
            k: keys, [S, B, G, D].
            v: values, [S, B, G, D].

        Returns:
            (queries [T, n*B, A, D], keys [2T, n*B, G, D], values likewise, seen bool [n*B, T, 2T]); every query sees
            itself, those that fill the last tile as well.
        """
        return (
            self.to_query_blocks(q),
            self._with_previous_block(k),
            self._with_previous_block(v),
            self._mask(q.shape[0], q.shape[1], q.device),
        )

    def to_query_blocks(self, x: Tensor) -> Tensor:
        """[S, B, ...] -> [T, n*B, ...], with zeros behind the run."""
        return self._split_into_blocks(x).transpose(0, 1).flatten(1, 2)

    def from_blocks(self, x: Tensor, length: int) -> Tensor:
        """What came of the queries, [T, n*B, ...] -> [S, B, ...]."""
        tiles = -(-length // self.block_size)
        return x.unflatten(1, (tiles, -1)).transpose(0, 1).flatten(0, 1)[:length]

    def kv_grad_from_blocks(self, grad: Tensor, length: int) -> Tensor:
        """The gradients of keys or values, [2T, n*B, ...] -> [S, B, ...]: each tile has been seen from two."""
        before, own = grad.chunk(2)
        total = self.from_blocks(own, length).clone()
        # What tile i + 1 saw of the tile before it.
        seen_later = self.from_blocks(before, -(-length // self.block_size) * self.block_size)[self.block_size :]
        total[: len(seen_later)] += seen_later[:length]
        return total

    def _split_into_blocks(self, x: Tensor) -> Tensor:
        """[n, T, B, ...]."""
        padding = -len(x) % self.block_size
        x = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, padding)) if padding else x
        return x.unflatten(0, (-1, self.block_size))

    def _with_previous_block(self, x: Tensor) -> Tensor:
        own = self._split_into_blocks(x)
        before = torch.cat((torch.zeros_like(own[:1]), own[:-1]))
        return torch.cat((before, own), 1).transpose(0, 1).flatten(1, 2)

    def _mask(self, length: int, batch: int, device: torch.device) -> Tensor:
        size, tiles = self.block_size, -(-length // self.block_size)
        query = torch.arange(tiles * size, device=device).view(tiles, 1, size, 1)
        key = query.view(tiles, 1, 1, size)[:, :, :, :1] + torch.arange(-size, size, device=device)
        seen = (key >= 0) & (key <= query) & (key > query - self.window)
        if self.document_starts is not None:
            starts = F.pad(self.document_starts, (0, 0, 0, tiles * size - length), value=length)
            seen = seen & (key >= starts.view(tiles, size, batch).transpose(1, 2).unsqueeze(-1))
        return seen.expand(tiles, batch, size, 2 * size).flatten(0, 1)
