"""Test that an absurd value of any key is refused at once, with one message and without a search."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.config.base.limits import MAX_CHARACTERS, MAX_RANKS, parse_count
from moefold.config.keys.annotations import max_magnitude
from moefold.config.keys.paths import key_types, sections
from moefold.config.load import config_from_dict
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.clock import processor_s

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
ABSURD = (
    "0",
    "-1",
    "1",
    str(2**20),
    str(2**31),
    str(2**63),
    str(10**30),
    str(-(10**30)),
    "9" * 5000,
    "0x" + "F" * 5000,
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-308",
    "[" * 300 + "]" * 300,
    "[[[[[[[[[[[[1]]]]]]]]]]]]",
    "[0x" + "F" * 5000 + "]",
    '"\\u0000"',
    "caf\udce9",
    f'"{"x" * 20_000}"',
)
MOST_S = 2.0
LONGEST_MESSAGE = 3 * MAX_CHARACTERS


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("section", sections())
def test_any_value_of_any_key_is_taken_or_refused_at_once(section, every):
    """In `make test` each key meets three of the values, the next key the next three."""
    for number, key in enumerate(key_types(section)):
        for value in ABSURD[number % every :: every]:
            before_s, refusal = processor_s(), ""
            try:
                check_config(load_config(QUICKSTART, [f"{section}.{key}={value}"]))
            except ConfigError as error:
                refusal = str(error)
            assert processor_s() - before_s < MOST_S, (key, value[:60])
            assert len(refusal) < LONGEST_MESSAGE


def test_every_number_has_an_upper_bound_that_is_enforced():
    for section in sections():
        for key in key_types(section):
            if (most := max_magnitude(section, key)) is None:
                continue
            bound = re.escape(f"{most}" if isinstance(most, int) else f"{most:.15g}")
            with pytest.raises(ConfigError, match=rf"{section}\.{key}=\S+ must be at most {bound}"):
                load_config(None, [f"{section}.{key}={int(most) + 1}"])
            with pytest.raises(ConfigError, match=rf"{section}\.{key}=\S+ must be at least -{bound}"):
                load_config(None, [f"{section}.{key}={-int(most) - 1}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run." + "a." * 60_000 + "b = 1", "a key has more than 32 parts"),
        ("[" + "a." * 60_000 + "b]", "a key has more than 32 parts"),
        ("x = {" + "a." * 60_000 + "b = 1}", "a key has more than 32 parts"),
        ("run = " + "[" * 60_000, "it is nested deeper than 100 levels"),
        ("run = " + "{a=" * 60_000, "it is nested deeper than 100 levels"),
        ("[run]\nsteps = " + "9" * 100_000, "a number has thousands of digits"),
        ("[run]\nsteps = 0x" + "F" * 100_000, "run.steps=(400000 bits) must be at most 1000000000"),
        ('[data]\npath = ["a\\u0000b"]', "data.path=['a\\x00b'] has a NUL character"),
        ('[run]\ndir = "a\\u0000b"', "has a NUL character"),
        ("[data]\nweights = [1e300]", "must hold numbers of at most 1e+15"),
        ("[model]\nlayers = '" + "9" * 6000 + " moe'", "model.layers="),
        ("[parallel]\npp = 2\nworld_size = 2\npipeline_layout = 'E" + "(" * 9000 + "t'", "groups within each other"),
        ("[parallel]\npp = 2\nworld_size = 2\npipeline_layout = 'E((t*99999)*99999)*99999L'", "letters and bars"),
    ],
    ids=lambda text: text[:24],
)
def test_hostile_recipes_are_one_message_at_once(tmp_path, capsys, text, message):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    before_s = processor_s()
    assert main(["train", str(path)]) == 2
    assert processor_s() - before_s < MOST_S
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layout world_size=99999999999999999999999", f"must be at most {MAX_RANKS}"),
        (f"layout world_size=8 gpus_per_node={'9' * 5000}", f"must be an integer of 1 to {MAX_RANKS}"),
        ("layout world_size=1000000007 tp=7", "parallel.tp=7 must divide world_size/pp=1000000007"),
        (
            "layout world_size=735134400 tp=8 pp=4 order=dp-pp-cp-tp moe_order=edp-pp-ep-etp",
            "give different pp groups",
        ),
        ("train {recipe} model.hidden_size=99999999999999999999", "model.hidden_size=99999999999999999999 must be at"),
        ("train {recipe} model.ffn.moe.num_experts=1000000007", "model.ffn.moe.num_experts=1000000007 must be at most"),
        ("train {recipe} model.layers=1000000007", "model.layers=1000000007 must be at most 10000"),
        ("train {recipe} train.global_batch_size=1000000000000000000", "train.global_batch_size=1000000000000000000 "),
        ("train {recipe} run.steps=100000000000000000000", "run.steps=100000000000000000000 must be at most 10"),
        (
            "train {recipe} moe.choice=sinkhorn moe.choice.iterations=1000000000",
            "moe.choice.iterations=1000000000 must be at most",
        ),
        (
            "train {recipe} train.optimizer=muon train.optimizer.ns_steps=1000000000",
            "train.optimizer.ns_steps=1000000000 must be at most 100",
        ),
        (
            "train {recipe} train.global_batch_size=131072 train.micro_batch_size=1",
            "gives each data-parallel rank 131072 micro-batches, more than 65536",
        ),
    ],
    ids=lambda words: words[:60],
)
def test_absurd_words_are_one_message_at_once(capsys, words, message):
    before_s = processor_s()
    assert main(words.format(recipe=QUICKSTART).split()) == 2
    assert processor_s() - before_s < MOST_S
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


PLAN = "plan mixtral-8x7b --gpu h100 --num-gpus {gpus} --seq-len {tokens} --global-batch-size {batch}"


@pytest.mark.parametrize("option", ["gpus", "tokens", "batch"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 10**30])
def test_absurd_sizes_of_a_plan_are_one_message_at_once(capsys, option, value):
    sizes = {"gpus": 16, "tokens": 4096, "batch": 64, option: value}
    before_s = processor_s()
    assert main(PLAN.format(**sizes).split()) == 2
    assert processor_s() - before_s < MOST_S
    assert f"{value} must be at " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["9", "1e9", "1e300", "1e308"])
@pytest.mark.parametrize(
    "words",
    [
        "plan mixtral-8x7b --gpu h100 --num-gpus 16 --seq-len 4096 --global-batch-size 64",
        "simulate {recipe}",
        "memory {recipe} --dry",
    ],
)
def test_an_absurd_imbalance_is_one_message_at_once(capsys, words, value):
    before_s = processor_s()
    assert main([*words.format(recipe=QUICKSTART).split(), "--imbalance", value]) == 2
    assert processor_s() - before_s < MOST_S
    err = capsys.readouterr().err
    assert "must be at least 1 and at most 8, the number of experts" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("word", ["x" * 90_000, f"model.{'x' * 90_000}=1", f"tp={'x' * 90_000}", f"x.y={'x' * 90_000}"])
def test_an_absurd_override_is_shortened(capsys, word):
    assert main(["train", str(QUICKSTART), word]) == 2
    assert len(capsys.readouterr().err) < LONGEST_MESSAGE


@pytest.mark.parametrize(
    "words",
    [
        "train {recipe} data.kind=tokens data.path={pipe} run.dir={folder}/run",
        "tokenize {pipe} --tokenizer bytes --out {folder}/out",
        "plan {pipe} --gpu h100 --num-gpus 8 --seq-len 4096 --global-batch-size 64",
    ],
)
def test_a_named_pipe_is_one_message(capsys, tmp_path, words):
    pipe = tmp_path / "pipe.bin"
    os.mkfifo(pipe)
    assert main(words.format(recipe=QUICKSTART, pipe=pipe, folder=tmp_path).split()) == 2
    assert "cannot be read: it is a named pipe, not a regular file\n" in capsys.readouterr().err


def test_text_that_spells_no_number_is_none():
    assert [parse_count(text) for text in ("7", "007", "", "-1", "1.0", "٣", "x")] == [7, 7, *[None] * 5]
    assert parse_count("9" * 5000) == 2**53


def test_bounds_hold_for_trees_of_other_origin():
    tree = tomllib.loads("[model]\nlayers = 4000000000")
    with pytest.raises(ConfigError, match="model.layers=4000000000 must be at most 10000"):
        config_from_dict(tree)
