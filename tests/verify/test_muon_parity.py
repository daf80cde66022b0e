"""Muon under every kind of sharding equals plain Muon on whole matrices: five steps, float64."""

import pytest

from moefold.config.schema import Config
from moefold.verify.compare import differences, run_oracle
from moefold.verify.mapping import run_mapping
from tests.verify.recipes import tiny, without_mapping

pytestmark = pytest.mark.parity

STEPS = 5
KINDS = {"optimizer": "muon", "global_batch_size": 8}
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
    worst = differences(oracle, pool.run(cfg.parallel.world_size, run_mapping, cfg, STEPS))[0]
    assert worst.error <= 1e-9, worst


@pytest.mark.parametrize("mapping", [*FAST, *(pytest.param(m, marks=pytest.mark.slow) for m in WIDE)], ids=str)
def test_sharded_muon_equals_plain_muon(pool, mapping):
    _assert_equal(pool, tiny(model=MODEL, train=KINDS, **mapping))
