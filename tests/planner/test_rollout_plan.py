"""Plans of recipes of reinforcement learning: sampling is not priced, and training mappings leave room for it."""

import json

import pytest

from moefold.cli.main import main
from moefold.recipe import load_config
from moefold.topology.rollout_mapping import has_rollout_mapping

RECIPE = """
[run]
dtype = "bfloat16"
[model]
preset = "tiny"
[train]
seq_len = 256
global_batch_size = 64
[data]
kind = "task"
task = "add"
[rl]
group_size = 8
[rollout]
max_tokens = 32
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text(RECIPE)
    return path


def test_the_plan_of_a_recipe_says_that_sampling_is_not_priced(recipe, capsys):
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "2"]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "sampling is not priced, nor its memory\n"
    assert json.loads(printed.out)["mappings"]
    assert main(["plan", "tiny", *words[2:], "--seq-len", "64", "--global-batch-size", "4", "--json"]) == 0
    assert not capsys.readouterr().err


def test_a_mapping_that_leaves_no_memory_for_rollouts_is_not_legal(recipe, tmp_path, capsys):
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "4"]
    recipe.write_text(RECIPE + "tp = 2\n")
    assert main([*words, "--json", "--top", "100"]) == 0
    # Sampling has the pipeline of training, and needs tp=2 in each of its stages.
    found = json.loads(capsys.readouterr().out)["mappings"]
    assert {mapping["pp"] for mapping in found} == {1, 2}
    assert main([*words, "--explain", "pp=4"]) == 1
    assert "illegal: rollouts cannot be sampled under tp=2 pp=4 ep=1 etp=1" in capsys.readouterr().out
    recipe.write_text(RECIPE + 'experts = "fetch"\n')
    assert main([*words, "--explain", "ep=1"]) == 1
    assert "rollout.experts='fetch' has no effect with ep=1" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["tp = 2", 'experts = "whole"'])
def test_a_planned_recipe_loads_where_training_has_the_mapping_of_sampling(recipe, tmp_path, setting):
    """A key without effect is refused: the planned recipe leaves it out."""
    recipe.write_text(f"{RECIPE}{setting}\n[parallel]\nworld_size = 2\nep = 2\n")
    fixed = ["tp=2", "pp=1", "ep=1", "etp=1"]
    words = ["plan", str(recipe), "--gpu", "h100", "--num-gpus", "4", "--fix", *fixed]
    assert main([*words, "--recipe", str(tmp_path / "planned.toml")]) == 0
    planned = load_config(tmp_path / "planned.toml")
    assert planned.parallel.tp == 2
    assert not has_rollout_mapping(planned.parallel, planned.rl, planned.rollout)
