"""Rules between the keys of a recipe: functions that name the sections that they read."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from moefold.config.part import Part
from moefold.config.problem import Problem
from moefold.config.schema import Config

Rule = Callable[..., Iterator[Any]]
"""Yields a message or `Problem` per violation. Each parameter without a default is a section of the recipe by its name;
`cfg` and `recipe` are the whole recipe."""


def ask(rule: Rule, cfg: Config) -> Iterator[Any]:
    """Return the violations of a rule by a recipe, whose sections it is called with."""
    # A method is looked up by its function: the hash of the object reads all of its fields.
    names = _sections_of(rule.__func__)[1:] if inspect.ismethod(rule) else _sections_of(rule)
    values: list[Any] = [cfg if name in ("cfg", "recipe") else getattr(cfg, name) for name in names]
    return rule(*values)


def part_problems(part: Part, recipe: Config) -> list[Problem]:
    """Return what a part does not go with in a recipe."""
    return list(ask(part.check, recipe))


@cache
def _sections_of(rule: Rule) -> tuple[str, ...]:
    parameters = inspect.signature(rule).parameters.values()
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
