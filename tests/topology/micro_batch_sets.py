"""Micro-batch sets of random documents, for tests of placements and attention plans."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from moefold.topology.attention_plan import AttentionPlan
from moefold.topology.token_placement import (
    Integers,
    MicroBatchSetShape,
    Placement,
    document_bounds,
    place_tokens,
    sorted_placement,
)

MAX_CHUNKS = 3


class Document(NamedTuple):
    """Tokens of a sample, by position."""

    sample: int
    start: int
    stop: int


class Task(NamedTuple):
    """Rows of a document, by position in the sample. Each attends to the keys up to its own key."""

    document: Document
    first: int
    stop: int
    compute_rank: int


def documents_of(placement: Placement) -> list[Document]:
    """Return the documents of a micro-batch set, in the order of their tokens."""
    length = placement.shape.seq_len
    bounds = placement.bounds_N.tolist()
    return [
        Document(first // length, first % length, first % length + stop - first)
        for first, stop in zip(bounds, bounds[1:], strict=False)
    ]


def tasks_of(plan: AttentionPlan) -> list[Task]:
    """Return the tasks of a plan one by one."""
    documents = documents_of(plan.placement)
    length = plan.placement.shape.seq_len
    columns = plan.documents_K, plan.firsts_K, plan.stops_K, plan.compute_ranks_K
    return [
        Task(documents[document], first % length, first % length + stop - first, rank)
        for document, first, stop, rank in zip(*(column.tolist() for column in columns), strict=True)
    ]


def max_over_mean(plan: AttentionPlan) -> float:
    """Return the pairs of the busiest rank over the mean of all ranks."""
    return float(plan.pairs_of_ranks.max() / plan.pairs_of_ranks.mean())


def has_each_token_once(placement: Placement) -> bool:
    """Return whether every token is in one run, and every rank has its number of tokens."""
    order = np.argsort(placement.firsts_M)
    ends = (placement.firsts_M + placement.lengths_M)[order]
    begins = np.append(placement.firsts_M[order], placement.shape.num_tokens)
    per_rank = np.bincount(placement.ranks_M, placement.lengths_M, placement.shape.num_ranks)
    is_even = bool((per_rank == placement.shape.tokens_per_rank).all())
    return begins[0] == 0 and bool((ends == begins[1:]).all()) and is_even


@st.composite
def sets(draw: st.DrawFn) -> tuple[MicroBatchSetShape, Integers]:
    """Draw a small micro-batch set and the bounds of its documents: of 1 token to a whole sample."""
    cp = draw(st.sampled_from((1, 2, 3, 4)))
    shape = MicroBatchSetShape(
        dp=draw(st.integers(1, 3)),
        cp=cp,
        micro_batch_size=draw(st.integers(1, 2)),
        seq_len=2 * cp * draw(st.integers(1, MAX_CHUNKS)),
    )
    inside = st.sets(st.integers(1, shape.seq_len - 1)) if shape.seq_len > 1 else st.just(set())
    starts = [[0, *sorted(draw(inside))] for _ in range(shape.num_samples)]
    return shape, document_bounds(shape, starts)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draw a placement of a kind, or any legal one."""
    shape, bounds_N = draw(sets())
    kind = draw(st.sampled_from(("samples", "documents", "balanced", "any")))
    if kind == "any":
        return any_placement(shape, bounds_N, draw(st.integers(0, 1000)))
    return place_tokens(kind, shape, bounds_N, draw(st.integers(1, 3)))


def any_placement(shape: MicroBatchSetShape, bounds_N: Integers, seed: int) -> Placement:
    """Give the tokens of a micro-batch set to the ranks at random."""
    tokens = np.random.default_rng(seed).permutation(shape.num_tokens)
    ranks = np.repeat(np.arange(shape.num_ranks), shape.tokens_per_rank)
    return sorted_placement(shape, bounds_N, ranks, tokens, np.ones(shape.num_tokens, np.int64))
