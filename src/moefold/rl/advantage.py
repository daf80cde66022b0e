"""Advantages of rollouts from the rewards of their groups. Pure functions of numpy arrays."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
"""Rewards [P, G] of P prompts with G rollouts each; NaN: the rollout has no reward."""

EPS = 1e-4
"""Added to a standard deviation, as in TRL's GRPOTrainer."""


def group(rewards: Rewards) -> Rewards:
    """Return the reward minus the mean of its group (arXiv:2503.20783)."""
    return rewards - _mean(rewards)


def group_std(rewards: Rewards) -> Rewards:
    """Return `group` divided by the standard deviation of the group, of G - 1 degrees of freedom (arXiv:2402.03300)."""
    centred = group(rewards)
    degrees = np.maximum(_counts(rewards) - 1, 1)
    std = np.sqrt(np.nansum(centred**2, axis=1, keepdims=True) / degrees)
    scaled: Rewards = centred / (std + EPS)
    return scaled


def leave_one_out(rewards: Rewards) -> Rewards:
    """Return the reward minus the mean of the other rewards of its group (RLOO, arXiv:2402.14740)."""
    counts = _counts(rewards)
    return group(rewards) * counts / np.maximum(counts - 1, 1)


def batch(rewards: Rewards) -> Rewards:
    """Return `group` divided by the standard deviation of the batch (REINFORCE++-baseline, arXiv:2501.03262)."""
    centred = group(rewards)
    known = centred[~np.isnan(centred)]
    std = float(np.sqrt(np.mean(known**2))) if known.size else 0.0
    return centred / (std + EPS)


ADVANTAGES: Mapping[str, Callable[[Rewards], Rewards]] = {
    "group": group,
    "group_std": group_std,
    "leave_one_out": leave_one_out,
    "batch": batch,
}
"""The values of rl.advantage."""


def is_mixed(rewards: Rewards) -> NDArray[np.bool_]:
    """Return whether each group has two different rewards, [P]; only such groups have a gradient."""
    low = np.min(np.where(np.isnan(rewards), np.inf, rewards), axis=1)
    high = np.max(np.where(np.isnan(rewards), -np.inf, rewards), axis=1)
    mixed: NDArray[np.bool_] = high > low
    return mixed


def length_penalty(lengths: NDArray[np.int64], start: int, max_tokens: int) -> NDArray[np.float64]:
    """Return DAPO's soft overlong punishment: 0 up to `start` tokens, -1 at max_tokens (arXiv:2503.14476 sec. 3.4).

    Args:
        lengths: tokens of each rollout.
        start: rl.length_penalty_from; 0: no punishment.
        max_tokens: rollout.max_tokens, above `start`.
    """
    if start == 0:
        return np.zeros(lengths.shape)
    return -np.clip((lengths - start) / (max_tokens - start), 0.0, 1.0)


def _counts(rewards: Rewards) -> NDArray[np.int64]:
    """Return the number of rewards of each group, [P, 1]."""
    counts: NDArray[np.int64] = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    return counts


def _mean(rewards: Rewards) -> Rewards:
    """Return the mean reward of each group, [P, 1]; 0 for a group without any."""
    mean: Rewards = np.nansum(rewards, axis=1, keepdims=True) / np.maximum(_counts(rewards), 1)
    return mean
