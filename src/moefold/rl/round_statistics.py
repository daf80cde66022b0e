"""Statistics of a round of rollouts, for metrics.jsonl, as functions without side effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moefold.rl.rollout import RolloutGroup


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Counts and seconds of sampling one round, including replaced groups."""

    num_groups: int = 0
    num_mixed: int = 0
    num_tokens: int = 0
    """Sampled tokens."""
    num_dropped: int = 0
    """Groups without any reward."""
    rollout_s: float = 0.0
    """Seconds of sampling, on the slowest rank."""
    reward_s: float = 0.0
    """Seconds of scoring after sampling, until all ranks have the rewards."""
    reshard_s: float = 0.0
    """Seconds of copying the weights to the mapping of sampling."""
    wait_s: float = 0.0
    """Seconds of waiting for new weights, on ranks that only sample."""

    def add(self, groups: Sequence[RolloutGroup], rollout_s: float, reward_s: float) -> Self:
        """Return the statistics including more groups."""
        return replace(
            self,
            num_groups=self.num_groups + len(groups),
            num_mixed=self.num_mixed + sum(group.is_mixed for group in groups),
            num_tokens=self.num_tokens + sum(len(rollout.tokens) for group in groups for rollout in group.rollouts),
            num_dropped=self.num_dropped + sum(bool(np.isnan(group.scores).all()) for group in groups),
            rollout_s=self.rollout_s + rollout_s,
            reward_s=self.reward_s + reward_s,
        )

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the metrics of the groups that a step trains on.

        Rewards are results of the reward function, or the weighted sum of several. `solved` is the fraction of sampled
        groups whose rewards are all 1, and `mixed_groups` the fraction of sampled groups with two different rewards.
        """
        scores = np.concatenate([group.scores for group in groups])
        scored = scores[~np.isnan(scores)]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lengths = np.array([len(rollout.tokens) for rollout in rollouts])
        return {
            "reward": float(scored.mean()) if scored.size else None,
            "reward_std": float(scored.std()) if scored.size else None,
            "rewards": mean_rewards([group.by_function for group in groups]),
            "solved": float(np.mean([bool((group.scores == 1).all()) for group in groups])),
            "mixed_groups": self.num_mixed / self.num_groups,
            "truncated": float(np.mean([rollout.is_truncated for rollout in rollouts])),
            "length_mean": float(lengths.mean()),
            "length_max": int(lengths.max()),
            "dropped": self.num_dropped,
            "rollout_s": self.rollout_s,
            "reward_s": self.reward_s,
            "reshard_s": self.reshard_s,
            "weights_wait_s": self.wait_s,
            "rollout_tokens_per_s": self.num_tokens / self.rollout_s if self.rollout_s else 0.0,
        }


def mean_rewards(scores: Sequence[Mapping[str, NDArray[np.float64]]]) -> dict[str, float | None] | None:
    """Return the mean results of each of several reward functions by name, or None for one without a number.

    The result is None for a single function. The scores are `RolloutGroup.by_function` of some groups.
    """
    # Rounds of a resumed run may be older than a function of the recipe.
    names = {name: None for parts in scores for name in parts}
    by_name = {name: np.concatenate([parts[name] for parts in scores if name in parts]) for name in names}
    return {
        name: None if np.isnan(values).all() else float(np.nanmean(values)) for name, values in by_name.items()
    } or None
