"""Keys without effect: rules, and the conditions of fields (`ReadIf`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moefold.config.chosen import read_key
from moefold.config.field import ReadIf
from moefold.config.part_table import shown_value
from moefold.config.schema import Config
from moefold.config.suggestions import choices_of, default_of, join_with_or

MOST_CHOICES = 4
"""Maximum number of values of a key in a remedy."""


@dataclass(frozen=True)
class UnusedKeyRule:
    """Keys without effect under a condition, with the reason and the remedy.

    The rule applies to keys that the recipe sets. Keys of a preset are ignored: a recipe that turns a part of the
    preset's model off need not reset each size of the part.
    """

    keys: str
    condition: Callable[[Config], bool]
    reason: str
    remedy: str


def why_unread(cfg: Config, marks: Iterable[ReadIf]) -> tuple[str, str] | None:
    """Return reason and remedy for a key that is not read, given the values of other keys; None if it is read.

    Args:
        marks: the conditions of the key.
    """
    for condition_mark in marks:
        conditions = condition_mark.conditions.split()
        values = {name: read_key(cfg, _parse(name)[0]) for name in conditions}
        if not any(_holds(condition, value) for condition, value in values.items()):
            terms = " and ".join(f"{_parse(condition)[0]}={shown_value(value)}" for condition, value in values.items())
            return f"nothing reads it with {terms}", f"set {join_with_or(list(map(_way_out, conditions)))}"
    return None


def _parse(condition: str) -> tuple[str, list[str], bool]:
    """Return key and values of a condition, and whether the key must have one of them; no values: not its default."""
    key, _, words = condition.partition("=")
    return key.removesuffix("!"), list(filter(None, words.split("|"))), not key.endswith("!")


def _holds(condition: str, value: Any) -> bool:
    """Return whether a value meets a condition on its key."""
    key, words, must_equal = _parse(condition)
    if not words:
        return bool(value != default_of(*key.split(".", 1)))
    return (shown_value(value).strip("'") in words) is must_equal


def _way_out(condition: str) -> str:
    """Return a key with the values that meet a condition; only the key if it has many values."""
    key, words, must_equal = _parse(condition)
    default = default_of(*key.split(".", 1))
    if isinstance(default, bool) and not words:
        words = [shown_value(not default)]
    elif not words or not must_equal:
        choices = [choice for choice in choices_of(*key.split(".", 1)) if choice not in (words or [default])]
        words = choices if len(choices) <= MOST_CHOICES else []
    values = [repr(word) if isinstance(default, str) else str(word) for word in words]
    return f"{key}={join_with_or(values)}" if values else key
