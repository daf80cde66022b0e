"""Families in files of their own: transformers in float64, folders out and in again, and their refusals."""

import ast
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moefold.cli.main import main
from moefold.config.model import ModelConfig
from moefold.convert.families import family_files
from moefold.convert.families.families import FAMILIES, UNSUPPORTED_FAMILIES
from moefold.convert.families.hf_config import inspect_config
from moefold.convert.families.known_keys import Json
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.weight_sources import HfSource
from moefold.errors import ConfigError
from tests.convert.hf_folders import add_tokenizer, loaded_in_silence
from tests.convert.hf_models import (
    CONFIG_MAPPING,
    FILED,
    SIZES,
    first_sizes,
    logits_of,
    make_model,
    multimodal_config,
    options_of,
    save_model,
    tokens_of,
    transformers,
)
from tests.convert.random_sizes import random_sizes
from tests.convert.regions import full_region
from tests.convert.side_by_side import assert_close, gradients_by_our_names, recipe, run_both
from tests.models import edit_model
from tests.slow import slow

TRUE_FLOAT64 = 1e-11
"""Largest relative error in float64; of a tensor, over its largest element."""
MULTIMODAL = [name for name, family in FILED.items() if family.multimodal]


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks torch for float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = Tensor.double if function is Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        return function(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", [0, *slow([(1,), (2,), (3,)])])
@pytest.mark.parametrize("name", FILED)
@pytest.mark.usefixtures("in_float64")
def test_logits_and_gradients_equal_transformers_in_float64(tmp_path, name, seed):
    theirs = make_model(name, **random_sizes(name, seed, is_cut=False))
    folder = save_model(theirs, tmp_path / "hf", dtype=torch.float64)
    cfg = recipe(folder, folder)
    logits, expected, gradients = run_both(theirs, folder, replace(cfg, run=replace(cfg.run, dtype="float64")))
    assert expected.dtype == torch.float64
    assert_close(logits, expected, TRUE_FLOAT64, "logits")
    expected_gradients = gradients_by_our_names(theirs, tmp_path / "gradients")
    for parameter_name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[parameter_name], 10 * TRUE_FLOAT64, parameter_name)


def _folder(tmp_path: Path, name: str, **how: Any) -> Path:
    return add_tokenizer(save_model(make_model(name), tmp_path / "hf", **how))


def _run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_model_comes_out_and_in_again(tmp_path, monkeypatch, capsys, caplog, name):
    """Convert to a folder of only the text model, which transformers loads. The bytes are the same from there on."""
    model, family = make_model(name), FILED[name]
    folder = add_tokenizer(save_model(model, tmp_path / "hf"))
    _run("import", folder, tmp_path / "ckpt", "--check")
    assert capsys.readouterr().out.count("ignored (not of the text model): ") == 1
    _run("export", tmp_path / "ckpt", tmp_path / "text", "--check")
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert written["model_type"] == (family.exported_as or family.name)
    assert written["max_position_embeddings"] == SIZES["max_position_embeddings"]
    before, after = (HfSource(open_hf_folder(path)) for path in (folder, tmp_path / "text"))
    assert before.shapes == after.shapes
    for parameter, shape in before.shapes.items():
        assert torch.equal(before.read(parameter, full_region(shape)), after.read(parameter, full_region(shape)))
    _run("import", tmp_path / "text", tmp_path / "again")
    _run("export", tmp_path / "again", tmp_path / "text-again")
    for path in sorted((tmp_path / "text").iterdir()):
        assert (tmp_path / "text-again" / path.name).read_bytes() == path.read_bytes(), path.name
    tokens = tokens_of(2, 16)
    logits = _logits_of_text(tmp_path / "text", family.architecture, tokens, monkeypatch, caplog)
    torch.testing.assert_close(logits, logits_of(model, tokens), rtol=1e-5, atol=1e-5)


def _logits_of_text(folder: Path, architecture: str, tokens: Tensor, monkeypatch: Any, caplog: Any) -> Tensor:
    """Return the logits of a folder of only a text model, which transformers loads without a message."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if architecture.endswith("ForCausalLM"):
        return logits_of(loaded_in_silence(folder, monkeypatch, caplog, **how), tokens)
    model = getattr(transformers, architecture).from_pretrained(folder, **how)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    with torch.no_grad():
        return model(input_ids=tokens).last_hidden_state @ head.T


def test_kimi_k25_in_bfloat16_keeps_every_bit(tmp_path):
    folder = _folder(tmp_path, "kimi-k25", dtype=torch.bfloat16)
    _run("import", folder, tmp_path / "ckpt", "--check")
    _run("export", tmp_path / "ckpt", tmp_path / "text", "--check")
    text = load_file(tmp_path / "text" / "model.safetensors")
    original = load_file(folder / "model.safetensors")
    names = {FILED["kimi-k25"].multimodal.text_name(key): key for key in original}
    assert {tensor.dtype for key, tensor in text.items() if "e_score" not in key} == {torch.bfloat16}
    assert all(torch.equal(tensor, original[names[key]]) for key, tensor in text.items())


INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}


@pytest.mark.parametrize("is_inside", [True, False])
def test_int4_files_of_kimi_k25_are_refused_by_name(is_inside):
    keys = _keys("kimi-k25")
    (keys["text_config"] if is_inside else keys)["quantization_config"] = INT4
    with pytest.raises(ConfigError, match=r"weights quantised by quant_method='compressed-tensors'; moefold reads"):
        inspect_config(keys, Path("hf"))


def _keys(name: str, **sizes: Any) -> dict[str, Any]:
    """config.json of a family with the first value of each option."""
    family = FILED[name]
    text = {**SIZES, **first_sizes(family), **sizes}
    if family.multimodal:
        config = multimodal_config(family, text, {})
    else:
        config = CONFIG_MAPPING[family.name](**text)
    keys: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return keys


def _text_of(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The object of a config.json that describes the text model, to be changed."""
    for key in FILED[name].multimodal.config_path if FILED[name].multimodal else ():
        keys = keys[key]
    return keys


REFUSED: dict[str, list[Json]] = {
    "sarvam-mla": [{"topk_method": "greedy"}, {"head_dim": 5}, {"attention_bias": True}],
    "sarvam-moe": [{"num_nextn_predict_layers": 1}, {"scoring_func": "softmax"}],
    "kimi-k25": [{"moe_layer_freq": 2}, {"scoring_func": "softmax"}],
    "flint": [{"layer_types": ["full_attention"] * 3}, {"shared_expert_intermediate_size": 0}],
    "lara-mini": [{"layer_types": ["chunked_attention"] * 4}, {"shared_expert_intermediate_size": 0}],
    "aria": [{"mlp_bias": True}, {"moe_num_shared_experts": 0}],
    "qwen3-vl-moe": [{"norm_topk_prob": False}, {"use_sliding_window": True}],
    "qwen3-omni-moe": [{"use_sliding_window": True}, {"layer_types": ["sliding_attention"] * 2}],
    "glm4v-moe": [{"use_qk_norm": True}, {"num_nextn_predict_layers": 1}],
    "ernie4-5-vl-moe": [{"use_bias": True}, {"moe_norm_min": 0.5}, {"moe_intermediate_size": [1, 2, 3]}],
    "deepseek-ocr2": [{"head_dim": 5}, {"mlp_bias": True}, {"topk_method": "noaux_tc"}, {"norm_topk_prob": True}],
}
EVERYWHERE: list[Json] = [{"hidden_act": "gelu"}, {"attention_dropout": 0.5}, {"my_gain": 2}, {"query_scale": 0.5}]


@pytest.mark.parametrize("name", FILED)
def test_keys_that_are_unknown_or_mean_other_mathematics_are_refused(name):
    inspect_config(_keys(name), Path("hf"))
    for change in (*REFUSED[name], *EVERYWHERE):
        keys = _keys(name)
        _text_of(name, keys).update(change)
        with pytest.raises(ConfigError, match="|".join(change)):
            inspect_config(keys, Path("hf"))
    with pytest.raises(ConfigError, match="gain=2, which moefold does not know"):
        inspect_config(_keys(name) | {"gain": 2}, Path("hf"))


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_key_that_the_text_model_lacks_has_the_default_of_transformers(name):
    family = FILED[name]
    # Sizes that fit the default sizes of the configuration classes.
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128 if "kv_lora_rank" in options_of(family) else 64}
    experts = {"n_routed_experts": 64} if "n_routed_experts" in options_of(family) else {}
    whole = _keys(name, hidden_size=1024, **heads, **experts)
    text = _text_of(name, whole)
    understood = set()
    for key in sorted(text.keys() - {"model_type", "tie_word_embeddings", "dtype"}):
        rest = json.loads(json.dumps(whole))
        del _text_of(name, rest)[key]
        found = _outcome(rest)
        if "config.json lacks " in str(found):
            continue
        understood.add(key)
        config = CONFIG_MAPPING[family.multimodal.model_type](**json.loads(json.dumps(rest)))
        theirs = json.loads(config.to_json_string(use_diff=False))
        assert found == _outcome(theirs), key
    assert {"rms_norm_eps", "initializer_range", "hidden_act", "rope_parameters", "num_key_value_heads"} <= understood


def _outcome(keys: dict[str, Any]) -> ModelConfig | str:
    return _outcome_of_text(json.dumps(keys, sort_keys=True))


@lru_cache(maxsize=4)
def _outcome_of_text(text: str) -> ModelConfig | str:
    try:
        model, _ = inspect_config(json.loads(text), Path("hf"))
    except ConfigError as error:
        return str(error)
    size = model.softmax_attention.head_dim
    return edit_model(model, {"attention.head_dim": size}) if model.attention.kind == "gqa" else model


def test_older_keys_of_sarvam_mla_mean_the_same_as_in_transformers():
    yarn = {"factor": 40, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
    older = {"model_type": "sarvam_mla", "rope_scaling": {"type": "deepseek_yarn", **yarn}, "rope_theta": 300.0}
    sizes = {key: value for key, value in _keys("sarvam-mla").items() if key in first_sizes(FILED["sarvam-mla"])}
    older |= {**SIZES, **sizes, "head_dim": 17, "q_head_dim": 9, "num_experts": 12, "num_shared_experts": 2}
    for key in ("rope_parameters", "n_routed_experts", "n_shared_experts"):
        older.pop(key, None)
    theirs = transformers.SarvamMLAConfig(**older)
    assert inspect_config(older, Path("hf"))[0] == inspect_config(theirs.to_dict(), Path("hf"))[0]
    assert inspect_config(older, Path("hf"))[0].rope.scaling.kind == "yarn"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("doge", "depends on later ones"),
        ("jetmoe", "heads of attention"),
        ("unlimited_ocr", "no loss of a sequence is defined"),
        ("nllb-moe", "an encoder"),
        ("switch_transformers", "an encoder"),
        ("openai_privacy_filter", "later tokens"),
        ("diffusion_gemma", "later tokens of a block"),
    ],
)
def test_types_that_no_causal_model_computes_are_refused_with_the_reason(tmp_path, capsys, model_type, reason):
    assert model_type in transformers.AutoConfig.for_model(model_type).model_type
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"model_type '{model_type}', which needs parts that moefold does not have: " in (
        error := capsys.readouterr().err
    )
    assert reason in error
    assert model_type in UNSUPPORTED_FAMILIES


MOST_LINES = 100
"""Of a family in a file."""


def _families_in(body: list[ast.stmt]) -> list[ast.expr]:
    """The entries of the tuple FAMILIES of a file."""
    (listed,) = (
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES"
    )
    return listed.elts


def test_families_are_data():
    sizes = []
    for path in Path(family_files.__path__[0]).glob("[!_]*.py"):
        body = ast.parse(path.read_text()).body
        assert not any(isinstance(node, ast.ClassDef) for node in body), path.name
        sizes += [entry.end_lineno - entry.lineno + 1 for entry in _families_in(body)]
    assert len(sizes) == len(FILED)
    assert max(sizes) <= MOST_LINES
    assert {family.name for family in FILED.values() if not family.exported_as} <= FAMILIES.keys()
