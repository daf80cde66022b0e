"""Causal attention over a whole sequence: the core that a layer calls between its projections."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.model.sight import Sight


class CoreAttention(Protocol):
    """Attention over all tokens of the samples, of which this rank may hold a part."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            q: queries, [S, B, A, D], any strides; S, A and G are this rank's own.
            k: keys, [S, B, G, D].
            v: values, [S, B, G, D].
            starts: position at which the document of each token begins, int64 [S, B], of the *whole* sample on every
                rank; None: a sample is one document.

        Returns:
            [S, B, A, D].
        """
        ...


class CausalAttention:
    """softmax(q k^T / sqrt(D)) v, in which a token sees itself and the tokens before it (arXiv:1706.03762 sec. 3.2.1).

    Query heads share key/value heads in groups (arXiv:2305.13245): head a reads key/value head a // (A/G).
    Local: no communication, no parameters.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            q: queries, [S, B, A, D], any strides.
            k: keys, [S, B, G, D]; G divides A.
            v: values, [S, B, G, D].
            starts: see `CoreAttention`.

        Returns:
            [S, B, A, D]; a view of a tensor with the batch outermost, as the kernel writes it.
        """
        sight, mask = Sight(starts=starts), None
        if sight.is_limited(q.shape[0]):
            positions = torch.arange(q.shape[0], device=q.device)
            mask = sight.mask(positions, positions).unsqueeze(1)
        # enable_gqa lets the kernel read each key/value head in place: no copy for its A/G query heads. With equal head
        # counts it would only rule kernels out.
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3),
            k.permute(1, 2, 0, 3),
            v.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.permute(2, 0, 1, 3)
