"""gpt-oss under every axis: sinks, windows, biases and the clamped gate equal the float64 oracle."""

from dataclasses import replace

import pytest

from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from moefold.verify.shrink import MAX_WINDOW, shrink
from tests.verify.recipes import tiny, without_mapping
from tests.verify.test_parity import assert_equals_oracle

MODEL = {
    "qkv_bias": True,
    "attention_output_bias": True,
    "attention_sinks": True,
    "attention_pattern": "WF",
    "sliding_window": 5,
    "moe_bias": True,
    "moe_activation": "clamped_swiglu",
    # Low, so that much is clamped.
    "swiglu_limit": 0.3,
    "router_bias": True,
    "rope_scaling": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_seq_len": 8,
    "rope_truncate": False,
    "rope_theta": 1000.0,
}


def _recipe(documents: bool = False, moe: dict[str, object] | None = None, **mapping: object) -> Config:
    train = {"micro_batch_size": 2, "global_batch_size": 8}
    cfg = tiny(model=MODEL | {"vocab_size": 8}, moe=moe, train=train, **mapping)
    return replace(cfg, data=replace(cfg.data, document_end=2)) if documents else cfg


MAPPINGS = [
    {"world_size": 1},
    {"world_size": 2, "tp": 2},
    {"world_size": 4, "tp": 4, "ep": 2},
    {"world_size": 2, "cp": 2},
    {"world_size": 2, "cp": 2, "context": "allgather"},
    {"world_size": 2, "cp": 2, "context": "ulysses"},
    {"world_size": 2, "pp": 2},
    {"world_size": 2, "ep": 2, "dispatcher": "allgather"},
    {"world_size": 2, "etp": 2},
    {"world_size": 2, "etp": 2, "dispatcher": "allgather"},
    {"world_size": 2, "zero": 3},
]


@pytest.mark.parity
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_every_axis(pool, mapping):
    assert_equals_oracle(pool, _recipe(**mapping))


@pytest.mark.parity
@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses"])
def test_windows_sinks_and_documents_under_a_fold(pool, context):
    cfg = _recipe(documents=True, world_size=4, tp=2, cp=2, ep=2, etp=2, context=context)
    assert_equals_oracle(pool, cfg)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("mapping", "weighs_early"),
    [({"ep": 4}, False), ({"ep": 2, "etp": 2}, False), ({"ep": 2, "etp": 2}, True)],
    ids=str,
)
def test_borrowed_experts_bring_their_biases(pool, mapping, weighs_early):
    moe = {
        "weight_in_expert": weighs_early,
        "choice": "skewed",
        "llep_min_tokens": 1,
        "llep_threshold": 1.0,
        "llep_capacity": 1.0,
    }
    assert_equals_oracle(pool, _recipe(moe=moe, world_size=4, dispatcher="leastloaded", **mapping))


@pytest.mark.parity
def test_dropping_with_padding(pool):
    # By position: equal tokens in equal windows have equal scores, up to rounding.
    moe = {"capacity_factor": 0.75, "pad_to_capacity": True, "drop_policy": "position"}
    assert_equals_oracle(pool, _recipe(moe=moe, world_size=2, ep=2))


FOLDS = [
    {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"tp": 2, "cp": 4, "ep": 4, "etp": 2},
    {"tp": 4, "pp": 2, "ep": 2, "etp": 2, "zero": 3},
    {"cp": 8, "ep": 8},
]


CONTEXTS_OF_FOLDS = [
    (degrees, context)
    for degrees in FOLDS
    for context in ("ring", "allgather", "ulysses")
    # Ulysses deals the 4 heads out to the ranks of tp and cp.
    if context != "ulysses" or degrees.get("tp", 1) * degrees.get("cp", 1) <= 4
]


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "context"), CONTEXTS_OF_FOLDS, ids=str)
def test_folds_of_eight_ranks(pool, degrees, context):
    train = {"seq_len": 32}
    cfg = _recipe(documents=context != "allgather", world_size=8, context=context, **degrees)
    assert_equals_oracle(pool, replace(cfg, train=replace(cfg.train, **train)))


@pytest.mark.parity
def test_a_shrunk_preset(pool):
    cfg = config_from_dict(
        {
            "run": {"dtype": "float64", "seed": 1},
            "model": {"preset": "gpt-oss-120b"},
            "parallel": {"world_size": 4, "tp": 2, "cp": 2, "ep": 2, "etp": 2},
            "train": {"seq_len": 4096, "global_batch_size": 4},
        }
    )
    small = shrink(cfg)
    assert small.model.layer_windows == (MAX_WINDOW, 0)
    assert small.model.moe_bias
    assert small.model.attention_sinks
    assert_equals_oracle(pool, small)


@pytest.mark.parity
def test_a_model_that_differs_a_little_is_noticed(pool):
    cfg = _recipe(world_size=2, etp=2)
    ranks = pool.run(2, run_distributed, cfg, 1)
    assert compare_records(run_oracle(without_mapping(cfg), 1), ranks)[0].error < 1e-9
    for change in ({"sliding_window": 6}, {"attention_pattern": "FW"}, {"swiglu_limit": 0.31}):
        other = replace(without_mapping(cfg), model=replace(cfg.model, **change))
        assert compare_records(run_oracle(other, 1), ranks)[0].error > 1e-4, change
