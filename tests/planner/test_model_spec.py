"""Shapes: the same counts as the runtime's formulas, and the operations that sources print."""

import re
from dataclasses import replace

import pytest

from moefold.config.presets import preset_names
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.flops import count_parameters
from moefold.errors import ConfigError
from moefold.planner.model_spec import (
    find_model_name,
    layer_parameters,
    load_model_spec,
)
from moefold.planner.planner import read_model
from moefold.planner.stage_splitter import RecipeStageSplitter
from moefold.validate.config import check_config


def test_layers_with_different_computations_are_different_kinds():
    spec = load_model_spec("gpt-oss-120b")
    assert [layer.window for layer in spec.kinds] == [128, 0]
    assert [spec.layers[:5].count(kind) for kind in (0, 1)] == [3, 2]


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_the_layers_are_the_matrices_and_two_norms(name):
    spec = load_model_spec(name)
    counted = count_parameters(spec.config)
    layers = sum(sum(layer_parameters(spec.kinds[kind])) for kind in spec.layers)
    assert layers == pytest.approx(counted.total - counted.mtp - counted.embedding - counted.head, rel=2e-3)


@pytest.mark.parametrize("name", preset_names())
def test_the_name_of_a_preset_is_the_preset(name):
    assert find_model_name(name) == name
    assert load_model_spec(name).config.preset == name


@pytest.mark.parametrize(
    ("name", "total"),
    [("kimi-linear-48b-a3b", 49.1e9), ("qwen3.5-35b-a3b", 35e9), ("qwen3.5-397b-a17b", 397e9), ("lfm2-8b-a1b", 8.3e9)],
)
def test_presets_of_hybrids_have_the_size_of_their_name(name, total):
    assert count_parameters(load_model_spec(name).config).total == pytest.approx(total, rel=0.015)


def test_a_hybrid_has_its_published_number_of_parameters():
    spec = load_model_spec("qwen3-next-80b-a3b")
    assert count_parameters(spec.config).total == pytest.approx(79.67e9, rel=1e-3)
    kinds = [spec.kinds[kind].attention.kind for kind in spec.layers[:5]]
    assert kinds == [*["gated_deltanet"] * 3, "gqa", "gated_deltanet"]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen3_30B_a3B (tokendrop)", "qwen3-30b-a3b"),
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("Kimi_K2", "kimi-k2"),
        ("LLAMA3.1_405B", "llama3-405b"),
        ("Llama3-8x70B", "llama3-8x70b"),
        ("Mixtral-8x22B-G8T8", "mixtral-8x22b-g8t8"),
        ("DeepSeekV4 Flash", None),
    ],
)
def test_names_as_tables_spell_them(spelling, name):
    assert find_model_name(spelling) == name


def test_a_recipe_and_a_folder_are_models_too(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[model]\npreset = "tiny"\n')
    assert load_model_spec(str(path)).config.hidden_size == load_model_spec("tiny").config.hidden_size
    with pytest.raises(ConfigError, match="does not exist"):
        load_model_spec(str(tmp_path / "absent" / "config.json"))


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'mixtral-8x7b'"):
        load_model_spec("mixtral-8x7")


def test_the_models_that_are_listed_are_those_that_can_be_planned():
    with pytest.raises(ConfigError) as error:
        load_model_spec("no-such-model")
    listed = re.search("he models are (.*); or name", str(error.value))[1].split(", ")
    assert set(listed) > {*preset_names(), "llama3-8b", "moonlight-16b"}
    for name in listed:
        cfg = read_model(name)[0]
        assert cfg.model == load_model_spec(name).config
        train = replace(cfg.train, seq_len=max(cfg.train.seq_len, cfg.model.selected_keys))
        check_config(replace(cfg, run=replace(cfg.run, device="cuda"), train=train, parallel=ParallelConfig()))


@pytest.mark.parametrize(("name", "chunks"), [("mixtral-8x22b", 56), ("deepseek-v3", 16), ("qwen3-235b-a22b", 24)])
def test_chunks_hold_every_layer_once(name, chunks):
    shape = load_model_spec(name)
    cfg = replace(read_model(name)[0], train=TrainConfig(seq_len=4096))
    stages = RecipeStageSplitter(cfg, shape)(tuple(range(chunks)))
    assert len(stages) == chunks
    held = [sum(column) for column in zip(*(stage.kind_counts for stage in stages), strict=True)]
    counts = [shape.all_layers.count(kind) for kind in range(len(shape.kinds))]
    assert held == counts
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (chunks - 1)
    assert [stage.has_loss for stage in stages] == [False] * (chunks - 1) + [True]
    assert max(sum(stage.kind_counts) for stage in stages) <= -(-len(shape.layers) // chunks) + 1
