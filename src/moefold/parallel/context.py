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

from moefold.model.attention_block import (
    Seen,
    accumulation_dtype,
    attention_block,
    attention_block_backward,
    merge_block_,
)
from moefold.model.attention_sink import fold_in_sinks, sink_gradient
from moefold.model.core_attention import CausalAttention, CoreAttention
from moefold.model.sight import Sight
from moefold.parallel.collectives import all_gather, reduce_scatter, swap_dims
from moefold.parallel.groups import Group
from moefold.parallel.ring import SUMS, await_all, pass_on, travel

ContextKind = Literal["ring", "allgather", "ulysses"]


def context_attention(kind: ContextKind, cp: Group, window: int = 0) -> CoreAttention:
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
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend; see the module for the shapes. Communicates with the neighbours in cp."""
        return _RingFunction.apply(q, torch.stack((k, v), 1), sinks, self._cp, Sight(self._window, starts))


class AllGatherAttention:
    """Gather all keys and values, then attend from the local queries (arXiv:2407.21783 sec. 3.3.2).

    One collective instead of cp-1 messages: less latency, more memory while a layer is computed. What is kept for the
    backward pass is local; the keys and values are gathered again.
    """

    def __init__(self, cp: Group, window: int = 0) -> None:
        self._cp = cp
        self._window = window

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend; see the module for the shapes. Communicates over cp."""
        return _AllGatherFunction.apply(q, torch.stack((k, v), 1), sinks, self._cp, Sight(self._window, starts))


class UlyssesAttention:
    """Exchange tokens for heads: each rank attends over the whole sequence with A/(tp*cp) heads (arXiv:2309.14509).

    Key/value heads that cp does not divide are repeated as often as it takes; cp divides A/tp.
    """

    def __init__(self, cp: Group, window: int = 0) -> None:
        self._cp = cp
        self._attend = CausalAttention(window)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend; see the module for the shapes. Two all-to-alls over cp."""
        cp, kv_heads = self._cp, k.shape[2]
        repeats = cp.size // gcd(kv_heads, cp.size)
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        # One message: the query, key and value heads of one destination side by side.
        heads = torch.cat([x.unflatten(2, (cp.size, -1)) for x in (q, k, v)], 3).flatten(2, 3)
        sizes = [x.shape[2] // cp.size for x in (q, k, v)]
        q, k, v = swap_dims(heads, cp, 2, 0).split(sizes, 2)
        sinks = None if sinks is None else sinks.chunk(cp.size)[cp.rank]
        out = self._attend(q, k, v, starts, sinks)
        return swap_dims(out, cp, 0, 2)


class _Blocks:
    """Which (query, key) pairs of the chunks of the sequence this rank computes, and what of them is seen."""

    def __init__(self, q: Tensor, cp: Group, sight: Sight) -> None:
        self.own_chunks = _zigzag(cp.size, cp.rank)
        self._size = q.shape[0] // 2
        self._sight = sight
        self._device = q.device
        self._is_limited = sight.is_limited(q.shape[0] * cp.size)

    def own(self) -> list[tuple[slice, Seen]]:
        """Blocks over my own keys: their rows, and what each sees of itself; with a window each chunk by itself.

        With two blocks, what the second sees of the first is in `before(own_chunks)`.
        """
        if not self._is_limited:
            return [(slice(None), "causal")]
        if not self._sight.window:
            positions = self._positions(self.own_chunks)
            return [(slice(None), self._sight.mask(positions, positions))]
        halves = (slice(self._size), slice(self._size, None))
        runs = [self._sight.of_run(chunk * self._size, self._size, self._device) for chunk in self.own_chunks]
        return list(zip(halves, runs, strict=True))

    def before(self, chunks: Sequence[int]) -> Iterator[tuple[slice, slice, Seen]]:
        """Blocks over the keys of some chunks of other ranks, ascending, that hold every pair that is seen.

        Yields:
            (rows of my queries, rows of the keys of `chunks`, which of the pairs are seen)
        """
        spans = [self._span(mine, chunks) for mine in self.own_chunks]
        if not self._sight.window and spans[0] == spans[1]:
            blocks = [(slice(2 * self._size), spans[0])]
        else:
            blocks = [(slice(i * self._size, (i + 1) * self._size), span) for i, span in enumerate(spans)]
        for rows, span in blocks:
            if span:
                yield self._block(rows, span, chunks)

    def _block(self, rows: slice, span: range, chunks: Sequence[int]) -> tuple[slice, slice, Seen]:
        """Of the rows of one chunk, or of all mine, those that see any key of a span, and of these keys those seen."""
        keys, window = slice(span.start * self._size, span.stop * self._size), self._sight.window
        if not self._is_limited:
            return rows, keys, "all"
        queries, positions = self._positions(self.own_chunks), self._positions(chunks)
        if window:
            first_query = self.own_chunks[rows.start // self._size] * self._size
            last_key = (chunks[span.stop - 1] + 1) * self._size - 1
            rows = slice(rows.start, min(rows.stop, rows.start + last_key + window - first_query))
            unseen = max(0, first_query - window + 1 - chunks[span.start] * self._size)
            keys = slice(keys.start + unseen, keys.stop)
        return rows, keys, self._sight.mask(queries[rows], positions[keys])

    def _span(self, mine: int, chunks: Sequence[int]) -> range:
        """The places in `chunks` of those that a chunk of mine looks back to: neighbours, as chunks ascend."""
        places = [
            i
            for i, chunk in enumerate(chunks)
            if chunk < mine and self._sight.reaches((mine - chunk - 1) * self._size + 1)
        ]
        return range(places[0], places[-1] + 1) if places else range(0)

    def _positions(self, chunks: Sequence[int]) -> Tensor:
        return torch.cat([torch.arange(i * self._size, (i + 1) * self._size, device=self._device) for i in chunks])


class _Attended:
    """Local queries and what they have gathered so far, beginning with the local keys and values."""

    def __init__(self, q: Tensor, kv: Tensor, blocks: _Blocks) -> None:
        own = blocks.own()
        parts = [attention_block(q[rows], kv[rows, 0], kv[rows, 1], seen=seen) for rows, seen in own]
        out, self.lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.q, self.out = q, out.to(accumulation_dtype(q.dtype))
        self._blocks = blocks
        if len(own) > 1:
            self.see(kv, blocks.own_chunks)

    def see(self, kv: Tensor, chunks: Sequence[int]) -> None:
        """Attend to the keys of some chunks of other ranks."""
        for rows, keys, seen in self._blocks.before(chunks):
            out, lse = attention_block(self.q[rows], kv[keys, 0], kv[keys, 1], seen=seen)
            merge_block_(self.out[rows], self.lse[rows], out, lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out in the type of the queries, lse), both with the sinks, which come in once."""
        out, lse = fold_in_sinks(self.out, self.lse, sinks)
        return out.to(self.q.dtype), lse


class _Gradients:
    """The gradient of the local queries summed over blocks, beginning with the local keys and values."""

    def __init__(self, given: tuple[Tensor, Tensor, Tensor, Tensor], kv: Tensor, blocks: _Blocks) -> None:
        self._given = given
        self._blocks = blocks
        own, parts = blocks.own(), []
        for rows, seen in own:
            grad_out, q, out, lse = (x[rows] for x in given)
            parts.append(attention_block_backward(grad_out, q, kv[rows, 0], kv[rows, 1], out, lse, seen=seen))
        dq, dk, dv = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        self.dq = dq.to(accumulation_dtype(q.dtype))
        self.own_dkv = torch.stack((dk, dv), 1)
        if len(own) > 1:
            self.own_dkv = self.own_dkv.to(self.dq.dtype)
            _add_shares(self.own_dkv, self.through(kv, blocks.own_chunks))

    def through(self, kv: Tensor, chunks: Sequence[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Add the share of each block to dq; yield (rows of kv, dk, dv) from the local queries."""
        for rows, keys, seen in self._blocks.before(chunks):
            grad_out, q, out, lse = (x[rows] for x in self._given)
            dq, dk, dv = attention_block_backward(grad_out, q, kv[keys, 0], kv[keys, 1], out, lse, seen=seen)
            self.dq[rows] += dq
            yield keys, dk, dv


class _RingFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, cp: Group, sight: Sight) -> Tensor:
        kv = kv.contiguous()
        arriving = travel(kv, cp)
        next(arriving)
        attended = _Attended(q, kv, _Blocks(q, cp, sight))
        for source, held in arriving:
            attended.see(held, _zigzag(cp.size, source))
        out, lse = attended.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, sight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, sight = ctx.args
        arriving = travel(kv, cp)
        next(arriving)
        gradients = _Gradients((grad_out, q, out, lse), kv, _Blocks(q, cp, sight))
        dkv = gradients.own_dkv.to(gradients.dq.dtype)
        incoming = torch.empty_like(dkv)
        under_way = pass_on(dkv, incoming, cp, SUMS)
        for source, held in arriving:
            shares = list(gradients.through(held, _zigzag(cp.size, source)))
            await_all(under_way, cp)
            dkv, incoming = incoming, dkv
            _add_shares(dkv, shares)
            under_way = pass_on(dkv, incoming, cp, SUMS)
        await_all(under_way, cp)
        return gradients.dq.to(q.dtype), incoming.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


class _AllGatherFunction(torch.autograd.Function):
    """(q [S/cp, B, A, D], kv [S/cp, 2, B, G, D], sinks [A] or None) -> [S/cp, B, A, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, cp: Group, sight: Sight) -> Tensor:
        chunks = _gather_chunks(kv, cp)
        attended = _Attended(q, kv, _Blocks(q, cp, sight))
        for seen in _seen_chunks(cp):
            attended.see(torch.cat([chunks[i] for i in seen]), seen)
        out, lse = attended.result(sinks)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.args = cp, sight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        cp, sight = ctx.args
        size = kv.shape[0] // 2
        chunks = _gather_chunks(kv, cp)
        gradients = _Gradients((grad_out, q, out, lse), kv, _Blocks(q, cp, sight))
        grads = dict(zip(_zigzag(cp.size, cp.rank), gradients.own_dkv.split(size), strict=True))
        for seen in _seen_chunks(cp):
            held = torch.cat([chunks[i] for i in seen])
            shares = list(gradients.through(held, seen))
            if len(shares) == 1 and len(shares[0][1]) == len(held):
                dkv = torch.stack(shares[0][1:], 1)
            else:
                dkv = torch.zeros_like(held, dtype=gradients.dq.dtype)
                _add_shares(dkv, shares)
            grads |= zip(seen, dkv.split(size), strict=True)
        unseen = torch.zeros_like(kv[:size])
        by_rank = [grads.get(i, unseen) for rank in range(cp.size) for i in _zigzag(cp.size, rank)]
        dkv = reduce_scatter(torch.cat([grad.to(gradients.dq.dtype) for grad in by_rank]), cp)
        return gradients.dq.to(q.dtype), dkv.to(kv.dtype), sink_gradient(grad_out, out, lse, sinks), None, None


def _add_shares(dkv: Tensor, shares: Iterable[tuple[slice, Tensor, Tensor]]) -> None:
    for rows, dk, dv in shares:
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


def _seen_chunks(cp: Group) -> list[range]:
    """The chunks of other ranks that lie before my queries: those that both of mine see, those that the second does."""
    first, second = _zigzag(cp.size, cp.rank)
    return [seen for seen in (range(first), range(first + 1, second)) if seen]
