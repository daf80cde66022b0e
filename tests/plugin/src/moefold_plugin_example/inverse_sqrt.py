"""Inverse square root decay (arXiv:1706.03762)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from moefold.config.base.field import at_least
from moefold.config.groups.lr_schedule import LrSchedulePart


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(LrSchedulePart):
    """Fall from the peak with the square root of the step, not below a share of the peak."""

    interface: ClassVar[int] = 1

    floor: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Lowest rate, as a share of the peak."""
    timescale: Annotated[int, at_least(1)] = 10
    """Steps after the first one until the rate has fallen to 0.71 of the peak."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step after the warm-up."""
        return peak * max(self.floor, (self.timescale / (self.timescale + step - first)) ** 0.5)

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return the rate by a power of -1/2."""

        def rate(peak: float, first: int, step: int, steps: int) -> float:
            share = (1 + (step - first) / self.timescale) ** -0.5
            return peak * share if share > self.floor else peak * self.floor

        return rate
