"""A placement is a bijection of slots and tokens, whatever the documents."""

import numpy as np
import pytest
from hypothesis import given, settings

from moefold.topology.attention_plan import plan_attention
from moefold.topology.token_placement import MicroBatchSetShape, document_bounds, place_tokens
from tests.topology.micro_batch_sets import max_over_mean, placements


@settings(max_examples=60)
@given(placements())
def test_every_token_has_one_slot(placement):
    shape = placement.shape
    slots = np.concatenate([placement.slots(rank) for rank in range(shape.num_ranks)])
    assert len(slots) == shape.num_ranks * shape.tokens_per_rank
    assert sorted(slots) == list(range(shape.num_tokens))
    filled = dict.fromkeys(range(shape.num_ranks), 0)
    for rank, first, length in zip(placement.ranks_M, placement.firsts_M, placement.lengths_M, strict=True):
        slot = filled[rank]
        assert list(placement.slots(rank)[slot : slot + length]) == list(range(first, first + length))
        filled[rank] += length


@pytest.mark.parametrize("starts", [[[0]], [[0], [1]], [[0, 3, 3], [0]], [[0], [0], [0]]])
def test_documents_of_another_round_are_refused(starts):
    with pytest.raises(ValueError, match="2 samples"):
        document_bounds(MicroBatchSetShape(dp=2, seq_len=6), starts)


def test_samples_are_in_the_order_of_ring_attention():
    shape = MicroBatchSetShape(dp=2, cp=2, micro_batch_size=2, seq_len=8)
    placement = place_tokens("samples", shape, document_bounds(shape, [[0]] * 4))
    assert list(placement.slots(3)) == [18, 19, 20, 21, 26, 27, 28, 29]


def test_documents_are_split_over_the_ranks_of_their_sample():
    shape = MicroBatchSetShape(dp=1, cp=2, seq_len=24)
    placement = place_tokens("documents", shape, document_bounds(shape, [[0, 18]]))
    # 18 = 4 chunks of 4 and 2 left; 6 = 4 chunks of 1 and 2 left: one share of the rest for each rank.
    assert list(placement.slots(0)) == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 21]
    # With blocks of 4, the short document is not cut into chunks.
    assert list(place_tokens("documents", shape, document_bounds(shape, [[0, 18]]), 4).slots(1)) == [
        *range(4, 12),
        20,
        21,
        22,
        23,
    ]


def test_balanced_documents_stay_whole_where_they_fit():
    shape = MicroBatchSetShape(dp=2, cp=2, seq_len=8)
    placement = place_tokens("balanced", shape, document_bounds(shape, [[0, 6], [0, 1, 3, 7]]))
    # 6 tokens fit on no rank of 4: two ranks have chunks of them. The other documents are whole.
    expected = [{0, 1, 5, 8}, {2, 3, 4, 15}, {11, 12, 13, 14}, {6, 7, 9, 10}]
    assert [set(placement.slots(rank).tolist()) for rank in range(4)] == expected


def test_balanced_work_is_nearer_to_the_mean():
    shape = MicroBatchSetShape(dp=4, cp=4, seq_len=4096)
    lengths = np.random.default_rng(0).lognormal(5.5, 1.3, (4, 200)).astype(int) + 1
    starts = [[0, *(end for end in np.cumsum(row) if end < 4096)] for row in lengths]
    bounds_N = document_bounds(shape, starts)
    ratio = {
        kind: max_over_mean(plan_attention(place_tokens(kind, shape, bounds_N, 64))) for kind in ("samples", "balanced")
    }
    assert ratio["balanced"] < ratio["samples"]
