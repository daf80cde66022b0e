"""Test which rank computes which token copy: each copy once, in whole chunks, and no move without need."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.parts.dispatcher.leastloaded.module import (
    RebalanceRule,
    TokenAssignment,
    home_assignment,
    order_by_rank,
    owner_ranks,
    plan_rebalance,
)

RULES = [RebalanceRule(t, c, m) for t in (1.0, 1.3) for c in (1.0, 1.1, 1.3) for m in (1, 2, 5) if c <= t or t == 1.0]


def assert_sound(load: list[int], num_ranks: int, rule: RebalanceRule) -> None:
    """Everything that a plan promises, checked without the way it was found."""
    shares = plan_rebalance(load, num_ranks, rule)
    assert shares.dtype == np.int64
    assert shares.shape == (num_ranks, len(load))
    assert (shares >= 0).all()
    assert shares.sum(0).tolist() == load
    own = home_assignment(load, num_ranks)
    total, before, after = sum(load), own.sum(1), shares.sum(1)
    if Fraction(int(before.max()) * num_ranks) <= Fraction(rule.threshold) * total:
        assert (shares == own).all()
        return
    limit = rule.max_tokens_per_rank(total, num_ranks)
    owner = owner_ranks(num_ranks, len(load))
    gives = np.array([(shares[r, owner == r] < own[r, owner == r]).any() for r in range(num_ranks)])
    assert (before[gives] > limit).all()
    # Nobody both lends and borrows.
    borrowed = np.where(owner == np.arange(num_ranks)[:, None], 0, shares)
    assert not borrowed[gives].any()
    assert ((borrowed == 0) | (borrowed >= rule.min_tokens)).all()
    assert (after <= np.maximum(before, limit)).all()
    assert (after[borrowed.sum(1) > 0] <= limit).all()
    if rule.min_tokens == 1:
        assert after.max() <= limit
    # Who is still over the limit could not give a whole chunk to anybody.
    largest_room = limit - after.min()
    for rank in np.flatnonzero(after > limit):
        assert min(largest_room, shares[rank, owner == rank].max()) < rule.min_tokens


@pytest.mark.parametrize(("num_ranks", "num_experts", "most"), [(1, 2, 3), (2, 2, 9), (2, 4, 3), (3, 3, 6), (4, 4, 2)])
def test_every_spilled_load_of_few_tokens_obeys_the_rule(num_ranks, num_experts, most):
    for load in itertools.product(range(most + 1), repeat=num_experts):
        for rule in RULES:
            assert_sound(list(load), num_ranks, rule)


@given(
    st.integers(1, 9).flatmap(
        lambda ranks: st.integers(1, 4).flatmap(
            lambda each: st.tuples(
                st.just(ranks), st.lists(st.integers(0, 5000), min_size=ranks * each, max_size=ranks * each)
            )
        )
    ),
    st.floats(1.0, 2.0),
    st.floats(1.0, 2.0),
    st.integers(1, 2000),
)
def test_spilled_random_loads_obey_the_rule(ranks_and_load, threshold, capacity, min_tokens):
    num_ranks, load = ranks_and_load
    assert_sound(load, num_ranks, RebalanceRule(threshold, capacity, min_tokens))


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("hot", [0.3, 0.5, 0.8, 0.95, 1.0])
def test_skewed_loads_end_within_the_capacity(num_ranks, hot):
    num_experts, total = 4 * num_ranks, 4096 * num_ranks
    load = [round(total * (1 - hot) / (num_experts - 1))] * num_experts
    load[5] = round(total * hot)
    shares = plan_rebalance(load, num_ranks, RebalanceRule(1.3, 1.1, 64))
    busiest = shares.sum(1).max() / (sum(load) / num_ranks)
    is_moved = (shares != home_assignment(load, num_ranks)).any()
    assert is_moved == (hot > 0.3 or num_ranks > 2)
    assert busiest <= (1.1 + num_ranks / total if is_moved else 1.3)


def test_a_hand_worked_plan():
    # Mean 10, limit 10. Rank 0 has 30: 10 of its largest expert go to rank 2 (least loaded, lower number), 8 to rank 3,
    # 2 to rank 1.
    load = [26, 4, 8, 0, 0, 0, 2, 0]
    shares = plan_rebalance(load, 4, RebalanceRule(1.3, 1.0, 1))
    assert shares.tolist() == [
        [6, 4, 0, 0, 0, 0, 0, 0],
        [2, 0, 8, 0, 0, 0, 0, 0],
        [10, 0, 0, 0, 0, 0, 0, 0],
        [8, 0, 0, 0, 0, 0, 2, 0],
    ]
    # In chunks of 5 nobody can take the last two.
    assert plan_rebalance(load, 4, RebalanceRule(1.3, 1.0, 5)).sum(1).tolist() == [12, 8, 10, 10]
    # The busiest has three times the mean.
    assert (plan_rebalance(load, 4, RebalanceRule(3.0, 1.0, 1)) == home_assignment(load, 4)).all()


def test_a_small_excess_moves_as_a_whole_chunk():
    assert plan_rebalance([40, 44, 60], 3, RebalanceRule(1.0, 1.1, 8)).sum(1).tolist() == [48, 44, 52]


def test_the_room_of_a_rank_relieved_of_a_whole_chunk_is_none():
    # Mean 10, limit 10, chunks of 6: rank 0 gives 6 to rank 3 and falls to 8; rank 1 finds no room of 6.
    rule = RebalanceRule(1.0, 1.0, 6)
    assert plan_rebalance([14, 13, 10, 3], 4, rule).sum(1).tolist() == [8, 13, 10, 9]


def _random_deal(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = random.Random(seed)
    num_ranks, parts, each = generator.choice([1, 2, 3, 4]), generator.choice([1, 2]), generator.choice([1, 2, 3])
    sources, experts = num_ranks * parts, num_ranks * each
    counts = np.array([[generator.choice([0, 0, 1, 5, 30]) for _ in range(experts)] for _ in range(sources)])
    return counts, plan_rebalance(counts.sum(0), num_ranks, RebalanceRule(1.0, 1.0, generator.choice([1, 3])))


def test_sources_and_ranks_agree_on_every_copy():
    for seed in range(100):
        counts, shares = _random_deal(seed)
        deal = TokenAssignment(counts, shares)
        sent = np.stack([deal.from_source(s) for s in range(len(counts))])
        got = np.stack([deal.to_rank(r) for r in range(len(shares))], 1)
        assert (sent == got).all(), seed
        assert (sent >= 0).all()
        assert (sent.sum(1) == counts).all()
        assert (sent.sum(0) == shares).all()


def test_a_source_sorts_its_rows_as_the_ranks_expect_them():
    for seed in range(100):
        _assert_sorted(*_random_deal(seed))


def _assert_sorted(counts: np.ndarray, shares: np.ndarray) -> None:
    owner = owner_ranks(*shares.shape)
    for source, row_counts in enumerate(counts):
        sent = TokenAssignment(counts, shares).from_source(source)
        order = order_by_rank(sent)
        assert sorted(order.tolist()) == list(range(row_counts.sum()))
        expert_of_row = np.repeat(np.arange(len(row_counts)), row_counts)[order]
        rank_of_row = np.repeat(np.arange(len(shares)), sent.sum(1))
        for rank in range(len(shares)):
            mine = expert_of_row[rank_of_row == rank].tolist()
            assert mine == sorted(mine, key=lambda e, rank=rank: (owner[e] != rank, e))
            assert np.bincount(mine, minlength=len(row_counts)).tolist() == sent[rank].tolist()


def test_evenly_spread_copies_of_one_expert_mostly_stay_where_they_are():
    counts = np.zeros((4, 4), dtype=np.int64)
    counts[:, 2] = 100
    shares = plan_rebalance(counts.sum(0), 4, RebalanceRule(1.3, 1.0, 1))
    deal = TokenAssignment(counts, shares)
    assert sum(deal.from_source(rank)[rank].sum() for rank in range(4)) == 400
