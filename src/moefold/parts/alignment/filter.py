"""Training on the conversations with high rewards."""

from dataclasses import dataclass
from typing import Annotated, Any

from moefold.config.field import Bound
from moefold.config.groups.alignment import RewardSelectionPart, is_threshold


@dataclass(frozen=True, kw_only=True)
class RewardFilter(RewardSelectionPart):
    """The conversations whose reward reaches the threshold."""

    threshold: Annotated[
        float | str,
        Bound('must be a number, a quantile from "q0" to "q1" such as "q0.8", or "best"', is_threshold),
    ] = "best"
    """Rows that are kept. A number: rows with at least this reward. "q0.8": rows with at least that quantile of the
    data set's rewards. "best": the row with the highest reward of each prompt."""

    def select(self, rewards: Any, members: Any) -> Any:
        """Return the conversations above the threshold."""
        return rewards.filter(members, self.threshold)
