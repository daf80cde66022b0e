"""Advantage over the mean of the other rollouts of the group (RLOO, arXiv:2402.14740)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.policy import AdvantagePart, centred, reward_counts

if TYPE_CHECKING:
    from moefold.config.groups.policy import Rewards


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutAdvantage(AdvantagePart):
    """The reward minus the mean of the other rewards of its group."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout; see the base class."""
        import numpy as np

        counts = reward_counts(rewards)
        return centred(rewards) * counts / np.maximum(counts - 1, 1)
