"""Constant learning rate."""

from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.groups.lr_schedule import LrSchedulePart


@dataclass(frozen=True, kw_only=True)
class ConstantRate(LrSchedulePart):
    """Stay at the peak."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the peak."""
        return peak

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return a function that returns the peak."""
        return lambda peak, first, step, steps: peak
