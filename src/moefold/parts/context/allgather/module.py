"""All-gather attention: every context-parallel rank gathers all keys and values."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.comm.groups import Group
from moefold.config.groups.context import zigzag
from moefold.model.causal_blocks import BlockAttention, BlockGradients, accumulate_kv_grads


class AllGatherAttention(BlockAttention):
    """All-gather attention: gather all keys and values, attend from the local queries (arXiv:2407.21783 sec. 3.3.2).

    One collective instead of cp-1 messages: less latency, more memory while a layer is computed. Only local tensors are
    saved for backward, which gathers the keys and values again.
    """

    def past_keys(self, kv: Tensor) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Gather the keys and values, and return chunks visible to both local chunks, then to the second only."""
        parts = all_gather(kv, self.cp).chunk(2 * self.cp.size)
        chunks = dict(zip(_chunks_by_rank(self.cp), parts, strict=True))
        first, second = zigzag(self.cp.size, self.cp.rank)
        past = (range(first), range(first + 1, second))
        return ((torch.cat([chunks[i] for i in numbers]), numbers) for numbers in past if numbers)

    def kv_gradient(
        self, kv: Tensor, past: Iterator[tuple[Tensor, Sequence[int]]], gradients: BlockGradients
    ) -> Tensor:
        """Reduce-scatter the gradients of all chunks. See base class."""
        size = kv.shape[0] // 2
        grads = dict(zip(zigzag(self.cp.size, self.cp.rank), gradients.local_dkv.split(size), strict=True))
        for past_kv, chunks in past:
            block_grads = list(gradients.block_grads(past_kv, chunks))
            if len(block_grads) == 1 and block_grads[0][1].shape == past_kv[:, 0].shape:
                dkv = torch.stack(block_grads[0][1:], 1)
            else:
                dkv = torch.zeros_like(past_kv, dtype=gradients.dq.dtype)
                accumulate_kv_grads(dkv, block_grads)
            grads |= zip(chunks, dkv.split(size), strict=True)
        zero_grad = torch.zeros_like(kv[:size])
        by_rank = [grads.get(i, zero_grad) for i in _chunks_by_rank(self.cp)]
        return reduce_scatter(torch.cat([grad.to(gradients.dq.dtype) for grad in by_rank]), self.cp)


def _chunks_by_rank(cp: Group) -> list[int]:
    """Return the numbers of the chunks of all ranks, rank by rank."""
    return [i for rank in range(cp.size) for i in zigzag(cp.size, rank)]
