"""Models whose experts are sent rows in 8 bits equal the oracle, which rounds by the definition of the format."""

from dataclasses import replace

import pytest

from moefold.config.schema import Config
from moefold.verify.compare import compare_records
from moefold.verify.distributed_run import run_distributed
from tests.verify.recipes import tiny, without_mapping
from tests.verify.test_parity import STEPS, TOLERANCE, _cached_oracle, _name, assert_equals_oracle

pytestmark = pytest.mark.parity

NARROW = {"dispatch_precision": "fp8-blockwise"}
TWO_BLOCKS = {"hidden_size": 144}
"""One of 128 and one that is cut off."""


def _recipe(moe: dict[str, object] | None = None, train: dict[str, object] | None = None, **parallel: object) -> Config:
    return tiny(TWO_BLOCKS, moe=NARROW | (moe or {}), train=train, **parallel)


@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 1},
        {"world_size": 2, "ep": 2},
        {"world_size": 2, "tp": 2, "etp": 2},
        {"world_size": 4, "tp": 2, "ep": 2, "etp": 2},
        {"world_size": 4, "tp": 2, "cp": 2, "ep": 4, "dispatcher": "allgather"},
        {"world_size": 4, "pp": 2, "ep": 2, "overlap_experts": True},
    ],
    ids=_name,
)
def test_every_mapping_equals_the_oracle(pool, mapping):
    assert_equals_oracle(pool, _recipe(**mapping))


@pytest.mark.parametrize(
    ("moe", "train"),
    [
        ({"choice": "skewed"}, {}),
        ({"weight_in_expert": True}, {"recompute": ("moe",)}),
    ],
    ids=["loans", "weights and recompute"],
)
def test_least_loaded_dispatch_equals_the_oracle(pool, moe, train):
    moe = {"llep_min_tokens": 1} | moe
    assert_equals_oracle(pool, _recipe(moe, train, world_size=2, ep=2, dispatcher="leastloaded"))


def test_padded_rows_equal_the_oracle(pool):
    padded = {"capacity_factor": 1.0, "drop_scope": "sub_sequence", "pad_to_capacity": True}
    assert_equals_oracle(pool, _recipe(padded, world_size=4, cp=2, ep=2, etp=2))


def test_an_oracle_that_does_not_round_is_another_one(pool):
    cfg = _recipe(world_size=2, ep=2)
    exact = without_mapping(replace(cfg, moe=replace(cfg.moe, dispatch_precision="dtype")))
    ranks = pool.run(2, run_distributed, cfg, STEPS)
    assert compare_records(_cached_oracle(exact), ranks)[0].error > 1e6 * TOLERANCE
