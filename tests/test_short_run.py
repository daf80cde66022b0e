"""A short run of any recipe shortens its warm-up and decay."""

from pathlib import Path

import pytest

from moefold.config.sections.train import TrainConfig
from moefold.config.shipped_recipes import shipped_files
from moefold.errors import ConfigError
from moefold.recipe import STEP_COUNT_KEYS, load_recipe
from moefold.validate.config import check_config

RECIPES = {name: files[0] for name, files in shipped_files().items() if files[0].suffix == ".toml"}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_recipe_takes_ten_steps(recipe):
    sites = load_recipe(recipe).cfg.sites
    # The refusal of a later first round names the way out.
    rounds = ["sites.every=10"] if sites.every > 10 and sites.is_active else []
    loaded = load_recipe(recipe, ["run.steps=10", *rounds])
    cfg, notes = loaded.cfg, loaded.messages
    if cfg.parallel.mapping != "auto":
        check_config(cfg)
    planned = load_recipe(recipe).cfg.train
    counts, before = _counts(cfg.train), _counts(planned)
    shrunk = [key for key in STEP_COUNT_KEYS if counts[key] != before[key]]
    assert sum(counts.values()) <= 10
    assert bool(shrunk) == (sum(before.values()) > 10)
    for key, note in zip(shrunk, notes, strict=True):
        assert note.startswith(f"{key} is {counts[key]} instead of {before[key]}: ")


def _counts(train: TrainConfig) -> dict[str, int]:
    decay = getattr(train.lr_schedule, "decay_steps", 0)
    return dict(zip(STEP_COUNT_KEYS, (train.warmup_steps, decay), strict=True))


def test_a_short_run_shortens_decay_and_warmup(tmp_path):
    recipe = tmp_path / "recipe.toml"
    text = '[run]\nsteps = 100\n[train]\nwarmup_steps = 20\nlr_schedule = { kind = "wsd", decay_steps = 50 }\n'
    recipe.write_text(text)
    sites = load_recipe(recipe).cfg.sites
    # The refusal of a later first round names the way out.
    rounds = ["sites.every=10"] if sites.every > 10 and sites.is_active else []
    loaded = load_recipe(recipe, ["run.steps=10", *rounds])
    cfg, notes = loaded.cfg, loaded.messages
    assert (cfg.train.warmup_steps, cfg.train.lr_schedule.decay_steps) == (2, 5)
    assert notes == (
        "train.warmup_steps is 2 instead of 20: run.steps=10 instead of the 100 of the recipe",
        "train.lr_schedule.decay_steps is 5 instead of 50: run.steps=10 instead of the 100 of the recipe",
    )
    assert load_recipe(recipe, ["run.steps=70"]).messages == ()


@pytest.mark.parametrize(
    "words", [["run.steps=10", "train.warmup_steps=20"], ["train.warmup_steps=200"]], ids=["typed", "recipe's steps"]
)
def test_a_warm_up_that_was_typed_is_refused_where_it_does_not_fit(words):
    recipe = RECIPES["quickstart"]
    loaded = load_recipe(recipe, words)
    cfg, notes = loaded.cfg, loaded.messages
    assert notes == ()
    with pytest.raises(ConfigError, match=r"train\.warmup_steps=\d+ must be at most run\.steps"):
        check_config(cfg)


def test_wrong_types_are_left_to_the_validation(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('run = 3\n[train]\nwarmup_steps = "many"\n')
    with pytest.raises(ConfigError, match="run=3 must be a section"):
        load_recipe(recipe, ["run.steps=1"])
