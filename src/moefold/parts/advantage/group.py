"""Advantage over the mean of the group (Dr. GRPO, arXiv:2503.20783)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.policy import AdvantagePart, centred

if TYPE_CHECKING:
    from moefold.config.groups.policy import Rewards


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(AdvantagePart):
    """The reward minus the mean of its group."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout; see the base class."""
        return centred(rewards)
