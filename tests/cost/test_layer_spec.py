"""Test that the table of parameters equals the real model, and its shard dims and groups by hand."""

import pytest
import torch

from moefold.config.presets import preset_names
from moefold.config.schema import Config
from moefold.convert.weight_sources import parameter_shapes
from moefold.cost.layer_spec import model_weights
from moefold.model.transformer import build_model
from moefold.recipe import load_config
from tests.models import edit_model, model_of

MODEL = model_of(
    {
        "layers": 2,
        "layers.ffn": "dense, moe",
        "hidden_size": 24,
        "attention.num_heads": 4,
        "attention.num_kv_heads": 2,
        "attention.head_dim": 6,
        "ffn.dense.intermediate_size": 20,
        "ffn.moe.intermediate_size": 10,
        "ffn.moe.num_experts": 3,
        "vocab_size": 32,
    }
)
WITH_EVERYTHING = edit_model(
    MODEL,
    {
        "ffn.moe.shared.intermediate_size": 8,
        "ffn.moe.shared.gate": True,
        "ffn.moe.bias": True,
        "ffn.moe.router.bias": True,
        "ffn.moe.router.expert_bias": True,
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.sinks": True,
        "attention.qk_norm": {},
        "mtp_layers": 2,
    },
)
LATENT = edit_model(
    MODEL,
    {
        "attention": "mla",
        "attention.q_lora_rank": 5,
        "attention.kv_lora_rank": 7,
        "attention.qk_nope_head_dim": 4,
        "attention.qk_rope_head_dim": 2,
        "attention.v_head_dim": 3,
    },
)
MODELS = {
    "everything": WITH_EVERYTHING,
    **{name: load_config(None, [f"model.preset={name}"]).model for name in preset_names()},
}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_equal_the_module(name: str) -> None:
    """Build the model on the meta device and compare every parameter, in order, and every buffer."""
    model = edit_model(MODELS[name], {"layers": min(8, MODELS[name].num_layers)})
    with torch.device("meta"):
        built = build_model(Config(model=model))
    shapes = [(key, tuple(parameter.shape)) for key, parameter in built.named_parameters()]
    assert [(key, weight.shape) for key, weight in model_weights(model).items()] == shapes
    shapes += [(key, tuple(buffer.shape)) for key, buffer in built.named_buffers()]
    assert list(parameter_shapes(model).items()) == shapes


def test_shard_dims_by_hand() -> None:
    """Compare the shapes of one rank of tp=2, ep=3, etp=2, and of tp=4, which does not divide the key-value heads."""
    moe = {weight.name: weight for weight in WITH_EVERYTHING.decoder_layers[1].params}
    found = {name: weight.shard(2, 3, 2).shape for name, weight in moe.items()}
    assert found == {
        "attention_norm.weight": (24,), "attention.wq": (12, 24), "attention.wk": (6, 24), "attention.wv": (6, 24),
        "attention.wo": (24, 12), "attention.bq": (12,), "attention.bk": (6,), "attention.bv": (6,),
        "attention.bo": (24,), "attention.sinks": (2,), "attention.query_norm.weight": (6,),
        "attention.key_norm.weight": (6,), "ffn_norm.weight": (24,), "ffn.shared_gate": (1, 24),
        "ffn.router.weight": (3, 24), "ffn.router.bias": (3,), "ffn.experts.w_gate": (1, 24, 5),
        "ffn.experts.w_up": (1, 24, 5), "ffn.experts.w_down": (1, 5, 24), "ffn.experts.b_gate": (1, 5),
        "ffn.experts.b_up": (1, 5), "ffn.experts.b_down": (1, 12), "ffn.shared.w_gate": (4, 24),
        "ffn.shared.w_up": (4, 24), "ffn.shared.w_down": (24, 4),
    }  # fmt: skip
    assert moe["attention.wk"].shard(4, 1, 1).shape == (12, 24)
    assert moe["attention.wq"].shard(4, 1, 1).shape == (6, 24)
    latent = {weight.name: weight.shard(2, 1, 1).shape for weight in LATENT.decoder_layers[0].params}
    assert latent == {
        "attention_norm.weight": (24,), "attention.wq_down": (5, 24), "attention.wq_up": (12, 5),
        "attention.wkv_down": (9, 24), "attention.wkv_up": (14, 7), "attention.wo": (24, 6),
        "attention.query_norm.weight": (5,), "attention.key_value_norm.weight": (7,), "ffn_norm.weight": (24,),
        "ffn.w_gate": (10, 24), "ffn.w_up": (10, 24), "ffn.w_down": (24, 10),
    }  # fmt: skip


def test_matrices_by_hand() -> None:
    """List the parameters that are not matrices, for weight decay, and the matrix that Muon leaves to AdamW."""
    weights = WITH_EVERYTHING.decoder_layers[1].params
    vectors = {weight.name.split(".", 1)[-1] for weight in weights if not weight.is_matrix}
    assert vectors == {
        "weight", "bq", "bk", "bv", "bo", "sinks", "query_norm.weight", "key_norm.weight", "router.bias",
        "experts.b_gate", "experts.b_up", "experts.b_down",
    }  # fmt: skip
    assert [weight.name for weight in weights if weight.is_matrix and not weight.updates_as_matrix] == [
        "ffn.shared_gate"
    ]
