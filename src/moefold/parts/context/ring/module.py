"""Ring attention: keys and values pass round the context-parallel ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import SUM_TAG, ring_pass, send_recv, wait_all
from moefold.comm.groups import Group
from moefold.config.groups.context import zigzag
from moefold.model.attention import AttentionMaskSpec
from moefold.model.causal_blocks import BlockGradients, CausalBlocks, OnlineSoftmax, accumulate_kv_grads
from moefold.ops.block_attention import CausalKernel, scale_queries, sink_gradient
from moefold.ops.documents import AttentionChunks, PackedDocuments


class RingAttention:
    """Ring attention: pass keys and values round the ring while attending to the current block (arXiv:2310.01889).

    The next block arrives while the current block is computed. Blocks, or halves of blocks, after the rank's queries
    are not computed: each rank does the same work in every step. In the backward pass, the gradients of the keys and
    values follow them one step later and reach their owner with the last step.
    """

    def __init__(self, cp: Group, window: int = 0, chunk_size: int = 0) -> None:
        self._cp = cp
        self._window = window
        self._chunks = AttentionChunks(chunk_size)
        self.block_kernel: CausalKernel | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend; see the module for the shapes. Communicates with the neighbours in cp."""
        documents = self._chunks.divide(documents, len(q) * self._cp.size, q.shape[1], q.device)
        mask_spec = AttentionMaskSpec(self._window, documents)
        return _RingFunction.apply(
            scale_queries(q, scale), torch.stack((k, v), 1), sinks, self._cp, mask_spec, self.block_kernel
        )


class _RingFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

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
