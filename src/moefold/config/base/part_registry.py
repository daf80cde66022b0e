"""Find the class of a part by its group and kind, in `parts/GROUP.py`, in a file of `parts/GROUP/`, or outside.

No other module imports a part by its path, so that a new class or a new file is a new kind.
"""

import importlib
import pkgutil
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moefold.config.base.aliases import moefold_value
from moefold.config.base.plugins import (
    class_problems,
    entry_point_of,
    entry_points_of,
    load_entry_point,
    origin_of,
    origin_of_entry,
)
from moefold.errors import ConfigError
from moefold.message_text import Problem, UnquotedText

PARTS = "moefold.parts"
GROUPS = "moefold.config.groups"
FOLDER = Path(__file__).parents[2] / "parts"


@cache
def built_in_kinds(group: str) -> tuple[str, ...]:
    """Return the built-in kinds of a group, sorted."""
    if _is_module(group):
        return tuple(sorted(_classes_of_module(group)))
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(FOLDER / group)])))


@cache
def kinds(group: str, words: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the kinds of a group that a recipe may name: built-in ones first, then kinds of installed packages.

    Args:
        words: the built-in kinds that count. Empty: all.
    """
    built_in = built_in_kinds(group)
    return (*(words or built_in), *(kind for kind in entry_points_of(group) if kind not in built_in))


def kinds_text(group: str, words: tuple[str, ...] = ()) -> str:
    """Return the kinds of a group for a message, as `one_of` does: built-in ones, then kinds of installed packages.

    Args:
        words: the built-in kinds that count. Empty: all.
    """
    installed = (f"{kind!r} ({origin_of_entry(points[0])})" for kind, points in entry_points_of(group).items())
    return one_of([*map(repr, words or built_in_kinds(group)), *installed])


def one_of(options: list[str]) -> str:
    """Return the legal values as text: "one of 'ring', 'ulysses'", or the only value."""
    return "one of " * (len(options) > 1) + ", ".join(options)


EXPERIMENTS = MappingProxyType(
    {
        "optimizer": ("delayed_adamw", "delayed_muon", "spsa"),
        "site_method": ("co2", "noloco", "sparseloco", "spes"),
    }
)
"""Kinds of the distribution `moefold-experiments`, by group."""


def missing_experiment(name: str, group: str, kind: str) -> str:
    """Return the refusal of a kind of `moefold-experiments` if that is not installed, or else ""."""
    if kind not in EXPERIMENTS.get(group, ()):
        return ""
    return (
        f"{name}={kind!r} is a part of moefold-experiments, which is not installed; pip install moefold-experiments, "
        "or in a checkout pip install ./experiments"
    )


def unknown_kind(name: str, group: str, kind: str, words: tuple[str, ...] = ()) -> Problem:
    """Return the refusal of a kind that a group lacks, with all kinds and the nearest one.

    Args:
        words: the built-in kinds that count. Empty: all.
    """
    if missing := missing_experiment(name, group, kind):
        return Problem("", None, missing)
    choices = kinds(group, words)
    spelled = [choice for choice in choices if choice.lower() == kind.lower()]
    suggestions = [moefold_value(name, kind)] if moefold_value(name, kind) else get_close_matches(kind, choices, n=1)
    way_out = "".join(f"did you mean {guess!r}?" for guess in (spelled or suggestions)[:1])
    shown = kind if len(repr(kind)) <= 60 else UnquotedText(f"{kind!r:.57}...")
    return Problem(name, shown, f"must be {kinds_text(group, words)}", way_out)


@cache
def groups() -> tuple[Any, ...]:
    """Return the base classes of the groups with one part in each recipe, sorted by the groups' names."""
    return tuple(base for base in all_groups() if "key" in vars(base) and not base.is_of_layers)


@cache
def find_group(name: str) -> Any:
    """Return the base class of a group."""
    return next(base for base in all_groups() if base.group == name)


@cache
def all_groups() -> tuple[Any, ...]:
    """Return the base classes of all groups, sorted by name."""
    folder = Path(__file__).parents[1] / "groups"
    modules = [importlib.import_module(f"{GROUPS}.{module.name}") for module in pkgutil.iter_modules([str(folder)])]
    bases = [value for module in modules for value in vars(module).values() if _is_part(value, module.__name__)]
    return tuple(sorted((base for base in bases if "group" in vars(base)), key=lambda base: base.group))


@cache
def kinds_with(group: str, fact: str, value: Any = True) -> tuple[str, ...]:
    """Return the built-in kinds of a group whose class has a value in a class attribute."""
    return tuple(kind for kind in built_in_kinds(group) if getattr(find_part(group, kind), fact) == value)


@cache
def find_part(group: str, kind: str) -> Any:
    """Return the class of a part.

    Args:
        kind: one of `built_in_kinds(group)`, or a kind of an installed package.

    Raises:
        ConfigError: the group has no such kind, a package from outside is broken, or two packages have the kind.
    """
    if kind in built_in_kinds(group):
        return _class_in(group, kind)
    base = find_group(group)
    if kind not in entry_points_of(group):
        raise ConfigError(unknown_kind(getattr(base, "key", group), group, kind))
    point = entry_point_of(group, kind)
    key = getattr(base, "key", group)
    part = load_entry_point(point, key)
    check_class(part, base, f"{key}={kind!r} of {origin_of_entry(point)} ({point.value})")
    return part


def check_class(part: Any, base: type[Any], origin: str) -> None:
    """Check that an object from a package or file is a class of parts of a group.

    Args:
        origin: its name and origin, the start of the message.

    Raises:
        ConfigError: it is not.
    """
    if faults := "; it ".join(class_problems(part, base)):
        raise ConfigError(f"{origin} {faults}")


def check_not_shadowed(group: str, kind: str) -> None:
    """Check that no installed package has a part with the name of a built-in kind. Raises ConfigError if one has."""
    if entry := entry_points_of(group).get(kind):
        raise ConfigError(
            f"{origin_of_entry(entry[0])} brings the {group} {kind!r}, which is the name of a built-in kind; uninstall "
            "it, or let it use another name"
        )


def class_of(group: str, value: Any) -> Any:
    """Return the class of the part that a key chooses, by its value: a kind, or a part."""
    return find_part(group, value) if isinstance(value, str) else type(value)


def kind_of(part: type[Any]) -> str:
    """Return the kind of the class of a part, or MODULE:CLASS for a class that a program made."""
    if not is_built_in(part):
        return origin_of(part)[0]
    return part.own_kind or part.__module__.removeprefix(f"{PARTS}.{part.group}.").removesuffix(".part")


def describe_class(part: Any) -> str:
    """Return the key and kind of a class of parts, and if it is from outside also its distribution or file."""
    origin = "" if is_built_in(part) else f" ({origin_of(part)[1]})"
    return f"{getattr(part, 'key', part.group)}={kind_of(part)!r}{origin}"


def is_built_in(part: type[Any]) -> bool:
    """Return whether the class of a part is built in."""
    return part.__module__.startswith(f"{PARTS}.")


def _is_module(group: str) -> bool:
    """Return whether the kinds of a group stand in one module."""
    return (FOLDER / f"{group}.py").is_file()


@cache
def _classes_of_module(group: str) -> dict[str, Any]:
    """Return the classes of the kinds of a group that stand in one module, by kind."""
    name = f"{PARTS}.{group}"
    classes = vars(importlib.import_module(name)).values()
    return {part.own_kind: part for part in classes if _is_part(part, name) and part.own_kind}


def _class_in(group: str, kind: str) -> Any:
    """Return the class of a built-in part: in a folder, the public subclass of `Part` that its module defines."""
    if _is_module(group):
        return _classes_of_module(group)[kind]
    name = f"{PARTS}.{group}.{kind}"
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        name += ".part"
        module = importlib.import_module(name)
    classes = [value for key, value in vars(module).items() if key[0] != "_" and _is_part(value, name)]
    assert len(classes) == 1, f"{name} must define one part, and defines {classes}"
    return classes[0]


def _is_part(value: Any, module: str) -> bool:
    """Return whether a value is a class of parts that a module defines."""
    return isinstance(value, type) and value.__module__ == module and hasattr(value, "changes_maths")
