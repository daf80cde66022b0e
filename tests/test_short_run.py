from pathlib import Path

import pytest

from moefold.config.presets import shipped_files
from moefold.errors import ConfigError
from moefold.recipe import load_recipe
from moefold.validate.config import check_config

RECIPES = [files[0] for files in shipped_files().values() if files[0].suffix == ".toml"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_takes_ten_steps(recipe):
    cfg, _, notes = load_recipe(recipe, ["run.steps=10"])
    check_config(cfg)
    planned = load_recipe(recipe).cfg.train.warmup_steps
    assert cfg.train.warmup_steps <= 10
    assert bool(notes) == (planned > 10)
    for note in notes:
        assert note.startswith(f"train.warmup_steps is {cfg.train.warmup_steps} instead of {planned}: ")


def test_the_decay_shrinks_too(tmp_path):
    recipe = tmp_path / "recipe.toml"
    text = '[run]\nsteps = 100\n[train]\nwarmup_steps = 20\ndecay_steps = 50\nlr_schedule = "wsd"\n'
    recipe.write_text(text)
    cfg, _, notes = load_recipe(recipe, ["run.steps=10"])
    assert (cfg.train.warmup_steps, cfg.train.decay_steps) == (2, 5)
    assert notes == (
        "train.warmup_steps is 2 instead of 20: run.steps=10 instead of the 100 of the recipe",
        "train.decay_steps is 5 instead of 50: run.steps=10 instead of the 100 of the recipe",
    )
    assert load_recipe(recipe, ["run.steps=70"]).messages == ()


@pytest.mark.parametrize(
    "words", [["run.steps=10", "train.warmup_steps=20"], ["train.warmup_steps=200"]], ids=["typed", "recipe's steps"]
)
def test_a_warm_up_that_was_typed_is_refused_where_it_does_not_fit(words):
    recipe = next(path for path in RECIPES if path.stem == "quickstart")
    cfg, _, notes = load_recipe(recipe, words)
    assert notes == ()
    with pytest.raises(ConfigError, match=r"train\.warmup_steps=\d+ must be at most run\.steps"):
        check_config(cfg)


def test_wrong_types_are_left_to_the_validation(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('run = 3\n[train]\nwarmup_steps = "many"\n')
    with pytest.raises(ConfigError, match="run=3 must be a section"):
        load_recipe(recipe, ["run.steps=1"])
