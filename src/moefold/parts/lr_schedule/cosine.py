"""Cosine decay (arXiv:1608.03983), without restarts."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from moefold.config.groups.lr_schedule import DecayPart, interpolate, progress


@dataclass(frozen=True, kw_only=True)
class CosineDecay(DecayPart):
    """Fall from the peak to min_lr along half a cosine."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step after the warm-up; see the base class."""
        return interpolate(self.min_lr, peak, (1 + math.cos(math.pi * progress(step, first, steps))) / 2)

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return the rate by the square of the cosine of half the angle."""

        def rate(peak: float, first: int, step: int, steps: int) -> float:
            share = (step - first) / max(1, steps - first)
            return self.min_lr + (peak - self.min_lr) * math.cos(math.pi / 2 * share) ** 2

        return rate
