"""Ring attention: keys and values pass round the context-parallel ranks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import SUM_TAG, ring_pass, send_recv, wait_all
from moefold.config.groups.context import zigzag
from moefold.model.causal_blocks import BlockAttention, BlockGradients, accumulate_kv_grads


class RingAttention(BlockAttention):
    """Ring attention: pass keys and values round the ring while attending to the current block (arXiv:2310.01889).

    The next block arrives while the current block is computed. Blocks, or halves of blocks, after the rank's queries
    are not computed: each rank does the same work in every step. In the backward pass, the gradients of the keys and
    values follow them one step later and reach their owner with the last step.
    """

    def past_keys(self, kv: Tensor) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Start the ring. See base class."""
        kv_blocks = ring_pass(kv, self.cp)
        next(kv_blocks)
        return ((block, zigzag(self.cp.size, source)) for source, block in kv_blocks)

    def kv_gradient(
        self, kv: Tensor, past: Iterator[tuple[Tensor, Sequence[int]]], gradients: BlockGradients
    ) -> Tensor:
        """Pass the gradients round the ring. See base class."""
        dkv = gradients.local_dkv.to(gradients.dq.dtype)
        incoming = torch.empty_like(dkv)
        works = send_recv(dkv, incoming, self.cp, SUM_TAG)
        for block, chunks in past:
            block_grads = list(gradients.block_grads(block, chunks))
            wait_all(works, self.cp)
            dkv, incoming = incoming, dkv
            accumulate_kv_grads(dkv, block_grads)
            works = send_recv(dkv, incoming, self.cp, SUM_TAG)
        wait_all(works, self.cp)
        return incoming
