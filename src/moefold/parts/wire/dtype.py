"""Tokens are sent in the compute type of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.dispatcher import WirePart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ComputeDtype(WirePart):
    """The compute type of the model."""

    def formula(self) -> Callable[["Tensor"], "Tensor"]:
        """Return the identity."""
        return lambda rows: rows
