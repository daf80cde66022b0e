"""Folders of Phi-3.5-MoE: older keys, contexts beyond the original one, and refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.cli.main import main
from moefold.convert.families.hf_config import read_model_config
from moefold.errors import ConfigError
from tests.convert.hf_models import LONGROPE, logits_of, make_model, save_model, tokens_of
from tests.convert.our_logits import SEQ_LEN, our_logits


def _folder(tmp_path: Path, change: dict[str, Any]) -> Path:
    """A folder whose config.json has other keys; None leaves a key out."""
    folder = save_model(make_model("phi-moe"), tmp_path / "hf")
    keys = json.loads((folder / "config.json").read_text()) | change
    kept = {key: value for key, value in keys.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_keys_of_the_released_folders_are_read(tmp_path):
    """They have `rope_scaling` with a `type`, the original length twice, and a window as long as the context."""
    older = {"type": "longrope", **{k: v for k, v in LONGROPE.items() if k not in ("rope_type", "rope_theta")}}
    change = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": older, "sliding_window": 384}
    folder = _folder(tmp_path, change | {"max_position_embeddings": 384, "original_max_position_embeddings": 96})
    model = read_model_config(folder)
    assert (model.norm.kind, model.ffn.moe.router.softmax.kind, model.head_bias) == ("layernorm", "sparsemixer", True)
    assert (isinstance(model.layers, int), model.sliding_window) == (True, 0)
    assert (model.rope.theta, model.rope.scaling.original_seq_len, model.rope.scaling.factor) == (10000.0, 96, 4.0)
    assert (model.rope.scaling.short_factors, model.rope.scaling.long_factors) == ((1.0, 1.5), (2.0, 5.0))
    assert (model.rope.scaling.short_mscale, model.rope.scaling.long_mscale) == (1.2, 1.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok=3, which moefold does not compute; only 2"),
        ({"router_jitter_noise": 0.0}, "model.ffn.moe.router.softmax.jitter=0.0 must be greater than 0"),
        ({"sliding_window": 0}, "sliding_window=0, which should be 1 or more"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which moefold does not compute"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "model.rope.scaling.short_factors has 1 numbers"),
        (
            {"rope_parameters": LONGROPE | {"long_factor": [1.0, -2.0]}},
            "model.rope.scaling.long_factors has the number -2.0",
        ),
        ({"rope_parameters": LONGROPE | {"long_factor": 2.0}}, "long_factor=2.0, which should be a list of numbers"),
        ({"rope_parameters": LONGROPE | {"long_factor": [1.0, "2"]}}, "long_factor='2', which should be a number"),
        ({"rope_parameters": LONGROPE | {"long_mscale": 0.0}}, "long_mscale=0.0, which should be above 0"),
        ({"rope_parameters": {k: v for k, v in LONGROPE.items() if k != "short_mscale"}}, "lacks short_mscale"),
        (
            {"rope_parameters": LONGROPE | {"rope_type": "yarn"}},
            "rope_type='yarn', which moefold does not compute; only 'default', 'longrope'",
        ),
    ],
)
def test_options_that_are_not_computed_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError) as raised:
        read_model_config(_folder(tmp_path, change))
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["lm_head.bias", "model.norm.bias", "model.layers.1.input_layernorm.bias"])
def test_a_bias_that_is_missing_or_unknown_stops_the_import(tmp_path, capsys, name):
    folder = _folder(tmp_path, {})
    tensors = load_file(folder / "model.safetensors")
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--no-tokenizer"]) == 2
    assert name in capsys.readouterr().err
    other = name.replace("bias", "scale")
    save_file({**rest, other: tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(folder), str(tmp_path / "ckpt"), "--no-tokenizer"]) == 2
    assert not (tmp_path / "ckpt").exists()


def test_beyond_the_original_context_the_long_factors_are_used(tmp_path):
    """transformers 5.24 switches only the attention factor there, unless its RoPE is told the length."""
    theirs = make_model("phi-moe", rope_parameters=LONGROPE | {"original_max_position_embeddings": SEQ_LEN - 1})
    folder = save_model(theirs, tmp_path / "hf")
    tokens = tokens_of(2, SEQ_LEN)
    found = our_logits(folder, tokens)
    as_released = logits_of(theirs.double(), tokens)
    rotary = theirs.model.rotary_emb
    rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=SEQ_LEN)
    torch.testing.assert_close(found, logits_of(theirs, tokens), rtol=2e-5, atol=2e-5)
    assert (found - as_released).abs().max() > 1e-3
