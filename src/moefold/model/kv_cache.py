"""KV cache: attention for decoding token by token.

`CachedAttention` replaces a layer's `core_attention` and caches keys and values, of this rank's heads. `LatentCache`
is the `latent_cache` of latent attention and caches the latents from which heads are computed. Keys are cached after
RoPE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.model.attention import CausalAttention, scale_queries
from moefold.ops.block_attention import attention_block, fold_in_sinks
from moefold.ops.documents import PackedDocuments


@dataclass
class DecodePositions:
    """Positions of the tokens of the current forward pass; shared by all layers, updated between passes."""

    positions_SB: Tensor
    """Position of each token in its sample, int64 [S, B]; ascending in S, and the same in all rows at the start."""
    num_keys: int
    """One more than the largest position."""
    is_prefill: bool
    """True if these are the first tokens of their samples (prefill)."""


class CachedAttention:
    """Attention over the tokens of this pass and all cached ones of the same sample.

    A token attends to keys at positions up to its own. Positions that a shorter sample has not reached yet hold zeros
    or padding; they are masked until they are overwritten.

    Args:
        decode_positions: of the pass; shared with the other layers.
        capacity: maximum positions of a sample.
        window: sliding window: most keys that a query attends to, its own included; 0: no limit.
    """

    def __init__(self, decode_positions: DecodePositions, capacity: int, window: int = 0) -> None:
        self._decode_positions = decode_positions
        self._capacity = capacity
        self._window = window
        self._prefill_attention = CausalAttention(window)
        self._key_value: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cached keys and values; 0 before the first pass."""
        return sum(cache.nbytes for cache in self._key_value or ())

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Cache the new keys and values, then attend; local.

        Args:
            q: queries, [S, B, A, D].
            k: keys of the same tokens, [S, B, G, D].
            v: values, [S, B, G, D].
            documents: None: a continued text is one document.
            sinks: see `CoreAttention`, [A]; likewise `scale`.

        Returns:
            [S, B, A, D].
        """
        assert documents is None, "a continued text is one document"
        q = scale_queries(q, scale)
        if self._key_value is None:
            self._key_value = self._zeros(k), self._zeros(v)
        samples_B = torch.arange(k.shape[1], device=k.device)
        for cache_BGLD, new_SBGD in zip(self._key_value, (k, v), strict=True):
            cache_BGLD[samples_B, :, self._decode_positions.positions_SB] = new_SBGD
        if self._decode_positions.is_prefill:
            return self._prefill_attention(q, k, v, None, sinks)
        keys, values = (cache_BGLD[:, :, : self._decode_positions.num_keys] for cache_BGLD in self._key_value)
        mask_BSL = decode_mask(self._decode_positions, self._window)
        if sinks is not None:
            block = attention_block(q, keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3), block_mask=mask_BSL)
            return fold_in_sinks(*block, sinks)[0]
        mask = mask_BSL.unsqueeze(1)
        is_grouped = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(q.permute(1, 2, 0, 3), keys, values, attn_mask=mask, enable_gqa=is_grouped)
        return out.permute(2, 0, 1, 3)

    def _zeros(self, x_SBGD: Tensor) -> Tensor:
        _, batch_size, heads, size = x_SBGD.shape
        return x_SBGD.new_zeros(batch_size, heads, self._capacity, size)


class LatentCache:
    """Cache of the latents and rotated keys, one vector a token, replicated on the tensor-parallel ranks.

    Args:
        decode_positions: of the pass; shared with the other layers.
        capacity: maximum positions of a sample.
        window: sliding window: most keys that a query attends to, its own included; 0: no limit.
    """

    def __init__(self, decode_positions: DecodePositions, capacity: int, window: int = 0) -> None:
        self._decode_positions = decode_positions
        self._capacity = capacity
        self._window = window
        self._latents_BLR: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cached latents and keys; 0 before the first pass."""
        return 0 if self._latents_BLR is None else self._latents_BLR.nbytes

    def add(self, new_SBR: Tensor) -> bool:
        """Cache the vectors of this pass; see `LatentCacheProtocol`."""
        _, batch_size, size = new_SBR.shape
        if self._latents_BLR is None:
            self._latents_BLR = new_SBR.new_zeros(batch_size, self._capacity, size)
        samples_B = torch.arange(batch_size, device=new_SBR.device)
        self._latents_BLR[samples_B, self._decode_positions.positions_SB] = new_SBR
        return not self._decode_positions.is_prefill

    def attend(self, query_SBAR: Tensor, rank: int, scale: float) -> Tensor:
        """Attend to the cached vectors; see `LatentCacheProtocol`."""
        assert self._latents_BLR is not None
        num_heads = query_SBAR.shape[2]
        mask_BSL = decode_mask(self._decode_positions, self._window)
        # Each query becomes A rows of one attention. The columns of the output beyond the latent are dropped.
        mask = mask_BSL.repeat_interleave(num_heads, 1).unsqueeze(1)
        keys = self._latents_BLR[:, : self._decode_positions.num_keys].unsqueeze(1)
        query = query_SBAR.transpose(0, 1).flatten(1, 2).unsqueeze(1)
        out = F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask, scale=scale)
        return out[:, 0, :, :rank].unflatten(1, (-1, num_heads)).transpose(0, 1)


def decode_mask(decode_positions: DecodePositions, window: int) -> Tensor:
    """Return the mask of cached keys that each query attends to, bool [B, S, keys]."""
    query_positions_BS1 = decode_positions.positions_SB.t().unsqueeze(-1)
    key_positions = torch.arange(decode_positions.num_keys, device=query_positions_BS1.device)
    mask_BSL = key_positions <= query_positions_BS1
    return mask_BSL & (key_positions > query_positions_BS1 - window) if window else mask_BSL
