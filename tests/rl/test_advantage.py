"""Advantages of each kind are sums by hand, and a rollout without reward changes no other."""

import numpy as np
import pytest

from moefold.config.base.part_registry import built_in_kinds
from moefold.config.chosen import chosen_in
from moefold.config.groups.policy import EPS, AdvantagePart
from moefold.config.sections.rl import RLConfig
from moefold.rl.reward import is_mixed, length_penalty

ADVANTAGES = {
    kind: chosen_in(RLConfig(advantage=kind), AdvantagePart).advantages for kind in built_in_kinds("advantage")
}

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [2.0, 0.0, 1.0, 5.0]])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_sum_to_zero_in_each_group_and_are_zero_in_an_equal_one(kind):
    advantages = ADVANTAGES[kind](REWARDS)
    assert advantages.sum(1) == pytest.approx(0, abs=1e-12)
    assert not advantages[1].any()
    assert advantages[0, 0] > 0 > advantages[0, 1]


def test_values_of_each_kind():
    assert ADVANTAGES["group"](REWARDS)[2].tolist() == [0, -2, -1, 3]
    std = np.std([2, 0, 1, 5], ddof=1)
    assert ADVANTAGES["group_std"](REWARDS)[2] == pytest.approx(np.array([0, -2, -1, 3]) / (std + EPS))
    assert ADVANTAGES["leave_one_out"](REWARDS)[2, 3] == pytest.approx(5 - np.mean([2, 0, 1]))
    centred = REWARDS - REWARDS.mean(1, keepdims=True)
    assert ADVANTAGES["batch"](REWARDS) == pytest.approx(centred / (centred.std() + EPS))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_rollout_without_a_reward_changes_no_other_advantage(kind):
    with_gap = np.array([[1.0, np.nan, 0.0, 1.0]])
    advantages = ADVANTAGES[kind](with_gap)
    assert np.isnan(advantages[0, 1])
    assert advantages[0, [0, 2, 3]] == pytest.approx(ADVANTAGES[kind](with_gap[:, [0, 2, 3]])[0])


def test_a_group_without_rewards_has_no_advantage_and_is_not_mixed():
    nothing = np.full((1, 4), np.nan)
    for kind in ADVANTAGES.values():
        assert np.isnan(kind(nothing)).all()
    assert is_mixed(np.concatenate((REWARDS, nothing))).tolist() == [True, False, True, False]


def test_the_length_penalty_falls_from_the_start_to_the_maximum():
    lengths = np.array([10, 20, 25, 30])
    assert length_penalty(lengths, 20, 30).tolist() == [0, 0, -0.5, -1]
    assert not length_penalty(lengths, 0, 30).any()
