"""config.json against [model]: families, presets, and the spellings of older folders. No torch."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from moefold.config.model import ModelConfig
from moefold.config.presets import preset_names
from moefold.convert.families.config_fields import MultiHeadKeyValue
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import families_for, family_unsupported_reason, read_model_config
from moefold.convert.families.hf_config import parse_model_config as read_keys
from moefold.convert.families.layer_fields import SparseLayers, joined_layers
from moefold.convert.families.rope_fields import RopeParameters
from moefold.errors import ConfigError
from tests.convert.family_models import model_of_family
from tests.models import edit_model, model_of

FAMILY_OF = {
    "deepseek-v3.2": "deepseek_v32",
    "glm-5": "glm_moe_dsa",
    "qwen3-next": "qwen3_next",
    # It computes as Qwen3-Next does, the first family that expresses it.
    "qwen3.5": "qwen3_next",
    "kimi-linear": "kimi_linear",
    "lfm2": "lfm2_moe",
    "ling-3": "bailing_hybrid",
    "mixtral": "mixtral",
    "qwen2-57b": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "olmoe": "olmoe",
}
FAMILY_OF |= {"glm": "glm4_moe", "minimax": "minimax_m2", "ernie": "ernie4_5_moe", "dots": "dots1"}
FAMILY_OF |= {"granite": "granitemoe", "hunyuan": "hunyuan_v1_moe", "kimi": "deepseek_v3"}
FAMILY_OF |= {"llama-4": "llama4_text", "longcat": "longcat_flash"}
FAMILY_OF |= {"gpt-oss": "gpt_oss", "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3"}


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.startswith(tuple(FAMILY_OF))])
def test_presets_have_the_family_of_their_name(preset):
    # The layers of multi-token prediction of DeepSeek-V3 have no place in a folder.
    model = model_of({"preset": preset})
    expected = next(family for start, family in FAMILY_OF.items() if preset.startswith(start))
    assert next(families_for(model)).name == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_config_of_a_family_reads_back(tmp_path, family):
    """From a random config of each family: the same model, and the same keys."""
    keys = FAMILIES[family].write(model_of_family(family))
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = read_model_config(tmp_path)
    assert FAMILIES[family].write(model) == keys


# Sizes that fit the default sizes of the configuration classes.
_DEFAULTS = {"num_attention_heads": 128, "num_key_value_heads": 64, "head_dim": 8, "num_hidden_layers": 5}
_DEFAULTS |= {"hidden_size": 1024, "n_routed_experts": 64, "num_experts": 64, "num_local_experts": 64}
_DEFAULTS |= {"linear_num_value_heads": 32}
_SPECIAL = {"llama": {"mlp_bias": False}, "mixtral": {"sliding_window": None}}
_SPECIAL |= {
    family.name: {"num_key_value_heads": 128}
    for family in FAMILIES.values()
    if any(isinstance(entry, MultiHeadKeyValue) for entry in family.config_fields)
}
_SPECIAL["deepseek_v2"] |= {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
_SPECIAL["llama4_text"] = {"no_rope_layers": [1, 0, 1, 1, 0], "attention_chunk_size": 8192}
_SPECIAL["longcat_flash"] |= {"num_layers": 3, "head_dim": 16}
_SPECIAL["kimi_linear"] = {"num_key_value_heads": 128}
_SPECIAL["deepseek_v3"] |= {"n_group": 2, "topk_group": 1}
_SPECIAL["deepseek_v32"] |= {"n_group": 2, "topk_group": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_has_the_default_of_transformers(family):
    """Each key is deleted in turn; a family may refuse the folder, but must not read another model into it."""
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
    whole = FAMILIES[family].write(model_of_family(family))
    whole |= {key: value for key, value in _DEFAULTS.items() if key in whole} | _SPECIAL.get(family, {})
    whole.pop("mlp_only_layers", None)
    if "layer_types" in whole:
        whole["layer_types"] = ["full_attention"] * 5
    if "mlp_layer_types" in whole:
        whole["mlp_layer_types"] = ["dense", *["sparse"] * 4]
    if "indexer_types" in whole:
        whole["indexer_types"] = ["full"] * 5
    assert isinstance(_outcome(whole), ModelConfig), _outcome(whole)
    understood = set()
    for key in whole.keys() - {"model_type", "architectures"}:
        rest = {name: value for name, value in whole.items() if name != key}
        found = _outcome(rest)
        if f"lacks {key}" in str(found):
            continue
        understood.add(key)
        theirs = transformers.AutoConfig.for_model(**rest).to_dict()
        if key in theirs:
            assert found == _outcome(rest | {key: theirs[key]}), key
    assert {"tie_word_embeddings", "num_key_value_heads"} <= understood
    assert {"rms_norm_eps", "norm_eps"} & understood
    if family == "deepseek_v3":
        assert {"n_group", "topk_group", "q_lora_rank", "first_k_dense_replace", "rope_interleave"} <= understood
        assert "num_nextn_predict_layers" in understood


def _outcome(keys: dict[str, object]) -> ModelConfig | str:
    """The model of a config.json, with its size of heads spelled out, or why there is none."""
    return _outcome_of_text(json.dumps(keys, sort_keys=True))


@lru_cache(maxsize=4)
def _outcome_of_text(text: str) -> ModelConfig | str:
    """The same; most defaults are the values of the whole config.json, which need not be read again."""
    try:
        model = read_keys(json.loads(text), Path("hf"))
        return _with_head_dim(model, model.softmax_attention.head_dim)
    except ConfigError as error:
        return str(error)


def _with_head_dim(model: ModelConfig, size: int) -> ModelConfig:
    """A model with another size of heads; latent attention has other sizes."""
    return edit_model(model, {"attention.head_dim": size}) if model.attention.kind == "gqa" else model


def test_deepseek_v3_has_groups_unless_it_says_otherwise():
    keys = FAMILIES["deepseek_v3"].write(model_of_family("deepseek_v3")) | {"n_routed_experts": 16}
    for key in ("n_group", "topk_group"):
        del keys[key]
    model = read_keys(keys, Path("hf"))
    assert (model.ffn.moe.router.num_groups, model.ffn.moe.router.top_groups) == (8, 4)
    # By default a token may choose from all four groups: that chooses nothing.
    assert read_keys(keys | {"n_group": 4}, Path("hf")).ffn.moe.router.num_groups == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention.qk_norm": {}}, "attention.qk_norm 'given' in this model, 'none' in the family"),
        ({"ffn.moe.router": "sigmoid"}, "ffn.moe.router 'sigmoid' in this model, 'softmax' in the family"),
        ({"ffn.moe.shared.intermediate_size": 8}, "ffn.moe.shared 'given' in this model"),
        ({"layers.ffn": "dense, moe"}, "layers"),
        ({"attention.rope_fraction": 0.5}, "attention.rope_fraction"),
    ],
)
def test_a_family_refuses_settings_that_it_cannot_write(change, reason):
    model = edit_model(ModelConfig(), change)
    assert family_unsupported_reason(FAMILIES["mixtral"], ModelConfig()) == ""
    assert reason in family_unsupported_reason(FAMILIES["mixtral"], model)


@pytest.mark.parametrize("width", [0, -4])
def test_no_qwen2_moe_folder_is_without_shared_expert(width):
    """transformers has tensors of width 0 for such a folder, and expects them in an exported one."""
    keys = FAMILIES["qwen2_moe"].write(model_of_family("qwen2_moe"))
    with pytest.raises(ConfigError, match=f"shared_expert_intermediate_size={width}, whose empty tensors moefold"):
        read_keys(keys | {"shared_expert_intermediate_size": width}, Path("hf"))
    model = edit_model(model_of_family("qwen2_moe"), {"ffn.moe.shared": "none"})
    assert "shared_expert_intermediate_size=0" in family_unsupported_reason(FAMILIES["qwen2_moe"], model)


def test_deepseek_v4_is_refused_with_the_parts_that_are_missing():
    with pytest.raises(ConfigError, match="model_type 'deepseek_v4', which needs .* hyper-connections .* token ids"):
        read_keys({"model_type": "deepseek_v4"}, Path("hf"))


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"indexer_types": "full"}, "indexer_types='full'"),
        ({"indexer_types": ["full", "shared"]}, "2 layers, and num_hidden_layers=3"),
        ({"indexer_types": ["shared", "full", "full"]}, "the first layer should be 'full'"),
        ({"index_topk_pattern": "FXF"}, "X"),
        ({"index_topk_freq": "4"}, "index_topk_freq='4'"),
        ({"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}, "layer_types"),
    ],
)
def test_types_of_indexers_that_have_no_meaning_are_refused(keys, refused):
    with pytest.raises(ConfigError, match=refused):
        read_keys(_keys_of_glm(keys), Path("hf"))


@pytest.mark.parametrize(
    ("keys", "selections"),
    [
        ({"indexer_types": ["full", "shared", "full"]}, "own shared own"),
        ({"index_topk_pattern": "FFS"}, "own own shared"),
        ({"index_topk_pattern": "FFF"}, "own own own"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, "own shared shared"),
        ({"index_topk_freq": 1}, "own own own"),
        ({"layer_types": ["indexed_attention"] * 3}, "own own own"),
    ],
)
def test_layers_that_share_a_selection_are_read_and_written(keys, selections):
    model = read_keys(_keys_of_glm(keys), Path("hf"))
    assert model.attention.indexer.top_k == 32
    assert [words.selection for words in model.layer_words] == selections.split()
    expected = ["shared" if layer.attention.shares_selection else "full" for layer in model.decoder_layers]
    assert FAMILIES["glm_moe_dsa"].write(model)["indexer_types"] == expected
    reason = family_unsupported_reason(
        FAMILIES["deepseek_v32"], edit_model(model, {"attention.indexer.rope_interleaved": False})
    )
    assert ("layers" in reason) == ("shared" in selections), reason


def _keys_of_glm(keys: dict[str, object]) -> dict[str, object]:
    written = FAMILIES["glm_moe_dsa"].write(model_of_family("glm_moe_dsa"))
    return {key: value for key, value in written.items() if key != "indexer_types"} | keys


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_families_with_an_indexer_and_without_do_not_stand_in_for_each_other(family):
    model = read_keys(FAMILIES[family].write(model_of_family(family)), Path("hf"))
    assert [found.name for found in families_for(model)] == [family]
    assert family_unsupported_reason(FAMILIES[family], model) == ""
    assert "index_topk=0" in family_unsupported_reason(
        FAMILIES[family], edit_model(model, {"attention.indexer": "none"})
    )
    assert "q_lora_rank=0" in family_unsupported_reason(
        FAMILIES[family], edit_model(model, {"attention.q_lora_rank": 0})
    )


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_no_deepseek_folder_is_without_shared_experts(family):
    model = read_keys(FAMILIES[family].write(model_of_family(family)), Path("hf"))
    assert family_unsupported_reason(FAMILIES[family], model) == ""
    assert "n_shared_experts=0" in family_unsupported_reason(
        FAMILIES[family], edit_model(model, {"ffn.moe.shared": "none"})
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope.theta": 1e4}),
        ({"rope_theta": 5e5}, {"rope.theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope.theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope.theta": 5e5, "rope.scaling": "linear", "rope.scaling.factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7}}, {"rope.theta": 7.0}),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 7},
                "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            },
            {"rope.theta": 1e4, "rope.scaling": "linear", "rope.scaling.factor": 3.0},
        ),
    ],
)
def test_rotations_of_new_and_older_folders(keys, expected):
    assert RopeParameters(1e4).read(keys) == expected


def test_yarn_takes_the_models_context_where_none_is_given():
    keys = {
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": None},
    }
    assert RopeParameters(1e4).read(keys)["rope.scaling.original_seq_len"] == 64


def test_sparse_layers_come_by_step_and_by_list():
    keys = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = model_of(joined_layers({"layers": 6, **SparseLayers().read(keys)}))
    assert [i for i, layer in enumerate(model.decoder_layers) if layer.ffn.is_routed] == [1, 5]


def test_the_rotation_that_transformers_takes_of_two():
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    }
    theirs = transformers.LlamaConfig(**both).rope_parameters
    assert RopeParameters(1e4).read(both) == RopeParameters(1e4).read({"rope_parameters": theirs})


def test_further_layers_have_two_names():
    keys = FAMILIES["deepseek_v3"].write(model_of_family("deepseek_v3"))
    del keys["num_nextn_predict_layers"]
    assert read_keys(keys | {"num_mtp_layers": 3}, Path("hf")).mtp_layers == 3
    assert read_keys(keys, Path("hf")).mtp_layers == 1


def test_a_folder_of_the_wrong_family_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="is of model_type 'gpt2', which moefold does not know; it knows llama, "):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist or is not a folder"):
        read_model_config(Path(tmp_path / "gone"))


RELEASED = {
    "minimax-m2": (
        {
            "rotary_dim": 64,
            "rope_theta": 5e6,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
        ("rope_parameters",),
    ),
    "glm-4.5": ({"partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None}, ("rope_parameters",)),
    "hunyuan-a13b": (
        {
            "moe_topk": [8] * 32,
            "num_shared_expert": [1] * 32,
            "moe_intermediate_size": [3072] * 32,
            "rope_theta": 10000.0,
            "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
            "use_qk_norm": True,
        },
        ("rope_parameters",),
    ),
    "kimi-k2": (
        {
            "model_type": "kimi_k2",
            "rope_theta": 50000.0,
            "rope_scaling": {
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "n_group": 1,
            "topk_group": 1,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        },
        ("rope_parameters", "rope_interleave"),
    ),
}
"""Keys of released folders by the preset of the model, and keys of transformers that they lack."""


@pytest.mark.parametrize("preset", RELEASED)
def test_older_spellings_mean_the_published_model(preset):
    model = model_of({"preset": preset})
    keys, lacking = RELEASED[preset]
    written = next(families_for(model)).write(model)
    found = read_keys({key: value for key, value in written.items() if key not in lacking} | keys, Path("hf"))
    assert replace(_with_head_dim(found, 0), init_std=0.02) == replace(_with_head_dim(model, 0), preset="")


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("minimax_m2", {"rotary_dim": 200, "rope_parameters": None}, "rotary_dim=200 of head_dim=8"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 2]}, "moe_topk=.1, 2, 2.; moefold computes equal layers only"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2, 2, 2]}, "num_shared_expert=.2, 2, 2., which moefold does not"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval=0, which should be a whole number"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True, which moefold does not compute"),
        ("granitemoe", {"attention_multiplier": 0}, "attention_multiplier=0.0, which should be above 0"),
        (
            "llama4_text",
            {"no_rope_layers": [1, 2, 0]},
            "no_rope_layers=.1, 2, 0., which should be 0 or 1 for each of 3",
        ),
        ("llama4_text", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0, which"),
        ("llama4_text", {"moe_layers": None, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step=0, which"),
        ("llama4_text", {"moe_layers": 3}, "moe_layers=3, which should be a list of whole numbers"),
        ("llama4_text", {"use_qk_norm": "yes"}, "use_qk_norm='yes', which should be true or false"),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": None},
            "attention_chunk_size",
        ),
        ("longcat_flash", {"num_layers": 0}, "num_layers=0, which should be 1 to 5000"),
        ("longcat_flash", {"num_layers": None}, "num_layers=None, which should be a whole number"),
        ("mixtral", {"num_hidden_layers": None}, "num_hidden_layers=None, which should be a whole number"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type='copy', which moefold does not compute"),
        ("longcat_flash", {"router_bias": True}, "router_bias=True, which moefold does not compute"),
        ("afmoe", {"mup_enabled": 3}, "mup_enabled=3 of hidden_size=48"),
        ("afmoe", {"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers=0, which"),
        ("exaone_moe", {"mlp_layer_types": ["dense", "other", "sparse"]}, "mlp_layer_types=.*, which moefold does not"),
        ("exaone_moe", {"layer_types": ["full_attention"]}, "layer_types=.'full_attention'., which moefold does not"),
    ],
)
def test_a_value_of_a_newer_family_that_cannot_be_is_named(family, keys, message):
    with pytest.raises(ConfigError, match=message):
        read_keys(FAMILIES[family].write(model_of_family(family)) | keys, Path("hf"))


def test_released_kimi_linear_folders_nest_the_sizes_of_linear_attention() -> None:
    keys = FAMILIES["kimi_linear"].write(
        edit_model(model_of_family("kimi_linear"), {"layers.attention": "linear, full", "layers": 5})
    )
    nested = {
        "head_dim": keys["linear_head_dim"],
        "num_heads": keys["linear_num_heads"],
        "short_conv_kernel_size": keys["linear_conv_kernel_dim"],
        "kda_layers": [1, 3, 5],
        "full_attn_layers": [2, 4],
    }
    flat = read_keys(keys, Path("hf"))
    rest = {key: value for key, value in keys.items() if not key.startswith("linear_") and key != "layer_types"}
    assert read_keys(rest | {"linear_attn_config": nested}, Path("hf")) == flat
    with pytest.raises(ConfigError, match=r"full_attn_layers=\[2\] and kda_layers=\[1, 3, 5\], which should hold each"):
        read_keys(rest | {"linear_attn_config": nested | {"full_attn_layers": [2]}}, Path("hf"))


def _linear_layers(model):
    return [i for i, layer in enumerate(model.decoder_layers) if layer.attention.is_recurrent]


def test_full_attention_interval_of_qwen3_next() -> None:
    keys = FAMILIES["qwen3_next"].write(model_of_family("qwen3_next")) | {"num_hidden_layers": 8}
    del keys["layer_types"]
    keys.pop("mlp_only_layers")
    assert _linear_layers(read_keys(keys | {"full_attention_interval": 2}, Path("hf"))) == [0, 2, 4, 6]
    assert _linear_layers(read_keys(keys, Path("hf"))) == [0, 1, 2, 4, 5, 6]
    with pytest.raises(ConfigError, match="full_attention_interval=0, which should be a whole number"):
        read_keys(keys | {"full_attention_interval": 0}, Path("hf"))
