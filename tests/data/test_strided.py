"""Samples of sites: disjoint, and together the samples of one run."""

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.sampler import StridedSampler


def samples(count: int) -> list[StridedSampler]:
    data = DataRequest(DataConfig(kind="synthetic"), seq_len=8, vocab_size=50, seed=3).open()
    return [StridedSampler(data.train, count, number) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sites_read_every_count_th_sample(count):
    data = DataRequest(DataConfig(kind="synthetic"), seq_len=8, vocab_size=50, seed=3).open()
    joined = [data.train.sample(i) for i in range(12)]
    found = [sampler.sample(i) for i in range(12 // count) for sampler in samples(count)]
    assert all(np.array_equal(a, b) for a, b in zip(joined, found, strict=True))
    assert samples(count)[0].batch(0, 2).tokens.shape == (2, 9)


def test_negative_index_is_refused():
    with pytest.raises(IndexError, match="must not be negative"):
        samples(2)[0].sample(-1)


class Dropping:
    """A source of 10 samples; some are dropped."""

    seq_len = 8
    split_name = "training"
    has_annotations = False
    fill_fraction = 1.0

    def __init__(self, dropped: set[int]) -> None:
        self.dropped = dropped
        self.num_dropped = len(dropped)
        self.is_all_dropped = len(dropped) == 10

    def __len__(self) -> int:
        return 10

    def is_dropped(self, index: int) -> bool:
        return index % 10 in self.dropped


def test_dropped_samples_are_left_out():
    sampler = StridedSampler(Dropping({1, 5}), 2, 1)
    assert list(sampler.next_sample_indices(0, 3)) == [1, 3, 4]
    assert (len(sampler), sampler.num_dropped, sampler.is_all_dropped) == (5, 1, False)
    assert StridedSampler(Dropping(set(range(10))), 2, 1).is_all_dropped
