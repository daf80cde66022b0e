"""Attention that remembers the keys and values of earlier tokens: the core of a layer that decodes token by token.

It stands at the seam `core`, so the layer around it is the one that trains. Keys come rotated; what is kept is what
the core is given, the heads of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """

    def __init__(self, span: Span, capacity: int) -> None:
        self._span = span
        self._capacity = capacity
        self._whole = CausalAttention()
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """Keep the new keys and values, then attend; local.

        Args:
            q: queries, [S, B, A, D].
            k: keys of the same tokens, [S, B, G, D].
            v: values, [S, B, G, D].
            starts: None: a text that is continued is one document.

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
            return self._whole(q, k, v)
        keys, values = (kept_BGLD[:, :, : self._span.num_keys] for kept_BGLD in self._kept)
        places = torch.arange(self._span.num_keys, device=k.device)
        is_seen_B1SL = places <= self._span.positions_SB.t()[:, None, :, None]
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3), keys, values, attn_mask=is_seen_B1SL, enable_gqa=q.shape[2] != k.shape[2]
        )
        return out.permute(2, 0, 1, 3)

    def _zeros(self, x_SBGD: Tensor) -> Tensor:
        _, batch_size, heads, size = x_SBGD.shape
        return x_SBGD.new_zeros(batch_size, heads, self._capacity, size)
