"""Rounds of random documents, for tests of placements and attention plans."""

import numpy as np
from hypothesis import strategies as st

from moefold.topology.token_placement import Integers, Placement, RoundShape, document_bounds, place, sorted_placement

MAX_CHUNKS = 3


@st.composite
def rounds(draw: st.DrawFn) -> tuple[RoundShape, Integers]:
    """Draw a small round and the bounds of its documents: of 1 token to a whole sample."""
    cp = draw(st.sampled_from((1, 2, 3, 4)))
    shape = RoundShape(
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
    shape, bounds_N = draw(rounds())
    kind = draw(st.sampled_from(("samples", "documents", "balanced", "any")))
    if kind == "any":
        return any_placement(shape, bounds_N, draw(st.integers(0, 1000)))
    return place(kind, shape, bounds_N, draw(st.integers(1, 3)))


def any_placement(shape: RoundShape, bounds_N: Integers, seed: int) -> Placement:
    """Give the tokens of a round to the ranks at random."""
    tokens = np.random.default_rng(seed).permutation(shape.num_tokens)
    ranks = np.repeat(np.arange(shape.num_ranks), shape.tokens_per_rank)
    return sorted_placement(shape, bounds_N, ranks, tokens, np.ones(shape.num_tokens, np.int64))
