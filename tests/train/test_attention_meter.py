"""Metrics of planned attention: balance, rows that moved and bytes, over all ranks of a step."""

from dataclasses import replace

import pytest

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.topology.attention_plan import plan_attention
from moefold.topology.token_placement import MicroBatchSetShape, document_bounds, place_tokens
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups
from tests.verify.recipes import tiny

TRAIN = {"global_batch_size": 8, "micro_batch_size": 2}


def _recipe(layers: int = 2, **parallel: object) -> Config:
    model = {"vocab_size": 8, "layers": layers}
    return tiny(model=model, train=TRAIN, data={"document_end": 2}, world_size=4, cp=2, context="planned", **parallel)


def _step(cfg: Config) -> tuple[tuple[float, ...], list[tuple[tuple[int, ...], ...]]]:
    """Return the metrics of two steps (the second must not contain the first), and the bounds of its documents."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    training.run(sharder.batch(0), 1)
    batch = sharder.batch(8)
    result = training.run(batch, 2)
    return tuple(result.attention.values()), [bounds.of_samples for bounds in batch.document_bounds]


@pytest.mark.parity
def test_metrics_equal_the_plans(pool):
    hosts = {"attention_hosts": "balanced", "attention_tolerance": 0.0, "attention_block": 1}
    ranks = pool.run(4, _step, _recipe(ep=4, **hosts))
    metrics = ranks[0][0]
    max_over_mean, moved_rows, sent_bytes = metrics
    assert all(rank[0] == metrics for rank in ranks)
    shape = MicroBatchSetShape(dp=2, cp=2, micro_batch_size=2, seq_len=16)
    busiest, mean, moved, num_bytes = 0, 0.0, 0, 0
    # The samples of both data-parallel ranks, in two rounds.
    for of_first, of_second in zip(ranks[0][1], ranks[2][1], strict=True):
        plan = plan_attention(
            place_tokens("samples", shape, document_bounds(shape, [*of_first, *of_second])), tolerance=0.0, block=1
        )
        busiest += int(plan.pairs_of_ranks.max())
        mean += plan.pairs_of_ranks.mean()
        exchange = plan.exchange()
        moved += exchange.queries.num_rows
        # Four query heads and two key/value heads of four numbers in float64, six and six rows of them.
        num_bytes += 8 * (exchange.queries.num_rows * 6 * 16 + exchange.keys.num_rows * 6 * 8)
    assert moved > 0
    assert max_over_mean == pytest.approx(busiest / mean)
    assert moved_rows == 2 * moved
    assert sent_bytes == 2 * num_bytes


@pytest.mark.parity
def test_attention_at_home_moves_nothing(pool):
    max_over_mean, moved_rows, sent_bytes = pool.run(4, _step, _recipe())[0][0]
    assert moved_rows == 0
    assert max_over_mean > 1
    assert sent_bytes > 0


# The second stage of each rank runs its micro-batches in another order than the first.
SWAPPED = """0F0,0F1,0F2,0F3,2F1,2F0,2F3,2F2,2B1,2B0,2B3,2B2,0B1,0B0,0B3,0B2
1F0,1F1,1F2,1F3,3F1,3B1,3F0,3B0,3F3,3B3,3F2,3B2,1B1,1B0,1B3,1B2
"""


@pytest.mark.parity
def test_the_balance_of_a_round_does_not_depend_on_the_order_of_micro_batches(pool, tmp_path):
    (tmp_path / "swapped.csv").write_text(SWAPPED)
    swapped = make_part("schedule", "csv", path=str(tmp_path / "swapped.csv"))
    base = _recipe(layers=4, pp=2, virtual_stages=2, schedule="interleaved")
    # In these samples now one, now the other rank has more work.
    base = replace(base, run=replace(base.run, seed=1))
    other = replace(base, parallel=replace(base.parallel, schedule=swapped))
    (expected, *_), (found, *_) = (pool.run(4, _step, cfg) for cfg in (base, other))
    assert found[0] == expected[0]


@pytest.mark.parity
def test_other_attention_has_no_metrics(pool):
    assert pool.run(1, _step, tiny(data={"document_end": 2}))[0][0] == ()
