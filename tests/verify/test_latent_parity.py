"""Latent attention and norms over all heads under every axis: equal to the one-process float64 oracle."""

import pytest

from tests.verify.recipes import few_samples, tiny
from tests.verify.test_parity import assert_equals_oracle

YARN = {
    "rope_scaling": "yarn",
    "rope_scaling_factor": 6.0,
    "rope_original_seq_len": 12,
    "rope_theta": 40.0,
    "rope_beta_fast": 2.0,
    "rope_beta_slow": 0.5,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 1.2,
    "rope_interleaved": True,
}
V2 = {
    "attention": "mla",
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "router_softmax": "pre",
    "num_groups": 4,
    "top_groups": 2,
    "router_scaling_factor": 2.0,
    "shared_expert_ffn_hidden_size": 16,
    "layer_pattern": "DM",
    **YARN,
}
V3 = V2 | {
    "q_lora_rank": 7,
    "v_head_dim": 8,
    "router_score": "sigmoid",
    "expert_bias": True,
    "layer_pattern": "M",
}
OLMOE = {"qk_norm": True, "qk_norm_width": "all_heads", "router_softmax": "pre"}
MODELS = {"v2": V2, "v3": V3, "olmoe": OLMOE}


def _id(value: object) -> str:
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _recipe(kind: str, mapping: dict[str, object]):
    model = {k: v for k, v in MODELS[kind].items() if not (kind == "v3" and k == "router_softmax")}
    return tiny(model=model, train={"global_batch_size": few_samples(8, mapping)}, **mapping)


AXES = [
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "cp": 2, "context": "ring"},
    {"world_size": 2, "pp": 2, "zero": 3},
    {"world_size": 2, "cp": 2, "context": "allgather"},
    {"world_size": 2, "cp": 2, "context": "ulysses"},
    {"world_size": 2, "ep": 2, "zero": 2},
    {"world_size": 1},
]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "mapping"), [("v3", mapping) for mapping in AXES] + [("v2", AXES[0]), ("olmoe", AXES[0])], ids=_id
)
def test_each_axis(pool, kind, mapping):
    assert_equals_oracle(pool, _recipe(kind, mapping))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v2", "olmoe"])
@pytest.mark.parametrize("mapping", AXES[1:], ids=_id)
def test_each_axis_of_the_others(pool, kind, mapping):
    assert_equals_oracle(pool, _recipe(kind, mapping))


@pytest.mark.parity
def test_norm_over_all_heads_where_ranks_share_a_key_head(pool):
    assert_equals_oracle(pool, _recipe("olmoe", {"world_size": 4, "tp": 4, "ep": 2}))


FOLDED = [
    {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"world_size": 8, "tp": 2, "cp": 4, "ep": 4, "etp": 2, "context": "allgather", "zero": 3},
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 8, "context": "ulysses"},
    {"world_size": 8, "tp": 4, "pp": 2, "ep": 2, "etp": 2, "zero": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mapping", FOLDED, ids=_id)
def test_folded_mappings_of_eight_ranks(pool, kind, mapping):
    assert_equals_oracle(pool, _recipe(kind, mapping))


@pytest.mark.parity
def test_one_folded_mapping_of_eight_ranks(pool):
    assert_equals_oracle(pool, _recipe("v3", FOLDED[0]))
