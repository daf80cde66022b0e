"""Causal attention over a whole sequence: the core that a layer calls between its projections."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

CoreAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [S, B, A, D], k [S, B, G, D], v [S, B, G, D]) -> [S, B, A, D]; S, A and G are this rank's own."""


class CausalAttention:
    """softmax(q k^T / sqrt(D)) v, in which a token sees itself and the tokens before it (arXiv:1706.03762 sec. 3.2.1).

    Query heads share key/value heads in groups (arXiv:2305.13245): head a reads key/value head a // (A/G).
    Local: no communication, no parameters.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            q: queries, [S, B, A, D], any strides.
            k: keys, [S, B, G, D]; G divides A.
            v: values, [S, B, G, D].

        Returns:
            [S, B, A, D]; a view of a tensor with the batch outermost, as the kernel writes it.
        """
        # enable_gqa lets the kernel read each key/value head in place: no copy for its A/G query heads. With equal head
        # counts it would only rule kernels out.
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3),
            k.permute(1, 2, 0, 3),
            v.permute(1, 2, 0, 3),
            is_causal=True,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.permute(2, 0, 1, 3)
