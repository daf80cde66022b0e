import pytest

from moefold.config.model import ModelConfig
from moefold.config.schema import has_dense_layers, has_moe_layers
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

CASES = [
    (
        ["model.hidden_size=100", "model.num_attention_heads=8"],
        "model.num_attention_heads=8 must divide model.hidden_size=100 when model.head_dim is 0; "
        "choose 1, 2, 4, 5, 10 or 20 heads, model.hidden_size=96 or 104, or set model.head_dim",
    ),
    (
        ["model.num_query_groups=3"],
        "model.num_query_groups=3 must divide model.num_attention_heads=8; choose 1, 2, 4 or 8",
    ),
    (["model.head_dim=7"], "model.head_dim=7 must be even, because RoPE rotates pairs; choose 6 or 8"),
    (
        ["model.hidden_size=24"],
        "the head size hidden_size/num_attention_heads=3 must be even, because RoPE rotates pairs; choose 2 or 4",
    ),
    (
        ["model.rope_fraction=0.3"],
        "model.rope_fraction=0.3 of a head of 32 is 9.6 dimensions, which must be a positive even number; "
        "choose 0.25 (8 dimensions) or 0.3125 (10 dimensions)",
    ),
    (["model.head_dim=4", "model.rope_fraction=0.25"], "choose 0.5 (2 dimensions) or 1 (4 dimensions)"),
    (
        ["model.rope_scaling=linear"],
        "model.rope_scaling='linear' changes nothing with model.rope_scaling_factor=1.0; give a factor above 1",
    ),
    (
        ["model.rope_scaling=llama3", "model.rope_scaling_factor=8", "model.rope_low_freq_factor=4"],
        "model.rope_low_freq_factor=4.0 must be below model.rope_high_freq_factor=4.0; the published pair is 1.0",
    ),
    (
        ["model.rope_scaling=yarn", "model.rope_scaling_factor=8", "model.rope_beta_slow=40"],
        "model.rope_beta_slow=40.0 must be below model.rope_beta_fast=32.0; the published pair is 1.0 and 32.0",
    ),
    (
        ["model.rope_scaling=yarn", "model.rope_scaling_factor=8", "model.rope_original_seq_len=6"],
        "so that some frequencies are scaled and some are not; choose 7 to 2010619",
    ),
    (
        ["model.rope_scaling=yarn", "model.rope_scaling_factor=8", "model.rope_mscale=1"],
        "model.rope_mscale=1.0 is divided by that of model.rope_mscale_all_dim, not given",
    ),
    (
        ["model.rope_scaling=yarn", "model.rope_scaling_factor=8", "model.rope_mscale_all_dim=1"],
        "model.rope_mscale_all_dim=1.0 divides that of model.rope_mscale, which is not given",
    ),
    (
        [
            *("model.rope_scaling=yarn", "model.rope_scaling_factor=8", "model.rope_attention_factor=1.1"),
            *("model.rope_mscale=1", "model.rope_mscale_all_dim=1"),
        ],
        "model.rope_mscale=1.0 has no effect with model.rope_attention_factor=1.1",
    ),
    (
        ["model.attention=mla", "model.qk_rope_head_dim=5"],
        "model.qk_rope_head_dim=5 must be even, because RoPE rotates pairs; choose 4 or 6",
    ),
    (
        ["model.attention=mla", "model.qk_norm=true"],
        "model.qk_norm=true does not go with model.attention='mla', which normalises its latents; set qk_norm=false",
    ),
    (
        ["model.attention=mla", "model.qkv_bias=true"],
        "model.qkv_bias=true does not go with model.attention='mla', which has no biases; set qkv_bias=false",
    ),
    (["model.layer_pattern="], "model.layer_pattern: an empty layer pattern; use D and M"),
    (["model.layer_pattern=MX"], "model.layer_pattern: unexpected 'X' in layer pattern 'MX'; use D and M"),
    (["model.layer_pattern=3M"], "model.layer_pattern: unexpected '3' in layer pattern '3M'"),
    (["model.layer_pattern=DM0"], "model.layer_pattern: a count of 0 in layer pattern 'DM0'"),
    (["model.attention_pattern=D"], "model.attention_pattern: unexpected 'D' in layer pattern 'D'; use F and W"),
    (["model.attention_pattern=F5"], "model.attention_pattern='F5' repeats a layer 5 times, more than"),
    (
        ["model.attention_pattern=WF"],
        "model.attention_pattern='WF' has layers of kind W, which attend to model.sliding_window=0 tokens; "
        "set model.sliding_window, or choose 'F'",
    ),
    (
        ["model.layer_pattern=D3M2"],
        "model.layer_pattern='D3M2' spells 5 layers, more than model.num_layers=4; shorten it or set model.num_layers",
    ),
    (
        ["model.layer_pattern=M999999999999"],
        "model.layer_pattern='M999999999999' repeats a layer 999999999999 times, more than model.num_layers=4",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=["+".join(words) for words, _ in CASES])
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.hidden_size=100", "model.head_dim=16"],
        ["model.num_query_groups=1"],
        ["model.num_query_groups=8"],
        ["model.rope_fraction=0.5"],
        ["model.head_dim=100", "model.rope_fraction=0.58"],
        ["model.rope_scaling=linear", "model.rope_scaling_factor=2"],
        ["model.rope_scaling=llama3", "model.rope_scaling_factor=8", "model.rope_original_seq_len=4096"],
        [
            "model.rope_scaling=yarn",
            "model.rope_scaling_factor=8",
            "model.rope_mscale=1",
            "model.rope_mscale_all_dim=1",
        ],
        ["model.attention=mla", "model.hidden_size=100", "model.num_attention_heads=3"],
        ["model.layer_pattern=DM"],
        ["model.layer_pattern=DM3"],
        ["model.layer_pattern=DMM"],
        ["model.layer_pattern=D"],
    ],
    ids="+".join,
)
def test_legal_sizes_are_accepted(overrides):
    check_config(load_config(None, overrides))


@pytest.mark.parametrize(("pattern", "moe", "dense"), [("M", True, False), ("D", False, True), ("DM3", True, True)])
def test_kinds_of_layers_of_a_pattern(pattern, moe, dense):
    model = ModelConfig(layer_pattern=pattern)
    assert (has_moe_layers(model), has_dense_layers(model)) == (moe, dense)
    assert ("M" in model.layer_kinds, "D" in model.layer_kinds) == (moe, dense)
