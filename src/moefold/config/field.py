"""Facts about a recipe key in the annotation of its field: `steps: Annotated[int, at_least(1)] = 100`."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


@dataclass(frozen=True)
class Bound:
    """Rule on the value of a key, checked for every config before it is used."""

    rule: str
    """What the value must be, as the message says it after key and value."""
    is_legal: Callable[[Any], bool]


@dataclass(frozen=True)
class Most:
    """Largest magnitude of a number, far above what any machine runs; checked while a recipe is read.

    Numbers without it have the largest magnitude of their type (`config/limits.py`).
    """

    value: int


@dataclass(frozen=True)
class ReadIf:
    """Mark of a key that has an effect only with other keys; on a section: of all its other keys.

    Of several marks, each must hold.
    """

    conditions: str
    """Separated by spaces; one of them suffices. "section.key": the key has another value than its default.
    "section.key=WORD|WORD", "section.key!=WORD": it has one of these values, or another one."""


class Judged(Enum):
    """Class of a key for `moefold verify`; on a section: of all its keys without a mark of their own.

    A key without a mark, in a section without one, changes the maths of a step: the oracle has to read it when it is
    set. If no formula has read it, the verdict would mean nothing, and the recipe is refused.
    """

    ROUNDS = "rounds of sites: the oracle of sites reads it, and `moefold verify` says that it compares no round"
    MAPPING = "mapping: what is compared with the oracle, and must not change the result"
    SPEED = "memory and speed: the same result"
    FORMAT = "number format: the comparison is in float64, or has a tolerance of its own"
    SIZE = "size that the parameters have: another one does not fit the formulas"
    START = "initial weights and random numbers: both sides begin with the same"
    SAMPLES = "samples: both sides read the same; the oracle takes tokens, documents, weights and columns from them"
    FILES = "files, logs and failures: no part of a step"
    ROLLOUTS = "rollouts: `moefold verify` says that it compares none; an objective is judged by its own settings"


class Trait(Enum):
    """Property of a key that the code of another part asks for."""

    SAME_TENSORS = auto()
    SAME_RUN = auto()


SAME_TENSORS = Trait.SAME_TENSORS
"""A key of [model] that does not change the meaning of stored tensors, or that is compared by its effect."""
SAME_RUN = Trait.SAME_RUN
"""A key that may change when a run is resumed without a line of the log; on a section: all its keys, but for those that
initial values follow from (`Judged.START`)."""


def at_least(low: int, meaning: str = "") -> Bound:
    """Return the rule that a number is at least `low`.

    Args:
        low: the smallest legal value.
        meaning: what some value means, such as "0: never".
    """
    return Bound(f"must be at least {low}{f' ({meaning})' if meaning else ''}", lambda value: value >= low)


POSITIVE = Bound("must be greater than 0", lambda value: value > 0)
BELOW_ONE = Bound("must lie in [0, 1): at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Bound("must lie in (0, 1]: above 0 and at most 1", lambda value: 0 < value <= 1)
ZERO_TO_ONE = Bound("must lie between 0 and 1", lambda value: 0 <= value <= 1)
