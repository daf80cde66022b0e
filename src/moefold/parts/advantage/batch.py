"""Advantage in standard deviations of the batch (REINFORCE++-baseline, arXiv:2501.03262)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.policy import EPS, AdvantagePart, centred

if TYPE_CHECKING:
    from moefold.config.groups.policy import Rewards


@dataclass(frozen=True, kw_only=True)
class BatchAdvantage(AdvantagePart):
    """`group`, divided by the standard deviation of the batch."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout; see the base class."""
        import numpy as np

        over_mean = centred(rewards)
        scored = over_mean[~np.isnan(over_mean)]
        std = float(np.sqrt(np.mean(scored**2))) if scored.size else 0.0
        return over_mean / (std + EPS)
