"""Learning rate of a step: the warm-up, then the schedule of the recipe (`parts/lr_schedule.py`).

A schedule is a function of the step and of run.steps: a run that continues with other settings has another schedule
from there on, whose rate may jump. `describe_schedule_change` reports this.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moefold.config.base.part import keys_of, without_source
from moefold.config.chosen import chosen_in
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.keys.paths import flat_settings
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.errors import ConfigError


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of optimizer step `step` of a run of `steps`.

    The warm-up is linear from 0: step i of it uses lr * i / warmup_steps, so its last step uses lr itself (without a
    warm-up, step 1 does). The part of `train.lr_schedule` gives the later rates. A run that is not longer than its
    warm-up has no decay. Steps after the last step use the rate of the last step.

    Args:
        train: lr, warmup_steps, lr_schedule and the keys of the schedule are read.
        steps: optimizer steps of the whole run, also the steps before a resume.
        step: 1-based.

    Raises:
        ValueError: `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"step={step} must be at least 1: steps are counted from 1")
    step = min(step, steps)
    if step <= train.warmup_steps:
        return train.lr * (step / train.warmup_steps)
    return chosen_in(train, LrSchedulePart).rate(train.lr, _peak_step(train), step, steps)


def _peak_step(train: TrainConfig) -> int:
    """Return the step with the peak rate, at which the schedule of the part begins."""
    return max(train.warmup_steps, 1)


SCHEDULE_KEYS = ("lr", "warmup_steps", "lr_schedule")
"""Keys of [train] that determine the schedule, with run.steps."""
SECOND_PEAK = 0.5
"""Ratio of the second peak to the first, if a schedule that ended at 0 is followed by another. The rate rises to about
a quarter of the first peak, because half of a cosine has passed. It ends at 0 again."""


def schedule_settings(run: RunConfig, train: TrainConfig) -> dict[str, Any]:
    """Return the settings of a run that determine its learning rates, by their keys."""
    values = keys_of(train)
    return {"run.steps": run.steps} | {f"train.{key}": without_source(values[key]) for key in SCHEDULE_KEYS}


def check_schedule_settings(settings: Mapping[str, Any]) -> None:
    """Check the settings of a checkpoint, which are absent in checkpoints of old versions.

    Raises:
        TypeError: they do not have the form that `schedule_settings` returns.
    """
    if not settings:
        return
    default = schedule_settings(RunConfig(), TrainConfig())
    if settings.keys() != default.keys():
        raise TypeError(f"schedule has the keys {sorted(settings)}")
    for key, value in settings.items():
        is_right = isinstance(value, dict) if key == LrSchedulePart.key else type(value) in (type(default[key]), int)
        if not is_right or (type(value) in (int, float) and not 0 <= value < math.inf):
            raise TypeError(f"schedule has {key}={value!r}")


def describe_schedule_change(before: Mapping[str, Any], run: RunConfig, training: TrainConfig, step: int) -> str:
    """Describe the learning rate after a checkpoint with other settings, or empty if the settings are the same.

    Args:
        before: `schedule_settings` of the run that saved the checkpoint, or empty if they are unknown.
        run, training: sections of the recipe that continues the run.
    """
    after = schedule_settings(run, training)
    if before == after or not 0 < step < run.steps:
        return ""
    rate = learning_rate(training, run.steps, step + 1)
    course = _describe_course(run, training, step)
    if not before:
        return f"the learning rate of step {step + 1} is {rate:.3g}; {course}"
    steps = before["run.steps"]
    keys = {name.removeprefix("train."): value for name, value in before.items() if name != "run.steps"}
    flat, old = flat_settings(after), flat_settings(before)
    changes = ", ".join(
        f"{key}={value} (it had {old.get(key, 'none')})" for key, value in flat.items() if old.get(key) != value
    )
    try:
        train = replace(training, **keys | {"lr_schedule": _part_before(keys["lr_schedule"], training)})
    except ConfigError:
        return f"with {changes} the learning rate of step {step + 1} is {rate:.3g}; {course}"
    last = learning_rate(train, steps, step)
    ended = f"the schedule of {steps:,} steps has ended; " if step >= steps and _ends_lower(train, steps) else ""
    verb = f"{'rises' if rate > last else 'falls'} from {last:.3g} to"
    if math.isclose(rate, last):
        verb = "stays at"
    return f"{ended}with {changes} the learning rate {verb} {rate:.3g} in step {step + 1}; {course}"


def _part_before(value: Any, train: TrainConfig) -> Any:
    """Return the value of train.lr_schedule that a checkpoint has recorded.

    Raises:
        ConfigError: it is a part of another package that is not installed.
    """
    if value == without_source(keys_of(train)["lr_schedule"]):
        return train.lr_schedule
    # Only a run that resumes with another schedule needs the builder of parts.
    from moefold.config.tables.build import build_part

    return build_part(LrSchedulePart.key, value)


def _decays(train: TrainConfig, steps: int) -> bool:
    """Return whether the schedule has a decay: the rate of the last step is lower than the peak."""
    peak = _peak_step(train)
    return steps > peak and chosen_in(train, LrSchedulePart).rate(train.lr, peak, steps, steps) < train.lr


def _ends_lower(train: TrainConfig, steps: int) -> bool:
    """Return whether the schedule has ended below the peak after `steps`. A schedule without an end never has."""
    rate = chosen_in(train, LrSchedulePart).rate
    peak = _peak_step(train)
    return _decays(train, steps) and rate(train.lr, peak, steps, steps) != rate(train.lr, peak, steps, 2 * steps)


def _describe_course(run: RunConfig, train: TrainConfig, step: int) -> str:
    """Describe the rates of a run after a step."""
    if not _decays(train, run.steps):
        return "it is constant after the warm-up" if step < train.warmup_steps else "it is constant from there on"
    return chosen_in(train, LrSchedulePart).describe(train.lr, _peak_step(train), step, run.steps)


def continuation(run: RunConfig, train: TrainConfig, steps: int) -> tuple[tuple[str, ...], str]:
    """Return overrides that continue a finished run to more steps, and their effect on the learning rate.

    If only the number of steps grows, a schedule that has ended is replaced by a schedule in the middle of its decay.
    The rate then jumps from its last value to about half of the peak. With the overrides the rate keeps its last value.
    If that was 0, a second and lower schedule follows.

    Args:
        run, train: sections of the recipe of the finished run.
        steps: the new run.steps.

    Returns:
        Overrides, and an explanation that may be empty.
    """
    # A command line has only one of both: a longer value replaces the value of the finished run.
    longer = f"run.epochs={run.epochs * steps / run.steps:g}" if run.epochs else f"run.steps={steps}"
    if not _ends_lower(train, run.steps):
        return (longer,), ""
    last = learning_rate(train, run.steps, run.steps)
    if last:
        return (longer, f"train.lr={last!r}"), f"keeps the learning rate at {last:.3g}, where its schedule has ended"
    peak = f"train.lr={train.lr * SECOND_PEAK!r}"
    return (longer, peak), "its learning rate has ended at 0: this one rises again, half as high, and ends at 0 too"
