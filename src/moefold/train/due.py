"""Schedules of a run: the steps after which it evaluates, saves or writes."""

from moefold.config.checkpoint import CheckpointConfig


def is_due(every: int, step: int) -> bool:
    """Return whether an event with period `every` happens after a step; 0: never."""
    return every > 0 and step % every == 0


def is_evaluation_due(every: int, step: int, last_step: int) -> bool:
    """Return whether to evaluate after a step: every train.eval_every steps, and after the last one; 0: never."""
    return is_due(every, step) or (every > 0 and step == last_step)


def is_save_due(checkpoint: CheckpointConfig, step: int, *, is_last: bool, is_stopped: bool) -> bool:
    """Return whether to save after a step. A run that saves at all also saves when a signal stops it."""
    is_end = (is_last and checkpoint.at_end) or (is_stopped and checkpoint.saves)
    return is_end or is_due(checkpoint.every, step)
