"""Context parallelism: attention over full samples whose tokens are sharded, S/cp per rank.

Three kinds with one signature, `(q [S/cp, B, A/tp, D], k [S/cp, B, G/tp, D], v likewise) -> [S/cp, B, A/tp, D]`. With
tokens sharded by `sequence_positions`, they compute what `CausalAttention` computes on the full sequence. Keys and
values are sent with their own G/tp heads, not expanded to the query heads. Every rank has the document bounds of the
full sample, so each rank knows which keys its own queries attend to.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import (
    SUM_TAG,
    all_gather,
    differentiable_all_reduce,
    reduce_scatter,
    ring_pass,
    send_recv,
    shard_dim_all_to_all,
    wait_all,
)
from moefold.comm.groups import Group, ParallelGroups
from moefold.config.schema import ParallelConfig
from moefold.model.attention import AttentionMaskSpec, CausalAttention, CoreAttention, SelfAttention, scale_queries
from moefold.model.indexer import LightningIndexer
from moefold.model.linear_attention import LinearAttention, SequenceSegments
from moefold.model.transformer import Transformer
from moefold.ops.block_attention import (
    BlockMask,
    CausalKernel,
    accumulation_dtype,
    attention_block,
    attention_block_backward,
    fold_in_sinks,
    merge_lse_,
    sink_gradient,
)
from moefold.ops.documents import AttentionChunks, PackedDocuments
from moefold.parallel.planned_attention import AttentionPlanner, PlannedAttention, PlanOptions, nodes_of_round

ContextKind = Literal["ring", "allgather", "ulysses", "planned"]


def apply_context_parallel(stage: Transformer, parallel: ParallelConfig, groups: ParallelGroups) -> None:
    """Replace the core attention of each layer, the segments of linear attention, and the head's sum over the ranks."""
    cp = groups.attn.cp
    kind = parallel.context
    if stage.is_last:
        stage.head.context_parallel = ContextParallelSum(cp)
    planner = _attention_planner(parallel, groups)
    for module in stage.modules():
        if isinstance(module, SelfAttention):
            if planner is not None:
                module.core_attention = PlannedAttention(planner, module.window)
            else:
                module.core_attention = context_parallel_attention(kind, cp, module.window, module.chunk_size)
            module.attends_in_blocks = planner is not None or (cp.size > 1 and kind != "ulysses")
        if isinstance(module, LinearAttention) and cp.size > 1:
            module.segments = ContextSegments(kind, cp)
        if isinstance(module, LightningIndexer) and cp.size > 1:
            module.keys = ContextKeys(kind, cp)


def _attention_planner(parallel: ParallelConfig, groups: ParallelGroups) -> AttentionPlanner | None:
    """Return what the layers plan their attention with; None: they do not, or there is nothing to send."""
    is_balanced = parallel.attention_hosts == "balanced"
    moves_work = is_balanced and (parallel.attention_pool or groups.attn.dp_cp.size) > 1
    if parallel.context != "planned" or not (groups.attn.cp.size > 1 or moves_work or parallel.placement == "balanced"):
        return None
    if not is_balanced:
        return AttentionPlanner(groups, PlanOptions())
    options = PlanOptions(
        tolerance=parallel.attention_tolerance,
        block=parallel.attention_block,
        pool=parallel.attention_pool,
        nodes=nodes_of_round(groups),
    )
    return AttentionPlanner(groups, options)


class ContextParallelSum:
    """`ContextParallel` of a group."""

    def __init__(self, cp: Group) -> None:
        self._cp = cp
        self.size = cp.size

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Sum over the members (all-reduce), with its adjoint."""
        return differentiable_all_reduce(x, self._cp)


def context_parallel_attention(kind: ContextKind, cp: Group, window: int = 0, chunk_size: int = 0) -> CoreAttention:
    """Return the core attention of a context-parallel rank without a plan; `CausalAttention` if cp is 1.

    Args:
        kind: ring, allgather or ulysses.
        cp: the ranks that share a sample.
        window: sliding window, the maximum number of keys per query, its own included; 0: no limit.
        chunk_size: tokens of an attention chunk; 0: no chunks.
    """
    if cp.size == 1:
        return CausalAttention(window, chunk_size)
    if kind == "ring":
        return RingAttention(cp, window, chunk_size)
    if kind == "allgather":
        return AllGatherAttention(cp, window, chunk_size)
    if kind == "ulysses":
        return UlyssesAttention(cp, window, chunk_size)
    raise ValueError(f"context kind {kind!r} must be one of 'ring', 'allgather', 'ulysses'")


def sequence_positions(kind: ContextKind, seq_len: int, cp: int, rank: int) -> Tensor:
    """Return the positions of the tokens of a context-parallel rank, in its order.

    ulysses splits the sequence into cp contiguous parts. ring and allgather split it into 2*cp chunks and give rank r
    the chunks r and 2*cp-1-r: an early one and a late one, so that every rank has the same number of (query, earlier
    key) pairs (arXiv:2407.21783 sec. 3.3.2).

    Args:
        kind: ring, allgather or ulysses.
        seq_len: tokens of a sample, S; divisible by cp, and by 2*cp if it is split into chunks.
        cp: context-parallel degree.
        rank: context-parallel rank.

    Returns:
        Ascending positions, int64 [S/cp].
    """
    if cp == 1 or kind == "ulysses":
        assert seq_len % cp == 0, (seq_len, cp)
        return torch.arange(rank * (seq_len // cp), (rank + 1) * (seq_len // cp))
    assert seq_len % (2 * cp) == 0, (seq_len, cp)
    size = seq_len // (2 * cp)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in _zigzag(cp, rank)])


class RingAttention:
    """Ring attention: pass keys and values round the ring while attending to the current block (arXiv:2310.01889).

    The next block arrives while the current one is computed. Blocks, or halves of blocks, after the rank's queries are
    not computed: each rank does the same work in every step. In the backward pass, the gradients of the keys and values
    follow them one step later and reach their owner with the last step.
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


class AllGatherAttention:
    """All-gather attention: gather all keys and values, attend from the local queries (arXiv:2407.21783 sec. 3.3.2).

    One collective instead of cp-1 messages: less latency, more memory while a layer is computed. Only local tensors are
    saved for backward, which gathers the keys and values again.
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
        """Attend; see the module for the shapes. Communicates over cp."""
        documents = self._chunks.divide(documents, len(q) * self._cp.size, q.shape[1], q.device)
        mask_spec = AttentionMaskSpec(self._window, documents)
        return _AllGatherFunction.apply(
            scale_queries(q, scale), torch.stack((k, v), 1), sinks, self._cp, mask_spec, self.block_kernel
        )


class UlyssesAttention:
    """Ulysses attention: all-to-all from tokens to heads, then full-sequence attention with A/(tp*cp) heads per rank.

    arXiv:2309.14509. If cp does not divide the key/value heads, they are repeated as often as needed; cp divides A/tp.
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
        """Attend; see the module for the shapes. Two all-to-alls over cp."""
        cp = self._cp
        kv_heads = k.shape[2]
        repeats = cp.size // gcd(kv_heads, cp.size)
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


@dataclass(frozen=True)
class _PastBlock:
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


class _CausalBlocks:
    """Attention blocks of this rank: the (query, key) chunk pairs to compute, with their masks."""

    def __init__(self, q: Tensor, cp: Group, mask_spec: AttentionMaskSpec, kernel: CausalKernel | None) -> None:
        self.local_chunks = _zigzag(cp.size, cp.rank)
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

    def past_blocks(self, chunks: Sequence[int]) -> Iterator[_PastBlock]:
        """Yield blocks over the keys of ascending chunks that cover every visible (query, earlier key) pair."""
        size = self._chunk_size
        num_past = [sum(chunk < local_chunk for chunk in chunks) for local_chunk in self.local_chunks]
        if self._needs_mask:
            for i, count in enumerate(num_past):
                yield from self._visible_blocks(i, chunks[:count])
            return
        # Of all keys that both chunks attend to, one block.
        spans = [(slice(2 * size), num_past[0])]
        if num_past[0] != num_past[1]:
            spans = [(slice(i * size, (i + 1) * size), count) for i, count in enumerate(num_past)]
        for rows, count in spans:
            if count:
                yield _PastBlock(rows, slice(None), slice(count * size), "all")

    def _visible_blocks(self, i: int, past: Sequence[int]) -> Iterator[_PastBlock]:
        """Yield the blocks of a local chunk, one by one for the samples if they hold documents."""
        first = self.local_chunks[i] * self._chunk_size
        documents = self._mask_spec.documents
        if documents is None:
            yield from self._blocks_of_document(i, past, range(first + self._chunk_size), slice(None))
            return
        for sample in range(self._q.shape[1]):
            document = documents.document_at(sample, first)
            yield from self._blocks_of_document(i, past, document, slice(sample, sample + 1))

    def _blocks_of_document(self, i: int, past: Sequence[int], document: range, samples: slice) -> Iterator[_PastBlock]:
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
                yield _PastBlock(rows, samples, slice(stop * size - len(keys), stop * size), mask)


class _OnlineSoftmax:
    """Online softmax of the local queries over blocks, starting with the local keys and values."""

    def __init__(self, q: Tensor, kv: Tensor, blocks: _CausalBlocks) -> None:
        blocks_of_rank = blocks.local_blocks()
        parts = [
            attention_block(q[rows], kv[rows, 0], kv[rows, 1], block_mask=mask, kernel=blocks.kernel)
            for rows, mask in blocks_of_rank
        ]
        out, self.lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
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


class _BlockGradients:
    """Gradient of the local queries, summed over blocks, starting with the local keys and values."""

    def __init__(self, query_tensors: tuple[Tensor, Tensor, Tensor, Tensor], kv: Tensor, blocks: _CausalBlocks) -> None:
        self._query_tensors = query_tensors
        self._blocks = blocks
        blocks_of_rank = blocks.local_blocks()
        parts = []
        for rows, mask in blocks_of_rank:
            grad_out, q, out, lse = (x[rows] for x in query_tensors)
            k, v = kv[rows, 0], kv[rows, 1]
            parts.append(attention_block_backward(grad_out, q, k, v, out, lse, block_mask=mask, kernel=blocks.kernel))
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.dq = dq.to(accumulation_dtype(q.dtype))
        self.local_dkv = torch.stack((dk, dv), 1)
        if len(blocks_of_rank) > 1:
            self.local_dkv = self.local_dkv.to(self.dq.dtype)
            _accumulate_kv_grads(self.local_dkv, self.block_grads(kv, blocks.local_chunks))

    def block_grads(self, kv: Tensor, chunks: Sequence[int]) -> Iterator[tuple[_PastBlock, Tensor, Tensor]]:
        """Add the gradient of each block to dq; yield the block with its dk and dv."""
        for block in self._blocks.past_blocks(chunks):
            grad_out, q, out, lse = (block.queries(x) for x in self._query_tensors)
            k, v = block.keys_and_values(kv)
            dq, dk, dv = attention_block_backward(
                grad_out, q, k, v, out, lse, block_mask=block.mask, kernel=self._blocks.kernel
            )
            block.queries(self.dq).add_(dq)
            yield block, dk, dv


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
        softmax = _OnlineSoftmax(q, kv, _CausalBlocks(q, cp, mask_spec, kernel))
        for source, block in kv_blocks:
            softmax.accumulate(block, _zigzag(cp.size, source))
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
        gradients = _BlockGradients((grad_out, q, out, lse), kv, _CausalBlocks(q, cp, mask_spec, kernel))
        dkv = gradients.local_dkv.to(gradients.dq.dtype)
        incoming = torch.empty_like(dkv)
        works = send_recv(dkv, incoming, cp, SUM_TAG)
        for source, block in kv_blocks:
            block_grads = list(gradients.block_grads(block, _zigzag(cp.size, source)))
            wait_all(works, cp)
            dkv, incoming = incoming, dkv
            _accumulate_kv_grads(dkv, block_grads)
            works = send_recv(dkv, incoming, cp, SUM_TAG)
        wait_all(works, cp)
        sinks_grad = sink_gradient(grad_out, out, lse, sinks)
        return gradients.dq.to(q.dtype), incoming.to(kv.dtype), sinks_grad, None, None, None


class _AllGatherFunction(torch.autograd.Function):
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
        chunks = _gather_chunks(kv, cp)
        softmax = _OnlineSoftmax(q, kv, _CausalBlocks(q, cp, mask_spec, kernel))
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
        gradients = _BlockGradients((grad_out, q, out, lse), kv, _CausalBlocks(q, cp, mask_spec, kernel))
        grads = dict(zip(_zigzag(cp.size, cp.rank), gradients.local_dkv.split(size), strict=True))
        for past in _past_chunks(cp):
            past_kv = torch.cat([chunks[i] for i in past])
            block_grads = list(gradients.block_grads(past_kv, past))
            if len(block_grads) == 1 and block_grads[0][1].shape == past_kv[:, 0].shape:
                dkv = torch.stack(block_grads[0][1:], 1)
            else:
                dkv = torch.zeros_like(past_kv, dtype=gradients.dq.dtype)
                _accumulate_kv_grads(dkv, block_grads)
            grads |= zip(past, dkv.split(size), strict=True)
        zero_grad = torch.zeros_like(kv[:size])
        by_rank = [grads.get(i, zero_grad) for rank in range(cp.size) for i in _zigzag(cp.size, rank)]
        dkv = reduce_scatter(torch.cat([grad.to(gradients.dq.dtype) for grad in by_rank]), cp)
        sinks_grad = sink_gradient(grad_out, out, lse, sinks)
        return gradients.dq.to(q.dtype), dkv.to(kv.dtype), sinks_grad, None, None, None


def _accumulate_kv_grads(dkv: Tensor, block_grads: Iterable[tuple[_PastBlock, Tensor, Tensor]]) -> None:
    for block, dk, dv in block_grads:
        dk_sum, dv_sum = block.keys_and_values(dkv)
        dk_sum += dk
        dv_sum += dv


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of indices of contiguous chunks, [start, stop)."""
    starts = [i for i in range(len(chunks)) if i == 0 or chunks[i] != chunks[i - 1] + 1]
    return list(pairwise([*starts, len(chunks)]))


def _zigzag(cp: int, rank: int) -> tuple[int, int]:
    """Return the two of 2*cp chunks that a rank holds."""
    return rank, 2 * cp - 1 - rank


def _gather_chunks(kv: Tensor, cp: Group) -> dict[int, Tensor]:
    """Gather the keys and values of every chunk of the sequence by all-gather, by chunk number."""
    parts = all_gather(kv, cp).chunk(2 * cp.size)
    numbers = [i for rank in range(cp.size) for i in _zigzag(cp.size, rank)]
    return dict(zip(numbers, parts, strict=True))


def _past_chunks(cp: Group) -> list[range]:
    """Return the earlier chunks of other ranks: those visible to both local chunks, then to the second only."""
    first, second = _zigzag(cp.size, cp.rank)
    return [past for past in (range(first), range(first + 1, second)) if past]


class ContextSegments(SequenceSegments):
    """Segments of linear attention on a context-parallel rank, in any order of the ranks' tokens.

    A segment turns the state S before it into T S + U, so each rank computes T and U of its segments, all ranks gather
    them, and each composes T and U of the earlier segments. The bytes sent do not depend on the length of the sequence:
    D * (D + Dv) numbers for each head, sample and segment, and K-1 tokens for the convolution. All segments are
    computed at the same time, so the zigzag order of ring attention, two segments a rank, is as good as any.

    Args:
        kind: ring, allgather or ulysses; see `sequence_positions`.
        cp: the ranks that share a sample.
    """

    def __init__(self, kind: ContextKind, cp: Group) -> None:
        self._cp = cp
        self._kind = kind
        segments_of_ranks = [(rank,) if kind == "ulysses" else _zigzag(cp.size, rank) for rank in range(cp.size)]
        self._own = segments_of_ranks[cp.rank]
        # Place of each segment in what is gathered, in the order of the sequence.
        gathered = [number for numbers in segments_of_ranks for number in numbers]
        self._places = [gathered.index(number) for number in range(len(gathered))]
        self.num_segments = len(self._own)
        self.initial_state = self._compose

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """See base class."""
        size = self._cp.size
        return sequence_positions(self._kind, num_tokens * size, size, self._cp.rank).to(device)

    def previous_tokens(self, x_SBC: Tensor, num_tokens: int) -> Tensor:
        """See base class; an all-gather over cp."""
        by_segment = x_SBC[len(x_SBC) - num_tokens :].unflatten(1, (self.num_segments, -1)).transpose(0, 1).contiguous()
        gathered = all_gather(by_segment, self._cp)
        zeros = _connected_zeros(gathered[0])
        found = [gathered[self._places[number - 1]] if number else zeros for number in self._own]
        return torch.stack(found, 1).flatten(1, 2)

    def _compose(self, transition: Tensor, update: Tensor) -> Tensor:
        """Return the states before this rank's segments; an all-gather over cp; see `InitialState`."""
        value_size = update.shape[-1]
        both = torch.cat((update, transition), -1).unflatten(0, (self.num_segments, -1))
        gathered = all_gather(both.contiguous(), self._cp)
        state = _connected_zeros(gathered[0, ..., :value_size])
        states = [state]
        for place in self._places[: max(self._own)]:
            new, through = gathered[place].split((value_size, gathered.shape[-1] - value_size), -1)
            state = through @ state + new
            states.append(state)
        return torch.cat([states[number] for number in self._own])


class ContextKeys:
    """Keys of sparse attention on a context-parallel rank; see `KeyGather`.

    Args:
        kind: ring, allgather or ulysses; see `sequence_positions`.
        cp: the ranks that share a sample.
    """

    def __init__(self, kind: ContextKind, cp: Group) -> None:
        self._kind = kind
        self._cp = cp

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """See `KeyGather`."""
        size = self._cp.size
        return sequence_positions(self._kind, num_tokens * size, size, self._cp.rank).to(device)

    def gather(self, x: Tensor) -> Tensor:
        """See `KeyGather`; an all-gather over cp."""
        gathered = all_gather(x.contiguous(), self._cp)
        if self._kind == "ulysses":
            return gathered
        parts = gathered.chunk(2 * self._cp.size)
        numbers = [i for rank in range(self._cp.size) for i in _zigzag(self._cp.size, rank)]
        return torch.cat([parts[numbers.index(i)] for i in range(len(parts))])


def _connected_zeros(x: Tensor) -> Tensor:
    """Return zeros that depend on x: the rank of the first segment takes part in the adjoint of the all-gather."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
