"""Mixtures take each part in its own order and by its share."""

import random

import numpy as np
import pytest

from moefold.data.mixture_sampler import MixtureSampler, floor_sum
from moefold.data.sample import Sample
from moefold.data.sampler import Sampler


class Numbers(Sampler):
    """Sample i of part p has tokens [p, i]."""

    seq_len = 1
    has_annotations = False

    def __init__(self, part: int, length: int) -> None:
        self.split_name, self.length, self.restored = part, length, None

    def __len__(self) -> int:
        return self.length

    def annotated_sample(self, index: int) -> Sample:
        return Sample(np.array([self.split_name, index]))

    def state(self, index: int) -> object:
        return None if self.split_name == 0 else [self.split_name, index]

    def restore(self, state: object) -> None:
        self.restored = state


def test_floor_sum_is_the_sum():
    rng = random.Random(0)
    for _ in range(300):
        count, modulus, factor, offset = (rng.randint(1, 60) for _ in range(4))
        expected = sum((factor * i + offset) // modulus for i in range(count))
        assert floor_sum(count, modulus, factor, offset) == expected


@pytest.mark.parametrize("shares", [(1.0,), (3.0, 1.0), (0.5, 0.001, 2.0), (1.0, 1.0, 1.0)])
def test_each_part_in_its_order_and_with_its_share(shares: tuple[float, ...]):
    mixture = MixtureSampler([Numbers(p, 10**6) for p in range(len(shares))], shares)
    taken = [0] * len(shares)
    for index in range(4000):
        part, number = mixture.sample(index).tolist()
        assert number == taken[part]
        taken[part] += 1
        for p, share in enumerate(shares):
            assert abs(taken[p] - share / sum(shares) * (index + 1)) < 4


def test_far_samples_cost_no_more():
    mixture = MixtureSampler([Numbers(p, 10) for p in range(3)], (0.2, 0.3, 0.5))
    part, number = mixture.locate(10**15)
    assert abs(number / 10**15 - (0.2, 0.3, 0.5)[part]) < 1e-9


def test_an_epoch_ends_before_any_part_comes_twice():
    mixture = MixtureSampler([Numbers(0, 30), Numbers(1, 1000)], (0.5, 0.5))
    assert 55 <= len(mixture) <= 60
    assert max(mixture.locate(i)[1] for i in range(len(mixture)) if mixture.locate(i)[0] == 0) < 30
    assert len(MixtureSampler([Numbers(0, 0), Numbers(1, 5)], (1.0, 1.0))) == 0


def test_states_go_to_their_parts():
    parts = [Numbers(0, 9), Numbers(1, 9)]
    mixture = MixtureSampler(parts, (1.0, 1.0))
    state = mixture.state(10)
    assert state == [None, [1, sum(mixture.locate(i)[0] == 1 for i in range(10))]]
    mixture.restore(state)
    assert parts[1].restored == state[1]
    assert MixtureSampler(parts[:1], (1.0,)).state(3) is None


def test_sample_names_its_mixture_part():
    mixture = MixtureSampler([Numbers(0, 100), Numbers(1, 100)], [1, 3])
    for index in range(20):
        part, number = mixture.sample(index).tolist()
        assert mixture.origin(index) == f"part {part}, sample {number}"
