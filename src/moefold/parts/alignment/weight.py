"""Conversations weighted by their rewards."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from moefold.config.groups.alignment import AlignmentPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class RewardWeight(AlignmentPart):
    """The loss of each conversation times exp(reward / beta), up to a factor."""

    changes_maths: ClassVar[bool] = False
    data_kind: ClassVar[str] = "sft"
    selects: ClassVar[bool] = True
    reward: Annotated[str, FlatKey("align.reward")]
    beta: Annotated[float, FlatKey("align.beta")]
    weight_cap: Annotated[float, FlatKey("align.weight_cap")]

    def select(self, rewards: Any, members: Any) -> Any:
        """Return all conversations with their weights."""
        return rewards.weight(members)
