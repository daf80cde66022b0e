"""A global batch that dp does not divide: the last ranks have padding, and every mapping equals the oracle."""

import numpy as np
import pytest

from moefold.config.schema import Config
from moefold.data.dataset import ProgramData
from moefold.verify.compare import compare_records
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.slow import slow
from tests.verify.oracle import STEPS, assert_all_equal_oracle, oracle_of
from tests.verify.padded_samples import DATA
from tests.verify.planned_cases import DOCUMENTS
from tests.verify.recipes import LATENT, tiny
from tests.verify.routing_cases import KINDS
from tests.verify.sparse_cases import SPARSE

pytestmark = pytest.mark.parity


def _recipe(mapping: dict[str, object], kind: str = "", **settings: object) -> Config:
    model, moe = KINDS.get(kind, ({}, {}))
    return tiny(**({"model": model, "moe": moe} | {"elastic": True} | mapping | settings))


def _compare(pool, cfgs: dict[str, Config], data: ProgramData | None = None) -> None:
    assert all(cfg.train.num_padding_micro_batches(cfg.parallel.dp) > 0 for cfg in cfgs.values())
    assert_all_equal_oracle(pool, cfgs, data)


FAST_KINDS = ("deepseek-v3", "sinkhorn")
MAPPINGS = {
    "dp 3": {"world_size": 3, "train": {"global_batch_size": 4}},
    "dp 3, two samples": {"world_size": 3, "zero": 1, "train": {"micro_batch_size": 2, "global_batch_size": 8}},
    "dp 5, two ranks of padding alone": {"world_size": 5, "zero": 3, "train": {"global_batch_size": 6}},
    "dp 7": {"world_size": 7, "zero": 2, "train": {"global_batch_size": 8}},
    "ep 2, edp 3": {"world_size": 6, "ep": 2, "zero": 2, "train": {"global_batch_size": 8}},
    "cp 2": {"world_size": 6, "cp": 2, "ep": 2, "zero": 3, "train": {"global_batch_size": 4}},
    "tp 2, etp 2": {"world_size": 6, "tp": 2, "etp": 2, "zero": 1, "train": {"global_batch_size": 5}},
    "pp 2": {"world_size": 6, "pp": 2, "zero": 1, "train": {"global_batch_size": 8}},
}


@pytest.mark.parametrize("mapping", ["dp 3", *slow((name,) for name in MAPPINGS if name != "dp 3")])
@pytest.mark.parametrize("kinds", [FAST_KINDS, *slow([(tuple(KINDS),)])], ids=["some", "all"])
def test_every_kind_of_routing(pool, mapping, kinds):
    _compare(pool, {kind: _recipe(MAPPINGS[mapping], kind) for kind in kinds})


WAYS: dict[str, dict[str, object]] = {
    "least loaded": {
        "dispatcher": "leastloaded",
        "moe": {"llep_min_tokens": 1, "llep_threshold": 1.0, "llep_capacity": 1.0},
    },
    "dedup": {"dispatcher": "dedup_alltoall"},
    "all-gather": {"dispatcher": "allgather"},
    "overlap": {"overlap_experts": True},
    "zero experts and drops": {
        "model": {"ffn.moe.zero_experts": 3, "ffn.moe.router.expert_bias": True},
        "moe": {"capacity_factor": 0.5},
    },
    "latent attention, mtp": {"model": {**LATENT, "mtp_layers": 2}},
    "recompute": {"train": {"recompute": ("moe",)}},
    "muon": {"train": {"optimizer": "muon"}},
    "indexers": {"model": SPARSE},
    "checked": {"faults": {"check_dispatch": True, "replica_check_every": 1}},
}


@pytest.mark.parametrize("way", slow((way,) for way in WAYS))
def test_every_way_of_training(pool, way):
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in WAYS[way].items()}
    train = {"global_batch_size": 8} | settings.pop("train", {})
    _compare(pool, {way: _recipe({"world_size": 6, "ep": 2, "zero": 1, "train": train}, **settings)})


@pytest.mark.parametrize("mapping", [*slow((name,) for name in ("dp 3, two samples", "cp 2", "pp 2"))])
def test_documents_with_prompts_and_padding_of_their_own(pool, mapping):
    cfgs = {
        kind: _recipe(MAPPINGS[mapping], kind, data={"kind": "program"}, **extra)
        for kind, extra in (("deepseek-v3", {}), ("sinkhorn", {}), ("", {"model": {"mtp_layers": 2}}))
    }
    _compare(pool, cfgs, DATA)


PLACED = {"world_size": 6, "cp": 2, "context": "planned", "data": DOCUMENTS, "train": {"global_batch_size": 4}}
HOSTS = {"attention_block": 4, "attention_hosts": "balanced"}


@pytest.mark.parametrize("planned", slow(((HOSTS,), ({"placement": "documents"},), ({"placement": "balanced"},))))
def test_planned_attention(pool, planned):
    _compare(pool, {str(planned): _recipe(PLACED | planned, "deepseek-v3")})


def _run_with_routed_padding(cfg: Config) -> DistributedRecord:
    """As if the filling samples were samples of weight 0 that are routed."""
    from moefold.data.sample import SampleBatch

    SampleBatch.pad_out = lambda self, is_unused: self
    return run_distributed(cfg, STEPS)


def _run_with_weight(cfg: Config) -> DistributedRecord:
    """As if the filling samples counted in the loss."""
    from moefold.train.batch_sharding import BatchSharder

    BatchSharder._read_weighted_samples = _without_mask(BatchSharder._read_weighted_samples)
    return run_distributed(cfg, STEPS)


def _without_mask(read):
    def changed(self, samples, num_taken):
        found, weights = read(self, samples, num_taken)
        return found, np.ones_like(weights)

    return changed


@pytest.mark.parametrize("run", [_run_with_routed_padding, *slow([(_run_with_weight,)])])
def test_padding_that_counts_is_noticed(fresh_pool, run):
    cfg = _recipe(MAPPINGS["dp 3"])
    worst = compare_records(oracle_of(cfg), fresh_pool.run(3, run, cfg))[0]
    assert worst.error > 1e-4
