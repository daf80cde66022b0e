"""Test the keys of other libraries' JSON files: each is read, constant, ignored by name, or refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moefold.config.model import ModelConfig
from moefold.convert.families.families import FAMILIES, MODEL_TYPES
from moefold.convert.families.hf_config import inspect_config, inspect_folder
from moefold.convert.families.known_keys import KeyReport, config_known_keys, declared_keys
from moefold.errors import ConfigError
from tests.convert.family_models import model_of_family
from tools.declared_keys import family_keys, format_table, make_table

BASE_CLASS = {
    "max_length": 20,
    "num_beams": 1,
    "pruned_heads": {},
    "top_p": 1.0,
    "return_dict": True,
    "use_cache": True,
}
BASE_CLASS |= {
    "id2label": {"0": "LABEL_0"},
    "is_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "no_repeat_ngram_size": 0,
}
VENDORS = {"unsloth_version": "2026.1", "unsloth_fixed": True, "auto_map": {"AutoModel": "modeling.Model"}}
VENDORS |= {"_attn_implementation_autoset": True, "license": "other"}
MATHS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "residual_dropout": 0.5, "scale_depth": 1.4}
MATHS |= {
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "norm_type": "layer_norm",
    "alibi": True,
    "is_causal": False,
}
NEUTRAL_MATHS = {"final_logit_softcapping": None, "attn_pdrop": 0.0, "key_multiplier": 1.0, "cla_share_factor": 1}
NEUTRAL_MATHS |= {"is_causal": True}
UNKNOWN = {"my_gain": 2, "my_switch": True, "my_list": [1], "my_table": {"a": 1}, "my_factor": 0.5}
HARMLESS = {"my_text": "anything", "my_null": None, "my_false": False}


def _keys(family: str) -> dict[str, Any]:
    return FAMILIES[family].write(model_of_family(family))


def _inspect(keys: Mapping[str, Any], *ignored: str) -> tuple[ModelConfig, KeyReport]:
    return inspect_config(keys, Path("hf"), ignored)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_each_kind_is_sorted_in_every_family(family):
    keys = _keys(family)
    model, report = _inspect(keys)
    assert not report.ignored
    assert {name.partition(".")[0] for name in (*report.read, *report.constant)} == keys.keys()
    for extra in (BASE_CLASS, NEUTRAL_MATHS):
        same, report = _inspect(keys | extra)
        assert same == model
        assert extra.keys() <= {*report.constant, *report.read}
        assert not report.ignored
    for extra in (VENDORS, HARMLESS):
        same, report = _inspect(keys | extra)
        assert same == model
        assert {text.partition("=")[0] for text in report.ignored} == extra.keys()
        assert all(key in report.note() for key in extra)
    refused = MATHS | UNKNOWN
    with pytest.raises(ConfigError, match=r"config\.json has .*") as raised:
        _inspect(keys | refused)
    for key in refused:
        assert re.search(rf"(has|;) {key}=.*--ignore-key {key}\b", str(raised.value)), key
    same, report = _inspect(keys | refused, *refused)
    assert same == model
    assert {text.partition("=")[0] for text in report.ignored} == refused.keys()
    with pytest.raises(ConfigError, match=r"rope_parameters\.gain=2, which moefold does not know"):
        _inspect(_with_nested(keys, {"gain": 2}))


def _with_nested(keys: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys to rope_parameters; families without RoPE get a table that they read instead."""
    if "rope_parameters" not in keys:
        pytest.skip("the family has no RoPE")
    return keys | {"rope_parameters": keys["rope_parameters"] | extra}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_the_class_of_transformers_declares_is_read_or_refused(family):
    """Each declared key that the family does not read is refused with another value than the default."""
    keys = _keys(family)
    known = config_known_keys(family)
    declared = declared_keys().families.get(family, {})
    assert declared
    _, report = _inspect(
        keys | {key: value for key, value in declared.items() if key not in keys and not _is_size(key)}
    )
    for key in declared.keys() - {*report.read, *keys} - known.neutral.keys():
        if _is_size(key):
            continue
        assert f"{key}=17" in _named(keys | {key: 17})


def _named(keys: dict[str, Any]) -> str:
    """The message that refuses keys, or the note on ignored ones."""
    try:
        return _inspect(keys)[1].note()
    except ConfigError as error:
        return str(error)


def _is_size(key: str) -> bool:
    """Return whether a key follows from sizes of the model, so that the class's default belongs to another one."""
    aliases = {alias for names in declared_keys().aliases.values() for alias in names}
    return key.endswith(("_dim", "_rank", "_layers", "_types", "_size", "_heads", "_experts", "_window")) or key in (
        *("layer_types", "num_experts_per_tok", "n_group", "topk_group", "moe_topk", "moe_k", "zero_expert_num"),
        *("mlp_only_layers", "no_rope_layers", "indexer_types", "rope_parameters", "full_attn_layers"),
        *aliases,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_transformers_are_read(family):
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
    config = transformers.AutoConfig.for_model(**_keys(family))
    config.architectures = [FAMILIES[family].architecture]
    model, report = _inspect(json.loads(config.to_json_string(use_diff=False)))
    assert model == _model_of_keys(family)
    assert not report.ignored


def _model_of_keys(family: str) -> ModelConfig:
    return _inspect(_keys(family))[0]


def test_the_table_equals_the_installed_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
    table = declared_keys()
    known = [name for name in MODEL_TYPES if name in table.families]
    if transformers.__version__ == table.versions["transformers"]:
        assert {name: family_keys(name) for name in known} == {name: table.families[name] for name in known}
        return
    # Under another version, at least a folder with the defaults of its classes has no unknown key.
    for name in known:
        added = {key: value for key, value in family_keys(name).items() if key not in table.families[name]}
        family = MODEL_TYPES[name].name
        if name == family:
            _inspect(_keys(family) | {key: value for key, value in added.items() if not value or value == 1})


@pytest.mark.slow
def test_the_whole_table_is_made_by_its_command():
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="the table also has the keys of PEFT")
    table = declared_keys()
    if table.versions != {"transformers": transformers.__version__, "peft": peft.__version__}:
        pytest.skip(f"the table is of {table.versions}")
    path = Path(__file__).parents[2] / "src/moefold/convert/families/declared_keys.json"
    assert format_table(make_table(tuple(sorted(MODEL_TYPES)))) == path.read_text()


@pytest.mark.parametrize(
    ("family", "key"),
    [("ernie4_5_moe", "moe_use_aux_free"), ("hunyuan_v1_moe", "use_rotary_pos_emb"), ("lfm2_moe", "use_pos_enc")],
)
def test_a_switch_of_a_published_folder_is_refused_if_it_is_off(family, key):
    keys = _keys(family)
    assert key in _inspect(keys | {key: True})[1].constant
    with pytest.raises(ConfigError, match=rf"has {key}=False, .*--ignore-key {key}"):
        _inspect(keys | {key: False})


@pytest.mark.parametrize(("family", "key"), [("deepseek_v3", "rope_interleave"), ("deepseek_v3", "norm_topk_prob")])
def test_null_is_not_the_true_of_the_class(family, key):
    keys = _keys(family)
    assert declared_keys().families[family][key] is True
    _inspect({other: value for other, value in keys.items() if other != key})
    with pytest.raises(ConfigError, match=f"has {key}=None, .* takes as false .*--ignore-key {key}"):
        _inspect(keys | {key: None})


def test_two_spellings_of_a_key_must_agree():
    keys = _keys("deepseek_v3")
    assert _inspect(keys | {"num_local_experts": keys["n_routed_experts"]})[0] == _inspect(keys)[0]
    with pytest.raises(ConfigError, match=r"num_local_experts=3 and n_routed_experts=\d+, two spellings of one key"):
        _inspect(keys | {"num_local_experts": 3})


@pytest.mark.parametrize(("model_type", "family"), [("qwen3_5_moe", "qwen3_5_moe_text"), ("llama4", "llama4_text")])
def test_keys_of_the_text_model_of_a_multimodal_folder_are_sorted(model_type, family):
    text = _keys(family)
    whole = {"model_type": model_type, "architectures": ["Any"], "text_config": text, "vision_config": {"depth": 2}}
    whole |= {"image_token_id" if model_type == "qwen3_5_moe" else "image_token_index": 99}
    model, report = _inspect(whole)
    assert model == _inspect(text)[0]
    assert "text_config.hidden_size" in report.read
    assert "vision_config" in report.constant
    with pytest.raises(ConfigError, match=r"text_config\.final_logit_softcapping=30"):
        _inspect(whole | {"text_config": text | {"final_logit_softcapping": 30}})
    _inspect(whole | {"text_config": text | {"final_logit_softcapping": 30}}, "final_logit_softcapping")
    with pytest.raises(ConfigError, match="gain=2, which moefold does not know"):
        _inspect(whole | {"gain": 2})


def test_keys_of_a_quantisation_are_sorted():
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
    }
    keys = _keys("deepseek_v3") | {"quantization_config": quantization | {"scale_fmt": "ue8m0"}}
    assert "quantization_config.fmt" in _inspect(keys)[1].constant
    with pytest.raises(ConfigError, match=r"quantization_config\.zero_point=True"):
        _inspect(keys | {"quantization_config": quantization | {"zero_point": True}})


QWEN_GENERATION = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 3], "pad_token_id": 1, "temperature": 0.6}
QWEN_GENERATION |= {"top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}


@pytest.mark.parametrize(
    ("file", "keys", "ignored", "refused"),
    [
        ("generation_config.json", QWEN_GENERATION, "do_sample=True, temperature=0.6, top_k=20, top_p=0.95", "my_bias"),
        ("generation_config.json", {"repetition_penalty": 1.05}, "repetition_penalty=1.05", "logit_gain"),
        (
            "tokenizer_config.json",
            {"eos_token": "</s>", "unsloth_x": 1, "boi_token": "<i>"},
            "unsloth_x=1",
            "drop_rate",
        ),
    ],
)
def test_keys_of_the_other_files_are_sorted(tmp_path, file, keys, ignored, refused):
    (tmp_path / "config.json").write_text(json.dumps(_keys("llama")))
    (tmp_path / file).write_text(json.dumps(keys))
    _, reports = inspect_folder(tmp_path)
    assert [report.file for report in reports] == ["config.json", file]
    assert ignored in reports[1].note()
    (tmp_path / file).write_text(json.dumps(keys | {refused: 0.25}))
    with pytest.raises(ConfigError, match=rf"{file} has {refused}=0\.25, which moefold does not know"):
        inspect_folder(tmp_path)
    inspect_folder(tmp_path, [refused])


def test_another_architecture_is_named():
    assert "architectures" in _inspect(_keys("llama") | {"architectures": ["MyLlamaForCausalLM"]})[1].note()


ROPE_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"attention_dropout": 0.0, "auto_map": {"AutoConfig": "x"}, "ep_size": 1, "moe_layer_freq": 1}
    | {"rope_scaling": ROPE_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000, "pretraining_tp": 1}
    | {"aux_loss_alpha": 0.001, "seq_aux": True, "torch_dtype": "bfloat16", "use_cache": True},
    "qwen3_moe": {"max_window_layers": 48, "rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001}
    | {"output_router_logits": False, "sliding_window": None, "use_sliding_window": False, "attention_dropout": 0.0},
    "gpt_oss": {"experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9}
    | {"attention_dropout": 0.0, "output_router_logits": False, "max_position_embeddings": 131072},
    "minimax_m2": {"attn_type_list": [1, 1, 1], "layernorm_mlp_beta": 1.0, "mtp_transformer_layers": 1, "use_mtp": True}
    | {"num_mtp_modules": 3, "mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid", "qk_norm_type": "per_layer"}
    | {"router_jitter_noise": 0.0, "layernorm_full_attention_alpha": 1.0, "shared_intermediate_size": 0},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "use_bias": False}
    | {"num_nextn_predict_layers": 1},
    "phimoe": {"hidden_dropout": 0.0, "input_jitter_noise": 0.01, "attention_dropout": 0.0, "sliding_window": None},
    "llama4_text": {"cache_implementation": "hybrid", "for_llm_compressor": False, "router_jitter_noise": 0.0}
    | {"output_router_logits": False, "pad_token_id": 200018},
    "glm_moe_dsa": {"ep_size": 1, "pretraining_tp": 1, "attention_dropout": 0.0},
    "qwen3_next": {"attention_dropout": 0.0, "router_aux_loss_coef": 0.001, "output_router_logits": False},
    "granitemoe": {"attention_dropout": 0.1 * 0, "router_aux_loss_coef": 0.0, "use_cache": True},
}
"""Keys that published folders of a family have besides those that moefold writes."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_keys_of_published_folders_are_known(family):
    keys = {key: value for key, value in _keys(family).items() if key != "rope_parameters"} | PUBLISHED[family]
    keys |= {"rope_parameters": _keys(family)["rope_parameters"]} if "rope_scaling" not in keys else {}
    keys["num_experts_per_tok"] = keys.get("experts_per_token", keys.get("num_experts_per_tok"))
    _inspect({key: value for key, value in keys.items() if value is not None or key in PUBLISHED[family]})
