"""Learning rate of the oracle: warm-up, then the formula of the schedule (docs/recipe.md, train.lr_schedule)."""

from moefold.config.chosen import chosen_in
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.train import TrainConfig
from moefold.verify.no_formula import formula_of


def oracle_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of a step, counted from 1, of a run of `steps`."""
    warmup = train.warmup_steps
    now = min(step, steps)
    rate = formula_of(chosen_in(train, LrSchedulePart))
    return train.lr * now / warmup if now <= warmup else float(rate(train.lr, max(1, warmup), now, steps))
