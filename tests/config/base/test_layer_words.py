"""Layers in words: each text has one meaning, and the shortest text of layers is read back as these."""

import random

import pytest

from moefold.config.base.layer_words import WORDS, LayerWords, parse_layers, repeat_layers, spell_layers
from moefold.config.edit import edit
from moefold.config.load import config_from_dict
from moefold.config.presets import load_preset, preset_names
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.recipe import load_config

DENSE = LayerWords(ffn="dense")
MOE = LayerWords()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (3, [MOE] * 3),
        ("3 moe", [MOE] * 3),
        ("dense, 2 moe", [DENSE, MOE, MOE]),
        ("2x(dense,moe),dense", [DENSE, MOE, DENSE, MOE, DENSE]),
        ("2 x (2 linear, full)", [LayerWords("linear"), LayerWords("linear"), MOE] * 2),
        (" chunk/dense , nope ", [LayerWords("chunk", ffn="dense"), LayerWords(position="nope")]),
        ("full/rope/own/moe, window/nope/shared/dense", [MOE, LayerWords("window", "nope", "shared", "dense")]),
    ],
)
def test_layers_of_a_text(text, rows):
    assert parse_layers(text) == tuple(rows)


@pytest.mark.parametrize("seed", range(200))
def test_spelled_layers_are_read_back(seed):
    draw = random.Random(seed)
    kinds = [LayerWords(*(draw.choice(words.split()) for words in WORDS)) for _ in range(draw.randint(1, 4))]
    kinds = [kind if kind.attention != "linear" else LayerWords("linear", ffn=kind.ffn) for kind in kinds]
    unit = [draw.choice(kinds) for _ in range(draw.randint(1, 10))]
    rows = (unit * draw.randint(1, 6))[: draw.randint(1, 60)]
    assert parse_layers(spell_layers(rows)) == tuple(rows)
    assert repeat_layers(rows, len(rows)) == tuple(rows)


def test_presets_have_the_shortest_text():
    for name in preset_names():
        layers = load_preset(name)["layers"]
        assert spell_layers(parse_layers(layers)) == layers


def test_a_count_keeps_the_kind_of_equal_layers_and_is_refused_for_others():
    assert load_config(None, ["model.layers=4 dense", "model.layers=2"]).model.layers == "2 dense"
    assert config_from_dict({"model": {"preset": "mixtral-8x7b", "layers": 2}}).model.layers == 2
    assert edit(Config(), {"model.layers": "4 dense", "train.seq_len": 64}).model.num_layers == 4
    dense = edit(Config(), {"model.layers": "4 dense"})
    assert edit(dense, {"model.layers": 3}).model.layers == "3 dense"
    for refused in (
        lambda: load_config(None, ["model.layers=dense, moe", "model.layers=4"]),
        lambda: load_config(None, ["model.preset=gpt-oss-20b", "model.layers=4"]),
        lambda: config_from_dict({"model": {"preset": "deepseek-v3", "layers": 4}}),
        lambda: edit(edit(Config(), {"model.layers": "dense, moe"}), {"model.layers": 4}),
    ):
        with pytest.raises(
            ConfigError, match="^model.layers=4 does not say which layers; write them by name, such as '"
        ):
            refused()
