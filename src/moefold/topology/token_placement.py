"""Placement of the tokens of a micro-batch set on the dp x cp ranks: the token in each slot of each rank.

Micro-batch set j is the j-th micro-batch of all dp x cp ranks together, B samples for each dp rank. A placement decides
only where tokens are computed. The result is the same. Documents are contiguous parts of a sample whose tokens attend
to each other only. Together they cover it.

Tokens of a micro-batch set have numbers: sample * S + position, with the samples of dp rank d being d*B .. (d+1)*B - 1.
A rank's slots are its tokens in the order of its rows, sample by sample. Member r of the dp x cp group is cp rank r %
cp of dp rank r // cp.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moefold.config.groups.context import TokenPlacement

Integers = NDArray[np.int64]

MAX_FITTING_RANKS = 8
"""Ranks that a document is offered to before it is split over several."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSetShape:
    """Ranks and tokens of a micro-batch set."""

    dp: int = 1
    cp: int = 1
    micro_batch_size: int = 1
    """Samples of a dp rank, B."""
    seq_len: int
    """Tokens of a sample, S. cp divides it."""

    @property
    def num_ranks(self) -> int:
        """Ranks, dp * cp."""
        return self.dp * self.cp

    @property
    def num_samples(self) -> int:
        """Samples of the micro-batch set, dp * B."""
        return self.dp * self.micro_batch_size

    @property
    def tokens_per_rank(self) -> int:
        """Slots of a rank, C = B * S / cp."""
        return self.micro_batch_size * self.seq_len // self.cp

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch set."""
        return self.num_samples * self.seq_len


@dataclass(frozen=True)
class Placement:
    """Token of each slot of each rank: a bijection of slots and tokens, as runs of consecutive tokens.

    Args:
        shape: ranks and tokens of the micro-batch set.
        bounds_N: number of the first token of each document, ascending from 0, and then the number of tokens, int64.
        ranks_M: rank of each run, int64, ascending.
        firsts_M: number of the first token of each run. The runs of a rank are in the order of its slots.
        lengths_M: tokens of each run, at least 1.
    """

    shape: MicroBatchSetShape
    bounds_N: Integers
    ranks_M: Integers
    firsts_M: Integers
    lengths_M: Integers

    @cached_property
    def runs_by_token(self) -> Integers:
        """Indices of the runs in the order of their tokens."""
        return np.argsort(self.firsts_M, kind="stable")

    def slots(self, rank: int) -> Integers:
        """Return the numbers of a rank's tokens, int64 [C]: sample * S + position."""
        own_spans = slice(*np.searchsorted(self.ranks_M, (rank, rank + 1)))
        run, offset = repeat_indices(self.lengths_M[own_spans])
        return self.firsts_M[own_spans][run] + offset


def document_bounds(shape: MicroBatchSetShape, documents_of_samples: Sequence[Sequence[int]]) -> Integers:
    """Return the number of the first token of each document of a set, and then of all tokens, int64 [N + 1].

    Args:
        documents_of_samples: for each sample of the micro-batch set the start positions of its documents, ascending
            from 0. The end of the sample may follow.

    Raises:
        ValueError: the documents do not match the samples of the micro-batch set.
    """
    length = shape.seq_len
    counts = [len(starts) for starts in documents_of_samples]
    flat = np.fromiter((start for starts in documents_of_samples for start in starts), np.int64, sum(counts))
    sample = np.repeat(np.arange(len(counts)), counts)
    numbers = (sample * length + flat)[flat < length]
    firsts = np.arange(shape.num_samples) * length
    if len(counts) != shape.num_samples or (np.diff(numbers) <= 0).any() or not np.isin(firsts, numbers).all():
        raise ValueError(
            f"a micro-batch set has {shape.num_samples} samples, whose documents begin at ascending positions from 0"
        )
    return np.append(numbers, shape.num_tokens)


def place_tokens(kind: TokenPlacement, shape: MicroBatchSetShape, bounds_N: Integers, block: int = 1) -> Placement:
    """Place the tokens of a micro-batch set. It is deterministic: every rank computes the same placement.

    Args:
        kind: "samples": each sample is split over the cp ranks of its dp rank, rank r has chunks r and 2*cp-1-r of 2*cp
            (arXiv:2407.21783 sec. 3.3.2). "documents": each document of the sample is split in this way (WLB-LLM,
            arXiv:2503.17924), into 2*cp chunks of whole blocks. The ranks share the rest in contiguous parts.
            "balanced": the documents of the set are placed longest first. Each goes to the rank with room that has the
            fewest visible pairs, of all dp x cp ranks (arXiv:2502.21231). A document that fits nowhere is split over
            the ranks with the most room, in chunks as above.
        bounds_N: see `document_bounds`.
        block: chunks of documents are multiples of this, in tokens.
    """
    if kind == "samples":
        return _place_samples(shape, bounds_N)
    if kind == "documents":
        return _place_documents(shape, bounds_N, block)
    return _place_balanced(shape, bounds_N)


def repeat_indices(counts: Integers) -> tuple[Integers, Integers]:
    """Repeat each index of `counts` as often as its count says, and number the repetitions from 0.

    For counts [2, 1]: [0, 0, 1] and [0, 1, 0].
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _place_samples(shape: MicroBatchSetShape, bounds_N: Integers) -> Placement:
    """Give each cp rank two chunks of each sample of its dp rank, or the whole sample without context parallelism."""
    cp = shape.cp
    num_chunks = 2 * cp if cp > 1 else 1
    size = shape.seq_len // num_chunks
    rank, sample, half = np.indices((shape.num_ranks, shape.micro_batch_size, min(2, num_chunks))).reshape(3, -1)
    cp_rank = rank % cp
    chunk = np.where(half == 0, cp_rank, num_chunks - 1 - cp_rank)
    firsts = (rank // cp * shape.micro_batch_size + sample) * shape.seq_len + chunk * size
    return Placement(shape, bounds_N, rank, firsts, np.full(len(rank), size))


def _place_documents(shape: MicroBatchSetShape, bounds_N: Integers, block: int) -> Placement:
    """Split each document over the cp ranks of its sample. Each rank gets S/cp tokens of each sample."""
    cp = shape.cp
    lengths = np.diff(bounds_N)
    size = lengths // (2 * cp * block) * block
    document, chunk = repeat_indices(np.where(size > 0, 2 * cp, 0))
    cp_ranks = [np.minimum(chunk, 2 * cp - 1 - chunk)]
    firsts = [bounds_N[document] + chunk * size[document]]
    counts = [size[document]]
    # The rest of each document, as one line of tokens for each sample, is cut into cp equal parts.
    remaining = lengths - 2 * cp * size
    left_ends = np.cumsum(remaining)
    samples = bounds_N[:-1] // shape.seq_len
    last_of_sample = np.searchsorted(samples, np.arange(shape.num_samples), "right") - 1
    sample_ends = left_ends[last_of_sample]
    share = np.diff(sample_ends, prepend=0) // cp
    cuts = (sample_ends - share * cp)[:, None] + share[:, None] * np.arange(cp)
    edges = np.unique(np.concatenate((cuts.ravel(), left_ends - remaining, left_ends[-1:])))
    begins = edges[:-1]
    owner = np.searchsorted(left_ends, begins, "right")
    sample = samples[owner]
    cp_ranks.append((begins - cuts[sample, 0]) // np.maximum(share[sample], 1))
    firsts.append(bounds_N[owner + 1] - (left_ends[owner] - begins))
    counts.append(np.diff(edges))
    first = np.concatenate(firsts)
    # Samples stay on their dp ranks.
    ranks = first // shape.seq_len // shape.micro_batch_size * cp + np.concatenate(cp_ranks)
    return sorted_placement(shape, bounds_N, ranks, first, np.concatenate(counts))


def sorted_placement(
    shape: MicroBatchSetShape, bounds_N: Integers, ranks: Integers, firsts: Integers, lengths: Integers
) -> Placement:
    """Build a placement from runs in any order: the slots of a rank are in the order of the numbers of its tokens."""
    order = np.lexsort((firsts, ranks))
    ranks, firsts, lengths = ranks[order], firsts[order], lengths[order]
    begins = np.ones(len(ranks), bool)
    begins[1:] = (np.diff(ranks) != 0) | (firsts[:-1] + lengths[:-1] != firsts[1:])
    starts = np.flatnonzero(begins)
    return Placement(shape, bounds_N, ranks[starts], firsts[starts], np.add.reduceat(lengths, starts))


def _place_balanced(shape: MicroBatchSetShape, bounds_N: Integers) -> Placement:
    """Give the documents of the micro-batch set to all ranks, longest first."""
    lengths = np.diff(bounds_N)
    order = np.argsort(-lengths, kind="stable")
    packer = _Packer(shape)
    for first, length in zip(bounds_N[order].tolist(), lengths[order].tolist(), strict=True):
        packer.add(first, length)
    ranks, firsts, counts = (np.array(column, np.int64) for column in zip(*packer.runs, strict=True))
    return sorted_placement(shape, bounds_N, ranks, firsts, counts)


class _Packer:
    """Ranks that are filled with documents: ranks with the fewest visible pairs first, until they have no room."""

    def __init__(self, shape: MicroBatchSetShape) -> None:
        self.runs: list[tuple[int, int, int]] = []
        """Rank, number of the first token, tokens."""
        self._room = [shape.tokens_per_rank] * shape.num_ranks
        self._pairs = [0] * shape.num_ranks
        self._capacity = shape.tokens_per_rank
        # Every rank with room has one valid entry in each heap, with its present pairs or room.
        self._by_pairs = [(0, rank) for rank in range(shape.num_ranks)]
        self._by_room = [(-shape.tokens_per_rank, rank) for rank in range(shape.num_ranks)]

    def add(self, first: int, length: int) -> None:
        """Place a document whole on one rank, or split over several."""
        rank = self._lightest_with_room(length)
        if rank is not None:
            self._give(rank, first, length, length * (length + 1) // 2)
            return
        ranks = self._roomiest(length)
        shares = _even_shares([self._room[rank] for rank in ranks], length)
        edges = [0]
        for share in (*shares, *shares[::-1]):
            is_late = len(edges) > len(shares)
            edges.append(edges[-1] + (share // 2 if is_late else share - share // 2))
        for i, rank in enumerate((*ranks, *ranks[::-1])):
            start, stop = edges[i], edges[i + 1]
            if stop > start:
                self._give(rank, first + start, stop - start, (stop * (stop + 1) - start * (start + 1)) // 2)

    def _give(self, rank: int, first: int, length: int, pairs: int) -> None:
        self.runs.append((rank, first, length))
        self._room[rank] -= length
        self._pairs[rank] += pairs
        if self._room[rank]:
            heapq.heappush(self._by_pairs, (self._pairs[rank], rank))
            heapq.heappush(self._by_room, (-self._room[rank], rank))

    def _lightest_with_room(self, length: int) -> int | None:
        """Return the rank with the fewest pairs among the first with room for a document, or None without room."""
        passed: list[tuple[int, int]] = []
        lightest = None
        while self._by_pairs and len(passed) < MAX_FITTING_RANKS:
            pairs, rank = heapq.heappop(self._by_pairs)
            if not self._room[rank] or pairs != self._pairs[rank]:
                continue
            if self._room[rank] >= length:
                lightest = rank
                break
            passed.append((pairs, rank))
        for entry in passed:
            heapq.heappush(self._by_pairs, entry)
        if lightest is None and length <= self._capacity:
            (lightest,) = self._roomiest(1)
            return lightest if self._room[lightest] >= length else None
        return lightest

    def _roomiest(self, length: int) -> list[int]:
        """Return the fewest ranks with the most room that together have room for a document."""
        ranks: list[int] = []
        room = 0
        while room < length:
            negative, rank = heapq.heappop(self._by_room)
            if -negative == self._room[rank] and rank not in ranks:
                ranks.append(rank)
                room += self._room[rank]
        for rank in ranks:
            heapq.heappush(self._by_room, (-self._room[rank], rank))
        return sorted(ranks)


def _even_shares(rooms: Sequence[int], total: int) -> list[int]:
    """Split a number over rooms as evenly as they allow."""
    shares = [0] * len(rooms)
    remaining = total
    for count, i in enumerate(sorted(range(len(rooms)), key=lambda i: (rooms[i], i))):
        shares[i] = min(rooms[i], remaining // (len(rooms) - count))
        remaining -= shares[i]
    return shares
