"""Exchanges of tensor parallelism beside its products: the same gradients under every mapping."""

import pytest

from tests.verify.recipes import LATENT, few_samples, tiny
from tests.verify.test_parity import assert_equals_oracle

pytestmark = pytest.mark.parity

DENSE = {"layer_pattern": "DM", "shared_expert_ffn_hidden_size": 16, "qkv_bias": True, "attention_output_bias": True}
CASES = {
    "tp": ({"world_size": 2, "tp": 2, "ep": 2}, DENSE, {}),
    "more ranks than query groups": ({"world_size": 4, "tp": 4, "etp": 2, "zero": 2}, {}, {}),
    "five axes": ({"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4}, DENSE, {}),
    "weights later": ({"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "schedule": "zero-bubble"}, DENSE, {}),
    "latent attention, made again": ({"world_size": 4, "tp": 2, "ep": 2, "zero": 3}, LATENT, {"recompute": ("layer",)}),
    "beside another micro-batch": ({"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "overlap_experts": True}, DENSE, {}),
    "offloaded": ({"world_size": 2, "tp": 2, "ep": 2}, DENSE, {"offload": ("norms",)}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(pool, name):
    parallel, model, train = CASES[name]
    train = train | {"global_batch_size": few_samples(8, parallel)}
    assert_equals_oracle(pool, tiny(model=model, train=train, overlap_tp=True, **parallel))
