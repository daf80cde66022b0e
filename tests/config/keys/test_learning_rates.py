"""The learning rate of a recipe that sets none follows from the method of training."""

import json

import pytest

from moefold.config.keys.help import keys_text
from moefold.config.keys.learning_rates import PRETRAINING, all_methods
from moefold.config.load import config_from_dict
from moefold.config.schema import config_to_dict
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError
from moefold.recipe import load_recipe
from moefold.validate.config import check_config
from tools.recipe_page import recipe_page

SFT = ("data.kind=sft", "data.path=x.jsonl")
PAIRS = ("data.kind=preference", "data.path=x.jsonl")
RL = ("data.kind=task", "rl.group_size=4")
ADAPTERS = ("lora.rank=4",)
CASES = {
    "nothing": ((), 3e-4),
    "a task": (("data.kind=task",), 3e-4),
    "adapters": (ADAPTERS, 2e-4),
    "conversations": (SFT, 2e-5),
    "conversations, adapters": ((*SFT, *ADAPTERS), 2e-4),
    "rewards": ((*SFT, "align.method=filter"), 2e-5),
    **{method: ((*PAIRS, f"align.method={method}"), 1e-6) for method in ("dpo", "ipo", "simpo", "kto")},
    "dpo, adapters": ((*PAIRS, "align.method=dpo", *ADAPTERS), 1e-5),
    "reinforcement learning": (RL, 1e-6),
    "reinforcement learning, adapters": ((*RL, *ADAPTERS), 1e-5),
}


@pytest.mark.parametrize("name", CASES)
def test_the_learning_rate_follows_from_the_method_and_a_given_one_stays(name):
    words, rate = CASES[name]
    recipe = load_recipe(None, words)
    assert recipe.cfg.train.lr == rate
    assert recipe.left_out >= {"train.lr"}
    # The record of a run is complete: its reader resolves nothing.
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe.cfg)))) == recipe.cfg
    # The default of another method is a setting like any other.
    given = load_recipe(None, [*words, "train.lr=0.0003"])
    assert (given.cfg.train.lr, "train.lr" in given.left_out) == (3e-4, False)


def test_the_class_has_the_default_of_pretraining():
    assert TrainConfig().lr == PRETRAINING.all_weights


def test_a_min_lr_above_the_default_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match=r"must be at most train.lr=1e-06, the default of preference optimisation;"):
        check_config(load_recipe(None, [*PAIRS, "align.method=dpo", "train.lr_schedule.min_lr=1e-5"]).cfg)


def test_keys_and_page_say_every_default():
    listed = keys_text("train.lr")
    page = recipe_page()
    assert "train.lr = by method" in listed
    for rates in all_methods():
        assert f"{rates.method} {rates.all_weights:g} (adapters {rates.adapters:g})" in listed
        assert f"| {rates.method} | {rates.all_weights:g} | {rates.adapters:g} | {rates.source} |" in page
