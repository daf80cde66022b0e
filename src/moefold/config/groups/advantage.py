"""Advantages of rollouts from the rewards of their groups."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rewards = NDArray[np.float64]

EPS = 1e-4
"""Added to a standard deviation, as in TRL's GRPOTrainer."""


@dataclass(frozen=True, kw_only=True)
class AdvantagePart(Part):
    """Advantages of a batch. Rewards are [P, G] of P prompts with G rollouts each; NaN: the rollout has none."""

    group: ClassVar[str] = "advantage"
    key: ClassVar[str] = "rl.advantage"
    changes_maths: ClassVar[bool] = False
    """`moefold verify` compares the loss of given advantages; tests compare them with TRL."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout, [P, G]; NaN where it has no reward."""
        raise NotImplementedError


def centred(rewards: "Rewards") -> "Rewards":
    """Return the reward minus the mean of its group, [P, G]."""
    import numpy as np

    mean = np.nansum(rewards, axis=1, keepdims=True) / np.maximum(reward_counts(rewards), 1)
    found: Rewards = rewards - mean
    return found


def reward_counts(rewards: "Rewards") -> "NDArray[np.int64]":
    """Return the number of rewards of each group, [P, 1]."""
    import numpy as np

    counts: NDArray[np.int64] = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    return counts
