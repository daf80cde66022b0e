"""Training and validation share no sample, and the held-out share is the fraction asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.held_out import IndexRanges, split_samples
from moefold.errors import ConfigError


def members(runs: IndexRanges) -> list[int]:
    return [runs[i] for i in range(len(runs))]


@settings(max_examples=200)
@given(num_samples=st.integers(1, 3000), fraction=st.floats(0.001, 0.95))
def test_training_and_validation_share_no_sample(num_samples: int, fraction: float):
    try:
        training, validation = split_samples(num_samples, fraction)
    except ConfigError:
        assert num_samples < max(1, round(num_samples * fraction)) + 2
        return
    train, held_out = members(training), members(validation)
    assert train
    assert held_out
    assert train == sorted(set(train))
    assert held_out == sorted(set(held_out))
    assert train[-1] < num_samples
    # Sample i ends with the token that sample i+1 begins with, so neighbours must not be in different parts.
    neighbours = {i + d for i in held_out for d in (-1, 0, 1)}
    assert not neighbours.intersection(train)
    assert len(held_out) == max(1, round(num_samples * fraction))


@pytest.mark.parametrize("num_samples", [10_000, 123_457])
def test_share_is_the_fraction_and_little_is_left_out(num_samples: int):
    training, validation = split_samples(num_samples, 0.05)
    assert len(validation) == round(0.05 * num_samples)
    assert num_samples - len(training) - len(validation) <= 2 * 64


def test_held_out_samples_come_from_everywhere():
    _, validation = split_samples(10_000, 0.05)
    per_tenth = [0] * 10
    for i in members(validation):
        per_tenth[i * 10 // 10_000] += 1
    assert min(per_tenth) >= 25
    assert max(per_tenth) <= 75


def test_fraction_zero_holds_nothing_out():
    training, validation = split_samples(7, 0.0)
    assert members(training) == list(range(7))
    assert len(validation) == 0
    with pytest.raises(IndexError):
        validation[0]


def test_smallest_data_that_can_be_split():
    training, validation = split_samples(3, 0.05)
    assert (len(training), len(validation)) == (1, 1)
    with pytest.raises(
        ConfigError, match=r"data.validation_fraction=0.05 leaves no training sample of the 2 .*give more"
    ):
        split_samples(2, 0.05)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_refuses_a_fraction_that_is_none(fraction: float):
    with pytest.raises(ConfigError, match="data.validation_fraction=.* must be at least 0 and below 1"):
        split_samples(100, fraction)


def test_runs_need_no_memory_for_long_data():
    training, validation = split_samples(2**40, 0.01)
    assert len(training.ranges) + len(validation.ranges) < 200
    assert training[len(training) - 1] < 2**40
