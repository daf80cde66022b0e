"""Attention of drawn documents over the ranks: counts by hand, the known shape, the same sets for all strategies."""

from dataclasses import replace

import numpy as np
import pytest

from moefold.config.base.part import make_part
from moefold.planner.cost_model.attention_load import AttentionPeers
from moefold.planner.lengths.balance import DocumentLoads, place_sets, plan_loads
from moefold.planner.lengths.distribution import ListedLengths, load_distribution
from moefold.planner.lengths.samples import RecordedSamples, StreamedSamples
from moefold.topology.token_placement import MicroBatchSetShape
from tests.planner.lengths.equal_documents import equal_documents

PLANNED = make_part("context", "planned")
LAST = replace(PLANNED, hosts="balanced", tolerance=0.02)


def loads_of(name: str, seq_len: int = 131072) -> DocumentLoads:
    return DocumentLoads(StreamedSamples(load_distribution(name)), seq_len)


def test_the_pairs_of_a_round_by_hand():
    # Two samples on two dp ranks with two cp ranks each: of the chunks of 2 tokens, a rank has 0 and 3, or 1 and 2.
    shape = MicroBatchSetShape(dp=2, cp=2, seq_len=8)
    ring = make_part("context", "ring")
    placement = place_sets([[(8,), (3, 5)]], shape, ring.plan)
    found = plan_loads(placement, shape, 0, ring)
    # One document: 1+2+7+8 and 3+4+5+6 pairs. Documents of 3 and 5 tokens: 1+2+4+5, and 3+1+2+3.
    assert found.pairs.tolist() == [[18.0, 18.0, 12.0, 9.0]]
    assert found.max_over_mean == pytest.approx(18 / (57 / 4))
    windowed = plan_loads(placement, shape, 2, ring)
    assert windowed.pairs.tolist() == [[7.0, 8.0, 7.0, 7.0]]


def test_ulysses_computes_whole_samples_with_a_part_of_the_heads():
    samples = RecordedSamples("", "", ((3, 5),))
    found = DocumentLoads(samples, 8, make_part("context", "ulysses")).sets(2, 1, 1)
    assert found.pairs[0].tolist() == [10.5, 10.5]


@pytest.mark.parametrize(
    "strategy", [make_part("context", "ring"), PLANNED, LAST], ids=["ring", "planned", "balanced hosts"]
)
def test_samples_of_one_document_are_even(strategy):
    loads = DocumentLoads(equal_documents(1024, 1024), 1024, strategy)
    load = loads.load(AttentionPeers(4, 2, 1, 8, 3), 0)
    assert load.max_over_mean == 1
    assert load.mean_keys == pytest.approx(1025 / 2)
    # Each chunk has 128 rows; a step of a ring joins two, and a planned task those in the middle, on one of four ranks.
    assert load.kernel_rows == (128 * 1.25 if strategy.is_planned else 2 * 128)
    # Rank 0 has the first chunk and the last, whose keys are all others: three rows for each of its own.
    assert load.sent_keys == (3 if strategy.is_planned else 0)
    assert load.sent_queries == 0


def test_only_ranks_that_wait_for_each_other_count():
    samples = RecordedSamples("", "", ((8,), (1,) * 8))
    loads = DocumentLoads(samples, 8, make_part("context", "ring"))
    pairs = loads.sets(1, 2, 1).pairs
    assert set(pairs.ravel().tolist()) == {36.0, 8.0}
    together = loads.load(AttentionPeers(1, 2, 1, group=2, num_sets=len(pairs)), 0)
    apart = loads.load(AttentionPeers(1, 2, 1, group=1, num_sets=len(pairs)), 0)
    assert together.keys == pytest.approx(pairs.max(1).mean() / 8)
    assert apart.keys == pytest.approx(pairs.mean(0).max() / 8)
    assert apart.keys < together.keys
    assert together.mean_keys == apart.mean_keys == pytest.approx(pairs.mean() / 8)


def test_rounds_one_by_one_have_the_mean_of_all():
    loads = loads_of("wlb", 8192)
    peers = AttentionPeers(2, 2, 1, 4, 8)
    whole = loads.load(peers, 0)
    count = len(loads.sets(2, 2, 1).pairs)
    keys = [replace(loads, only_set=i).load(peers, 0).keys for i in range(count)]
    assert np.mean(keys) == pytest.approx(whole.keys)
    assert np.std(keys) > 0
    assert replace(loads, only_set=count).load(peers, 0) == replace(loads, only_set=0).load(peers, 0)


@pytest.mark.parametrize(
    "strategy", [make_part("context", "ring"), PLANNED, LAST], ids=["ring", "planned", "balanced hosts"]
)
@pytest.mark.parametrize("num_sets", [1, 3, 100])
def test_the_lower_bound_plans_nothing_and_is_one(strategy, num_sets):
    loads = replace(loads_of("wlb", 8192), strategy=strategy)
    for window in (0, 100):
        peers = AttentionPeers(2, 64, 2, 2, num_sets)
        bound = replace(loads, is_lower_bound=True).load(peers, window)
        assert len(loads.known_sets) == bool(window)
        load = loads.load(peers, window)
        assert bound.keys <= load.keys * (1 + 1e-12)
        assert bound.mean_keys == pytest.approx(load.mean_keys, rel=1e-12)
        assert bound.kernel_rows >= load.kernel_rows


@pytest.mark.parametrize("placement", ["samples", "documents"])
def test_nodes_that_hold_whole_samples_need_no_plan_of_their_own(placement):
    loads = replace(loads_of("wlb", 8192), strategy=replace(PLANNED, placement=placement))
    shared = loads.sets(4, 4, 1)
    assert loads.sets(4, 4, 1, 0, 8) is shared
    assert not shared.exchanged["remote_keys"].any()
    assert loads.sets(4, 4, 1, 0, 2).exchanged["remote_keys"].any()


def test_all_strategies_see_the_same_documents():
    loads = loads_of("wikipedia", 8192)
    means = [
        replace(loads, strategy=s).sets(2, 4, 1).pairs.mean() for s in (make_part("context", "ring"), PLANNED, LAST)
    ]
    assert means[0] == means[1] == means[2]


GOLDEN = [
    # lengths, S, cp, dp; busiest over mean of samples, documents, balanced placement (hosts home), and balanced hosts
    # with tolerance 0.02; rows of keys per token, and of queries, of the last. From a prototype of the plan: its shape.
    ("wikipedia", 131072, 8, 4, 4.84, 2.05, 3.83, 1.05, 1.81, 0.086),
    ("wlb", 131072, 8, 4, 4.49, 2.16, 3.54, 1.08, 2.68, 0.103),
    ("prolong", 131072, 8, 4, 3.68, 1.74, 3.04, 1.04, 1.41, 0.072),
    ("magi", 131072, 8, 4, 3.66, 2.14, 2.92, 1.06, 3.38, 0.132),
]


@pytest.mark.parametrize("row", GOLDEN, ids=[row[0] for row in GOLDEN])
def test_the_balance_of_the_strategies_has_the_known_shape(row):
    name, seq_len, cp, dp, samples, documents, balanced, hosts, keys, queries = row
    loads = loads_of(name, seq_len)
    found = {
        placement: replace(loads, strategy=replace(PLANNED, placement=placement)).sets(cp, dp, 1).max_over_mean
        for placement in ("samples", "documents", "balanced")
    }
    # Documents over the cp ranks of their sample are the most even of the placements, zigzags of samples the least.
    assert found["documents"] < found["balanced"] < found["samples"]
    assert found == pytest.approx({"samples": samples, "documents": documents, "balanced": balanced}, rel=0.3)
    last = replace(loads, strategy=replace(LAST, placement="balanced")).sets(cp, dp, 1)
    assert last.max_over_mean == pytest.approx(hosts, abs=0.06)
    assert last.received_keys == pytest.approx(keys, rel=0.3)
    assert last.moved_queries == pytest.approx(queries, rel=0.3)
    # Ring attention receives the rows of all other ranks.
    assert last.received_keys < cp - 1


@pytest.mark.parametrize("name", ["wikipedia", "wlb", "prolong", "magi"])
def test_balanced_hosts_are_within_a_tenth_of_the_mean(name):
    assert replace(loads_of(name), strategy=LAST).sets(8, 4, 1).max_over_mean <= 1.1
    # On 1,024 ranks, a block of 128 rows at the end of the longest documents is a tenth of a rank's work.
    fine = replace(LAST, block=64)
    assert replace(loads_of(name), strategy=fine).sets(8, 128, 1).max_over_mean <= 1.1


def test_equal_documents_need_no_moves():
    lengths = StreamedSamples(ListedLengths("", "", [64]))
    found = DocumentLoads(lengths, 1024, replace(LAST, placement="documents")).sets(2, 2, 1)
    assert found.max_over_mean == 1
    assert found.moved_queries == 0


@pytest.mark.parametrize("hosts", ["home", "balanced"])
@pytest.mark.parametrize("placement", ["samples", "documents", "balanced"])
@pytest.mark.parametrize("pool", [0, 2])
def test_sets_planned_together_have_the_loads_of_each_set_alone(placement, hosts, pool):
    shape = MicroBatchSetShape(dp=4, cp=2, micro_batch_size=2, seq_len=1024)
    strategy = replace(PLANNED, placement=placement, hosts=hosts, pool=pool, block=16)
    samples = StreamedSamples(load_distribution("wlb")).draw(1024, 24, seed=1)
    sets = [samples[first : first + 8] for first in (0, 8, 16)]
    together = plan_loads(place_sets(sets, shape, strategy.plan), shape, 100, strategy, 4)
    alone = [plan_loads(place_sets([own], shape, strategy.plan), shape, 100, strategy, 4) for own in sets]
    np.testing.assert_array_equal(together.pairs, np.concatenate([one.pairs for one in alone]))
    for name, rows in together.exchanged.items():
        np.testing.assert_array_equal(rows, np.concatenate([one.exchanged[name] for one in alone]))
    assert len({row.tobytes() for row in together.pairs}) == 3


@pytest.mark.parametrize(("cp", "hosts"), [(1, "home"), (1, "balanced"), (4, "home"), (4, "balanced")])
@pytest.mark.parametrize("placement", ["documents", "balanced"])
def test_loads_of_another_shape_stand_in_only_for_equal_plans(placement, cp, hosts):
    strategy = replace(PLANNED, placement=placement, hosts=hosts)
    loads = replace(loads_of("wlb", 2048), strategy=strategy)
    # The balanced placement of the first shape stands in for the second: equally many ranks and samples.
    loads.sets(2, 4, 2, 0, 4)
    shape = MicroBatchSetShape(dp=8 // cp, cp=cp, micro_batch_size=cp, seq_len=2048)
    samples = loads.samples.draw(2048, 32 * 8, loads.seed)
    sets = [samples[first : first + 8] for first in range(0, len(samples), 8)]
    exact = plan_loads(place_sets(sets, shape, strategy.plan), shape, 0, strategy, 4)
    found = loads.sets(cp, 8 // cp, cp, 0, 4)
    np.testing.assert_array_equal(found.pairs, exact.pairs)
    assert found.kernel_rows == exact.kernel_rows
    for name, rows in found.exchanged.items():
        np.testing.assert_array_equal(rows, exact.exchanged[name])
