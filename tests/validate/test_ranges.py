import math
import re
import tomllib
from dataclasses import fields

import pytest

from moefold.config.bounds import bounds, range_problems
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.config.suggestions import key_types
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

CASES = [
    ("run.dir=''", "run.dir='' must name a folder"),
    ("run.seed=-1", "run.seed=-1 must be at least 0 and below 2**63"),
    ("run.seed=9223372036854775808", "must be at most 9223372036854775807"),
    ("sites.count=0", "must lie between 1 and 1024"),
    ("sites.number=-2", "must be at least 0, or -1 (all sites on this machine)"),
    ("sites.density=0", "must lie between 1/4096 and 1"),
    ("run.steps=0", "run.steps=0 must be at least 1"),
    ('model.linear_attention={kind="kda",decay_bound=0.1}', "must be at most 0 (0: none)"),
    ("model.attention.scale=-1", "must be at least 0 (0: 1/sqrt(head_dim))"),
    ("data.document_end=-2", "must be at least 0, or -1 (a sample is one document)"),
    ("moe.eval_capacity_factor=-2", "must be at least 0 (0: dropless), or -1 (as moe.capacity_factor)"),
    ("train.loss_chunk=-2", "must be at least 0 (0: all), or -1 (automatic)"),
    ("faults.straggler_factor=1", "must be above 1, or 0 (off)"),
    ("rl.group_size=1", "must be at least 2, or 0 (no reinforcement learning)"),
    ('rollout.url="localhost:8000"', "must begin with http:// or https://"),
    ("rl.reference=''", "must name 'start', a checkpoint, a run or a Hugging Face folder"),
    ("metrics.wandb_project='team/x'", "must have at most 128 characters, and none of / \\ # ? % :"),
    ("metrics.wandb_tags=['']", "must be a list of tags of 1 to 64 characters"),
    (f"metrics.wandb_tags=['{'x' * 65}']", "must be a list of tags of 1 to 64 characters"),
]


LISTS = [
    ("reward.weights=[inf]", "must hold numbers of at most 1e+15"),
    ("reward.weights=[nan]", "must hold numbers"),
]


@pytest.mark.parametrize(("word", "message"), CASES + LISTS, ids=[word for word, _ in CASES + LISTS])
def test_a_value_out_of_its_range_is_refused(word, message):
    # By way of the tree, because a recipe that switches the key off would be told so first.
    with pytest.raises(ConfigError) as error:
        check_config(config_from_dict(tomllib.loads(word)))
    assert str(error.value).startswith(word.split("=")[0])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "kind", "setting", "value", "message"),
    [
        ("align.method", "filter", "reward", "", "must name a column"),
        ("align.method", "weight", "weight_cap", 0.5, "must be at least 1, or 0 (none)"),
        ("parallel.context", "planned", "tolerance", -0.1, "must lie between 0 and 1: 0.1 keeps 10 % above the mean"),
        ("parallel.context", "planned", "tolerance", 1.5, "must lie between 0 and 1: 0.1 keeps 10 % above the mean"),
        ("align.method", "condition", "want", math.inf, "must be a finite number"),
    ],
)
def test_a_setting_of_a_part_out_of_its_range_is_refused(key, kind, setting, value, message):
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError) as error:
        config_from_dict({section: {name: {"kind": kind, setting: value}}})
    assert str(error.value) == f"{key}.{setting}={value!r} {message}"


COMMON_RULES = {
    r"must be at least (\d+)(?: \([^)]*\))?": lambda low: ([low - 1], [low, low + 1]),
    r"must be greater than (\d+)": lambda low: ([low, low - 1], [low + 1]),
    r"must lie in \[0, 1\).*": lambda: ([-1, 1], [0, 0.5]),
    r"must lie in \(0, 1\].*": lambda: ([0, 2], [0.5, 1]),
    r"must lie between 0 and 1": lambda: ([-1, 2], [0, 0.5, 1]),
}
"""Values outside and inside a range, by the rule that a message states."""


def _values(rule: str) -> tuple[list[float], list[float]] | None:
    """Return values that a common rule refuses and values that it takes, or None for another rule."""
    for pattern, values in COMMON_RULES.items():
        if found := re.fullmatch(pattern, rule):
            return values(*(int(number) for number in found.groups()))
    return None


RANGED = [(section, key, bound) for section, key, bound in bounds() if _values(bound.rule)]


@pytest.mark.parametrize(
    ("section", "key", "bound"), RANGED, ids=[f"{section}.{key}: {bound.rule}" for section, key, bound in RANGED]
)
def test_a_range_is_what_its_rule_says(section, key, bound):
    outside, inside = _values(bound.rule)
    kind = key_types(section)[key]
    assert [value for value in inside if kind is float or value == int(value) if not bound.is_legal(value)] == []
    for value in outside:
        cfg = config_from_dict({section: {key: kind(value)}})
        assert f"{section}.{key}={kind(value)!r} {bound.rule}" in range_problems(cfg)
        with pytest.raises(ConfigError, match=rf"^{section}\.{key}="):
            check_config(cfg)


def test_every_number_of_the_schema_has_a_range():
    ranged = {f"{section}.{key}" for section, key, _ in bounds()}
    cfg = Config()
    numbers = {
        f"{section.name}.{field.name}"
        for section in fields(cfg)
        for field in fields(getattr(cfg, section.name))
        if type(field.default) in (int, float)
    }
    assert numbers - ranged == {"parallel.zero", "sites.values"}
    cases = {word.split("=")[0] for word, _ in CASES}
    assert {f"{section}.{key}" for section, key, bound in bounds() if not _values(bound.rule)} <= cases


def test_the_ends_of_ranges_that_include_them():
    words = [
        "moe.aux_loss=0",
        "train.optimizer.beta1=0",
        "train.clip_grad=0",
        "data.validation_fraction=0",
        "run.seed=0",
    ]
    check_config(load_config(None, words))
