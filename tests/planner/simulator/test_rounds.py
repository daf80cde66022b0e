"""Rounds of reinforcement learning, in turn and at once: against hand-worked times and a clock."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moefold.planner.simulator.rounds import COPY, DECODE, REWARD, TRAIN, RoundTimeline, RoundTimes, simulate_rounds


def times(
    copy: float = 1, prefill: float = 2, decode: float = 4, reward: float = 0, train: float = 5, updates: int = 1
):
    return RoundTimes(copy_s=copy, prefill_s=prefill, decode_s=decode, reward_s=reward, train_s=train, updates=updates)


def spans(rounds: RoundTimeline, part: str) -> list[tuple[float, float]]:
    return [(phase.start_s, phase.end_s) for phase in rounds.phases if phase.part == part]


def test_parts_follow_each_other_on_the_same_ranks():
    rounds = simulate_rounds(times(updates=2), 2, None)
    assert [(phase.part, phase.start_s) for phase in rounds.phases if phase.round_number == 1] == [
        (COPY, 17),
        ("prompts", 18),
        (DECODE, 20),
        (TRAIN, 24),
        (TRAIN, 29),
    ]
    assert rounds.step_s == 17 / 2
    assert rounds.idle_share(is_training=True) == rounds.idle_share(is_training=False) == 0
    assert not spans(rounds, REWARD)


def test_one_round_ahead_the_longer_part_counts():
    """Sampling takes 7 s and training 5 s: round 2 is sampled by the weights of round 0, while round 1 is trained."""
    rounds = simulate_rounds(times(), 4, 1)
    # The first two rounds are sampled by the first weights, after one copy.
    assert spans(rounds, COPY) == [(0, 1), (13, 14), (20, 21)]
    assert spans(rounds, DECODE) == [(3, 7), (9, 13), (16, 20), (23, 27)]
    assert spans(rounds, TRAIN) == [(7, 12), (13, 18), (20, 25), (27, 32)]
    assert rounds.step_s == 7
    assert rounds.idle_share(is_training=True) == pytest.approx(2 / 7)
    assert rounds.idle_share(is_training=False) == 0


def test_one_round_ahead_of_slow_training_waits_for_nothing():
    rounds = simulate_rounds(times(train=20), 4, 1)
    assert spans(rounds, TRAIN) == [(7, 27), (27, 47), (47, 67), (67, 87)]
    assert rounds.step_s == 20
    assert rounds.idle_share(is_training=False) == pytest.approx(13 / 20)


@settings(max_examples=60)
@given(
    seconds=st.lists(st.floats(0.1, 9), min_size=5, max_size=5),
    updates=st.integers(1, 3),
    rounds_ahead=st.integers(1, 4),
)
def test_the_mean_step_equals_the_mean_of_many_rounds(seconds, updates, rounds_ahead):
    parts = times(*seconds, updates=updates)
    count = 1200
    rounds = simulate_rounds(parts, count, rounds_ahead)
    ends = [end for _, end in spans(rounds, TRAIN)][updates - 1 :: updates]
    # Rounds repeat with a period of at most rounds_ahead + 1, of which 240 is a multiple, once the lead of the first
    # rounds is used up. That takes long where two parts need almost the same time.
    before, mean = ((ends[last] - ends[last - 240]) / 240 / updates for last in (count - 241, count - 1))
    assume(before == pytest.approx(mean, rel=1e-9))
    assert rounds.step_s == pytest.approx(mean, rel=1e-6)
    for part in (COPY, DECODE, TRAIN):
        found = spans(rounds, part)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(found, found[1:], strict=False))
    # A round is trained after it is sampled, and sampled after the weights that it uses are trained.
    decoded = [end for _, end in spans(rounds, DECODE)]
    began = [start for start, _ in spans(rounds, TRAIN)][::updates]
    assert all(start >= end - 1e-9 for start, end in zip(began, decoded, strict=True))
    starts = [start for start, _ in spans(rounds, "prompts")]
    for number in range(rounds_ahead + 1, count):
        assert starts[number] >= ends[number - rounds_ahead - 1] - 1e-9
