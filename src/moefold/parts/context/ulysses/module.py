"""Ulysses attention: context-parallel ranks exchange tokens for heads."""

from math import gcd

import torch
from torch import Tensor

from moefold.comm.collectives import shard_dim_all_to_all
from moefold.comm.groups import Group
from moefold.model.attention import CausalAttention
from moefold.ops.documents import PackedDocuments


class UlyssesAttention:
    """Ulysses attention: all-to-all from tokens to heads, then full-sequence attention with A/(tp*cp) heads per rank.

    arXiv:2309.14509. If cp does not divide the key/value heads, they are repeated as often as needed. cp divides A/tp.
    """

    def __init__(self, cp: Group, window: int = 0, chunk_size: int = 0) -> None:
        self._cp = cp
        self._core_attention = CausalAttention(window, chunk_size)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend. See the module for the shapes. Two all-to-alls over cp."""
        cp = self._cp
        repeats = cp.size // gcd(k.shape[2], cp.size)
        if repeats > 1:
            k = k.repeat_interleave(repeats, 2)
            v = v.repeat_interleave(repeats, 2)
        # One message: the query, key and value heads of one destination are contiguous.
        heads = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]
        received = shard_dim_all_to_all(torch.cat([x.flatten(3) for x in heads], 3), cp, 2, 0).squeeze(2)
        parts = received.split([x.shape[3] * x.shape[4] for x in heads], 2)
        q, k, v = (part.unflatten(2, x.shape[3:]) for part, x in zip(parts, heads, strict=True))
        sinks = None if sinks is None else sinks.chunk(cp.size)[cp.rank]
        out = self._core_attention(q, k, v, documents, sinks, scale)
        return shard_dim_all_to_all(out, cp, 0, 2)
