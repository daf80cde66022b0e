"""Learning rate of the oracle: warm-up, then a share of the decay, as docs/recipe.md defines train.lr_schedule."""

import math

from moefold.config.schema import TrainConfig
from moefold.verify.no_formula import unknown_kind


def oracle_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of a step, counted from 1, of a run of `steps`."""
    peak = train.lr
    floor = train.min_lr
    warmup = train.warmup_steps
    begin = max(1, warmup)
    now = min(step, steps)
    share = max(0, now - begin) / max(1, steps - begin)
    match train.lr_schedule:
        case "cosine":
            left = math.cos(math.pi / 2 * share) ** 2
        case "linear":
            left = 1 - share
        case "wsd":
            length = train.decay_steps or max(1, steps // 10)
            begin = max(begin, steps - length)
            left = 1 - max(0, now - begin) / max(1, steps - begin)
        case "constant":
            left = 1.0
        case unknown:
            unknown_kind("train.lr_schedule", unknown)
    return peak * now / warmup if now <= warmup else floor + (peak - floor) * left
