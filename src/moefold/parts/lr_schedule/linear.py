"""Linear decay."""

from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.groups.lr_schedule import DecayPart, interpolate, progress


@dataclass(frozen=True, kw_only=True)
class LinearDecay(DecayPart):
    """Fall from the peak to min_lr by the same amount in each step."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step after the warm-up; see the base class."""
        return interpolate(self.min_lr, peak, 1 - progress(step, first, steps))

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return the rate as the peak less equal steps."""

        def rate(peak: float, first: int, step: int, steps: int) -> float:
            return peak - (step - first) * (peak - self.min_lr) / max(1, steps - first)

        return rate
