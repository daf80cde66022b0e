"""Conversations weighted by their rewards."""

from dataclasses import dataclass
from typing import Annotated, Any

from moefold.config.field import POSITIVE, Bound
from moefold.config.groups.alignment import RewardSelectionPart


@dataclass(frozen=True, kw_only=True)
class RewardWeight(RewardSelectionPart):
    """The loss of each conversation times exp(reward / beta), up to a factor."""

    beta: Annotated[float, POSITIVE] = 0.1
    """Temperature of the rewards."""
    weight_cap: Annotated[float, Bound("must be at least 1, or 0 (none)", lambda cap: cap >= 1 or cap == 0)] = 20.0
    """Maximum factor of a row's loss; the mean factor over the data set is 1 before the cap. 0: no maximum."""

    def select(self, rewards: Any, members: Any) -> Any:
        """Return all conversations with their weights."""
        return rewards.weight(members, self.beta, self.weight_cap)
