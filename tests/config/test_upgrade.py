"""Recipes and runs of format 1 in format 2."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moefold.board.run_finder import find_runs
from moefold.board.run_reader import RunReader
from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.sample_order import data_order_change, sample_order
from moefold.config.base.limits import FORMAT
from moefold.config.base.part import Part, make_part
from moefold.config.base.part_registry import built_in_kinds
from moefold.config.chosen import read_key
from moefold.config.keys.paths import key_types, kind_settings, part_keys, tables
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.presets import preset_names
from moefold.config.schema import Config, config_to_dict
from moefold.config.upgrade.moved_keys import LAYERS, MOVED, OFF
from moefold.config.upgrade.recipe import upgraded
from moefold.config.upgrade.refusals import upgraded_word
from moefold.config.upgrade.text import upgrade_text
from moefold.convert.run_config import parse_run_config
from moefold.errors import ConfigError
from moefold.optim.lr_schedule import schedule_settings
from moefold.recipe import load_config, load_recipe

OLD_RUN = Path(__file__).with_name("format1")
"""config.json and moefold.json of a run that a version with format 1 made."""

RECIPE = """# A recipe.

[run]
steps = 100  # few

[train]
# The peak.
lr = 2e-3
min_lr = 2e-4  # a tenth
lr_schedule = "wsd"
decay_steps = 5

[data]
kind = "synthetic"
"""
UPGRADED = """# A recipe.

format = 2

[run]
steps = 100  # few

[train]
# The peak.
lr = 2e-3
# a tenth
lr_schedule = { kind = "wsd", min_lr = 2e-4, decay_steps = 5 }

[data]
kind = "synthetic"
"""


def test_a_file_keeps_its_lines_and_comments():
    assert upgrade_text(RECIPE, "r.toml") == (UPGRADED, [])
    assert upgrade_text(UPGRADED, "r.toml") == (UPGRADED, [])


def test_a_table_stands_where_the_first_flat_key_did():
    found, _ = upgrade_text("[train]\nmin_lr = 1e-5 # low\nlr = 1\n", "r.toml")
    assert found == 'format = 2\n\n[train]\nlr_schedule = { kind = "cosine", min_lr = 1e-5 }  # low\nlr = 1\n'


def test_a_key_that_no_part_reads_is_left_out_and_named():
    found, left_out = upgrade_text('[train]\nlr_schedule = "constant"\nmin_lr = 1e-5\n', "r.toml")
    assert found == 'format = 2\n\n[train]\nlr_schedule = "constant"\n'
    assert left_out == ["train.min_lr"]


def test_an_unusual_form_is_refused_with_the_new_names():
    with pytest.raises(ConfigError, match=r"move by hand: train.min_lr \(train.lr_schedule.min_lr\)"):
        upgrade_text("train.min_lr = 1e-5\n", "r.toml")


def test_a_key_that_is_set_by_both_names_is_refused():
    """One of two values would be lost without a word."""
    for text, names in (
        ("[model]\nnum_layers = 4\nlayers = 3\n", "model.num_layers and model.layers"),
        ('[model]\nlayer_pattern = "DM"\nlayers = 3\n', "model.layer_pattern and model.layers"),
        ("[train]\nmin_lr = 1e-5\nlr_schedule = { min_lr = 1e-4 }\n", "train.min_lr and train.lr_schedule.min_lr"),
    ):
        with pytest.raises(ConfigError, match=f"r.toml has both {names}, its new name; remove one"):
            upgrade_text(text, "r.toml")


def test_a_section_of_another_form_is_refused_with_the_right_one():
    with pytest.raises(ConfigError, match=r"write each section as \[section\] with its keys below"):
        upgrade_text("[[model]]\nnum_layers = 4\n", "r.toml")


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("format = 3\n", "update it"),
        ('format = "new"\n', "write format = 2"),
        ("format = 0\n", "write format = 2"),
    ],
)
def test_another_format_is_refused(tmp_path, text, way_out):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"reads up to 2; {way_out}"):
        load_config(tmp_path / "r.toml")
    with pytest.raises(ConfigError, match=f"reads up to 2; {way_out}"):
        upgrade_text(text, "r.toml")


def test_every_place_exists_and_no_key_has_two():
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        assert key not in key_types(section)
        if str(place) == "model.layers":
            continue
        is_here = str(place) in (*kind_settings(), *tables())
        assert is_here or not set(place.kinds) & set(built_in_kinds(part_keys()[place.key]))
    places = [(str(place), place.kinds) for place in MOVED.values() if str(place) != "model.layers"]
    assert len(set(places)) == len(places) == len(MOVED) - 5


def test_an_old_key_is_refused_with_the_new_word(tmp_path):
    (tmp_path / "r.toml").write_text("[train]\nmin_lr = 2e-4\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "r.toml")
    assert str(error.value) == (
        'train.min_lr is train.lr_schedule.min_lr now: write train.lr_schedule = { kind = "cosine", min_lr = 0.0002 }, '
        "or run moefold recipe upgrade FILE"
    )
    (tmp_path / "r.toml").write_text('[train]\nmin_lr = 2e-4\nlr_schedule = "constant"\n')
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "r.toml")
    assert str(error.value) == (
        "train.min_lr is train.lr_schedule.min_lr now, a key of 'cosine', 'linear' or 'wsd', and not of 'constant'; "
        "leave it out"
    )
    with pytest.raises(ConfigError, match=r"^train.min_lr is .* now: write train.lr_schedule.min_lr=2e-4$"):
        load_config(None, ["train.min_lr=2e-4"])


def test_a_key_of_an_experiment_is_refused_whatever_its_value():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["train.gradient_delay=0"])
    assert str(error.value).endswith("write train.optimizer=delayed_adamw or delayed_muon")
    for key, value in {"gradient_delay": 0, "delay_correction": 0.0, "spsa_eps": 1e-3}.items():
        with pytest.raises(ConfigError, match=f"^train.{key} is train.optimizer.* now, a key of .*; leave it out$"):
            config_from_dict({"train": {key: value}})


def test_an_old_run_of_an_experiment_has_its_kind_and_settings():
    old = {"optimizer": "muon", "muon_momentum": 0.9, "gradient_delay": 1, "delay_correction": 0.5, "spsa_eps": 1e-3}
    kind = {"kind": "delayed_muon", "momentum": 0.9, "correction": 0.5}
    assert upgraded({"train": old}) == ({"train": {"optimizer": kind}}, ["train.spsa_eps"])
    old = {"optimizer": "spsa", "eps": 1e-8, "weight_decay": 0.0, "spsa_eps": 1e-2, "gradient_delay": 0}
    kind = {"kind": "spsa", "weight_decay": 0.0, "eps": 1e-2}
    assert upgraded({"train": old})[0] == {"train": {"optimizer": kind}}
    text = '[train]\noptimizer = "adamw"\nbeta1 = 0.8\ngradient_delay = 1\n'
    line = 'optimizer = { kind = "delayed_adamw", beta1 = 0.8 }'
    assert upgrade_text(text, "r.toml")[0] == f"format = 2\n\n[train]\n{line}\n"


def test_words_of_a_command_line():
    assert upgraded_word("train.min_lr=1e-5", {}) == "train.lr_schedule.min_lr=1e-5"
    assert upgraded_word("train.lr=1e-5", {}) == "train.lr=1e-5"
    assert upgraded_word("train.decay_steps=5", {"train": {"lr_schedule": "wsd"}}).startswith("train.lr_schedule.")
    with pytest.raises(ConfigError, match="a key of 'wsd', and not of 'cosine'"):
        upgraded_word("train.decay_steps=5", {})


@pytest.mark.parametrize(
    ("flat", "layers"),
    [
        ({"num_layers": 4}, 4),
        ({"layer_pattern": "D"}, "4 dense"),
        ({"num_layers": 61, "layer_pattern": "D3M58"}, "3 dense, 58 moe"),
        ({"num_layers": 8, "attention_pattern": "L3F"}, "2 x (3 linear, full)"),
        ({"num_layers": 8, "attention_pattern": "C3F", "rope_pattern": "R3N"}, "2 x (3 chunk, full/nope)"),
        ({"num_layers": 4, "layer_pattern": "DM", "attention_pattern": "WF"}, "2 x (window/dense, full/moe)"),
        ({"num_layers": 6, "index_pattern": "F2S", "layer_kinds": "MMMMMM"}, "2 x (2 full, shared)"),
        ({"preset": "gpt-oss-20b", "num_layers": 5}, "2 x (window, full), window"),
        ({"preset": "deepseek-v3", "layer_pattern": "M"}, 61),
        ({"preset": "deepseek-v3", "num_layers": 62}, "3 dense, 58 moe, dense"),
    ],
)
def test_patterns_are_layers_in_words(flat, layers):
    [found, unread] = upgraded({"model": flat})
    assert found == {"model": {key: flat[key] for key in flat if key == "preset"} | {"layers": layers}}
    assert not unread


@pytest.mark.parametrize(
    "flat", [{"layer_pattern": "DX"}, {"num_layers": 0}, {"num_layers": "4"}, {"layer_pattern": "M5"}]
)
def test_a_pattern_that_is_not_understood_is_refused_as_it_stands(flat):
    assert upgraded({"model": flat})[0] == {"model": flat}
    with pytest.raises(ConfigError, match="is model.layers now: write the layers by name"):
        config_from_dict({"model": flat})


def test_words_of_layers():
    assert upgraded_word("model.num_layers=8", {}) == "model.layers=8"
    assert upgraded_word("model.num_layers=2", {"model": {"preset": "gpt-oss-20b"}}) == "model.layers='window, full'"
    assert upgraded_word("model.layer_pattern=D3M", {"model": {"num_layers": 8}}) == "model.layers='2 x (3 dense, moe)'"
    with pytest.raises(ConfigError, match="model.layer_pattern is model.layers now"):
        upgraded_word("model.layer_pattern=X", {})


def test_another_kind_keeps_common_settings_and_names_those_that_it_leaves_out(tmp_path):
    (tmp_path / "r.toml").write_text(UPGRADED)
    found = load_recipe(tmp_path / "r.toml", ["train.lr_schedule=linear"])
    assert found.cfg.train.lr_schedule == make_part("lr_schedule", "linear", min_lr=2e-4)
    assert found.messages == (
        "train.lr_schedule='linear' leaves out train.lr_schedule.decay_steps=5 of the recipe, which it has no key for",
    )
    found = load_recipe(tmp_path / "r.toml", ["train.lr_schedule.min_lr=1e-5"])
    assert found.cfg.train.lr_schedule == make_part("lr_schedule", "wsd", min_lr=1e-5, decay_steps=5)
    assert not found.messages


def old_settings() -> dict[str, dict[str, object]]:
    return json.loads((OLD_RUN / "config.json").read_text())


@pytest.mark.parametrize(
    ("flat", "upcycle", "unread"),
    [
        (
            {"upcycle_from": "a", "upcycle_router": "zero", "upcycle_scaling": False, "upcycle_noise": 0.1},
            {"dense": "a", "router_init": "zero", "scaling": False, "noise": 0.1},
            [],
        ),
        ({"upcycle_from": "a"}, {"dense": "a"}, []),
        ({"upcycle_from": "", "upcycle_router": "group"}, None, ["model.upcycle_router"]),
        ({"upcycle_noise": 0.1}, None, ["model.upcycle_noise"]),
    ],
)
def test_upcycling_of_a_model_is_a_table_of_checkpoint(flat, upcycle, unread):
    found = {"model": {"layers": 2}} | ({"checkpoint": {"upcycle": upcycle}} if upcycle else {})
    assert upgraded({"model": {"layers": 2, **flat}}) == (found, unread)
    assert upgraded({"model": {"layers": 2, **flat}, "checkpoint": {"every": 3}})[0]["checkpoint"]["every"] == 3
    old = config_from_dict({"model": {"layers": 2}}) if upcycle is None else config_from_dict(found)
    assert parse_run_config({"model": {"layers": 2, **flat}}, OLD_RUN / "config.json") == old
    with pytest.raises(ConfigError) as error:
        config_from_dict({"model": {"layers": 2, **flat}})
    name = "noise" if upcycle is None and "upcycle_noise" in flat else "dense"
    old_name = "model.upcycle_noise" if name == "noise" else "model.upcycle_from"
    assert f"{old_name} is checkpoint.upcycle.{name} now" in str(error.value)


def test_a_recipe_that_upcycles_is_rewritten_across_its_sections():
    text = '[model]\nlayers = 2\nupcycle_from = "a"  # dense\nupcycle_noise = 1e-2\n\n[checkpoint]\nevery = 3\n'
    line = 'upcycle = { dense = "a", noise = 1e-2 }'
    found = f"format = 2\n\n[model]\nlayers = 2\n# dense\n\n[checkpoint]\n{line}\nevery = 3\n"
    assert upgrade_text(text, "r.toml") == (found, [])
    text = '[model]\nlayers = 2\nupcycle_from = "a"\n'
    assert upgrade_text(text, "r.toml")[0].endswith('[checkpoint]\nupcycle = { dense = "a" }\n')
    assert upgraded_word("model.upcycle_noise=0.1", {"model": {"upcycle_from": "a"}}) == "checkpoint.upcycle.noise=0.1"
    assert upgraded_word("model.upcycle_from=", {}) == "checkpoint.upcycle=none"
    with pytest.raises(ConfigError, match=r"now: write checkpoint.upcycle.dense=a$"):
        load_config(None, ["model.upcycle_from=a"])


def test_an_old_run_has_the_same_settings():
    tree = old_settings()
    cfg = parse_run_config(tree, OLD_RUN / "config.json")
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        value = read_key(cfg, str(place))
        kind = getattr(read_key(cfg, place.key), "kind", None)
        if value is None or str(place) in (*tables(), "model.layers") or (place.kinds and kind not in place.kinds):
            continue
        assert (list(value) if isinstance(value, tuple) else value) == tree[section][key]
    assert cfg.model.layers == tree["model"]["num_layers"]
    assert config_from_dict(config_to_dict(cfg)) == cfg
    assert upgraded(config_to_dict(cfg)) == (config_to_dict(cfg), [])


def test_an_old_checkpoint_has_the_schedule_of_its_run():
    cfg = parse_run_config(old_settings(), OLD_RUN / "config.json")
    meta = read_meta(OLD_RUN / "step-000004")
    assert meta.state_of("schedule") == schedule_settings(cfg.run, cfg.train)
    assert meta.format == FORMAT


SWITCHES = {name: str(place) for name, place in MOVED.items() if str(place) in tables().keys() - part_keys()}
SWITCHES |= {name: MOVED[name].key for name in OFF} | {"model.rope_scaling": "model.rope.scaling"}
"""Flat keys that switched a table off, and the table."""


def recorded(model: ModelConfig) -> dict[str, object]:
    """All keys of [model] as a run of an earlier version recorded them; a key that no part reads has a value too."""
    found = {key: value for key, value in old_settings()["model"].items() if f"model.{key}" in MOVED}
    found |= {key: as_word(getattr(model, key)) for key in key_types("model") if key not in ("ffn", "rope")}
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        value = read_key(Config(model=model), str(place)) if section == "model" else None
        if str(place) == LAYERS:
            found.pop(key, None)
        elif section == "model" and name in SWITCHES and name != "model.rope_scaling":
            found[key] = (value or 0) if name in OFF else value is not None
        elif value is not None:
            found[key] = as_word(value)
    return found


def as_word(value: object) -> object:
    return value.kind if isinstance(value, Part) else value


@pytest.mark.parametrize("preset", preset_names())
def test_a_run_that_switched_a_table_of_its_preset_off_has_none(preset):
    before = config_from_dict({"model": {"preset": preset}}).model
    all_keys = recorded(before)
    for name in ("", *SWITCHES):
        flat = dict(all_keys)
        given: dict[str, dict[str, object]] = {"model": {"preset": preset}}
        if name:
            key = name.removeprefix("model.")
            off = 0 if name in OFF else "none" if name == "model.rope_scaling" else False
            if flat.get(key) == off:
                continue
            flat[key] = off
            owner, _, table = SWITCHES[name].rpartition(".")
            if hasattr(read_key(Config(model=before), owner), table):
                section, _, path = SWITCHES[name].partition(".")
                given.setdefault(section, {})[path] = "none"
        wanted = config_from_dict(given).model
        tree, _ = upgraded({"model": flat})
        assert config_from_dict(tree).model == wanted, name
        tree["model"]["preset"] = ""
        assert config_from_dict(tree).model == replace(wanted, preset=""), name


def test_a_switch_of_sparsemixer_is_read_whatever_the_order():
    tree, unread = upgraded({"moe": {"sparsemixer_sampling": False}, "model": {"router_softmax": "sparsemixer"}})
    assert not unread
    assert not config_from_dict(tree).model.ffn.moe.router.softmax.samples
    word = upgraded_word("moe.sparsemixer_sampling=false", {"model": {"router_softmax": "sparsemixer"}})
    assert word == "model.ffn.moe.router.softmax.samples=false"


def test_an_indexer_has_its_kind():
    tree, _ = upgraded({"model": {"index_topk": 16}})
    assert tree == {"model": {"attention": {"indexer": {"kind": "lightning", "top_k": 16}}}}


def test_refusals_name_the_way_out():
    for model, line in (
        ({"index_topk": 0}, 'write model.attention.indexer = "none"'),
        ({"preset": "deepseek-v3", "num_query_groups": 8}, "a key of 'gqa', and not of 'mla'"),
    ):
        with pytest.raises(ConfigError, match=line):
            config_from_dict({"model": model})
    for words, line in (
        (["model.preset=gpt-oss-20b", "model.attention_pattern=WF"], r"write model.layers='12 x \(window, full\)'"),
        (["model.preset=deepseek-v3", "model.num_layers=4"], "write model.layers='3 dense, moe'"),
    ):
        with pytest.raises(ConfigError, match=line):
            load_config(None, words)
    assert upgraded_word("model.qk_norm_width=all_heads", {}) == "model.attention.qk_norm.over=all_heads"


def test_all_moved_keys_of_a_command_line_are_refused_at_once():
    words = ["model.num_layers=3", "train.beta1=0.8", "train", "moe.top_kk=1"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    for line in (
        "train.beta1 is train.optimizer.beta1 now",
        "model.num_layers is model.layers now",
        "'train' is not an override",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("flat", "method"),
    [
        (
            {"method": "condition", "template": "{prompt} {reward}", "want": 0.9},
            {"kind": "condition", "reward": "reward", "template": "{prompt} {reward}", "want": 0.9},
        ),
        ({"method": "filter", "threshold": "q0.8"}, {"kind": "filter", "reward": "reward", "threshold": "q0.8"}),
        ({"method": "dpo"}, "dpo"),
    ],
    ids=["condition", "filter", "dpo"],
)
def test_an_old_checkpoint_has_the_samples_of_its_run(tmp_path, flat, method):
    fields = json.loads((OLD_RUN / "step-000004" / "moefold.json").read_text())
    fields["order"] |= {f"align.{key}": value for key, value in flat.items()}
    (tmp_path / "moefold.json").write_text(json.dumps(fields))
    meta = read_meta(tmp_path)
    assert meta.order["align.method"] == method
    cfg = parse_run_config({**old_settings(), "align": flat}, OLD_RUN / "config.json")
    assert data_order_change(meta, sample_order(cfg)) == ""
    (tmp_path / "moefold.json").write_text(json.dumps(asdict(meta)))
    assert read_meta(tmp_path) == meta


def test_the_board_shows_an_old_run_in_the_new_keys(tmp_path):
    shutil.copy(OLD_RUN / "config.json", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (run,) = find_runs([tmp_path])
    reader = RunReader(run)
    reader.read()
    settings = reader.recipe()["settings"]
    assert settings["train.lr_schedule"] == "wsd"
    assert settings["train.lr_schedule.min_lr"] == old_settings()["train"]["min_lr"]
