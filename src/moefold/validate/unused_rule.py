"""Rule on keys without effect."""

from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.schema import Config


@dataclass(frozen=True)
class UnusedKeyRule:
    """Keys without effect under a condition, with the reason and the remedy.

    It concerns keys that the recipe sets. A preset describes a model: a recipe that switches a part of it off, for a
    comparison, need not take back each size of that part.
    """

    keys: str
    condition: Callable[[Config], bool]
    reason: str
    remedy: str
