"""Plateaus of the held-out reward, after which the reference model is reset (ProRL, arXiv:2505.24864). Pure."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Plateau:
    """Held-out rewards so far; its fields are JSON values, for a checkpoint."""

    best: float | None = None
    """Highest reward of an evaluation; None before the first one."""
    num_since_best: int = 0
    """Evaluations since the highest reward, or since the last reset."""
    num_resets: int = 0
    """Resets of the reference model."""

    def record(self, reward: float) -> Self:
        """Return the state after an evaluation."""
        if self.best is None or reward > self.best:
            return type(self)(best=reward, num_resets=self.num_resets)
        return type(self)(best=self.best, num_since_best=self.num_since_best + 1, num_resets=self.num_resets)

    @classmethod
    def from_json(cls, state: object) -> Self:
        """Return the state that a checkpoint has; that of a new run for None.

        Raises:
            TypeError: it is no such state.
        """
        if state is None:
            return cls()
        if not isinstance(state, dict) or state.keys() != {"best", "num_since_best", "num_resets"}:
            raise TypeError(f"rl is {state!r}")
        counts = [state["num_since_best"], state["num_resets"]]
        best = state["best"]
        if any(type(count) is not int or count < 0 for count in counts) or type(best) not in (float, int, type(None)):
            raise TypeError(f"rl is {state!r}")
        return cls(**state)
