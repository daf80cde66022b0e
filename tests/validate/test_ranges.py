"""Every number of a recipe has a range, and values outside of it are refused with the rule."""

import math
import re
import tomllib
from dataclasses import fields, replace

import pytest

from moefold.config.base.field import Bound
from moefold.config.base.part import Part, Table, metadata_of, required_settings, settings_of
from moefold.config.chosen import read_key, with_key
from moefold.config.keys.annotations import bounds, range_problems
from moefold.config.keys.paths import default_of, kind_settings, owners_of, tables
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.message_text import Problem
from moefold.recipe import load_config
from moefold.validate.config import check_config

LIMITS = [
    ("run.seed=9223372036854775808", "must be at most 9223372036854775807"),
    ("reward.weights=[inf]", "must hold numbers of at most 1e+15"),
    ("reward.weights=[nan]", "must hold numbers"),
]


@pytest.mark.parametrize(("word", "message"), LIMITS, ids=[word for word, _ in LIMITS])
def test_a_number_that_is_too_large_is_refused(word, message):
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


PROBES = {
    int: (-2, -1, 0, 1, 2, 1025),
    float: (-2.0, -0.1, 0.0, 0.5, 1.0, 1.5, 2.0, float("inf")),
    str: ("", "a", "~", "a/b\nc", "x" * 129),
    tuple: ((), ("",), ("x" * 65,)),
}
"""Values by their type; each range refuses at least one of them. So there is no list of keys here to keep up."""


def _of_tables() -> list[tuple[str, Bound, Part | Table]]:
    """Return the ranges of settings of tables, each with the path of the setting and a table with its defaults."""
    return [
        (f"{path}.{setting}", bound, owner(**dict.fromkeys(required_settings(owner), "a")))
        for path, mark in tables().items()
        for owner in owners_of(mark)
        for setting in settings_of(owner)
        for bound in metadata_of(owner)[setting]
        if isinstance(bound, Bound)
    ]


RANGED = [(f"{section}.{key}", bound, None) for section, key, bound in bounds()] + _of_tables()
IDS = [f"{name}{f' of {part}' if part else ''}: {bound.rule}" for name, bound, part in RANGED]


def _with(name: str, table: Part | Table | None, value: object) -> Config:
    """Return the default recipe with another value of a key, or of a setting of a table."""
    path, _, setting = name.rpartition(".")
    return with_key(Config(), *((path, replace(table, **{setting: value})) if table else (name, value)))


@pytest.mark.parametrize(("name", "bound", "part"), RANGED, ids=IDS)
def test_each_bound_refuses_what_its_rule_says(name, bound, part):
    default = getattr(part, name.rpartition(".")[2]) if part else read_key(Config(), name)
    assert bound.is_legal(default)
    outside, inside = _values(bound.rule) or ([], [])
    kind = type(default)
    assert [value for value in inside if kind is float or value == int(value) if not bound.is_legal(value)] == []
    outside = [kind(value) for value in outside] or [value for value in PROBES[kind] if not bound.is_legal(value)]
    assert outside
    for value in outside:
        cfg = _with(name, part, value)
        assert Problem(name, value, bound.rule) in range_problems(cfg)
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)}="):
            check_config(cfg)


def test_every_number_of_the_schema_has_a_range():
    cfg = Config()
    numbers = {
        f"{section.name}.{field.name}"
        for section in fields(cfg)
        for field in fields(getattr(cfg, section.name))
        if type(field.default) in (int, float)
    }
    numbers |= {name for name in kind_settings() if type(default_of(*name.split(".", 1))) in (int, float)}
    assert numbers - {name for name, _, _ in RANGED} == {"model.layers", "parallel.zero"}


def test_the_ends_of_ranges_that_include_them():
    words = [
        "moe.aux_loss=0",
        "train.optimizer.beta1=0",
        "train.clip_grad=0",
        "data.validation_fraction=0",
        "run.seed=0",
    ]
    check_config(load_config(None, words))
