"""Samplers visit every sample once an epoch, and a sample does not depend on earlier requests."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moefold.data.held_out import IndexRanges, split_samples
from moefold.data.packed_samples import PackedSamples
from moefold.data.sampler import SplitSampler
from moefold.data.token_stream import TokenStream
from moefold.errors import ConfigError

S = 8


class CountingStream(TokenStream):
    """Token i is i, so that every token shows where it came from."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        assert 0 <= start <= stop <= self.length
        return np.arange(start, stop, dtype=np.int64)


def make_split(num_samples: int = 50, order_key: int | None = 5) -> SplitSampler:
    source = PackedSamples(CountingStream(num_samples * S + 1), S)
    return SplitSampler(source, IndexRanges((range(num_samples),)), order_key=order_key)


@pytest.mark.parametrize(
    ("num_tokens", "num_samples"), [(0, 0), (1, 0), (S, 0), (S + 1, 1), (2 * S, 1), (2 * S + 1, 2)]
)
def test_samples_that_tokens_make(num_tokens: int, num_samples: int):
    assert len(PackedSamples(CountingStream(num_tokens), S)) == num_samples


def test_sample_is_its_window_of_the_stream():
    source = PackedSamples(CountingStream(100), S)
    assert source.sample(3).tolist() == list(range(3 * S, 4 * S + 1))


@pytest.mark.parametrize("order_key", [None, 1, 2])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_visits_every_sample_once(order_key: int | None, epoch: int):
    split = make_split(order_key=order_key)
    firsts = [int(split.sample(epoch * len(split) + i)[0]) for i in range(len(split))]
    assert sorted(firsts) == [i * S for i in range(50)]


def test_order_changes_with_epoch_and_key_and_not_otherwise():
    def order(key: int | None, epoch: int) -> list[int]:
        split = make_split(order_key=key)
        return [int(split.sample(epoch * 50 + i)[0]) for i in range(50)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(None, 0) == order(None, 3) == [i * S for i in range(50)]


def test_samples_do_not_depend_on_earlier_requests():
    split = make_split()
    forwards = [split.sample(i).tolist() for i in range(120)]
    backwards = [split.sample(i).tolist() for i in reversed(range(120))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 12])
def test_global_batch_is_the_same_for_every_dp(dp: int):
    split, whole = make_split(), make_split()
    for step in (0, 3, 9):
        expected = whole.batch(step * 12, 12)
        parts = [split.batch(step * 12 + r * 12 // dp, 12 // dp) for r in range(dp)]
        for name in ("inputs", "labels"):
            given = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(given, getattr(expected, name))
            assert given.shape == (12, S)


def test_batches_continue_one_another_whatever_their_size():
    split = make_split()
    small = [split.batch(step * 4, 4).inputs for step in range(6)]
    large = [split.batch(step * 8, 8).inputs for step in range(3)]
    assert np.array_equal(np.concatenate(small), np.concatenate(large))


def test_labels_are_inputs_shifted_by_one():
    batch = make_split().batch(7, 2)
    inputs, labels = batch.inputs, batch.labels
    assert inputs.dtype == labels.dtype == np.int64
    assert np.array_equal(inputs + 1, labels)
    assert inputs.flags.c_contiguous
    assert inputs.flags.writeable
    assert labels.flags.c_contiguous


def test_empty_count_gives_an_empty_batch():
    batch = make_split().batch(3, 0)
    inputs, labels = batch.inputs, batch.labels
    assert inputs.shape == labels.shape == (0, S)


def test_refuses_a_negative_sample():
    with pytest.raises(IndexError, match="negative"):
        make_split().sample(-1)


def test_error_of_an_empty_split_names_the_remedy():
    empty = SplitSampler(PackedSamples(CountingStream(100), S), IndexRanges(()), order_key=None)
    with pytest.raises(ConfigError, match="data.validation_fraction=0 holds no sample out; set it above 0"):
        empty.sample(0)


def test_no_token_of_validation_is_in_training():
    source = PackedSamples(CountingStream(1000 * S + 3), S)
    parts = [SplitSampler(source, runs, order_key=9) for runs in split_samples(len(source), 0.1)]
    train, held_out = ({int(t) for i in range(len(part)) for t in part.sample(i)} for part in parts)
    assert len(held_out) > 700
    assert not train & held_out


def test_origin_of_a_sample_is_its_row():
    split = make_split(50)
    assert split.origin(7) == f"row {split.sample(7)[0] // S}"
    assert split.origin(57) != split.origin(7), "another epoch, another order"
