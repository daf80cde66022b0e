"""Muon under every kind of sharding equals plain Muon on whole matrices: three steps, float64."""

import pytest

from moefold.config.schema import Config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.verify.recipes import LATENT, tiny, without_mapping

pytestmark = pytest.mark.parity

STEPS = 3
KINDS = {"optimizer": "muon", "global_batch_size": 4}
MODEL = {"layer_pattern": "DM", "shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True}
FAST = [
    {"world_size": 4, "tp": 2, "ep": 2, "etp": 2, "zero": 1},
    {"world_size": 4, "cp": 2, "ep": 4, "zero": 3},
    {"world_size": 4, "tp": 2, "pp": 2, "etp": 2, "zero": 2},
]
WIDE = [
    {"world_size": 1},
    {"world_size": 2, "zero": 0},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 4, "zero": 0, "ep": 2},
    {"world_size": 4, "zero": 3},
    {"world_size": 4, "tp": 4, "etp": 4},
    {"world_size": 4, "tp": 2, "cp": 2, "etp": 2, "zero": 0},
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 2},
    {"world_size": 8, "tp": 2, "ep": 2, "etp": 2, "zero": 3, "order": "pp-tp-cp-dp"},
    {"world_size": 8, "tp": 4, "pp": 2, "ep": 2, "zero": 3, "schedule": "interleaved", "virtual_stages": 2},
]


def _assert_equal(pool, cfg: Config) -> None:
    oracle = run_oracle(without_mapping(cfg), STEPS)
    worst = compare_records(oracle, pool.run(cfg.parallel.world_size, run_distributed, cfg, STEPS))[0]
    assert worst.error <= 1e-9, worst


@pytest.mark.parametrize("mapping", [*FAST, *(pytest.param(m, marks=pytest.mark.slow) for m in WIDE)], ids=str)
def test_sharded_muon_equals_plain_muon(pool, mapping):
    _assert_equal(pool, tiny(model=MODEL, train=KINDS, **mapping))


LATENT_MODEL = LATENT | {"mtp_layers": 1}


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (LATENT_MODEL, ()),
        pytest.param({"moe_bias": True, "qkv_bias": True, "router_bias": True}, (), marks=pytest.mark.slow),
        pytest.param({"num_experts": 2}, (), marks=pytest.mark.slow),
        pytest.param({"tie_embeddings": True}, ("experts", "router"), marks=pytest.mark.slow),
    ],
    ids=["latent", "biases", "few experts", "some groups"],
)
def test_every_kind_of_matrix(pool, model, groups):
    train = {**KINDS, **({"muon_groups": groups} if groups else {})}
    zero = 2 if model.get("num_experts") else 3
    mapping = {} if zero == 2 else {"tp": 2, "ep": 2}
    _assert_equal(pool, tiny(model=model, train=train, world_size=4, zero=zero, **mapping))


def _run_with_shards_for_matrices(cfg: Config) -> DistributedRecord:
    """As if each rank made what it holds of a matrix orthogonal by itself."""
    from moefold.optim import muon

    def by_shards(self, source, work, sink):
        for name, parameter in self.of_rank.items():
            values = parameter.to_local()
            for place in range(len(values) if values.dim() == 3 else 1):
                if values.numel():
                    sink(muon.MatrixKey(name), place, work(muon.MatrixKey(name), source(muon.MatrixKey(name), place)))

    def remember(self, group, tensors):
        self.of_rank = tensors

    muon.MatrixRedistributor.__init__, muon.MatrixRedistributor.run = remember, by_shards
    return run_distributed(cfg, 1)


def test_shards_made_orthogonal_by_themselves_are_noticed(pool):
    cfg = tiny(model=MODEL, train=KINDS, world_size=2, tp=2, ep=2)
    oracle = run_oracle(without_mapping(cfg), 1)
    found = compare_records(oracle, pool.run(2, _run_with_shards_for_matrices, cfg))
    errors = {difference.name: difference.error for difference in found}
    assert errors["weights layers.0.attention.wq"] > 1e-3
    assert errors["weights layers.0.ffn.w_down"] > 1e-3
    # Experts are whole on their ranks.
    assert errors["weights layers.1.ffn.experts.w_up"] < 1e-9
