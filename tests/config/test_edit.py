"""`moefold.edit`: values by name, with parts."""

from operator import attrgetter

import pytest

import moefold
from moefold.config.base.part import make_part
from moefold.config.edit import edit_model
from moefold.config.keys.paths import tables
from moefold.config.presets import preset_names
from moefold.recipe import load_config


def test_plain_keys_and_settings_of_parts_change():
    cfg = load_config(None, ["train.lr_schedule.min_lr=1e-5"])
    found = moefold.edit(cfg, {"train.lr": 1e-3, "train.recompute": ("norms",), "train.lr_schedule.min_lr": 1e-4})
    words = ["train.lr=1e-3", 'train.recompute=["norms"]', "train.lr_schedule.min_lr=1e-4"]
    assert found == load_config(None, words)
    assert moefold.edit(cfg, {}) == cfg


def test_another_kind_keeps_the_settings_that_it_has_too():
    cfg = load_config(None, ["train.lr_schedule.min_lr=1e-5"])
    settings = {"train.lr_schedule.decay_steps": 7, "train.lr_schedule": "wsd"}
    schedule = make_part("lr_schedule", "wsd", min_lr=1e-5, decay_steps=7)
    assert moefold.edit(cfg, settings).train.lr_schedule == schedule
    assert moefold.edit(cfg, {"train.lr_schedule": schedule}).train.lr_schedule == schedule
    assert moefold.edit(cfg, {"train.lr_schedule": {"kind": "wsd"}}).train.lr_schedule == make_part(
        "lr_schedule", "wsd"
    )
    assert moefold.edit(cfg, {"train.lr_schedule": "constant"}).train.lr_schedule == make_part(
        "lr_schedule", "constant"
    )


@pytest.mark.parametrize(
    ("table", "setting", "value"),
    [
        ("model.ffn.moe.router", "scaling_factor", 2.0),
        ("model.attention", "num_heads", 64),
        ("model.ffn.moe", "top_k", 4),
        ("model.rope", "theta", 5e5),
    ],
)
def test_a_table_keeps_the_kind_and_the_settings_that_it_leaves_out(table, setting, value):
    cfg = load_config(None, ["model.preset=deepseek-v3"])
    found = moefold.edit(cfg, {f"{table}.{setting}": value})
    assert found != cfg
    assert moefold.edit(cfg, {table: {setting: value}}) == found
    kind = getattr(attrgetter(table)(cfg), "kind", None)
    assert kind is None or moefold.edit(cfg, {table: {"kind": kind, setting: value}}) == found


@pytest.mark.parametrize("preset", preset_names())
def test_an_empty_table_changes_nothing(preset):
    model = load_config(None, [f"model.preset={preset}"]).model
    for path in (path.removeprefix("model.") for path in tables() if path.startswith("model.")):
        owner, _, name = path.rpartition(".")
        holder = attrgetter(owner)(model) if owner else model
        if getattr(holder, name, None) is not None:
            assert edit_model(model, {path: {}}) == model, path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.lrr": 1.0}, "unknown key train.lrr; did you mean train.lr?"),
        ({"train.lr": "much"}, "train.lr='much' must be a number"),
        ({"train.lr_schedule": "cosin"}, "train.lr_schedule='cosin' must be one of"),
        ({"train.lr_schedule.min_lr": -1.0}, "train.lr_schedule.min_lr=-1.0 must be at least 0"),
        ({"train.lr_schedule.decay_steps": 1}, "is not a key of 'cosine', whose keys are min_lr; it is a key of 'wsd'"),
        ({"train.min_lr": 0.1}, "train.min_lr is train.lr_schedule.min_lr now"),
        ({"model.preset": "tiny"}, "edit: model.preset fills other keys"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(moefold.ConfigError) as error:
        moefold.edit(load_config(None), settings)
    assert message in str(error.value)
