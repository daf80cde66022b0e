"""Advantages of rollouts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.policy import EPS, AdvantagePart, centred, reward_counts

if TYPE_CHECKING:
    from moefold.config.groups.policy import Rewards


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(AdvantagePart, kind="group"):
    """The reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783)."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout. See the base class."""
        return centred(rewards)


@dataclass(frozen=True, kw_only=True)
class GroupStdAdvantage(AdvantagePart, kind="group_std"):
    """The advantage of `group` in standard deviations of the group, with G - 1 degrees of freedom (GRPO)."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout. See the base class."""
        import numpy as np

        over_mean = centred(rewards)
        degrees = np.maximum(reward_counts(rewards) - 1, 1)
        std = np.sqrt(np.nansum(over_mean**2, axis=1, keepdims=True) / degrees)
        return over_mean / (std + EPS)


@dataclass(frozen=True, kw_only=True)
class BatchAdvantage(AdvantagePart, kind="batch"):
    """The advantage of `group` in standard deviations of the batch (REINFORCE++-baseline, arXiv:2501.03262)."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout. See the base class."""
        import numpy as np

        over_mean = centred(rewards)
        scored = over_mean[~np.isnan(over_mean)]
        std = float(np.sqrt(np.mean(scored**2))) if scored.size else 0.0
        return over_mean / (std + EPS)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutAdvantage(AdvantagePart, kind="leave_one_out"):
    """The reward minus the mean of the other rewards of its group (RLOO, arXiv:2402.14740)."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout. See the base class."""
        import numpy as np

        counts = reward_counts(rewards)
        return centred(rewards) * counts / np.maximum(counts - 1, 1)
