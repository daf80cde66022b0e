"""Rules between the keys of a recipe: functions that name the sections that they read."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from moefold.config.schema import Config

Rule = Callable[..., Iterator[str]]
"""Yields a message per violation. Each parameter without a default is a section of the recipe by its name, or `cfg`."""


def ask(rule: Rule, cfg: Config) -> Iterator[str]:
    """Return the messages of a rule about a recipe, whose sections it is called with."""
    values: list[Any] = [cfg if name == "cfg" else getattr(cfg, name) for name in _sections_of(rule)]
    return rule(*values)


@cache
def _sections_of(rule: Rule) -> tuple[str, ...]:
    parameters = inspect.signature(rule).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)
