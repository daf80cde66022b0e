"""The distribution: its kinds, the message of a recipe without it, and the answers to old keys."""

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import moefold
import moefold_experiments
from moefold.config.base import part_registry, plugins
from moefold.config.base.part import settings_of
from moefold.config.base.part_registry import EXPERIMENTS, find_part, kind_of
from moefold.config.load import config_from_dict
from moefold.config.tables import build, part_class
from moefold.config.upgrade.moved_keys import KIND, MOVED
from moefold.config.upgrade.recipe import upgraded
from moefold.errors import ConfigError
from moefold.recipe import load_config
from tests.architecture.imports import imports_torch
from tests.parts.formula_rule import assert_formula

PROJECT = Path(__file__).parents[1]
KINDS = [(group, kind) for group, kinds in EXPERIMENTS.items() for kind in kinds]


def test_the_entry_points_are_the_kinds_that_the_package_knows_by_name():
    points = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {name.removeprefix("moefold."): tuple(sorted(kinds)) for name, kinds in points.items()} == EXPERIMENTS
    assert distribution("moefold-experiments").version == moefold.__version__
    assert Path(moefold_experiments.__file__).is_relative_to(PROJECT)


def test_the_package_imports_no_experiment():
    files = Path(part_registry.__file__).parents[1].rglob("*.py")
    assert [str(file) for file in files if "moefold_experiments" in file.read_text()] == []


@pytest.mark.parametrize(("group", "kind"), KINDS)
def test_a_formula_stands_by_itself_and_reads_each_field(group, kind):
    part = find_part(group, kind)
    assert kind_of(part) == kind
    assert_formula(part)


def test_parts_are_read_without_torch():
    modules = [find_part(group, kind).__module__ for group, kind in KINDS]
    assert imports_torch([*dict.fromkeys(modules)]) == []


@pytest.mark.parametrize(("group", "kind"), KINDS)
@pytest.mark.parametrize("form", ["{}", '{{kind="{}"}}'])
def test_without_the_distribution_a_recipe_names_the_package_to_install(monkeypatch, group, kind, form):
    for module in (part_registry, plugins, build, part_class):
        monkeypatch.setattr(module, "entry_points_of", lambda group: {})
    part_registry.kinds.cache_clear()
    key = part_registry.find_group(group).key
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"{key}={form.format(kind)}"])
    part_registry.kinds.cache_clear()
    assert str(refused.value) == (
        f"{key}={kind!r} is a part of moefold-experiments, which is not installed; pip install moefold-experiments, "
        "or in a checkout pip install ./experiments"
    )


OLD_KEYS = [(name, kind) for name, place in MOVED.items() for kind in place.kinds if ("optimizer", kind) in KINDS]


@pytest.mark.parametrize(("name", "kind"), OLD_KEYS)
def test_an_old_run_of_a_kind_has_its_settings(name, kind):
    place = MOVED[name]
    optimizer = kind.removeprefix("delayed_") if place.setting == KIND else kind
    tree, unread = upgraded({"train": {"optimizer": optimizer, name.removeprefix("train."): 1.0}})
    part = config_from_dict(tree).train.optimizer
    assert (part.kind, unread) == (kind, [])
    assert place.setting == KIND or (place.setting in settings_of(type(part)) and getattr(part, place.setting) == 1.0)
