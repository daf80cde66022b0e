"""Rule on keys without effect."""

from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.schema import Config


@dataclass(frozen=True)
class UnusedKeyRule:
    """Keys without effect under a condition, with the reason and the remedy."""

    keys: str
    condition: Callable[[Config], bool]
    reason: str
    remedy: str
