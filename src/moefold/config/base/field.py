"""Facts about a recipe key in the annotation of its field: `steps: Annotated[int, at_least(1)] = 100`."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


@dataclass(frozen=True)
class Bound:
    """Rule on the value of a key, checked for every config before it is used."""

    rule: str
    """Rule on the value, as error messages state it after key and value."""
    is_legal: Callable[[Any], bool]


@dataclass(frozen=True)
class MaxMagnitude:
    """Largest magnitude of a number, far above the values of any real run. It is checked while a recipe is read.

    Numbers without it have the largest magnitude of their type (`config/base/limits.py`).
    """

    value: int


@dataclass(frozen=True)
class ReadIf:
    """Condition for a key to have an effect, or on a section for all its other keys to have one.

    If a key has several conditions, all must hold.
    """

    conditions: str
    """Alternatives, separated by spaces. "section.key": the key differs from its default. "section.key=WORD|WORD",
    "section.key!=WORD": it has one of these values, or another value."""


class VerifyAs(Enum):
    """Class of a key for `moefold verify`.

    It annotates a key, or a section for all its keys without an annotation of their own. A key without any changes the
    maths of a step: the oracle must read the key when the recipe sets it. `moefold verify` refuses a recipe with such a
    key that no formula has read, because the verdict would mean nothing.
    """

    ROUNDS = "rounds of sites: the oracle of sites reads the key, and `moefold verify` says that it compares no round"
    MAPPING = "mapping: the runtime under it is compared with the oracle, and it must not change the result"
    SPEED = "memory and speed: the key does not change the result"
    FORMAT = "number format: the comparison is in float64, or has a tolerance of its own"
    SIZE = "size of parameters: parameters of another size do not fit the formulas"
    START = "initial weights and random numbers: runtime and oracle begin with the same ones"
    SAMPLES = "samples: runtime and oracle read the same tokens, documents, weights and columns"
    FILES = "files, logs and failures: the key changes nothing in a step"
    ROLLOUTS = "rollouts: `moefold verify` says that it compares none; an objective is judged by its own settings"


class Trait(Enum):
    """Property of a key that the code of another part asks for."""

    SAME_TENSORS = auto()
    SAME_RUN = auto()


SAME_TENSORS = Trait.SAME_TENSORS
"""A key of [model] that does not change the meaning of stored tensors, or that is compared by its effect."""
SAME_RUN = Trait.SAME_RUN
"""A key that may change when a run is resumed without a line of the log. On a section it stands for all keys except
those that determine initial values (`VerifyAs.START`)."""


def at_least(low: int, meaning: str = "") -> Bound:
    """Return the bound that a number is at least `low`.

    Args:
        meaning: meaning of a special value, such as "0: never".
    """
    return Bound(f"must be at least {low}{f' ({meaning})' if meaning else ''}", lambda value: value >= low)


POSITIVE = Bound("must be greater than 0", lambda value: value > 0)
BELOW_ONE = Bound("must lie in [0, 1): at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Bound("must lie in (0, 1]: above 0 and at most 1", lambda value: 0 < value <= 1)
ZERO_TO_ONE = Bound("must lie between 0 and 1", lambda value: 0 <= value <= 1)
