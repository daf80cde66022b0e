"""The shuffle of indices is a permutation without memory, the same for the same key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.index_shuffle import IndexShuffle

keys = st.integers(0, 2**64 - 1)


@settings(max_examples=60)
@given(length=st.integers(1, 700), key=keys)
def test_a_shuffle_has_each_index_once(length: int, key: int):
    permutation = IndexShuffle(length, key)
    assert sorted(permutation(i) for i in range(length)) == list(range(length))


@settings(max_examples=60)
@given(length=st.integers(1, 2**62), key=keys, data=st.data())
def test_stays_in_range_and_repeats_itself_for_any_length(length: int, key: int, data: st.DataObject):
    index = data.draw(st.integers(0, length - 1))
    image = IndexShuffle(length, key)(index)
    assert 0 <= image < length
    assert IndexShuffle(length, key)(index) == image


@settings(max_examples=30)
@given(length=st.integers(2**20, 2**50), key=keys, data=st.data())
def test_two_indices_never_meet(length: int, key: int, data: st.DataObject):
    permutation = IndexShuffle(length, key)
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=20, unique=True))
    assert len({permutation(i) for i in indices}) == len(indices)


def test_order_looks_random_and_differs_between_keys():
    n = 5000
    orders = [np.array([IndexShuffle(n, key)(i) for i in range(n)]) for key in (1, 2)]
    for order in orders:
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert (np.diff(order) == 1).mean() < 0.01
    assert (orders[0] == orders[1]).mean() < 0.01


def test_every_order_of_three_occurs():
    orders = {tuple(IndexShuffle(3, key)(i) for i in range(3)) for key in range(200)}
    assert len(orders) == 6


@pytest.mark.parametrize("index", [-1, 5])
def test_refuses_an_index_outside(index: int):
    with pytest.raises(IndexError, match="outside"):
        IndexShuffle(5, 0)(index)


def test_refuses_an_empty_range():
    with pytest.raises(ValueError, match="at least 1"):
        IndexShuffle(0, 0)
