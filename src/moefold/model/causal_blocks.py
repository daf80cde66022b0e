"""Causal attention of a rank's two chunks of a sequence in blocks of queries and keys, for context parallelism."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.groups import Group
from moefold.config.groups.context import zigzag
from moefold.model.attention import AttentionMaskSpec
from moefold.ops.block_attention import (
    BlockMask,
    CausalKernel,
    accumulation_dtype,
    attention_block,
    attention_block_backward,
    fold_in_sinks,
    merge_lse_,
    scale_queries,
    sink_gradient,
)
from moefold.ops.documents import AttentionChunks, PackedDocuments


@runtime_checkable
class HasAttentionKernel(Protocol):
    """Core attention that a kernel of the device may compute, where it supports the tensors."""

    kernel: Any


@runtime_checkable
class HasBlockKernel(Protocol):
    """Core attention whose blocks a kernel of the device may compute."""

    block_kernel: CausalKernel | None


class BlockAttention(ABC):
    """Attention of the ranks of cp that attend to each other's keys and values in blocks."""

    def __init__(self, cp: Group, window: int = 0, chunk_size: int = 0) -> None:
        self.cp = cp
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
        """Attend. See `CoreAttention` for the shapes. Communicates over cp."""
        documents = self._chunks.divide(documents, len(q) * self.cp.size, q.shape[1], q.device)
        mask_spec = AttentionMaskSpec(self._window, documents)
        return _AttendInBlocks.apply(scale_queries(q, scale), torch.stack((k, v), 1), sinks, self, mask_spec)

    @abstractmethod
    def past_keys(self, kv: Tensor) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Start to exchange keys and values, [S/cp, 2, B, G, D], and return what other ranks sent, with its chunks.

        Communicates over cp. The caller attends to its own keys meanwhile.
        """

    @abstractmethod
    def kv_gradient(
        self, kv: Tensor, past: Iterator[tuple[Tensor, Sequence[int]]], gradients: "BlockGradients"
    ) -> Tensor:
        """Return the gradient of this rank's keys and values, with the parts that other ranks compute.

        Communicates over cp.

        Args:
            past: result of `past_keys`.
        """


class _AttendInBlocks(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None, attention, mask) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, attention: BlockAttention, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        past = attention.past_keys(kv)
        softmax = OnlineSoftmax(q, kv, CausalBlocks(q, attention.cp, mask_spec, attention.block_kernel))
        for block, chunks in past:
            softmax.accumulate(block, chunks)
        out, lse = softmax.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = attention, mask_spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        attention, mask_spec = ctx.args
        past = attention.past_keys(kv)
        blocks = CausalBlocks(q, attention.cp, mask_spec, attention.block_kernel)
        gradients = BlockGradients((grad_out, q, out, lse), kv, blocks)
        dkv = attention.kv_gradient(kv, past, gradients)
        return gradients.dq.to(q.dtype), dkv.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


@dataclass(frozen=True)
class PastBlock:
    """Local queries, and earlier keys of their documents within their windows."""

    rows: slice
    """Rows of the local queries."""
    samples: slice
    keys: slice
    """Rows of the keys."""
    mask: BlockMask

    def queries(self, x: Tensor) -> Tensor:
        """Return the block's part of a tensor of the local queries, [S/cp, B, ...]."""
        return x[self.rows, self.samples]

    def keys_and_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's parts of keys and values, [Sk, 2, B, ...]."""
        return kv[self.keys, 0, self.samples], kv[self.keys, 1, self.samples]


class CausalBlocks:
    """Attention blocks of this rank: the (query, key) chunk pairs to compute, with their masks."""

    def __init__(self, q: Tensor, cp: Group, mask_spec: AttentionMaskSpec, kernel: CausalKernel | None) -> None:
        self.local_chunks = zigzag(cp.size, cp.rank)
        self._chunk_size = q.shape[0] // 2
        self._mask_spec = mask_spec
        self._q = q
        self._needs_mask = mask_spec.needs_mask(q.shape[0] * cp.size)
        # Blocks of documents have new shapes in every step, for which cuDNN would build new plans.
        is_supported = kernel is not None and not self._needs_mask and kernel.supports(q, q, q)
        self.kernel = kernel if is_supported else None

    def local_blocks(self) -> list[tuple[slice, BlockMask]]:
        """Return the blocks over the local keys as (rows, mask): one, or one for each local chunk.

        With two blocks, the second chunk's attention to the first is in `past_blocks(local_chunks)`.
        """
        if not self._needs_mask:
            return [(slice(None), "causal")]
        halves = (slice(self._chunk_size), slice(self._chunk_size, None))
        masks = [
            self._mask_spec.local_mask(chunk * self._chunk_size, self._q[rows])
            for chunk, rows in zip(self.local_chunks, halves, strict=True)
        ]
        return list(zip(halves, masks, strict=True))

    def past_blocks(self, chunks: Sequence[int]) -> Iterator[PastBlock]:
        """Yield blocks over the keys of ascending chunks that cover every visible (query, earlier key) pair."""
        size = self._chunk_size
        num_past = [sum(chunk < local_chunk for chunk in chunks) for local_chunk in self.local_chunks]
        if self._needs_mask:
            for i, count in enumerate(num_past):
                yield from self._visible_blocks(i, chunks[:count])
            return
        # One block has all keys that both chunks attend to.
        spans = [(slice(2 * size), num_past[0])]
        if num_past[0] != num_past[1]:
            spans = [(slice(i * size, (i + 1) * size), count) for i, count in enumerate(num_past)]
        for rows, count in spans:
            if count:
                yield PastBlock(rows, slice(None), slice(count * size), "all")

    def _visible_blocks(self, i: int, past: Sequence[int]) -> Iterator[PastBlock]:
        """Yield the blocks of a local chunk, one by one for the samples if they hold documents."""
        first = self.local_chunks[i] * self._chunk_size
        documents = self._mask_spec.documents
        if documents is None:
            yield from self._blocks_of_document(i, past, range(first + self._chunk_size), slice(None))
            return
        for sample in range(self._q.shape[1]):
            document = documents.document_at(sample, first)
            yield from self._blocks_of_document(i, past, document, slice(sample, sample + 1))

    def _blocks_of_document(self, i: int, past: Sequence[int], document: range, samples: slice) -> Iterator[PastBlock]:
        """Yield the blocks of a local chunk over the earlier keys of the document of its first token.

        Only that document reaches into earlier chunks. A run of contiguous chunks is one block, trimmed to the queries
        that attend to any of its keys, and to the keys that any query attends to.
        """
        size = self._chunk_size
        window = self._mask_spec.window
        first = self.local_chunks[i] * size
        first_key = max(document.start, first - window + 1) if window else document.start
        last_query = min(document.stop, first + size) - 1
        for start, stop in _runs(past):
            keys = range(max(past[start] * size, first_key), (past[start] + stop - start) * size)
            if keys:
                queries = range(first, min(last_query, keys[-1] + window - 1 if window else last_query) + 1)
                mask = self._mask_spec.past_mask(queries, keys, self._q)
                rows = slice(i * size, i * size + len(queries))
                yield PastBlock(rows, samples, slice(stop * size - len(keys), stop * size), mask)


class OnlineSoftmax:
    """Online softmax of the local queries over blocks, starting with the local keys and values."""

    def __init__(self, q: Tensor, kv: Tensor, blocks: CausalBlocks) -> None:
        blocks_of_rank = blocks.local_blocks()
        results = [
            attention_block(q[rows], kv[rows, 0], kv[rows, 1], block_mask=mask, kernel=blocks.kernel)
            for rows, mask in blocks_of_rank
        ]
        out, self.lse = results[0] if len(results) == 1 else (torch.cat(rows) for rows in zip(*results, strict=True))
        self.q = q
        self.out = out.to(accumulation_dtype(q.dtype))
        self._blocks = blocks
        if len(blocks_of_rank) > 1:
            self.accumulate(kv, blocks.local_chunks)

    def accumulate(self, kv: Tensor, chunks: Sequence[int]) -> None:
        """Attend to the keys of some chunks of other ranks."""
        for block in self._blocks.past_blocks(chunks):
            k, v = block.keys_and_values(kv)
            out, lse = attention_block(block.queries(self.q), k, v, block_mask=block.mask, kernel=self._blocks.kernel)
            merge_lse_(block.queries(self.out), block.queries(self.lse), out, lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out in the type of the queries, lse), both with the attention sinks, which are added once."""
        out, lse = fold_in_sinks(self.out, self.lse, sinks)
        return out.to(self.q.dtype), lse


class BlockGradients:
    """Gradient of the local queries, summed over blocks, starting with the local keys and values."""

    def __init__(self, query_tensors: tuple[Tensor, Tensor, Tensor, Tensor], kv: Tensor, blocks: CausalBlocks) -> None:
        self._query_tensors = query_tensors
        self._blocks = blocks
        blocks_of_rank = blocks.local_blocks()
        results = []
        for rows, mask in blocks_of_rank:
            grad_out, q, out, lse = (x[rows] for x in query_tensors)
            k, v = kv[rows, 0], kv[rows, 1]
            results.append(attention_block_backward(grad_out, q, k, v, out, lse, block_mask=mask, kernel=blocks.kernel))
        dq, dk, dv = results[0] if len(results) == 1 else (torch.cat(rows) for rows in zip(*results, strict=True))
        self.dq = dq.to(accumulation_dtype(q.dtype))
        self.local_dkv = torch.stack((dk, dv), 1)
        if len(blocks_of_rank) > 1:
            self.local_dkv = self.local_dkv.to(self.dq.dtype)
            accumulate_kv_grads(self.local_dkv, self.block_grads(kv, blocks.local_chunks))

    def block_grads(self, kv: Tensor, chunks: Sequence[int]) -> Iterator[tuple[PastBlock, Tensor, Tensor]]:
        """Add the gradient of each block to dq, and yield the block with its dk and dv."""
        for block in self._blocks.past_blocks(chunks):
            grad_out, q, out, lse = (block.queries(x) for x in self._query_tensors)
            k, v = block.keys_and_values(kv)
            dq, dk, dv = attention_block_backward(
                grad_out, q, k, v, out, lse, block_mask=block.mask, kernel=self._blocks.kernel
            )
            block.queries(self.dq).add_(dq)
            yield block, dk, dv


def accumulate_kv_grads(dkv: Tensor, block_grads: Iterable[tuple[PastBlock, Tensor, Tensor]]) -> None:
    """Add the gradients of blocks to the gradient of the keys and values."""
    for block, dk, dv in block_grads:
        dk_sum, dv_sum = block.keys_and_values(dkv)
        dk_sum += dk
        dv_sum += dv


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of indices of contiguous chunks, [start, stop)."""
    starts = [i for i in range(len(chunks)) if i == 0 or chunks[i] != chunks[i - 1] + 1]
    return list(pairwise([*starts, len(chunks)]))
