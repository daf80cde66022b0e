"""Attention that remembers the keys and values of earlier tokens: the core of a layer that decodes token by token.

It stands at the seam `core`, so the layer around it is the one that trains. Keys come rotated; what is kept is what
the core is given, the heads of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.model.attention_block import attention_block
from moefold.model.attention_sink import fold_in_sinks
from moefold.model.core_attention import CausalAttention


@dataclass
class Span:
    """Where the tokens of the present forward pass stand; one object for all layers, changed between passes."""

    positions_SB: Tensor
    """Position of each token in its sample, int64 [S, B]; ascending in S, and the same in all rows at the start."""
    num_keys: int
    """One more than the largest position."""
    is_start: bool
    """These are the first tokens of their samples: they see nothing but each other."""


class CachedAttention:
    """softmax(q k^T / sqrt(D)) v over the tokens of this pass and all earlier ones of the same sample.

    A token sees the keys at positions up to its own. Positions that a shorter sample has not reached yet hold zeros,
    or what padding left there, and no token sees them before it overwrites them.

    Args:
        span: of the pass; shared with the other layers.
        capacity: positions that a sample can have.
        window: keys that a query sees at most, its own included; 0: no limit.
    """

    def __init__(self, span: Span, capacity: int, window: int = 0) -> None:
        self._span = span
        self._capacity = capacity
        self._window = window
        self._whole = CausalAttention(window)
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Keep the new keys and values, then attend; local.

        Args:
            q: queries, [S, B, A, D].
            k: keys of the same tokens, [S, B, G, D].
            v: values, [S, B, G, D].
            starts: None: a text that is continued is one document.
            sinks: see `CoreAttention`, [A].

        Returns:
            [S, B, A, D].
        """
        assert starts is None, "a text that is continued is one document"
        if self._kept is None:
            self._kept = self._zeros(k), self._zeros(v)
        samples_B = torch.arange(k.shape[1], device=k.device)
        for kept_BGLD, new_SBGD in zip(self._kept, (k, v), strict=True):
            kept_BGLD[samples_B, :, self._span.positions_SB] = new_SBGD
        if self._span.is_start:
            return self._whole(q, k, v, None, sinks)
        keys, values = (kept_BGLD[:, :, : self._span.num_keys] for kept_BGLD in self._kept)
        seen_BSL = self._seen(k.device)
        if sinks is not None:
            block = attention_block(q, keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3), seen=seen_BSL)
            return fold_in_sinks(*block, sinks)[0]
        mask, is_grouped = seen_BSL.unsqueeze(1), q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(q.permute(1, 2, 0, 3), keys, values, attn_mask=mask, enable_gqa=is_grouped)
        return out.permute(2, 0, 1, 3)

    def _seen(self, device: torch.device) -> Tensor:
        """Which kept key each query sees, bool [B, S, keys]."""
        places, own_BS1 = torch.arange(self._span.num_keys, device=device), self._span.positions_SB.t().unsqueeze(-1)
        seen_BSL = places <= own_BS1
        return seen_BSL & (places > own_BS1 - self._window) if self._window else seen_BSL

    def _zeros(self, x_SBGD: Tensor) -> Tensor:
        _, batch_size, heads, size = x_SBGD.shape
        return x_SBGD.new_zeros(batch_size, heads, self._capacity, size)
