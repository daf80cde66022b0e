"""Training on the conversations with high rewards."""

from dataclasses import dataclass
from typing import Annotated, Any

from moefold.config.groups.alignment import RewardSelectionPart
from moefold.config.part import FlatKey


@dataclass(frozen=True, kw_only=True)
class RewardFilter(RewardSelectionPart):
    """The conversations whose reward reaches the threshold."""

    threshold: Annotated[float | str, FlatKey("align.threshold")]

    def select(self, rewards: Any, members: Any) -> Any:
        """Return the conversations above the threshold."""
        return rewards.filter(members, self.threshold)
