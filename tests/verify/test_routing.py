"""Every router, loss and drop rule equals the oracle: values, gradients, biases, metrics."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.validate.config import check_config
from moefold.verify.compare import compare_records
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.slow import slow
from tests.verify.oracle import STEPS, TOLERANCE, assert_all_equal_oracle, oracle_of
from tests.verify.recipes import tiny
from tests.verify.routing_cases import KINDS, MAPPINGS

pytestmark = pytest.mark.parity

RECOMPUTED = (
    *("global batch", "last global batch", "deepseek-v3", "quantile", "jitter"),
    *("drop positions", "drop on each rank"),
)
"""Kinds whose second forward pass could count, draw or drop otherwise than the first one."""


def _recipe(kind: str, mapping: dict[str, object]) -> Config:
    model, moe = KINDS[kind]
    # Two samples in a micro-batch tell a loss of each sample from one of the micro-batch, and queues of drops that go
    # by position from those that go by sample.
    pairs = moe.get("aux_kind") == "sequence" or "capacity_factor" in moe
    shards = int(mapping.get("tp", 1)) * int(mapping.get("cp", 1)) * int(mapping.get("pp", 1))
    dp = int(mapping["world_size"]) // shards
    # Two micro-batches on a rank, more where stages overlap.
    samples = 16 if pairs and dp > 2 else 8 if (pairs and shards > 2) or dp > 1 else 4 if pairs or shards > 2 else 2
    train = {"micro_batch_size": 2 if pairs else 1, "global_batch_size": samples}
    return tiny(model=model, moe=moe, train=train, **mapping)


@pytest.mark.parametrize(
    "mapping",
    [MAPPINGS[0], *slow((mapping,) for mapping in MAPPINGS[1:])],
)
def test_every_kind_of_routing(pool, mapping):
    stages = int(mapping.get("pp", 1)) * int(mapping.get("virtual_stages", 1))
    # Oracles are shared among mappings of equally many layers.
    cfgs = {kind: _recipe(kind, {"world_size": 8} | mapping) for kind in KINDS}
    assert {cfg.model.num_layers for cfg in cfgs.values()} == {max(2, stages)}
    assert_all_equal_oracle(pool, cfgs)


def _recomputing(cfg: Config, part: str) -> Config:
    """Return the recipe with a part of each layer, and with it the router, computed once more in the backward pass."""
    cfg = replace(cfg, train=replace(cfg.train, recompute=(part,)))
    check_config(cfg)
    return cfg


@pytest.mark.parametrize(
    ("kinds", "mapping", "part"),
    [
        (("global batch", "jitter"), {"world_size": 2, "cp": 2, "etp": 2}, "moe"),
        *slow(
            [
                (RECOMPUTED, {"world_size": 2, "cp": 2, "etp": 2}, "moe"),
                (RECOMPUTED, {"world_size": 4, "pp": 2, "cp": 2, "etp": 2}, "moe"),
                (RECOMPUTED, {"world_size": 8, "tp": 2, "cp": 2, "ep": 4, "etp": 2}, "layer"),
            ]
        ),
    ],
    ids=["two ranks", "two ranks, more kinds", "pipeline", "whole layers of eight ranks"],
)
def test_recomputed_routing_equals_the_oracle(pool, kinds, mapping, part):
    assert_all_equal_oracle(pool, {kind: _recomputing(_recipe(kind, mapping), part) for kind in kinds})


@pytest.mark.parametrize("mapping", [{"ep": 2}, *slow([({"pp": 2, "ep": 2, "zero": 3},)])])
def test_five_bias_updates_equal_hand_written_ones(pool, mapping):
    """Two data-parallel ranks, two micro-batches each, recomputed: counts cover the global batch, once."""
    rate = 0.05
    model = {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True, "layers": 2}
    cfg = tiny(
        model=model,
        moe={"bias_update_rate": rate, "aux_loss": 0.0},
        train={"global_batch_size": 4},
        world_size=2 * int(mapping.get("pp", 1)),
        **mapping,
    )
    assert (cfg.parallel.dp, cfg.num_micro_batches) == (2, 2)
    cfg = _recomputing(cfg, "moe")
    ranks = pool.run(cfg.parallel.world_size, run_distributed, cfg, 5)
    steps = ranks[0].steps
    copies = 4 * cfg.train.seq_len * cfg.model.ffn.moe.top_k
    final = {name: w for rank in ranks for name, w in rank.weights.items() if name.endswith("expert_bias")}
    for layer in range(2):
        bias = [0.0] * cfg.model.ffn.moe.num_experts
        for step in steps:
            assert (step.moe_layers[layer].bias_min, step.moe_layers[layer].bias_max) == pytest.approx(
                (min(bias), max(bias)), abs=1e-6
            )
            counts = step.expert_counts[layer].tolist()
            assert sum(counts) == copies
            mean = copies / cfg.model.ffn.moe.num_experts
            bias = [b + rate * ((count < mean) - (count > mean)) for b, count in zip(bias, counts, strict=True)]
        assert max(bias) > rate
        assert final[f"layers.{layer}.ffn.router.expert_bias"].tolist() == pytest.approx(bias, abs=1e-6)
    worst = compare_records(oracle_of(cfg, 5), ranks)[0]
    assert worst.error <= TOLERANCE, worst


def _aux_and_norm(pool, cfg: Config) -> tuple[float, float]:
    step = pool.run(cfg.parallel.world_size, run_distributed, cfg, 1)[0].steps[0]
    return step.aux_loss, step.grad_norm


@pytest.mark.parametrize(
    "mappings",
    [
        [{"world_size": 4, "tp": 2, "ep": 4}],
        *slow([([{"world_size": 4, "cp": 2, "etp": 2}, {"world_size": 4, "pp": 2}],)]),
    ],
)
def test_the_global_batch_loss_depends_on_dp_and_on_no_other_axis(pool, mappings):
    """dp says which micro-batches go through together, so how much of the batch the first of them know."""

    def recipe(**mapping: int) -> Config:
        moe = {"aux_kind": "global_batch", "aux_loss": 0.5}
        return tiny(moe=moe, train={"global_batch_size": 4}, **mapping)

    alone, *same = [_aux_and_norm(pool, recipe(**mapping)) for mapping in ({"world_size": 2}, *mappings)]
    assert same == [pytest.approx(alone, rel=TOLERANCE)] * len(mappings)
    # One micro-batch after another, each with the counts of those before it.
    other = _aux_and_norm(pool, recipe(world_size=1))
    assert abs(other[0] - alone[0]) > 1e-6


@pytest.mark.parametrize(
    "cuts",
    [
        [(4, {}), (8, {"world_size": 2, "cp": 2})],
        *slow([([(1, {"world_size": 4, "tp": 2, "ep": 4}), (2, {"world_size": 4, "pp": 2, "etp": 2})],)]),
    ],
)
def test_the_last_loss_depends_on_no_axis_and_no_micro_batch_size(pool, cuts):
    def steps(size: int, **mapping: int) -> list[tuple[float, float]]:
        moe = {"aux_kind": "last_global_batch", "aux_loss": 0.5}
        cfg = tiny(moe=moe, train={"global_batch_size": 8, "micro_batch_size": size}, **mapping)
        record = pool.run(cfg.parallel.world_size, run_distributed, cfg, 3)[0]
        return [(step.aux_loss, step.grad_norm) for step in record.steps]

    one = steps(1)
    # An even load costs its coefficient in each of the two layers; later steps look back at the routed tokens.
    assert one[0][0] == pytest.approx(2 * 0.5, rel=TOLERANCE)
    assert all(aux > 2 * 0.5 + 1e-3 for aux, _ in one[1:])
    for size, mapping in cuts:
        assert steps(size, **mapping) == [pytest.approx(step, rel=TOLERANCE) for step in one]


def test_the_loss_of_each_sample_does_not_depend_on_the_cut_into_micro_batches(pool):
    def recipe(size: int, kind: str) -> Config:
        train = {"global_batch_size": 8, "micro_batch_size": size}
        return tiny(moe={"aux_kind": kind, "aux_loss": 0.5}, train=train)

    one, four = (_aux_and_norm(pool, recipe(size, "sequence")) for size in (1, 4))
    assert four == pytest.approx(one, rel=TOLERANCE)
    of_micro_batch = [_aux_and_norm(pool, recipe(size, "micro_batch"))[0] for size in (1, 4)]
    assert of_micro_batch[0] == pytest.approx(one[0], rel=TOLERANCE)
    assert abs(of_micro_batch[1] - one[0]) > 1e-6


def _run_with_counts_of_one_scope(cfg: Config) -> DistributedRecord:
    """As if the global-batch loss knew only the micro-batch of its own data-parallel rank."""
    from moefold.model.moe.dispatch import ShardedMicroBatch

    ShardedMicroBatch.sum_over_data_parallel = ShardedMicroBatch.sum
    return run_distributed(cfg, STEPS)


def _run_with_shifted_noise(cfg: Config) -> DistributedRecord:
    """As if the noise of a token depended on its place on the rank."""
    from moefold.model.moe import router

    whole = router.uniform_noise
    router.uniform_noise = lambda seed, step, samples, positions, width, **how: whole(
        seed, step, samples, positions - positions[0], width, **how
    )
    return run_distributed(cfg, STEPS)


@pytest.mark.parametrize(
    ("kind", "mapping", "broken", "named"),
    [
        ("global batch", {"ep": 2}, _run_with_counts_of_one_scope, "aux_loss"),
        ("jitter", {"tp": 2}, _run_with_shifted_noise, "router"),
    ],
)
def test_a_broken_rule_is_noticed_and_named(fresh_pool, kind, mapping, broken, named):
    cfg = _recipe(kind, {"world_size": 2, **mapping})
    found = [d for d in compare_records(oracle_of(cfg), fresh_pool.run(2, broken, cfg)) if d.error > 1e-6]
    assert any(named in d.name for d in found), found[:5]
