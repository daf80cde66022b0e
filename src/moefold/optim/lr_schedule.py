"""Learning-rate schedules: warm-up, then cosine, linear, WSD or constant. Pure and torch-free."""

import math

from moefold.config.schema import TrainConfig


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of optimizer step `step` of a run of `steps`.

    The warm-up is linear from 0: step i of it uses lr * i / warmup_steps, so its last step uses lr itself (without a
    warm-up, step 1 does). After it:

    * cosine, linear: fall to min_lr, which the last step uses exactly.
    * wsd: stays at lr, then falls linearly over the last decay_steps (0: a tenth of the run, at least one) to min_lr,
      which the last step uses exactly. If the decay overlaps the warm-up, it starts after the warm-up.
    * constant: stays at lr.

    A run no longer than its warm-up has no decay. Steps after the last one use the rate of the last.

    Args:
        train: lr, min_lr, warmup_steps, lr_schedule and decay_steps are read.
        steps: optimizer steps of the whole run, those before a resume included.
        step: 1-based.

    Raises:
        ValueError: `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"step={step} must be at least 1: steps are counted from 1")
    step = min(step, steps)
    if step <= train.warmup_steps:
        return train.lr * (step / train.warmup_steps)
    peak_step = max(train.warmup_steps, 1)
    match train.lr_schedule:
        case "cosine":
            return _interpolate(train, (1 + math.cos(math.pi * _progress(step, peak_step, steps))) / 2)
        case "linear":
            return _interpolate(train, 1 - _progress(step, peak_step, steps))
        case "wsd":
            decay_steps = train.decay_steps or max(1, steps // 10)
            return _interpolate(train, 1 - _progress(step, max(peak_step, steps - decay_steps), steps))
        case "constant":
            return train.lr


def _progress(step: int, first: int, last: int) -> float:
    """Return the fraction of the way from step `first` to step `last`, 0 up to `first`."""
    return (step - first) / (last - first) if step > first else 0.0


def _interpolate(train: TrainConfig, fraction: float) -> float:
    """Interpolate from min_lr (fraction 0) to lr (fraction 1), both exactly."""
    return train.lr if fraction == 1 else train.min_lr + (train.lr - train.min_lr) * fraction
