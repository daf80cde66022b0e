"""Learning-rate schedules."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moefold.config.base.field import MaxMagnitude, at_least
from moefold.config.base.limits import MAX_STEPS
from moefold.config.groups.lr_schedule import DecayPart, LrSchedulePart, interpolate, progress
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.config.sections.run import RunConfig
    from moefold.config.sections.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class ConstantRate(LrSchedulePart, kind="constant"):
    """Stay at the peak."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step: always the peak."""
        return peak

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return a function that returns the peak."""
        return lambda peak, first, step, steps: peak


@dataclass(frozen=True, kw_only=True)
class LinearDecay(DecayPart, kind="linear"):
    """Fall from the peak to min_lr by the same amount in each step."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step after the warm-up. See the base class."""
        return interpolate(self.min_lr, peak, 1 - progress(step, first, steps))

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return the rate as the peak less equal steps."""

        def rate(peak: float, first: int, step: int, steps: int) -> float:
            return peak - (step - first) * (peak - self.min_lr) / max(1, steps - first)

        return rate


@dataclass(frozen=True, kw_only=True)
class CosineDecay(DecayPart, kind="cosine"):
    """Fall from the peak to min_lr along half a cosine (arXiv:1608.03983), without restarts."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step after the warm-up. See the base class."""
        return interpolate(self.min_lr, peak, (1 + math.cos(math.pi * progress(step, first, steps))) / 2)

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return the rate by the square of the cosine of half the angle."""

        def rate(peak: float, first: int, step: int, steps: int) -> float:
            share = (step - first) / max(1, steps - first)
            return self.min_lr + (peak - self.min_lr) * math.cos(math.pi / 2 * share) ** 2

        return rate


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(DecayPart, kind="wsd"):
    """Stay at the peak, then fall linearly to min_lr over the last decay_steps (WSD, arXiv:2404.06395).

    If the decay overlaps the warm-up, it starts after the warm-up.
    """

    decay_steps: Annotated[int, at_least(0), MaxMagnitude(MAX_STEPS)] = 0
    """Steps of the final linear decay. 0: a tenth of the steps of the run, at least one step."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        """Return the learning rate of a step after the warm-up. See the base class."""
        return interpolate(self.min_lr, peak, 1 - progress(step, self._decay_start(first, steps), steps))

    def describe(self, peak: float, first: int, step: int, steps: int) -> str:
        """Describe the decay that is left after a step, for the log."""
        begin = max(self._decay_start(first, steps), step)
        end = self.rate(peak, first, steps, steps)
        return f"the decay of wsd begins after step {begin:,} and ends at {end:.3g} in step {steps:,}"

    def check(self, run: "RunConfig", train: "TrainConfig") -> Iterator[Problem]:
        """Yield an error if warm-up and decay are longer than the run."""
        warmup = train.warmup_steps
        steps = run.steps
        if warmup <= steps < warmup + self.decay_steps:
            yield Problem(
                "train.lr_schedule.decay_steps",
                self.decay_steps,
                f"and train.warmup_steps={warmup} must fit into run.steps={steps}",
                f"choose decay_steps of at most {steps - warmup}",
            )

    def formula(self) -> Callable[[float, int, int, int], float]:
        """Return the rate counted from the end of the run."""

        def rate(peak: float, first: int, step: int, steps: int) -> float:
            length = min(self.decay_steps or max(1, steps // 10), steps - first)
            remaining = min(steps - step, length)
            return peak if remaining == length else self.min_lr + remaining * (peak - self.min_lr) / length

        return rate

    def _decay_start(self, first: int, steps: int) -> int:
        """Return the last step with the peak rate."""
        return max(first, steps - (self.decay_steps or max(1, steps // 10)))
