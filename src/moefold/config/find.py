"""Find the class of a part by its group and kind: a file of `parts/GROUP/`, or an entry point of another package.

Nothing else of the package imports a part, so that a new file is a new kind.
"""

import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

PARTS = "moefold.parts"
GROUPS = "moefold.config.groups"
ENTRY_POINTS = "moefold."
"""Start of the name of an entry-point group; the rest is the group of the part."""


@cache
def built_in_kinds(group: str) -> tuple[str, ...]:
    """Return the kinds of a group that the package has, sorted.

    The name of the file is the kind, with `-` as `__`, and `_` before it where it begins with a digit: `_1f1b.py`.
    """
    folder = Path(__file__).parents[1] / "parts" / group
    names = (found.name for found in pkgutil.iter_modules([str(folder)]))
    return tuple(sorted(name.removeprefix("_").replace("__", "-") for name in names))


@cache
def kinds(group: str) -> tuple[str, ...]:
    """Return the kinds of a group that a recipe may name: built-in ones first, then kinds of installed packages."""
    built_in = built_in_kinds(group)
    return (*built_in, *(name for name in sorted(_entry_points(group)) if name not in built_in))


@cache
def groups() -> tuple[Any, ...]:
    """Return the base class of each group that a recipe key chooses from, in order of the groups' names."""
    folder = Path(__file__).parent / "groups"
    modules = [importlib.import_module(f"{GROUPS}.{found.name}") for found in pkgutil.iter_modules([str(folder)])]
    found = [value for module in modules for value in vars(module).values() if _is_part(value, module.__name__)]
    return tuple(base for base in found if "key" in vars(base))


def find_group(name: str) -> Any:
    """Return the base class of a group."""
    return next(group for group in groups() if group.group == name)


@cache
def find_part(group: str, kind: str) -> Any:
    """Return the class of a part.

    Args:
        group: the folder of `parts/`.
        kind: one of `kinds(group)`.

    Raises:
        KeyError: the group has no such kind.
    """
    if kind in built_in_kinds(group):
        return _class_in(group, kind)
    return _entry_points(group)[kind].load()


def class_of(group: str, value: Any) -> Any:
    """Return the class of the part that a key chooses, by its value: a kind, or a part."""
    return find_part(group, value) if isinstance(value, str) else type(value)


def kind_of(part: type[Any]) -> str:
    """Return the kind of the class of a part; MODULE:CLASS of one that a program made."""
    own = f"{part.__module__}:{part.__qualname__}"
    return next((kind for kind in kinds(part.group) if _is_in(part.group, kind, part)), own)


def _is_in(group: str, kind: str, part: Any) -> bool:
    """Return whether a kind is a class, without loading other packages."""
    if kind in built_in_kinds(group):
        return bool(part.__module__.startswith(f"{PARTS}.{group}.")) and find_part(group, kind) is part
    return _entry_points(group)[kind].value == f"{part.__module__}:{part.__qualname__}"


def _class_in(group: str, kind: str) -> Any:
    """Return the class of a built-in part: the public subclass of `Part` that its module defines."""
    stem = f"_{kind}" if kind[0].isdigit() else kind.replace("-", "__")
    name = f"{PARTS}.{group}.{stem}"
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        name += ".part"
        module = importlib.import_module(name)
    found = [value for key, value in vars(module).items() if key[0] != "_" and _is_part(value, name)]
    assert len(found) == 1, f"{name} must define one part, and defines {found}"
    return found[0]


def _is_part(value: Any, module: str) -> bool:
    """Return whether a value is a class of parts that a module defines."""
    return isinstance(value, type) and value.__module__ == module and hasattr(value, "changes_maths")


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=f"{ENTRY_POINTS}{group}")}
