"""All-gather attention: every context-parallel rank gathers all keys and values."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.comm.groups import Group
from moefold.config.groups.context import zigzag
from moefold.model.attention import AttentionMaskSpec
from moefold.model.causal_blocks import BlockAttention, BlockGradients, CausalBlocks, OnlineSoftmax, accumulate_kv_grads
from moefold.ops.block_attention import CausalKernel, sink_gradient


class _AllGatherFunction(torch.autograd.Function):
    """See `BlockAttention.function`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        cp: Group,
        mask_spec: AttentionMaskSpec,
        kernel: CausalKernel | None,
    ) -> Tensor:
        chunks = _gather_chunks(kv, cp)
        softmax = OnlineSoftmax(q, kv, CausalBlocks(q, cp, mask_spec, kernel))
        for past in _past_chunks(cp):
            softmax.accumulate(torch.cat([chunks[i] for i in past]), past)
        out, lse = softmax.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, mask_spec, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, mask_spec, kernel = ctx.args
        size = kv.shape[0] // 2
        chunks = _gather_chunks(kv, cp)
        gradients = BlockGradients((grad_out, q, out, lse), kv, CausalBlocks(q, cp, mask_spec, kernel))
        grads = dict(zip(zigzag(cp.size, cp.rank), gradients.local_dkv.split(size), strict=True))
        for past in _past_chunks(cp):
            past_kv = torch.cat([chunks[i] for i in past])
            block_grads = list(gradients.block_grads(past_kv, past))
            if len(block_grads) == 1 and block_grads[0][1].shape == past_kv[:, 0].shape:
                dkv = torch.stack(block_grads[0][1:], 1)
            else:
                dkv = torch.zeros_like(past_kv, dtype=gradients.dq.dtype)
                accumulate_kv_grads(dkv, block_grads)
            grads |= zip(past, dkv.split(size), strict=True)
        zero_grad = torch.zeros_like(kv[:size])
        by_rank = [grads.get(i, zero_grad) for rank in range(cp.size) for i in zigzag(cp.size, rank)]
        dkv = reduce_scatter(torch.cat([grad.to(gradients.dq.dtype) for grad in by_rank]), cp)
        sinks_grad = sink_gradient(grad_out, out, lse, sinks)
        return gradients.dq.to(q.dtype), dkv.to(kv.dtype), sinks_grad, None, None, None


class AllGatherAttention(BlockAttention):
    """All-gather attention: gather all keys and values, attend from the local queries (arXiv:2407.21783 sec. 3.3.2).

    One collective instead of cp-1 messages: less latency, more memory while a layer is computed. Only local tensors are
    saved for backward, which gathers the keys and values again.
    """

    function = _AllGatherFunction


def _gather_chunks(kv: Tensor, cp: Group) -> dict[int, Tensor]:
    """Gather the keys and values of every chunk of the sequence by all-gather, by chunk number."""
    parts = all_gather(kv, cp).chunk(2 * cp.size)
    numbers = [i for rank in range(cp.size) for i in zigzag(cp.size, rank)]
    return dict(zip(numbers, parts, strict=True))


def _past_chunks(cp: Group) -> list[range]:
    """Return the earlier chunks of other ranks: chunks visible to both local chunks, then to the second only."""
    first, second = zigzag(cp.size, cp.rank)
    return [past for past in (range(first), range(first + 1, second)) if past]
