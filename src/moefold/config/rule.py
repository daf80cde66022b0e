"""Rules between the keys of a recipe: functions whose parameters name the sections that they read."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from moefold.config.base.part import Part
from moefold.config.schema import Config
from moefold.message_text import Problem

Rule = Callable[..., Iterator[Any]]
"""Yields a message or `Problem` per violation. Each parameter without a default is a section of the recipe by its name.
`cfg` and `recipe` are the whole recipe."""


def apply_rule(rule: Rule, cfg: Config) -> Iterator[Any]:
    """Return the violations of a rule, which is called with the sections of a recipe."""
    # Methods are cached by their function, because the hash of the object would read all its fields.
    names = _sections_of(rule.__func__)[1:] if inspect.ismethod(rule) else _sections_of(rule)
    values: list[Any] = [cfg if name in ("cfg", "recipe") else getattr(cfg, name) for name in names]
    return rule(*values)


def part_problems(part: Part, recipe: Config) -> list[Problem]:
    """Return the settings of a recipe that are incompatible with a part."""
    return list(apply_rule(part.check, recipe))


@cache
def _sections_of(rule: Rule) -> tuple[str, ...]:
    parameters = inspect.signature(rule).parameters.values()
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
