"""Context parallelism: attention over full samples whose tokens are sharded, S/cp per rank.

Three kinds with one signature, `(q [S/cp, B, A/tp, D], k [S/cp, B, G/tp, D], v likewise) -> [S/cp, B, A/tp, D]`. With
tokens sharded by `sequence_positions`, they compute what `CausalAttention` computes on the full sequence. Keys and
values are sent with their own G/tp heads, not expanded to the query heads. Every rank has the document starts of the
full sample, so each rank computes the masks of its own queries.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import (
    SUM_TAG,
    all_gather,
    reduce_scatter,
    ring_pass,
    send_recv,
    shard_dim_all_to_all,
    wait_all,
)
from moefold.comm.groups import Group
from moefold.model.attention import AttentionMaskSpec, CausalAttention, CoreAttention, SelfAttention
from moefold.model.transformer import Transformer
from moefold.ops.block_attention import (
    BlockMask,
    accumulation_dtype,
    attention_block,
    attention_block_backward,
    fold_in_sinks,
    merge_lse_,
    sink_gradient,
)

ContextKind = Literal["ring", "allgather", "ulysses"]


def apply_context_parallel(stage: Transformer, kind: ContextKind, cp: Group) -> None:
    """Give every attention layer the core attention of a context-parallel rank."""
    for module in stage.modules():
        if isinstance(module, SelfAttention):
            module.core_attention = context_parallel_attention(kind, cp, module.window)


def context_parallel_attention(kind: ContextKind, cp: Group, window: int = 0) -> CoreAttention:
    """Return the core attention of a context-parallel rank; `CausalAttention` if cp is 1.

    Args:
        kind: ring, allgather or ulysses.
        cp: the ranks that share a sample.
        window: sliding window, the maximum number of keys per query, its own included; 0: no limit.
    """
    if cp.size == 1:
        return CausalAttention(window)
    if kind == "ring":
        return RingAttention(cp, window)
    if kind == "allgather":
        return AllGatherAttention(cp, window)
    if kind == "ulysses":
        return UlyssesAttention(cp, window)
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

    def __init__(self, cp: Group, window: int = 0) -> None:
        self._cp = cp
        self._window = window

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend; see the module for the shapes. Communicates with the neighbours in cp."""
        return _RingFunction.apply(
            q, torch.stack((k, v), 1), sinks, self._cp, AttentionMaskSpec(self._window, document_starts)
        )


class AllGatherAttention:
    """All-gather attention: gather all keys and values, attend from the local queries (arXiv:2407.21783 sec. 3.3.2).

    One collective instead of cp-1 messages: less latency, more memory while a layer is computed. Only local tensors are
    saved for backward, which gathers the keys and values again.
    """

    def __init__(self, cp: Group, window: int = 0) -> None:
        self._cp = cp
        self._window = window

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend; see the module for the shapes. Communicates over cp."""
        return _AllGatherFunction.apply(
            q, torch.stack((k, v), 1), sinks, self._cp, AttentionMaskSpec(self._window, document_starts)
        )


class UlyssesAttention:
    """Ulysses attention: all-to-all from tokens to heads, then full-sequence attention with A/(tp*cp) heads per rank.

    arXiv:2309.14509. If cp does not divide the key/value heads, they are repeated as often as needed; cp divides A/tp.
    """

    def __init__(self, cp: Group, window: int = 0) -> None:
        self._cp = cp
        self._core_attention = CausalAttention(window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend; see the module for the shapes. Two all-to-alls over cp."""
        cp = self._cp
        kv_heads = k.shape[2]
        repeats = cp.size // gcd(kv_heads, cp.size)
        if repeats > 1:
            k = k.repeat_interleave(repeats, 2)
            v = v.repeat_interleave(repeats, 2)
        # One message: the query, key and value heads of one destination are contiguous.
        heads = torch.cat([x.unflatten(2, (cp.size, -1)) for x in (q, k, v)], 3).flatten(2, 3)
        sizes = [x.shape[2] // cp.size for x in (q, k, v)]
        q, k, v = shard_dim_all_to_all(heads, cp, 2, 0).split(sizes, 2)
        sinks = None if sinks is None else sinks.chunk(cp.size)[cp.rank]
        out = self._core_attention(q, k, v, document_starts, sinks)
        return shard_dim_all_to_all(out, cp, 0, 2)


class _CausalBlocks:
    """Attention blocks of this rank: the (query, key) chunk pairs to compute, with their masks."""

    def __init__(self, q: Tensor, cp: Group, mask_spec: AttentionMaskSpec) -> None:
        self.local_chunks = _zigzag(cp.size, cp.rank)
        self._chunk_size = q.shape[0] // 2
        self._mask_spec = mask_spec
        self._q = q
        self._needs_mask = mask_spec.needs_mask(q.shape[0] * cp.size)

    def local_blocks(self) -> list[tuple[slice, BlockMask]]:
        """Return the blocks over the local keys as (rows, mask); with a sliding window, one block for each local chunk.

        With two blocks, the second chunk's attention to the first is in `past_blocks(local_chunks)`.
        """
        if not self._needs_mask:
            return [(slice(None), "causal")]
        if not self._mask_spec.window:
            positions = self._positions(self.local_chunks)
            return [(slice(None), self._mask_spec.mask(positions, positions))]
        halves = (slice(self._chunk_size), slice(self._chunk_size, None))
        masks = [
            self._mask_spec.local_mask(chunk * self._chunk_size, self._q[rows])
            for chunk, rows in zip(self.local_chunks, halves, strict=True)
        ]
        return list(zip(halves, masks, strict=True))

    def past_blocks(self, chunks: Sequence[int]) -> Iterator[tuple[slice, slice, BlockMask]]:
        """Yield blocks over the keys of ascending chunks of other ranks that cover every visible (query, key) pair.

        Yields:
            (rows of the local queries, rows of the keys of `chunks`, mask)
        """
        spans = [self._visible_chunks(own_chunk, chunks) for own_chunk in self.local_chunks]
        if not self._mask_spec.window and spans[0] == spans[1]:
            blocks = [(slice(2 * self._chunk_size), spans[0])]
        else:
            blocks = [(slice(i * self._chunk_size, (i + 1) * self._chunk_size), span) for i, span in enumerate(spans)]
        for rows, span in blocks:
            if span:
                yield self._visible_block(rows, span, chunks)

    def _visible_block(self, rows: slice, span: range, chunks: Sequence[int]) -> tuple[slice, slice, BlockMask]:
        """Trim a block to the queries that see any key of the span, and to the keys that any of them sees."""
        keys = slice(span.start * self._chunk_size, span.stop * self._chunk_size)
        window = self._mask_spec.window
        if not self._needs_mask:
            return rows, keys, "all"
        queries = self._positions(self.local_chunks)
        positions = self._positions(chunks)
        if window:
            first_query = self.local_chunks[rows.start // self._chunk_size] * self._chunk_size
            last_key = (chunks[span.stop - 1] + 1) * self._chunk_size - 1
            rows = slice(rows.start, min(rows.stop, rows.start + last_key + window - first_query))
            num_hidden_keys = max(0, first_query - window + 1 - chunks[span.start] * self._chunk_size)
            keys = slice(keys.start + num_hidden_keys, keys.stop)
        return rows, keys, self._mask_spec.mask(queries[rows], positions[keys])

    def _visible_chunks(self, local_chunk: int, chunks: Sequence[int]) -> range:
        """Return the indices in `chunks` of the chunks visible to a local chunk; contiguous, as `chunks` ascend."""
        indices = [
            i
            for i, chunk in enumerate(chunks)
            if chunk < local_chunk and self._mask_spec.in_window((local_chunk - chunk - 1) * self._chunk_size + 1)
        ]
        return range(indices[0], indices[-1] + 1) if indices else range(0)

    def _positions(self, chunks: Sequence[int]) -> Tensor:
        return torch.cat(
            [torch.arange(i * self._chunk_size, (i + 1) * self._chunk_size, device=self._q.device) for i in chunks]
        )


class _OnlineSoftmax:
    """Online softmax of the local queries over blocks, starting with the local keys and values."""

    def __init__(self, q: Tensor, kv: Tensor, blocks: _CausalBlocks) -> None:
        blocks_of_rank = blocks.local_blocks()
        parts = [attention_block(q[rows], kv[rows, 0], kv[rows, 1], block_mask=mask) for rows, mask in blocks_of_rank]
        out, self.lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.q = q
        self.out = out.to(accumulation_dtype(q.dtype))
        self._blocks = blocks
        if len(blocks_of_rank) > 1:
            self.accumulate(kv, blocks.local_chunks)

    def accumulate(self, kv: Tensor, chunks: Sequence[int]) -> None:
        """Attend to the keys of some chunks of other ranks."""
        for rows, keys, mask in self._blocks.past_blocks(chunks):
            out, lse = attention_block(self.q[rows], kv[keys, 0], kv[keys, 1], block_mask=mask)
            merge_lse_(self.out[rows], self.lse[rows], out, lse)

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
            parts.append(attention_block_backward(grad_out, q, kv[rows, 0], kv[rows, 1], out, lse, block_mask=mask))
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.dq = dq.to(accumulation_dtype(q.dtype))
        self.local_dkv = torch.stack((dk, dv), 1)
        if len(blocks_of_rank) > 1:
            self.local_dkv = self.local_dkv.to(self.dq.dtype)
            _accumulate_kv_grads(self.local_dkv, self.block_grads(kv, blocks.local_chunks))

    def block_grads(self, kv: Tensor, chunks: Sequence[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Add the gradient of each block to dq; yield (rows of kv, dk, dv) of the block."""
        for rows, keys, mask in self._blocks.past_blocks(chunks):
            grad_out, q, out, lse = (x[rows] for x in self._query_tensors)
            dq, dk, dv = attention_block_backward(grad_out, q, kv[keys, 0], kv[keys, 1], out, lse, block_mask=mask)
            self.dq[rows] += dq
            yield keys, dk, dv


class _RingFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, cp: Group, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        kv = kv.contiguous()
        kv_blocks = ring_pass(kv, cp)
        next(kv_blocks)
        softmax = _OnlineSoftmax(q, kv, _CausalBlocks(q, cp, mask_spec))
        for source, block in kv_blocks:
            softmax.accumulate(block, _zigzag(cp.size, source))
        out, lse = softmax.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, mask_spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, mask_spec = ctx.args
        kv_blocks = ring_pass(kv, cp)
        next(kv_blocks)
        gradients = _BlockGradients((grad_out, q, out, lse), kv, _CausalBlocks(q, cp, mask_spec))
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
        return gradients.dq.to(q.dtype), incoming.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


class _AllGatherFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, cp: Group, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        chunks = _gather_chunks(kv, cp)
        softmax = _OnlineSoftmax(q, kv, _CausalBlocks(q, cp, mask_spec))
        for past in _past_chunks(cp):
            softmax.accumulate(torch.cat([chunks[i] for i in past]), past)
        out, lse = softmax.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, mask_spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, mask_spec = ctx.args
        size = kv.shape[0] // 2
        chunks = _gather_chunks(kv, cp)
        gradients = _BlockGradients((grad_out, q, out, lse), kv, _CausalBlocks(q, cp, mask_spec))
        grads = dict(zip(_zigzag(cp.size, cp.rank), gradients.local_dkv.split(size), strict=True))
        for past in _past_chunks(cp):
            past_kv = torch.cat([chunks[i] for i in past])
            block_grads = list(gradients.block_grads(past_kv, past))
            if len(block_grads) == 1 and len(block_grads[0][1]) == len(past_kv):
                dkv = torch.stack(block_grads[0][1:], 1)
            else:
                dkv = torch.zeros_like(past_kv, dtype=gradients.dq.dtype)
                _accumulate_kv_grads(dkv, block_grads)
            grads |= zip(past, dkv.split(size), strict=True)
        zero_grad = torch.zeros_like(kv[:size])
        by_rank = [grads.get(i, zero_grad) for rank in range(cp.size) for i in _zigzag(cp.size, rank)]
        dkv = reduce_scatter(torch.cat([grad.to(gradients.dq.dtype) for grad in by_rank]), cp)
        return gradients.dq.to(q.dtype), dkv.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


def _accumulate_kv_grads(dkv: Tensor, block_grads: Iterable[tuple[slice, Tensor, Tensor]]) -> None:
    for rows, dk, dv in block_grads:
        dkv[rows, 0] += dk
        dkv[rows, 1] += dv


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
