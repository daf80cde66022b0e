"""Advantage in standard deviations of the group (GRPO, arXiv:2402.03300)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.policy import EPS, AdvantagePart, centred, reward_counts

if TYPE_CHECKING:
    from moefold.config.groups.policy import Rewards


@dataclass(frozen=True, kw_only=True)
class GroupStdAdvantage(AdvantagePart):
    """`group`, divided by the standard deviation of the group, with G - 1 degrees of freedom."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout; see the base class."""
        import numpy as np

        over_mean = centred(rewards)
        degrees = np.maximum(reward_counts(rewards) - 1, 1)
        std = np.sqrt(np.nansum(over_mean**2, axis=1, keepdims=True) / degrees)
        scaled: Rewards = over_mean / (std + EPS)
        return scaled
