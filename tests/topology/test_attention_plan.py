"""An attention plan computes every visible pair once, moves every needed row once, and balances the ranks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.topology.attention_plan import plan_attention
from moefold.topology.token_placement import Integers, MicroBatchSetShape, document_bounds, place_tokens
from tests.topology.micro_batch_sets import documents_of, has_each_token_once, max_over_mean, placements, tasks_of

WINDOWS = st.sampled_from((0, 0, 1, 3, 5))
TOLERANCES = st.sampled_from((None, 0.0, 0.1, 0.5))


def _visible_pairs(placement, window: int) -> set[tuple[int, int]]:
    """Every pair of a query and a key that it attends to, by the numbers of their tokens."""
    pairs = set()
    for sample, start, stop in documents_of(placement):
        first = sample * placement.shape.seq_len
        for query in range(start, stop):
            low = max(start, query - window + 1) if window else start
            pairs |= {(first + query, first + key) for key in range(low, query + 1)}
    return pairs


def _pairs_of_task(task, seq_len: int, window: int) -> list[tuple[int, int]]:
    """The pairs of one task, as its docstring defines them."""
    first = task.document.sample * seq_len
    return [
        (first + query, first + key)
        for query in range(task.first, task.stop)
        for key in range(task.document.start, query + 1)
        if not window or key > query - window
    ]


@settings(max_examples=60)
@given(placements(), WINDOWS, TOLERANCES, st.integers(1, 4), st.data())
def test_every_visible_pair_is_in_one_task(placement, window, tolerance, block, data):
    shape = placement.shape
    pool = data.draw(st.sampled_from([n for n in range(shape.num_ranks) if not n or shape.num_ranks % n == 0]))
    nodes = data.draw(st.sampled_from((None, [rank // 2 for rank in range(shape.num_ranks)])))
    plan = plan_attention(placement, window=window, tolerance=tolerance, block=block, pool=pool, nodes=nodes)
    by_task = [_pairs_of_task(task, shape.seq_len, window) for task in tasks_of(plan)]
    computed = [pair for pairs in by_task for pair in pairs]
    assert len(computed) == len(set(computed))
    assert set(computed) == _visible_pairs(placement, window)
    work = [len(pairs) for pairs in by_task]
    assert list(plan.pairs) == work
    assert list(plan.pairs_of_ranks) == [
        sum(count for count, task in zip(work, tasks_of(plan), strict=True) if task.compute_rank == rank)
        for rank in range(shape.num_ranks)
    ]


@settings(max_examples=60)
@given(placements(), WINDOWS, TOLERANCES, st.integers(1, 4))
def test_every_needed_row_reaches_its_host_once(placement, window, tolerance, block):
    shape = placement.shape
    ranks = range(shape.num_ranks)
    plan = plan_attention(placement, window=window, tolerance=tolerance, block=block)
    exchange = plan.exchange()
    held = [set(placement.slots(rank)) for rank in ranks]
    queries = [set() for _ in ranks]
    keys = [set() for _ in ranks]
    for task in tasks_of(plan):
        pairs = _pairs_of_task(task, shape.seq_len, window)
        queries[task.compute_rank] |= {query for query, _ in pairs}
        keys[task.compute_rank] |= {key for _, key in pairs}
    for transfers, needed in ((exchange.queries, queries), (exchange.keys, keys)):
        received = [[[] for _ in ranks] for _ in ranks]
        for source, destination, first, length in zip(*(column.tolist() for column in transfers), strict=True):
            received[destination][source] += range(first, first + length)
        for rank in ranks:
            assert not received[rank][rank]
            rows = [row for part in received[rank] for row in part]
            assert len(rows) == len(set(rows)), "a row is sent to a rank twice"
            assert set(rows) == needed[rank] - held[rank]
            for source in ranks:
                assert set(received[rank][source]) <= held[source]
                assert received[rank][source] == sorted(received[rank][source])
        assert list(transfers.received(len(ranks))) == [sum(map(len, received[rank])) for rank in ranks]
        assert transfers.sent(len(ranks)).sum() == transfers.received(len(ranks)).sum() == transfers.num_rows


@settings(max_examples=60)
@given(placements(), WINDOWS, TOLERANCES)
def test_a_rank_computes_only_its_part_of_the_exchange(placement, window, tolerance):
    plan = plan_attention(placement, window=window, tolerance=tolerance, block=2)
    whole = plan.exchange()
    for rank in range(placement.shape.num_ranks):
        part = plan.exchange(rank)
        for of_part, of_whole in zip((part.queries, part.keys), (whole.queries, whole.keys), strict=True):
            is_own = (of_whole.sources_X == rank) | (of_whole.destinations_X == rank)
            for column, of_all in zip(of_part, of_whole, strict=True):
                assert column.tolist() == of_all[is_own].tolist()


@settings(max_examples=60)
@given(placements(), WINDOWS, st.sampled_from((0.0, 0.02, 0.3)), st.integers(1, 5), st.data())
def test_the_busiest_rank_has_one_block_more_than_its_share(placement, window, tolerance, block, data):
    num_ranks = placement.shape.num_ranks
    pool = data.draw(st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0]))
    plan = plan_attention(placement, window=window, tolerance=tolerance, block=block, pool=pool)
    longest = max(stop - start for _, start, stop in documents_of(placement))
    of_block = sum(min(row, window or row) for row in range(max(1, longest - block + 1), longest + 1))
    for pairs in plan.pairs_of_ranks.reshape(-1, pool):
        # In a pool of one rank nothing moves.
        assert pairs.max() <= np.ceil((1 + tolerance) * pairs.mean()) + of_block


@pytest.mark.parametrize("starts", [[0, 1, 3, 7], [0], [0, 5, 6], [0, 2, 4, 6, 8, 10]])
def test_no_assignment_of_blocks_is_better_by_more_than_a_block(starts):
    shape = MicroBatchSetShape(cp=3, seq_len=12)
    block = 2
    plan = plan_attention(place_tokens("samples", shape, document_bounds(shape, [starts])), tolerance=0.0, block=block)
    stops = [*starts[1:], shape.seq_len]
    blocks = [
        sum(range(row + 1, min(row + block, stop - start) + 1))
        for start, stop in zip(starts, stops, strict=True)
        for row in range(0, stop - start, block)
    ]
    best = min(
        max(sum(pairs for pairs, host in zip(blocks, hosts, strict=True) if host == rank) for rank in range(3))
        for hosts in product(range(3), repeat=len(blocks))
    )
    assert plan.pairs_of_ranks.max() <= best + max(blocks)


def test_work_moves_only_where_ranks_differ():
    shape = MicroBatchSetShape(dp=2, cp=2, seq_len=64)
    equal = place_tokens("samples", shape, document_bounds(shape, [[0], [0]]))
    home = plan_attention(equal)
    assert tasks_of(plan_attention(equal, tolerance=0.0, block=4)) == tasks_of(home)
    assert home.exchange().queries.num_rows == 0
    # A whole sample as one document against a sample of documents of 4 tokens.
    unequal = place_tokens("samples", shape, document_bounds(shape, [[0], list(range(0, 64, 4))]))
    plan = plan_attention(unequal, tolerance=0.1, block=4)
    assert max_over_mean(plan_attention(unequal)) > 1.8
    assert max_over_mean(plan) < 1.25
    assert plan.exchange().queries.num_rows > 0
    # Pools of a sample's ranks cannot help each other.
    pooled = plan_attention(unequal, tolerance=0.1, block=4, pool=2)
    assert tasks_of(pooled) == tasks_of(plan_attention(unequal))


def test_rows_prefer_a_rank_of_their_node():
    shape = MicroBatchSetShape(dp=4, cp=1, seq_len=64)
    short = list(range(0, 64, 4))
    placement = place_tokens("samples", shape, document_bounds(shape, [[0], short, short, short]))
    moved = {}
    for name, nodes in {"none": None, "pairs": [0, 1, 1, 0]}.items():
        plan = plan_attention(placement, tolerance=1.0, block=4, nodes=nodes)
        moved[name] = {task.compute_rank for task in tasks_of(plan) if task.document.sample == 0} - {0}
    assert 1 in moved["none"]
    assert moved["pairs"] - {3} < moved["none"] | {1, 2}
    assert 3 in moved["pairs"]


def test_attention_of_documents_sends_less_than_an_all_gather():
    shape = MicroBatchSetShape(dp=1, cp=4, seq_len=256)
    bounds_N = document_bounds(shape, [[0, 10, 100, 120, 180]])
    all_gathered = 3 * shape.seq_len
    for kind in ("samples", "documents"):
        assert plan_attention(place_tokens(kind, shape, bounds_N)).exchange().keys.num_rows < all_gathered


@pytest.fixture(scope="module")
def large_set() -> tuple[MicroBatchSetShape, Integers]:
    """10,000 documents in samples of 131,072 tokens over 1,024 ranks, with the lengths of FlexSP's Wikipedia."""
    shape = MicroBatchSetShape(dp=128, cp=8, seq_len=131072)
    rng = np.random.default_rng(0)
    starts = []
    for _ in range(shape.num_samples):
        ends = np.cumsum(np.ceil(rng.lognormal(6.63, 1.258, 500)).astype(np.int64))
        starts.append([0, *ends[ends < shape.seq_len].tolist()])
    return shape, document_bounds(shape, starts)


@pytest.mark.parametrize("kind", ["samples", "documents", "balanced"])
def test_a_plan_of_a_thousand_ranks_is_balanced_and_small(large_set, kind):
    shape, bounds_N = large_set
    assert len(bounds_N) > 10_000
    placement = place_tokens(kind, shape, bounds_N, 128)
    assert has_each_token_once(placement)
    home = plan_attention(placement)
    plan = plan_attention(placement, tolerance=0.02)
    assert max_over_mean(home) > 3
    assert max_over_mean(plan) < 1.1
    # Every move empties a task, satisfies a source or fills a destination: time is linear in tasks and ranks.
    assert len(plan.compute_ranks_K) - len(home.compute_ranks_K) < 2 * shape.num_ranks
    assert len(home.compute_ranks_K) <= len(placement.ranks_M) + len(bounds_N) - 1
