"""Conversations weighted by their rewards."""

from dataclasses import dataclass
from typing import Annotated, Any

from moefold.config.groups.alignment import RewardSelectionPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class RewardWeight(RewardSelectionPart):
    """The loss of each conversation times exp(reward / beta), up to a factor."""

    beta: Annotated[float, FlatKey("align.beta")]
    weight_cap: Annotated[float, FlatKey("align.weight_cap")]

    def select(self, rewards: Any, members: Any) -> Any:
        """Return all conversations with their weights."""
        return rewards.weight(members, self.beta, self.weight_cap)
