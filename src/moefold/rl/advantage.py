"""Mixed groups and length penalties of rollouts. Pure functions of numpy arrays."""

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
"""Rewards [P, G] of P prompts with G rollouts each; NaN: the rollout has no reward."""


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
