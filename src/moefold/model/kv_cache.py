"""Attention that remembers earlier tokens, for a layer that decodes token by token.

`CachedAttention` stands at the seam `core`, so the layer around it is the one that trains: it keeps the keys and values
that the core is given, the heads of this rank. `LatentCache` stands at the seam `kept` of latent attention: it keeps
what the heads would be made of. Keys come rotated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.model.attention import CausalAttention
from moefold.ops.block_attention import attention_block, fold_in_sinks


@dataclass
class DecodePositions:
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
        decode_positions: of the pass; shared with the other layers.
        capacity: positions that a sample can have.
        window: keys that a query sees at most, its own included; 0: no limit.
    """

    def __init__(self, decode_positions: DecodePositions, capacity: int, window: int = 0) -> None:
        self._decode_positions = decode_positions
        self._capacity = capacity
        self._window = window
        self._prefill_attention = CausalAttention(window)
        self._key_value: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values; 0 before the first pass."""
        return sum(kept.nbytes for kept in self._key_value or ())

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Keep the new keys and values, then attend; local.

        Args:
            q: queries, [S, B, A, D].
            k: keys of the same tokens, [S, B, G, D].
            v: values, [S, B, G, D].
            document_starts: None: a text that is continued is one document.
            sinks: see `CoreAttention`, [A].

        Returns:
            [S, B, A, D].
        """
        assert document_starts is None, "a text that is continued is one document"
        if self._key_value is None:
            self._key_value = self._zeros(k), self._zeros(v)
        samples_B = torch.arange(k.shape[1], device=k.device)
        for kept_BGLD, new_SBGD in zip(self._key_value, (k, v), strict=True):
            kept_BGLD[samples_B, :, self._decode_positions.positions_SB] = new_SBGD
        if self._decode_positions.is_start:
            return self._prefill_attention(q, k, v, None, sinks)
        keys, values = (kept_BGLD[:, :, : self._decode_positions.num_keys] for kept_BGLD in self._key_value)
        seen_BSL = decode_mask(self._decode_positions, self._window)
        if sinks is not None:
            block = attention_block(q, keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3), block_mask=seen_BSL)
            return fold_in_sinks(*block, sinks)[0]
        mask = seen_BSL.unsqueeze(1)
        is_grouped = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(q.permute(1, 2, 0, 3), keys, values, attn_mask=mask, enable_gqa=is_grouped)
        return out.permute(2, 0, 1, 3)

    def _zeros(self, x_SBGD: Tensor) -> Tensor:
        _, batch_size, heads, size = x_SBGD.shape
        return x_SBGD.new_zeros(batch_size, heads, self._capacity, size)


class LatentCache:
    """The latents and rotated keys of all tokens, one vector for each, whole on every tensor-parallel rank.

    Args:
        decode_positions: of the pass; shared with the other layers.
        capacity: positions that a sample can have.
        window: keys that a query sees at most, its own included; 0: no limit.
    """

    def __init__(self, decode_positions: DecodePositions, capacity: int, window: int = 0) -> None:
        self._decode_positions = decode_positions
        self._capacity = capacity
        self._window = window
        self._latents_BLR: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the latents and keys; 0 before the first pass."""
        return 0 if self._latents_BLR is None else self._latents_BLR.nbytes

    def add(self, new_SBR: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keep those of this pass; see `LatentCacheProtocol`."""
        _, batch_size, size = new_SBR.shape
        if self._latents_BLR is None:
            self._latents_BLR = new_SBR.new_zeros(batch_size, self._capacity, size)
        samples_B = torch.arange(batch_size, device=new_SBR.device)
        self._latents_BLR[samples_B, self._decode_positions.positions_SB] = new_SBR
        if self._decode_positions.is_start:
            return None
        return self._latents_BLR[:, : self._decode_positions.num_keys], decode_mask(
            self._decode_positions, self._window
        )


def decode_mask(decode_positions: DecodePositions, window: int) -> Tensor:
    """Which kept key each query sees, bool [B, S, keys]."""
    own_BS1 = decode_positions.positions_SB.t().unsqueeze(-1)
    places = torch.arange(decode_positions.num_keys, device=own_BS1.device)
    seen_BSL = places <= own_BS1
    return seen_BSL & (places > own_BS1 - window) if window else seen_BSL
