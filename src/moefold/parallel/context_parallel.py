"""Context parallelism: each rank holds S/cp tokens of a sample, and attention still sees all of them.

Three ways with one signature, `(q [S/cp, B, A/tp, D], k [S/cp, B, G/tp, D], v likewise) -> [S/cp, B, A/tp, D]`; cut by
`sequence_positions`, they compute what `CausalAttention` computes on the whole sequence. Keys and values travel with
their own heads, never expanded to the query heads. Where documents begin is known to every rank for the whole sample,
so what a query sees of a block is decided where the query is.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.comm.collectives import all_gather, reduce_scatter, shard_dim_all_to_all
from moefold.comm.groups import Group
from moefold.comm.ring import SUM_TAG, ring_pass, send_recv, wait_all
from moefold.model.attention import CausalAttention, CoreAttention
from moefold.model.attention_mask import AttentionMaskSpec
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


def context_parallel_attention(kind: ContextKind, cp: Group, window: int = 0) -> CoreAttention:
    """The attention core of a context-parallel rank; the plain one where cp is 1.

    Args:
        kind: how attention sees the whole sequence.
        cp: the ranks of a sample.
        window: keys that a query sees at most, its own included; 0: no limit.
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
    """The positions of the tokens that a context-parallel rank holds, in its order.

    ulysses cuts the sequence into cp runs. ring and allgather cut it into 2*cp chunks and give rank r the chunks r and
    2*cp-1-r: an early one and a late one, so that every rank has the same number of (query, earlier key) pairs
    (arXiv:2407.21783 sec. 3.3.2).

    Args:
        kind: how attention sees the whole sequence.
        seq_len: tokens of a sample, S; divisible by cp, and by 2*cp where it is cut into chunks.
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
    """Keys and values travel round the ring of ranks while each rank attends to those it holds (arXiv:2310.01889).

    The next block arrives while the present one is computed. Blocks that lie in the future of the rank's queries, whole
    or by halves, are not computed: each rank does the same work in every step. In the backward pass, the gradients of
    the keys and values travel with them, one step behind, and come home with the last step.
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
    """Gather all keys and values, then attend from the local queries (arXiv:2407.21783 sec. 3.3.2).

    One collective instead of cp-1 messages: less latency, more memory while a layer is computed. What is kept for the
    backward pass is local; the keys and values are gathered again.
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
    """Exchange tokens for heads: each rank attends over the whole sequence with A/(tp*cp) heads (arXiv:2309.14509).

    Key/value heads that cp does not divide are repeated as often as it takes; cp divides A/tp.
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
        # One message: the query, key and value heads of one destination side by side.
        heads = torch.cat([x.unflatten(2, (cp.size, -1)) for x in (q, k, v)], 3).flatten(2, 3)
        sizes = [x.shape[2] // cp.size for x in (q, k, v)]
        q, k, v = shard_dim_all_to_all(heads, cp, 2, 0).split(sizes, 2)
        sinks = None if sinks is None else sinks.chunk(cp.size)[cp.rank]
        out = self._core_attention(q, k, v, document_starts, sinks)
        return shard_dim_all_to_all(out, cp, 0, 2)


class _CausalBlocks:
    """Which (query, key) pairs of the chunks of the sequence this rank computes, and what of them is seen."""

    def __init__(self, q: Tensor, cp: Group, mask_spec: AttentionMaskSpec) -> None:
        self.local_chunks = _zigzag(cp.size, cp.rank)
        self._chunk_size = q.shape[0] // 2
        self._mask_spec = mask_spec
        self._device = q.device
        self._needs_mask = mask_spec.needs_mask(q.shape[0] * cp.size)

    def local_blocks(self) -> list[tuple[slice, BlockMask]]:
        """Blocks over my own keys: their rows, and what each sees of itself; with a window each chunk by itself.

        With two blocks, what the second sees of the first is in `past_blocks(local_chunks)`.
        """
        if not self._needs_mask:
            return [(slice(None), "causal")]
        if not self._mask_spec.window:
            positions = self._positions(self.local_chunks)
            return [(slice(None), self._mask_spec.mask(positions, positions))]
        halves = (slice(self._chunk_size), slice(self._chunk_size, None))
        runs = [
            self._mask_spec.local_mask(chunk * self._chunk_size, self._chunk_size, self._device)
            for chunk in self.local_chunks
        ]
        return list(zip(halves, runs, strict=True))

    def past_blocks(self, chunks: Sequence[int]) -> Iterator[tuple[slice, slice, BlockMask]]:
        """Blocks over the keys of some chunks of other ranks, ascending, that hold every pair that is seen.

        Yields:
            (rows of my queries, rows of the keys of `chunks`, which of the pairs are seen)
        """
        spans = [self._visible_chunks(mine, chunks) for mine in self.local_chunks]
        if not self._mask_spec.window and spans[0] == spans[1]:
            blocks = [(slice(2 * self._chunk_size), spans[0])]
        else:
            blocks = [(slice(i * self._chunk_size, (i + 1) * self._chunk_size), span) for i, span in enumerate(spans)]
        for rows, span in blocks:
            if span:
                yield self._visible_block(rows, span, chunks)

    def _visible_block(self, rows: slice, span: range, chunks: Sequence[int]) -> tuple[slice, slice, BlockMask]:
        """Of the rows of one chunk, or of all mine, those that see any key of a span, and of these keys those seen."""
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
            unseen = max(0, first_query - window + 1 - chunks[span.start] * self._chunk_size)
            keys = slice(keys.start + unseen, keys.stop)
        return rows, keys, self._mask_spec.mask(queries[rows], positions[keys])

    def _visible_chunks(self, local_chunk: int, chunks: Sequence[int]) -> range:
        """The places in `chunks` of those that a chunk of mine looks back to: neighbours, as chunks ascend."""
        places = [
            i
            for i, chunk in enumerate(chunks)
            if chunk < local_chunk and self._mask_spec.in_window((local_chunk - chunk - 1) * self._chunk_size + 1)
        ]
        return range(places[0], places[-1] + 1) if places else range(0)

    def _positions(self, chunks: Sequence[int]) -> Tensor:
        return torch.cat(
            [torch.arange(i * self._chunk_size, (i + 1) * self._chunk_size, device=self._device) for i in chunks]
        )


class _OnlineSoftmax:
    """Local queries and what they have gathered so far, beginning with the local keys and values."""

    def __init__(self, q: Tensor, kv: Tensor, blocks: _CausalBlocks) -> None:
        own = blocks.local_blocks()
        parts = [attention_block(q[rows], kv[rows, 0], kv[rows, 1], block_mask=seen) for rows, seen in own]
        out, self.lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.q = q
        self.out = out.to(accumulation_dtype(q.dtype))
        self._blocks = blocks
        if len(own) > 1:
            self.accumulate(kv, blocks.local_chunks)

    def accumulate(self, kv: Tensor, chunks: Sequence[int]) -> None:
        """Attend to the keys of some chunks of other ranks."""
        for rows, keys, seen in self._blocks.past_blocks(chunks):
            out, lse = attention_block(self.q[rows], kv[keys, 0], kv[keys, 1], block_mask=seen)
            merge_lse_(self.out[rows], self.lse[rows], out, lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out in the type of the queries, lse), both with the sinks, which come in once."""
        out, lse = fold_in_sinks(self.out, self.lse, sinks)
        return out.to(self.q.dtype), lse


class _BlockGradients:
    """The gradient of the local queries summed over blocks, beginning with the local keys and values."""

    def __init__(self, query_tensors: tuple[Tensor, Tensor, Tensor, Tensor], kv: Tensor, blocks: _CausalBlocks) -> None:
        self._query_tensors = query_tensors
        self._blocks = blocks
        own = blocks.local_blocks()
        parts = []
        for rows, seen in own:
            grad_out, q, out, lse = (x[rows] for x in query_tensors)
            parts.append(attention_block_backward(grad_out, q, kv[rows, 0], kv[rows, 1], out, lse, block_mask=seen))
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.dq = dq.to(accumulation_dtype(q.dtype))
        self.local_dkv = torch.stack((dk, dv), 1)
        if len(own) > 1:
            self.local_dkv = self.local_dkv.to(self.dq.dtype)
            _accumulate_kv_grads(self.local_dkv, self.block_grads(kv, blocks.local_chunks))

    def block_grads(self, kv: Tensor, chunks: Sequence[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Add the share of each block to dq; yield (rows of kv, dk, dv) from the local queries."""
        for rows, keys, seen in self._blocks.past_blocks(chunks):
            grad_out, q, out, lse = (x[rows] for x in self._query_tensors)
            dq, dk, dv = attention_block_backward(grad_out, q, kv[keys, 0], kv[keys, 1], out, lse, block_mask=seen)
            self.dq[rows] += dq
            yield keys, dk, dv


class _RingFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, cp: Group, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        kv = kv.contiguous()
        arriving = ring_pass(kv, cp)
        next(arriving)
        attended = _OnlineSoftmax(q, kv, _CausalBlocks(q, cp, mask_spec))
        for source, held in arriving:
            attended.accumulate(held, _zigzag(cp.size, source))
        out, lse = attended.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, mask_spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, sight = ctx.args
        arriving = ring_pass(kv, cp)
        next(arriving)
        gradients = _BlockGradients((grad_out, q, out, lse), kv, _CausalBlocks(q, cp, sight))
        dkv = gradients.local_dkv.to(gradients.dq.dtype)
        incoming = torch.empty_like(dkv)
        under_way = send_recv(dkv, incoming, cp, SUM_TAG)
        for source, held in arriving:
            shares = list(gradients.block_grads(held, _zigzag(cp.size, source)))
            wait_all(under_way, cp)
            dkv, incoming = incoming, dkv
            _accumulate_kv_grads(dkv, shares)
            under_way = send_recv(dkv, incoming, cp, SUM_TAG)
        wait_all(under_way, cp)
        return gradients.dq.to(q.dtype), incoming.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


class _AllGatherFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, cp: Group, mask_spec: AttentionMaskSpec
    ) -> Tensor:
        chunks = _gather_chunks(kv, cp)
        attended = _OnlineSoftmax(q, kv, _CausalBlocks(q, cp, mask_spec))
        for seen in _past_chunks(cp):
            attended.accumulate(torch.cat([chunks[i] for i in seen]), seen)
        out, lse = attended.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, mask_spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, sight = ctx.args
        size = kv.shape[0] // 2
        chunks = _gather_chunks(kv, cp)
        gradients = _BlockGradients((grad_out, q, out, lse), kv, _CausalBlocks(q, cp, sight))
        grads = dict(zip(_zigzag(cp.size, cp.rank), gradients.local_dkv.split(size), strict=True))
        for seen in _past_chunks(cp):
            held = torch.cat([chunks[i] for i in seen])
            shares = list(gradients.block_grads(held, seen))
            if len(shares) == 1 and len(shares[0][1]) == len(held):
                dkv = torch.stack(shares[0][1:], 1)
            else:
                dkv = torch.zeros_like(held, dtype=gradients.dq.dtype)
                _accumulate_kv_grads(dkv, shares)
            grads |= zip(seen, dkv.split(size), strict=True)
        unseen = torch.zeros_like(kv[:size])
        by_rank = [grads.get(i, unseen) for rank in range(cp.size) for i in _zigzag(cp.size, rank)]
        dkv = reduce_scatter(torch.cat([grad.to(gradients.dq.dtype) for grad in by_rank]), cp)
        return gradients.dq.to(q.dtype), dkv.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


def _accumulate_kv_grads(dkv: Tensor, block_grads: Iterable[tuple[slice, Tensor, Tensor]]) -> None:
    for rows, dk, dv in block_grads:
        dkv[rows, 0] += dk
        dkv[rows, 1] += dv


def _zigzag(cp: int, rank: int) -> tuple[int, int]:
    """The two of 2*cp chunks that a rank holds."""
    return rank, 2 * cp - 1 - rank


def _gather_chunks(kv: Tensor, cp: Group) -> dict[int, Tensor]:
    """The keys and values of every chunk of the sequence, by its number."""
    parts = all_gather(kv, cp).chunk(2 * cp.size)
    numbers = [i for rank in range(cp.size) for i in _zigzag(cp.size, rank)]
    return dict(zip(numbers, parts, strict=True))


def _past_chunks(cp: Group) -> list[range]:
    """The chunks of other ranks that lie before my queries: those that both of mine see, those that the second does."""
    first, second = _zigzag(cp.size, cp.rank)
    return [seen for seen in (range(first), range(first + 1, second)) if seen]
