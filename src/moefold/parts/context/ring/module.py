"""Ring attention: keys and values pass round the context-parallel ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import SUM_TAG, ring_pass, send_recv, wait_all
from moefold.comm.groups import Group
from moefold.config.groups.context import zigzag
from moefold.model.attention import AttentionMaskSpec
from moefold.model.causal_blocks import BlockAttention, BlockGradients, CausalBlocks, OnlineSoftmax, accumulate_kv_grads
from moefold.ops.block_attention import CausalKernel, sink_gradient


class _RingFunction(torch.autograd.Function):
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
        kv = kv.contiguous()
        kv_blocks = ring_pass(kv, cp)
        next(kv_blocks)
        softmax = OnlineSoftmax(q, kv, CausalBlocks(q, cp, mask_spec, kernel))
        for source, block in kv_blocks:
            softmax.accumulate(block, zigzag(cp.size, source))
        out, lse = softmax.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, mask_spec, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, mask_spec, kernel = ctx.args
        kv_blocks = ring_pass(kv, cp)
        next(kv_blocks)
        gradients = BlockGradients((grad_out, q, out, lse), kv, CausalBlocks(q, cp, mask_spec, kernel))
        dkv = gradients.local_dkv.to(gradients.dq.dtype)
        incoming = torch.empty_like(dkv)
        works = send_recv(dkv, incoming, cp, SUM_TAG)
        for source, block in kv_blocks:
            block_grads = list(gradients.block_grads(block, zigzag(cp.size, source)))
            wait_all(works, cp)
            dkv, incoming = incoming, dkv
            accumulate_kv_grads(dkv, block_grads)
            works = send_recv(dkv, incoming, cp, SUM_TAG)
        wait_all(works, cp)
        sinks_grad = sink_gradient(grad_out, out, lse, sinks)
        return gradients.dq.to(q.dtype), incoming.to(kv.dtype), sinks_grad, None, None, None


class RingAttention(BlockAttention):
    """Ring attention: pass keys and values round the ring while attending to the current block (arXiv:2310.01889).

    The next block arrives while the current block is computed. Blocks, or halves of blocks, after the rank's queries
    are not computed: each rank does the same work in every step. In the backward pass, the gradients of the keys and
    values follow them one step later and reach their owner with the last step.
    """

    function = _RingFunction
