"""Learning-rate schedules: the shape of the learning rate after the warm-up."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from moefold.config.base.field import at_least
from moefold.config.base.part import Part
from moefold.config.base.small_sizes import SmallSizes


@dataclass(frozen=True, kw_only=True)
class LrSchedulePart(Part):
    """Learning rate after the warm-up, which is linear and the same for all schedules."""

    group: ClassVar[str] = "lr_schedule"
    key: ClassVar[str] = "train.lr_schedule"
    ends_at_min_lr: ClassVar[bool] = False
    """True if the schedule has a learning rate min_lr, whose upper bound is train.lr."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> Annotated[float, at_least(0)]:
        """Return the learning rate of a step after the warm-up.

        Args:
            peak: learning rate at the end of the warm-up.
            first: last step of the warm-up, or 1 without warm-up. Its rate is exactly the peak.
            step: from `first` to `steps`, counted from 1.
            steps: optimizer steps of the whole run. The last step has exactly the lowest rate.
        """
        raise NotImplementedError

    def describe(self, peak: float, first: int, step: int, steps: int) -> str:
        """Describe the remaining decay after a step, for the log."""
        return f"the {self.kind} ends at {self.rate(peak, first, steps, steps):.3g} in step {steps:,}"

    def formula(self) -> Callable[[float, int, int, int], float] | None:
        """Return a second implementation of `rate`, for the oracle, or None if it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class DecayPart(LrSchedulePart):
    """Schedule that falls from the peak to `min_lr`."""

    ends_at_min_lr: ClassVar[bool] = True
    min_lr: Annotated[float, at_least(0)] = 0.0
    """Learning rate at the end of the decay, at most train.lr."""

    def shrink(self, small: SmallSizes) -> Self:
        """Return the schedule for the peak of a small recipe."""
        return replace(self, min_lr=min(self.min_lr, small.lr))


def interpolate(low: float, high: float, fraction: float) -> float:
    """Return the number at a fraction of the way from `low` (0) to `high` (1), exact at both ends."""
    return high if fraction == 1 else low + (high - low) * fraction


def progress(step: int, first: int, last: int) -> float:
    """Return the fraction of the way from step `first` to step `last`, 0 up to `first`."""
    return (step - first) / (last - first) if step > first else 0.0
