"""The length of a run in epochs: the number of steps follows from the data, and only one of them is given."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moefold.config.base.limits import MAX_STEPS
from moefold.errors import ConfigError
from moefold.optim.lr_schedule import continuation
from moefold.recipe import load_config, load_recipe
from moefold.train.run_folder import choose_run_folder
from moefold.train.start import set_up_run
from tests.train.written_runs import write_run

TINY = ("model.preset=tiny", "run.device=cpu", "train.seq_len=32", "train.global_batch_size=4", "data.shuffle=false")


def token_words(tmp_path, num_samples=10):
    np.save(tmp_path / "tokens.npy", (np.arange(num_samples * 32 + 1) % 250).astype(np.uint16))
    path = f"data.path={tmp_path / 'tokens.npy'}"
    return (*TINY, "data.kind=tokens", path, "data.validation_fraction=0", f"run.dir={tmp_path / 'run'}")


def started(*words, recipe=None):
    return set_up_run(load_recipe(recipe, words), None)


def refused(*words, recipe=None):
    with pytest.raises(ConfigError) as error:
        started(*words, recipe=recipe)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.4, 1), (0.01, 1), (2.5, 7)])
def test_epochs_are_steps_rounded_up(tmp_path, epochs, steps):
    setup = started(*token_words(tmp_path), f"run.epochs={epochs}")
    assert (setup.cfg.run.steps, setup.folder.cfg.run.steps) == (steps, steps)
    assert f"run.epochs={epochs} is run.steps={steps}: 10 samples of 32 tokens, 4 in a step" in setup.messages


def test_a_site_counts_its_own_samples(tmp_path):
    words = ("sites.count=2", "sites.number=1", "sites.meet=127.0.0.1:1", "sites.every=1", "run.epochs=2")
    assert started(*token_words(tmp_path), *words).cfg.run.steps == 3


def test_a_step_of_reinforcement_learning_takes_a_prompt_for_each_group(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(9)))
    rl = ("data.kind=prompts", f"data.path={prompts}", "data.validation_fraction=0", "reward.use=exact", "rl.updates=2")
    rl += (
        "rl.objective=clip",
        "rl.group_size=2",
        "rollout.max_tokens=4",
        "run.epochs=1",
        f"run.dir={tmp_path / 'run'}",
    )
    # Two prompts in a step, and rounds of two steps.
    assert started(*TINY, *rl).cfg.run.steps == 6
    assert "rl.mixed_only=true takes as many prompts as it needs" in refused(*TINY, *rl, "rl.mixed_only=true")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data.kind=synthetic"], "data.kind='synthetic' has no end"),
        (["data.kind=huggingface", "data.path=x/y", "data.streaming=true"], "reads a stream, whose length is unknown"),
    ],
)
def test_data_of_unknown_length_is_refused(words, reason):
    message = refused(*TINY, *words, "run.epochs=1")
    assert message.startswith("run.epochs=1 needs the length of the data, and ")
    assert reason in message
    assert message.endswith("; set run.steps")


def test_the_command_line_replaces_epochs_or_steps_of_the_recipe(tmp_path):
    both = "run.steps=3 and run.epochs=2 both give the length of the run; leave one out"
    assert refused("run.steps=3", "run.epochs=2") == both
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[run]\nsteps = 3\nepochs = 2\n")
    assert refused(recipe=recipe) == both
    assert "both give the length" in refused("run.steps=4", recipe=recipe)
    recipe.write_text("[run]\nsteps = 3\n")
    setup = started(*token_words(tmp_path), "run.epochs=2", recipe=recipe)
    assert (setup.cfg.run.epochs, setup.cfg.run.steps) == (2, 5)
    assert "run.epochs=2 replaces run.steps=3 of the recipe" in setup.messages
    recipe.write_text("[run]\nepochs = 2\n")
    assert load_config(recipe).run.steps == MAX_STEPS
    cfg = started(*token_words(tmp_path), "run.steps=4", recipe=recipe).cfg
    assert (cfg.run.epochs, cfg.run.steps) == (0, 4)


def test_rules_hold_for_the_steps_that_the_epochs_are(tmp_path):
    words = (*token_words(tmp_path), "run.epochs=1")
    assert "train.warmup_steps=4 must be at most run.steps=3" in refused(*words, "train.warmup_steps=4")
    assert "run.epochs=-1.0 must be at least 0" in refused(*words[:-1], "run.epochs=-1")
    assert f"at most {MAX_STEPS} are allowed" in refused(*words[:-1], "run.epochs=1e14")


def test_a_run_that_has_lost_a_file_keeps_its_steps(tmp_path):
    words = (*token_words(tmp_path), "data.corrupt=skip")
    write_run_of_one_epoch(tmp_path / "run", *words, steps=9, saved=2)
    recipe = load_recipe(None, [*words, "run.epochs=1"])
    cfg = replace(recipe.cfg, run=replace(recipe.cfg.run, steps=3))
    kept = [choose_run_folder(one, left_out=recipe.left_out).cfg.run.steps for one in (cfg, with_epochs(cfg, 2))]
    assert kept == [9, 3]


def write_run_of_one_epoch(folder, *words, steps, saved):
    write_run(folder, *words, steps=saved, saved=saved)
    tree = json.loads((folder / "config.json").read_text())
    tree["run"] |= {"steps": steps, "epochs": 1.0}
    (folder / "config.json").write_text(json.dumps(tree))


def with_epochs(cfg, epochs):
    return replace(cfg, run=replace(cfg.run, epochs=epochs))


def test_a_finished_run_goes_on_with_more_epochs(tmp_path):
    words = token_words(tmp_path)
    cfg = started(*words, "run.epochs=1", "train.lr_schedule=constant").cfg
    assert continuation(cfg.run, cfg.train, 2 * cfg.run.steps) == (("run.epochs=2",), "")
    write_run_of_one_epoch(tmp_path / "run", *words, steps=3, saved=3)
    longer = started(*words, "run.epochs=2")
    assert (longer.folder.cfg.run.dir, longer.cfg.run.steps) == (str(tmp_path / "run"), 5)
    assert longer.resume is not None
    assert not longer.is_finished
    assert started(*words, "run.epochs=1").is_finished
    assert choose_run_folder(longer.cfg).message == ""
