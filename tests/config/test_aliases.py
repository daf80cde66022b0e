"""Names of other software are answered with moefold's: keys, values, matrices, and options of commands."""

from typing import get_args

import pytest

from moefold.cli.main import main
from moefold.config.aliases import KEY_OF, MATRIX_OF, OPTION_OF, RELATED_KEY_OF, VALUE_OF, key_hint
from moefold.config.suggestions import key_types, sections
from moefold.errors import ConfigError
from moefold.recipe import load_config

OUR_KEYS = {f"{section}.{key}" for section in sections() for key in key_types(section)}


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, words)
    return str(error.value)


def test_the_table_names_keys_and_values_that_exist():
    assert {*KEY_OF.values(), *RELATED_KEY_OF.values()} <= OUR_KEYS
    for (key, theirs), ours in VALUE_OF.items():
        section, _, name = key.partition(".")
        values = get_args(key_types(section)[name])
        assert ours in values, key
        assert theirs not in values, (key, theirs)


def test_a_name_of_ours_has_no_other_meaning():
    """The name of a key of any section is answered with that section, before the table is asked."""
    ambiguous = {theirs for theirs in KEY_OF if any(theirs in key_types(section) for section in sections())}
    assert ambiguous <= {"lr", "optim", "precision", "group_size", "load", "resume", "packing"}
    assert not KEY_OF.keys() & RELATED_KEY_OF.keys()


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("train.learning_rate=1e-3", "unknown key train.learning_rate; moefold calls this train.lr"),
        ("model.num_experts_per_tok=2", "unknown key model.num_experts_per_tok; moefold calls this model.top_k"),
        ("train.max_steps=3", "unknown key train.max_steps; moefold calls this run.steps"),
        ("parallel.tensor_parallel_size=2", "moefold calls this parallel.tp"),
        ("parallel.tensor-model-parallel-size=2", "moefold calls this parallel.tp"),
        ("training.steps=3", "override 'training.steps=3': unknown key training.steps; moefold calls this run.steps"),
        ("parallelism.expert_parallel_degree=2", "moefold calls this parallel.ep"),
        ("optimizer.lr=1e-3", "moefold calls this train.lr"),
        ("max_steps=3", "override 'max_steps=3' names no section; moefold calls this run.steps"),
        ("--max_steps=3", "moefold calls this run.steps"),
        ("train.warmup_ratio=0.1", "unknown key train.warmup_ratio; moefold sets this by train.warmup_steps"),
        ("train.num_train_epochs=3", "moefold calls this run.epochs"),
        ("run.dtype=float16", "must be one of 'bfloat16', 'float32', 'float64'; did you mean 'bfloat16'?"),
        ("run.dtype=fp32", "did you mean 'float32'?"),
        ("parallel.schedule=1F1B", "did you mean '1f1b'?"),
        ("parallel.dispatcher=flex", "did you mean 'deepep'?"),
    ],
)  # fmt: skip
def test_a_name_of_others_is_answered_with_ours(word, answer):
    assert answer in refused(word)
    assert "\n" not in refused(word)


def test_a_recipe_is_answered_as_an_override_is(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("learning_rate = 1e-3\n[model]\nnum_local_experts = 8\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert "unknown key learning_rate; moefold calls this train.lr" in str(error.value)
    assert "unknown key model.num_local_experts; moefold calls this model.num_experts" in str(error.value)


@pytest.mark.parametrize(
    ("target", "ours"), [("q_proj", "wq"), ("linear_fc1", '"w_gate", "w_up"'), ("all-linear", "all"), ("o_proj", "wo")]
)
def test_a_matrix_of_others_is_answered_with_ours(target, ours):
    settings = ("lora.rank=2", f"lora.targets=['{target}']", "model.preset=tiny")
    from moefold.validate.config import check_config

    with pytest.raises(ConfigError, match=f"moefold calls it {ours}; choose "):
        check_config(load_config(None, settings))
    assert "." not in MATRIX_OF[target]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["train", "--train.lr", "1e-3"], "settings have no dashes: train.lr=VALUE"),
        (["train", "--learning-rate=1e-3"], "moefold calls this train.lr"),
        (["train", "--num_train_epochs", "3"], "moefold calls this run.epochs"),
        (["generate", "runs/x", "--prompt", "a", "--max-new-tokens", "3"], "moefold calls this --max-tokens"),
        (["generate", "runs/x", "--prompt", "a", "--learning-rate", "3"], "`moefold generate --help`"),
    ],
)
def test_an_option_of_others_is_answered_with_ours(capsys, words, answer):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"; {answer}" in err
    assert err.count("\n") == 1
    assert all(option.startswith("--") for option in OPTION_OF.values())


def test_an_unknown_name_has_no_hint():
    assert key_hint("frobnicate") == ""
