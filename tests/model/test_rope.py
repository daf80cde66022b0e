"""Rotary frequencies and pairs, against transformers and against the definition."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.config.model import ModelConfig
from moefold.convert.families.families import FAMILIES
from moefold.convert.families.hf_config import parse_model_config
from moefold.errors import ConfigError
from moefold.model.rope import RopeTable, build_rope, rope_frequencies
from moefold.verify.oracle_attention import apply_rope
from tests.models import config_of

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")


def _model(**keys: Any) -> ModelConfig:
    return config_of({"model": keys, "train": {"global_batch_size": 1}}).model


def _rotated_factor(cfg: ModelConfig, seq_len: int = 0) -> float:
    return cfg.rope.scaling.rotated_factor(seq_len)


def _random_yarn(seed: int) -> tuple[ModelConfig, dict[str, Any]]:
    """Return a legal setting in our words and in the words of transformers."""
    rng = random.Random(seed)
    theirs: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": rng.uniform(20.0, 200000.0),
        "factor": rng.uniform(1.5, 64.0),
        "beta_fast": rng.uniform(8.0, 64.0),
        "beta_slow": rng.uniform(0.3, 6.0),
        "truncate": rng.random() < 0.5,
        "original_max_position_embeddings": rng.randint(40, 8192),
        "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
    }
    kind = rng.choice(["derived", "given", "mscale"])
    if kind == "given":
        theirs["attention_factor"] = rng.uniform(0.5, 2.0)
    elif kind == "mscale":
        theirs |= {"mscale": rng.uniform(0.2, 2.0), "mscale_all_dim": rng.uniform(0.2, 2.0)}
    names = {
        "original_max_position_embeddings": "rope.scaling.original_seq_len",
        "rope_theta": "rope.theta",
        "partial_rotary_factor": "attention.rope_fraction",
    }
    ours = {names.get(key, f"rope.scaling.{key}"): value for key, value in theirs.items() if key != "rope_type"}
    return _model(
        hidden_size=64,
        **({"attention.num_heads": 2, "rope.scaling": "yarn", "attention.head_dim": rng.choice([8, 24, 64])} | ours),
    ), theirs


@pytest.mark.parametrize("seed", range(40))
def test_yarn_equals_transformers(seed):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cfg, theirs = _random_yarn(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=cfg.attention.head_dim,
        max_position_embeddings=9000,
        rope_parameters=theirs,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    # transformers computes in float32.
    torch.testing.assert_close(rope_frequencies(cfg.rope_settings), expected.double(), rtol=3e-5, atol=1e-10)
    assert _rotated_factor(cfg) == pytest.approx(factor, rel=1e-12)


def test_llama3_without_a_blend_equals_transformers():
    """Llama 4 Scout gives both factors as 1: each frequency is scaled in full or not at all."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 64}
    theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    config = transformers.LlamaConfig(head_dim=32, max_position_embeddings=9000, rope_parameters=theirs)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = {
        "rope.scaling": "llama3",
        "rope.scaling.factor": 16.0,
        "rope.theta": 5e5,
        "rope.scaling.original_seq_len": 64,
    }
    cfg = _model(
        **({"attention.head_dim": 32, "rope.scaling.low_freq_factor": 1.0, "rope.scaling.high_freq_factor": 1.0} | ours)
    )
    torch.testing.assert_close(rope_frequencies(cfg.rope_settings), expected.double(), rtol=3e-5, atol=1e-10)


def test_yarn_by_hand():
    """Four pairs of base 16 turn 64, 32, 16 and 8 times in 402 positions: the betas 32 and 16 blend from 1 to 2."""
    seq_len = round(64 * 2 * math.pi)
    keys = {
        "rope.scaling": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_seq_len": seq_len,
        "rope.theta": 16.0,
    }
    cfg = _model(
        **(
            {
                "attention.head_dim": 8,
                "rope.scaling.beta_fast": 32.0,
                "rope.scaling.beta_slow": 16.0,
                "rope.scaling.truncate": False,
            }
            | keys
        )
    )
    expected = torch.tensor([1.0, 1 / 2, 1 / 16, 1 / 32], dtype=torch.float64)
    torch.testing.assert_close(rope_frequencies(cfg.rope_settings), expected, rtol=2e-3, atol=0)
    assert _rotated_factor(cfg) == 1 + math.log(4) / 10


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_scores_equal_the_oracle(is_interleaved, fraction):
    """The order of the resulting pairs is free, the products of queries and keys are not."""
    keys = {"rope.scaling": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_seq_len": 20, "rope.theta": 50.0}
    cfg = _model(
        **({"attention.head_dim": 8, "rope.interleaved": is_interleaved, "attention.rope_fraction": fraction} | keys)
    )
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(5, 2, 3, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    turn = build_rope(cfg.rope_settings, torch.arange(5), torch.float64)
    given = torch.einsum("sbhd,tbhd->bhst", turn(query), turn(key))
    positions = torch.arange(5).expand(2, 5)
    query, key = (apply_rope(cfg, x.transpose(0, 1), cfg.rope_settings.rotary_dim, positions) for x in (query, key))
    torch.testing.assert_close(given, torch.einsum("bshd,bthd->bhst", query, key), rtol=1e-12, atol=1e-12)


def test_the_two_kinds_of_pairs_differ():
    ropes = [_model(**{"attention.head_dim": 8, "rope.interleaved": flag}).rope_settings for flag in (False, True)]
    query = torch.randn(5, 1, 1, 8, generator=torch.Generator().manual_seed(2))
    scores = [
        torch.einsum("sbhd,tbhd->st", *[build_rope(rope, torch.arange(5), torch.float32)(query)] * 2) for rope in ropes
    ]
    assert float((scores[0] - scores[1]).abs().max()) > 0.1


@pytest.mark.parametrize("seq_len", [64, 65])
@pytest.mark.parametrize("attention_factor_given", [None, 1.7])
def test_longrope_equals_transformers(seq_len, attention_factor_given):
    """Within the original context of 64 tokens, and beyond it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64}
    theirs |= {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0], "factor": 4.0}
    theirs |= {} if attention_factor_given is None else {"attention_factor": attention_factor_given}
    config = transformers.LlamaConfig(head_dim=8, max_position_embeddings=256, rope_parameters=theirs)
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=seq_len)
    cfg = parse_model_config({**config.to_dict(), "vocab_size": 64}, Path("folder"))
    torch.testing.assert_close(rope_frequencies(cfg.rope_settings, seq_len), expected.double(), rtol=3e-5, atol=1e-10)
    assert _rotated_factor(cfg, seq_len) == pytest.approx(factor, rel=1e-12)
    # The keys that a family writes read back.
    assert parse_model_config(FAMILIES["llama"].write(cfg), Path("folder")) == cfg


_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "keys",
    [
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 1.1},
        {"attention_factor": 1.1, "mscale_all_dim": 1.3},
        {"mscale": 0, "mscale_all_dim": 1.0},
        {"factor": None},
        {"beta_fast": None, "beta_slow": 0},
        {"rope_type": "linear", "mscale": 0.7, "beta_fast": 3},
    ],
)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_settings_of_yarn_mean_the_same_as_in_transformers(family, keys):
    """Frequencies, the factor of rotated parts and, with latent attention, the factor of the scores."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    theirs = _YARN | keys
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 384, "num_key_value_heads": 4, "hidden_act": "swish"}
    sizes |= {} if family == "deepseek_v3" else {"head_dim": 8}
    if family == "deepseek_v3":
        sizes |= {"n_routed_experts": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        sizes |= {"qk_rope_head_dim": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_group": 1}
        sizes |= {"topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.AutoConfig.for_model(family, **sizes, rope_parameters=dict(theirs))
    expected, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, "cpu")
    folder_keys = {"model_type": family, **sizes, "rope_scaling": theirs, "rope_theta": 3.0}
    cfg = parse_model_config(folder_keys, Path("folder"))
    torch.testing.assert_close(rope_frequencies(cfg.rope_settings), expected.double(), rtol=3e-5, atol=1e-10)
    assert _rotated_factor(cfg) == pytest.approx(factor, rel=1e-12)
    if family == "deepseek_v3" and keys.get("factor", 1):
        scores = modeling_deepseek_v3.yarn_apply_mscale(config.rope_parameters, 1.0)
        assert cfg.rope.scaling.score_factor == pytest.approx(scores, rel=1e-12)
    # The keys that a family writes read back.
    assert parse_model_config(FAMILIES[family].write(cfg), Path("folder")) == cfg


def test_an_original_length_outside_the_rope_parameters_has_precedence():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(rope_parameters=dict(_YARN), original_max_position_embeddings=32)
    keys = {**config.to_dict(), "rope_parameters": _YARN, "original_max_position_embeddings": 32}
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    cfg = parse_model_config(keys, Path("folder"))
    assert cfg.rope.scaling.original_seq_len == 32
    torch.testing.assert_close(rope_frequencies(cfg.rope_settings), expected.double(), rtol=3e-5, atol=1e-10)


def test_scores_that_other_scalings_would_scale_are_refused():
    keys = FAMILIES["deepseek_v3"].write(parse_model_config(transformers.DeepseekV3Config().to_dict(), Path("folder")))
    keys["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "mscale_all_dim": 1.0}
    with pytest.raises(ConfigError, match="mscale_all_dim=1.0 of rope_type='linear', with which moefold does not"):
        parse_model_config(keys, Path("folder"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", [None, 0])
def test_a_table_has_the_bits_of_angles_that_are_computed(dtype, seed):
    """In passes whose positions grow over the ends of the table, one row or many, in any order."""
    settings = (ModelConfig() if seed is None else _random_yarn(seed)[0]).rope_settings
    frequencies = rope_frequencies(settings, 4096)
    table = RopeTable(settings, dtype, None, frequencies, 4096)
    generator = torch.Generator().manual_seed(0)
    for last in (0, 7, 255, 256, 300, 1023, 3000, 5):
        for count in (1, 3, 64):
            positions = torch.randint(0, last + 1, (count,), generator=generator)
            found = table.rope(positions, last)
            expected = build_rope(settings, positions, dtype, None, frequencies, 4096)
            assert torch.equal(found.cos, expected.cos)
            assert torch.equal(found.sin, expected.sin)
            assert found.cos.is_contiguous()
