"""Test that padding is not routed and counts nowhere: every mapping equals the oracle, which leaves it out."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from moefold.config.schema import Config
from moefold.verify.compare import compare_records
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.slow import slow
from tests.verify.oracle import STEPS, TOLERANCE, assert_all_equal_oracle, oracle_of
from tests.verify.padded_samples import DATA
from tests.verify.recipes import tiny
from tests.verify.routing_cases import KINDS, MAPPINGS
from tests.verify.sparse_cases import SPARSE, SPARSE_LATENT

pytestmark = pytest.mark.parity


def _recipe(mapping: dict[str, object], kind: str = "", **settings: object) -> Config:
    model, moe = KINDS.get(kind, ({}, {}))
    stages = int(mapping.get("pp", 1))
    dp = int(mapping["world_size"]) // (stages * int(mapping.get("tp", 1)) * int(mapping.get("cp", 1)))
    sizes = {"micro_batch_size": 2, "global_batch_size": max(8, 2 * dp * stages)}
    return tiny(model=model, moe=moe, train=sizes, data={"kind": "program"}, **(mapping | settings))


def _run(cfg: Config) -> DistributedRecord:
    return run_distributed(cfg, STEPS, data=DATA)


FAST_KINDS = ("deepseek-v3", "sinkhorn", "quantile", "drop on each rank")


@pytest.mark.parametrize(
    ("mapping", "kinds"),
    [
        ({"world_size": 2, "cp": 2, "ep": 2}, FAST_KINDS),
        *slow((mapping, tuple(KINDS)[part::3]) for mapping in ({"world_size": 2}, *MAPPINGS) for part in range(3)),
    ],
)
def test_every_kind_of_routing(pool, mapping, kinds):
    mapping = {"world_size": 8} | mapping
    assert_all_equal_oracle(pool, {kind: _recipe(mapping, kind) for kind in kinds}, DATA)


@pytest.mark.parametrize(
    ("mapping", "model", "stage"),
    [
        ({"world_size": 2, "tp": 2}, SPARSE, "sparse"),
        *slow(
            [
                ({"world_size": 2, "tp": 2}, SPARSE, "warmup"),
                ({"world_size": 4, "cp": 2, "ep": 2, "context": "allgather"}, SPARSE_LATENT, "sparse"),
                ({"world_size": 4, "cp": 2, "pp": 2, "context": "allgather"}, SPARSE_LATENT, "warmup"),
            ]
        ),
    ],
)
def test_indexers_do_not_learn_from_padding(pool, mapping, model, stage):
    train = {"micro_batch_size": 2, "global_batch_size": 8, "indexer_stage": stage}
    cfg = tiny(model=model, train=train, data={"kind": "program"}, **mapping)
    worst = compare_records(oracle_of(cfg, data=DATA), pool.run(mapping["world_size"], _run, cfg))[0]
    assert worst.error <= TOLERANCE, worst


LOAN = {"llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0}
WAYS: dict[str, dict[str, object]] = {
    "least loaded": {"dispatcher": "leastloaded", "moe": LOAN},
    "dedup": {"dispatcher": "dedup_alltoall"},
    "all-gather": {"dispatcher": "allgather"},
    "fp8": {"moe": {"dispatch_precision": "fp8-blockwise"}, "model": {"hidden_size": 128}},
    "overlap": {"overlap_experts": True},
    "weights early": {"moe": {"weight_in_expert": True}},
    "zero experts": {"model": {"ffn.moe.zero_experts": 3, "ffn.moe.router.softmax": "pre"}},
    "zero experts and drops": {
        "model": {"ffn.moe.zero_experts": 3, "ffn.moe.router.expert_bias": True},
        "moe": {"capacity_factor": 0.5},
    },
    "mtp": {"model": {"mtp_layers": 2}},
    "recompute": {"train": {"recompute": ("moe",)}},
    "checked dispatch": {"faults": {"check_dispatch": True}},
}


@pytest.mark.parametrize("way", [*slow((way,) for way in WAYS)])
def test_every_way_of_dispatch(pool, way):
    mapping = {"world_size": 4, "cp": 2, "ep": 4}
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in WAYS[way].items()}
    sizes = {"micro_batch_size": 2, "global_batch_size": 16}
    train = sizes | settings.pop("train", {})
    cfg = tiny(train=train, data={"kind": "program"}, **(mapping | settings))
    worst = compare_records(oracle_of(cfg, data=DATA), pool.run(4, _run, cfg))[0]
    assert worst.error <= TOLERANCE, worst


def _run_broken(part: str, cfg: Config) -> DistributedRecord:
    """As if a rank took padding for tokens: in the losses, in the dispatch and the counts, or on one rank of cp."""
    from moefold.data.sample import SampleBatch
    from moefold.model.moe.dispatch import ShardedMicroBatch
    from moefold.model.moe.token_group import TokenPositions

    match part:
        case "rows":
            TokenPositions.is_token = lambda self: None
        case "ranks":
            local_rows = ShardedMicroBatch.local_rows
            ShardedMicroBatch.local_rows = lambda self, column: local_rows(self, column).roll(1)
        case "counts":
            SampleBatch.is_token = lambda self: np.ones(self.inputs.shape, dtype=np.bool_)
    return _run(cfg)


@pytest.mark.parametrize(("part", "named"), [("rows", "load"), *slow([("ranks", "aux_loss"), ("counts", "z_loss")])])
def test_padding_that_counts_is_noticed(fresh_pool, part, named):
    cfg = _recipe({"world_size": 2, "cp": 2, "ep": 2})
    cfg = replace(cfg, train=replace(cfg.train, global_batch_size=4))
    found = compare_records(oracle_of(cfg, data=DATA), fresh_pool.run(2, partial(_run_broken, part), cfg))
    assert any(named in error.name and error.error > 1e-6 for error in found)
