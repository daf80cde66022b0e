"""Rules for every built-in part: its file is its kind, its fields are recipe keys, its formula stands by itself."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import moefold.parts
from moefold.config.chosen import chosen
from moefold.config.field import Judged
from moefold.config.find import built_in_kinds, find_part, groups, kind_of
from moefold.config.groups.attention import AttentionPart, OutputGate, QueryKeyNorm
from moefold.config.part import Part
from moefold.config.schema import Config
from moefold.config.suggestions import choices_of, default_of, part_keys
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.architecture import imports
from tests.models import edit_model

PACKAGE = moefold.parts.__name__
PARTS = Path(moefold.parts.__file__).parent
KINDS = [(group, kind) for group in groups() for kind in built_in_kinds(group.group)]
ids = [f"{group.group}-{kind}" for group, kind in KINDS]
BASES = {"moefold.config.part", *(group.__module__ for group in groups())}
"""Modules of base classes, whose `formula` is none."""
LIBRARIES = {"torch", "numpy", "math", "functools", "dataclasses", "typing", "collections"}
"""What a formula may import, beside its own file and `config`."""


def test_each_folder_of_parts_is_a_group():
    folders = {path.name for path in PARTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*(group.group for group in groups()), "attention", "ffn", "indexer", "norm", "span"}


def test_nothing_imports_a_part():
    """`config/find.py` finds a part by its kind; files of a part import their own folder."""
    found = imports.imports(PARTS.parent)
    outside = [one for one in found if one.imported.startswith("parts.") and not one.importer.startswith("parts.")]
    assert [str(one) for one in outside] == []


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
    assert f"{name}={kind!r} must be one of" in str(of_recipe.value)
    assert "; did you mean " in str(of_recipe.value)


@pytest.mark.parametrize("key", ["attention", "linear_attention", "norm"])
def test_the_layers_of_a_misspelled_kind_are_refused_by_its_key(key):
    model = replace(edit_model(Config().model, {"attention_pattern": "FL"}), **{key: "mlaa"})
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


@pytest.mark.parametrize(("group", "kind"), KINDS, ids=ids)
def test_a_formula_reads_each_field_and_no_method_of_its_part(group, kind):
    part = find_part(group.group, kind)
    if not part.changes_maths:
        assert part.formula is Part.formula
        return
    assert part.formula not in (Part.formula, group.formula), "each built-in kind is judged"
    check_formula(part)


@pytest.mark.parametrize("kind", built_in_kinds("attention"))
def test_the_formula_of_an_attention_reads_each_field_and_no_method(kind):
    """The oracle itself reads the fields that all kinds have: spans, RoPE; and the framed ones."""
    part = find_part("attention", kind)
    shared = {field.name for field in fields(AttentionPart)} | part.framed
    read = _check_formula(part, {field.name for field in fields(part)} - shared)
    for name, nested in (("gate", OutputGate), ("qk_norm", QueryKeyNorm)):
        assert name not in read or {f"{name}.{field.name}" for field in fields(nested)} <= read


def check_formula(part) -> None:
    """Check that the formula of a part reads each of its fields, and none of its methods."""
    _check_formula(part, {field.name for field in fields(part)} - part.framed)


def _check_formula(part, names: set[str]) -> set[str]:
    """Check that the formula of a part reads fields, and no method; return what it reads."""
    read = _attributes(part)
    hints = get_type_hints(part, include_extras=True)
    formats = {name for name in names if any(isinstance(m, Judged) for m in getattr(hints[name], "__metadata__", ()))}
    assert names - formats <= read
    methods = {name for name in dir(part) if not name.startswith("__")} - {field.name for field in fields(part)}
    assert read & (methods - {"formula"}) == set()
    return read


def _attributes(part) -> set[str]:
    """Return what the formula of a part reads of the part: attributes of `self`, and of `part` in its oracle.py.

    The formula of a part may call the formula of the part that it extends, and functions of the oracle.py of another.
    """
    trees = []
    for base in (base for base in part.__mro__ if "formula" in vars(base) and base.__module__ not in BASES):
        trees.append(ast.parse(textwrap.dedent(inspect.getsource(base.formula))))
        oracle = Path(inspect.getfile(base)).with_name("oracle.py")
        trees += [ast.parse(oracle.read_text())] if _has_folder(base) and oracle.exists() else []
    trees += [ast.parse(inspect.getsource(called)) for tree in trees for called in _called(tree)]
    for tree in trees:
        assert not (_imported(tree) - LIBRARIES), "a formula imports torch, math and types"
    paths = [ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {path.partition(".")[2] for path in paths if path.startswith(("self.", "part."))}


def _called(tree: ast.AST) -> Iterator[Any]:
    """Yield the functions that an oracle.py takes from another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.endswith(".oracle"):
            found = import_module(node.module)
            yield from (getattr(found, alias.name) for alias in node.names)


@pytest.mark.parametrize("kind", built_in_kinds("ffn"))
def test_the_formula_of_a_network_reads_each_field_that_the_oracle_leaves_it(kind):
    part = find_part("ffn", kind)
    read = _check_formula(part, {field.name for field in fields(part)} - part.framed)
    assert not part.framed & read


def _has_folder(part) -> bool:
    return part.__module__.endswith(".part")


def _imported(tree: ast.AST) -> set[str]:
    """Return the libraries that a formula imports; of the package, modules other than its own oracle and `config`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            own = node.module.startswith("moefold.config.") or node.module.endswith((".oracle", ".part"))
            found |= set() if own else {node.module.split(".")[0]}
    return found
