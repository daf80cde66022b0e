"""Change of the loss by a round of the sites, over a few steps before and after it."""

from collections import deque

STEPS = 5
"""Most steps before and after a round whose mean losses are compared."""


class LossSpike:
    """Mean loss of the steps after a round minus the mean of the steps before; `last` is the value of the last round.

    Args:
        gap: fewest steps between two rounds; no more steps are compared.
    """

    def __init__(self, gap: int) -> None:
        self._num_steps = min(STEPS, gap)
        self._losses: deque[float] = deque(maxlen=self._num_steps)
        self._before: float | None = None
        self._num_after = 0
        self.last: float | None = None
        """None before the first round, and after a round with fewer steps before or after it."""

    def add(self, loss: float) -> None:
        """Add the loss of a step, computed with the weights before it."""
        self._losses.append(loss)
        self._num_after += 1
        if self._before is not None and self._num_after == self._num_steps:
            self.last = self._mean() - self._before

    def mark(self) -> None:
        """Mark that a round follows the last step."""
        self._before = self._mean() if len(self._losses) == self._num_steps else None
        self._num_after = 0
        self.last = None

    def _mean(self) -> float:
        return sum(self._losses) / len(self._losses)
