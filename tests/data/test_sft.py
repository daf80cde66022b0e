"""Packing by best fit: every thing once, and no bin too full."""

import random

import pytest

from moefold.data.bin_packing import pack_best_fit


def test_best_fit_packing_by_hand():
    # 6 opens a bin, 5 another, which the other 5 fills; 4 fills the first, and 3 and 1 share a third.
    assert pack_best_fit([1, 5, 6, 4, 3, 5], 10) == [[0, 4], [1, 5], [2, 3]]
    assert pack_best_fit([], 10) == []
    assert pack_best_fit([10, 10], 10) == [[0], [1]]


@pytest.mark.parametrize("seed", range(20))
def test_each_length_is_packed_once_and_no_bin_is_too_full(seed: int):
    rng = random.Random(seed)
    capacity = rng.randint(1, 70)
    lengths = [rng.randint(1, capacity) for _ in range(rng.randint(1, 200))]
    bins = pack_best_fit(lengths, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members == sorted(members) for members in bins)
    assert bins == sorted(bins)
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert max(loads) <= capacity
    # No two bins would fit into one, or the second had never been opened.
    assert sum(sorted(loads)[:2]) > capacity or len(bins) == 1
