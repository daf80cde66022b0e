"""Test the rules of every built-in part: its file is its kind, its fields are keys, its formula is independent."""

import inspect
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

import moefold.parts
from moefold.config.base.part import Part
from moefold.config.base.part_registry import all_groups, built_in_kinds, find_part, groups, kind_of, kinds_text
from moefold.config.chosen import chosen
from moefold.config.groups.attention import OutputGate, QueryKeyNorm, Temperature
from moefold.config.keys.paths import choices_of, default_of, part_keys
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.models import edit_model
from tests.parts.formula_rule import assert_formula

PARTS = Path(moefold.parts.__file__).parent
KINDS = [(group, kind) for group in groups() for kind in built_in_kinds(group.group)]
ids = [f"{group.group}-{kind}" for group, kind in KINDS]


def test_each_module_and_folder_of_parts_is_a_group():
    found = {path.parent.name for path in PARTS.glob("*/__init__.py")}
    found |= {path.stem for path in PARTS.glob("*.py")} - {"__init__"}
    assert found == {*(group.group for group in groups()), "attention", "ffn", "indexer", "norm", "span"}


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.group)
def test_the_key_of_a_group_chooses_from_its_kinds(group):
    section, key = group.key.split(".", 1)
    assert choices_of(section, key)[: len(built_in_kinds(group.group))] == built_in_kinds(group.group)
    default = default_of(section, key)
    assert getattr(default, "kind", default) in built_in_kinds(group.group)
    assert isinstance(chosen(Config(), group), group)


@pytest.mark.parametrize("name", [name for name in part_keys() if name.count(".") == 1])
def test_a_kind_that_a_program_misspells_is_refused_as_in_a_recipe(name):
    section, key = name.split(".")
    kind = f"{default_of(section, key)}z"
    cfg = replace(Config(), **{section: replace(getattr(Config(), section), **{key: kind})})
    with pytest.raises(ConfigError) as of_program:
        check_config(cfg)
    with pytest.raises(ConfigError) as of_recipe:
        load_config(None, [f"{name}={kind}"])
    assert str(of_program.value) == str(of_recipe.value)
    assert f"{name}={kind!r} must be {kinds_text(part_keys()[name], choices_of(section, key))}" in str(of_recipe.value)
    assert "; did you mean " in str(of_recipe.value)


@pytest.mark.parametrize("key", ["attention", "linear_attention", "norm"])
def test_the_layers_of_a_misspelled_kind_are_refused_by_its_key(key):
    model = replace(edit_model(Config().model, {"layers.attention": "full, linear"}), **{key: "mlaa"})
    with pytest.raises(ConfigError, match=f"^model.{key}='mlaa' must be one of "):
        model.decoder_layers  # noqa: B018


@pytest.mark.parametrize(("group", "kind"), KINDS, ids=ids)
def test_a_part_is_a_frozen_dataclass_of_recipe_keys(group, kind):
    part = find_part(group.group, kind)
    assert issubclass(part, group)
    assert kind_of(part) == kind
    assert part.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(part))
    assert inspect.getdoc(part) != inspect.getdoc(group)
    assert all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(part))


EVERY_KIND = [(group, kind) for group in all_groups() for kind in built_in_kinds(group.group)]
UNREAD = {"layernorm": {"zero_centered"}}
"""Fields that the `check` of a kind refuses."""


@pytest.mark.parametrize(
    ("group", "kind"), [pytest.param(*each, id=f"{each[0].group}-{each[1]}") for each in EVERY_KIND]
)
def test_a_formula_reads_each_field_that_the_oracle_leaves_it(group, kind):
    part = find_part(group.group, kind)
    if not part.changes_maths:
        assert part.formula is Part.formula
        return
    if (group.group, kind) == ("indexer", "shared"):
        assert part.formula is group.formula, "an earlier layer selects the keys"
        return
    assert part.formula not in (Part.formula, group.formula), "each built-in kind is judged"
    read = assert_formula(part, UNREAD.get(kind, ()))
    assert not part.framed & read
    for name, nested in (("gate", OutputGate), ("qk_norm", QueryKeyNorm), ("temperature", Temperature)):
        assert name not in read or {f"{name}.{field.name}" for field in fields(nested)} <= read
