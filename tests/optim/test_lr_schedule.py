"""The learning-rate schedule: hand-worked values, end points, continuity, and the corners of short runs."""

import itertools
import math
import subprocess
import sys
from dataclasses import dataclass

import pytest

from moefold.config.base.part import make_part, settings_of
from moefold.config.base.part_registry import find_part
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.schema import Config, config_to_dict
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.config.tables.toml_text import toml_value
from moefold.optim.lr_schedule import (
    check_schedule_settings,
    continuation,
    describe_schedule_change,
    learning_rate,
    schedule_settings,
)
from moefold.recipe import load_recipe

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def train_config(**changes: object) -> TrainConfig:
    values = {"lr": 1.0, "lr_schedule": "cosine", "min_lr": 0.2, "warmup_steps": 4} | changes
    own = settings_of(find_part("lr_schedule", values["lr_schedule"]))
    settings = {key: values.pop(key) for key in ("min_lr", "decay_steps") if key in values}
    schedule = make_part(
        "lr_schedule", values.pop("lr_schedule"), **{key: settings[key] for key in own if key in settings}
    )
    return TrainConfig(**values, lr_schedule=schedule)


def curve(train: TrainConfig, steps: int) -> list[float]:
    return [learning_rate(train, steps, step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_linearly_from_zero_to_the_peak(schedule: str) -> None:
    assert curve(train_config(lr_schedule=schedule), 100)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_linear_by_hand() -> None:
    # Peak at step 4, minimum at step 8: 0.8 is lost in four equal parts.
    expected = [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert curve(train_config(lr_schedule="linear"), 8) == pytest.approx(expected, abs=1e-15)


def test_cosine_by_hand() -> None:
    # Quarters of a half turn: cos(45 deg) = sqrt(1/2), cos(90 deg) = 0.
    quarter = math.sqrt(0.5)
    expected = [0.25, 0.5, 0.75, 1.0, 0.6 + 0.4 * quarter, 0.6, 0.6 - 0.4 * quarter, 0.2]
    assert curve(train_config(lr_schedule="cosine"), 8) == pytest.approx(expected, abs=1e-15)


def test_wsd_by_hand() -> None:
    wsd = train_config(lr_schedule="wsd", warmup_steps=2, decay_steps=4)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert curve(wsd, 10) == pytest.approx(expected, abs=1e-15)


def test_constant_by_hand() -> None:
    assert curve(train_config(lr_schedule="constant", warmup_steps=2), 5) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("steps", "decay"), [(5, 1), (10, 1), (19, 1), (20, 2), (100, 10)])
def test_wsd_without_a_length_decays_over_a_tenth(steps: int, decay: int) -> None:
    rates = curve(train_config(lr_schedule="wsd", warmup_steps=0), steps)
    assert sum(rate < 1.0 for rate in rates) == decay
    assert rates[-decay - 1] == 1.0


def test_wsd_decay_longer_than_the_rest_starts_after_the_warmup() -> None:
    wsd = train_config(lr_schedule="wsd", decay_steps=50)
    assert curve(wsd, 8) == curve(train_config(lr_schedule="linear"), 8)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("lr", "min_lr"), [(3e-4, 3e-5), (0.1, 0.0), (1e-3, 1e-3), (0.01, 0.001)])
def test_peak_and_minimum_are_exact(schedule: str, warmup: int, lr: float, min_lr: float) -> None:
    rates = curve(train_config(lr_schedule=schedule, warmup_steps=warmup, lr=lr, min_lr=min_lr), 60)
    assert rates[max(warmup, 1) - 1] == lr
    assert rates[-1] == min_lr
    assert all(min_lr <= rate <= lr for rate in rates[max(warmup, 1) - 1 :])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 100])
def test_never_rises_after_the_peak_and_has_no_jump(schedule: str, warmup: int) -> None:
    rates = curve(train_config(lr_schedule=schedule, warmup_steps=warmup, min_lr=0.0), 1000)
    after = rates[max(warmup, 1) - 1 :]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
    # The steepest of them are the 1/100 a step of the warm-up and of the default wsd decay.
    assert max(abs(b - a) for a, b in itertools.pairwise(rates)) <= 0.01 + 1e-12


def test_no_warmup_equals_a_warmup_of_one_step() -> None:
    for schedule in SCHEDULES:
        none, one = (train_config(lr_schedule=schedule, warmup_steps=warmup) for warmup in (0, 1))
        assert curve(none, 12) == curve(one, 12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_past_the_last_step_the_last_rate_holds(schedule: str) -> None:
    train = train_config(lr_schedule=schedule)
    last = learning_rate(train, 20, 20)
    assert [learning_rate(train, 20, step) for step in (21, 40, 10**9)] == [last] * 3
    assert last == (1.0 if schedule == "constant" else 0.2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_shorter_than_its_warmup_only_warms_up(schedule: str) -> None:
    train = train_config(lr_schedule=schedule, warmup_steps=10)
    assert curve(train, 5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert curve(train, 10)[-1] == 1.0
    assert learning_rate(train, 5, 8) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_of_one_step_uses_the_peak(schedule: str) -> None:
    assert curve(train_config(lr_schedule=schedule, warmup_steps=0), 1) == [1.0]


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step} must be at least 1"):
        learning_rate(train_config(), 10, step)


def test_does_not_import_torch() -> None:
    code = "import sys, moefold.optim.lr_schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def config(steps: int, **changes: object) -> Config:
    return Config(run=RunConfig(steps=steps), train=train_config(**changes))


ENDED = [
    ({"lr_schedule": "cosine"}, ["run.steps=40", "train.lr=0.2"], 0.2),
    ({"lr_schedule": "linear"}, ["run.steps=40", "train.lr=0.2"], 0.2),
    ({"lr_schedule": "wsd"}, ["run.steps=40", "train.lr=0.2"], 0.2),
    ({"lr_schedule": "cosine", "min_lr": 0.0}, ["run.steps=40", "train.lr=0.5"], 0.0),
    ({"lr_schedule": "wsd", "min_lr": 0.0, "decay_steps": 8}, ["run.steps=40", "train.lr=0.5"], 0.0),
    ({"lr_schedule": "cosine", "min_lr": 1e-7 / 3, "lr": 3e-4}, ["run.steps=40", f"train.lr={1e-7 / 3!r}"], 1e-7 / 3),
    ({"lr_schedule": "constant"}, ["run.steps=40"], 1.0),
    ({"lr_schedule": "cosine", "min_lr": 1.0}, ["run.steps=40"], 1.0),
    # The warm-up is not over: the decay has not begun.
    ({"lr_schedule": "cosine", "warmup_steps": 20}, ["run.steps=40"], 1.0),
]


@pytest.mark.parametrize(("settings", "words", "last"), ENDED)
def test_settings_to_train_on_with_are_legal_and_continue_the_decay(
    tmp_path, settings: dict[str, object], words: list[str], last: float
) -> None:
    cfg = config(20, **settings)
    overrides, effect = continuation(cfg.run, cfg.train, 40)
    assert list(overrides) == words
    assert bool(effect) == (len(words) > 1)
    recipe = tmp_path / "recipe.toml"
    given = [f"{key} = {toml_value(getattr(cfg.train, key))}" for key in ("lr", "warmup_steps", "lr_schedule")]
    recipe.write_text("\n".join(["[train]", *given, "[run]\nsteps = 20"]))
    # The rules for keys without effect apply to keys that a user writes.
    longer = load_recipe(recipe, list(overrides)).cfg
    rates = curve(longer.train, 40)[20:]
    before = curve(cfg.train, 20)
    assert before[-1] == last
    assert max(rates) <= max(last, max(before) / 2)
    if cfg.train.warmup_steps == 20:
        assert rates[0] > 0.99
    elif last:
        assert rates == [last] * 20
    else:
        assert rates[0] > 0 == rates[-1]


LINES = [
    (
        {},
        (20, 40),
        20,
        "the schedule of 20 steps has ended; with run.steps=40 (it had 20) the learning rate rises from 0.2 to 0.635 "
        "in step 21; the cosine ends at 0.2 in step 40",
    ),
    (
        {"min_lr": 0.0},
        (20, 40),
        20,
        "the schedule of 20 steps has ended; with run.steps=40 (it had 20) the learning rate rises from 0 to 0.544 in "
        "step 21; the cosine ends at 0 in step 40",
    ),
    (
        {},
        (40, 20),
        10,
        "with run.steps=20 (it had 40) the learning rate falls from 0.946 to 0.678 in step 11; the cosine ends at 0.2 "
        "in step 20",
    ),
    (
        {"lr_schedule": "wsd"},
        (40, 60),
        30,
        "with run.steps=60 (it had 40) the learning rate stays at 1 in step 31; the decay of wsd begins after step 54 "
        "and ends at 0.2 in step 60",
    ),
    (
        {"lr_schedule": "constant"},
        (20, 40),
        20,
        "with run.steps=40 (it had 20) the learning rate stays at 1 in step 21; it is constant from there on",
    ),
]


@pytest.mark.parametrize(("settings", "steps", "at", "line"), LINES)
def test_a_resume_with_another_schedule_states_the_rates_and_their_meaning(settings, steps, at, line) -> None:
    before, after = (config(count, **settings) for count in steps)
    assert describe_schedule_change(schedule_settings(before.run, before.train), after.run, after.train, at) == line
    rates = [learning_rate(before.train, steps[0], at), learning_rate(after.train, steps[1], at + 1)]
    # Independent of the wording: the line has the numbers of the steps.
    assert all(f"{rate:.3g}" in line for rate in rates)


def test_a_resume_with_another_peak_names_each_setting() -> None:
    before, after = config(20), config(40, lr=0.2)
    assert describe_schedule_change(schedule_settings(before.run, before.train), after.run, after.train, 20) == (
        "the schedule of 20 steps has ended; with run.steps=40 (it had 20), train.lr=0.2 (it had 1.0) the learning "
        "rate stays at 0.2 in step 21; it is constant from there on"
    )


def test_the_same_schedule_a_finished_run_and_a_new_run_say_nothing() -> None:
    cfg = config(20)
    assert not describe_schedule_change(schedule_settings(cfg.run, cfg.train), cfg.run, cfg.train, 10)
    recipe = config(10)
    assert not describe_schedule_change(schedule_settings(recipe.run, recipe.train), cfg.run, cfg.train, 20)
    assert not describe_schedule_change({}, cfg.run, cfg.train, 0)
    # A checkpoint of an old version does not tell its schedule.
    assert describe_schedule_change({}, cfg.run, cfg.train, 19) == (
        "the learning rate of step 20 is 0.2; the cosine ends at 0.2 in step 20"
    )


def test_broken_schedules_of_checkpoints_are_refused() -> None:
    cfg = Config()
    settings = schedule_settings(cfg.run, cfg.train)
    check_schedule_settings(settings)
    check_schedule_settings({})
    assert set(settings) - {"run.steps"} <= {f"train.{key}" for key in config_to_dict(Config())["train"]}
    for key, value in (
        ("train.lr", "x"),
        ("train.lr", math.nan),
        ("run.steps", 1.5),
        ("run.steps", True),
        ("train.lr_schedule", "step"),
        ("train.lr_schedule", ["cosine"]),
    ):
        with pytest.raises(TypeError):
            check_schedule_settings(settings | {key: value})
    with pytest.raises(TypeError):
        check_schedule_settings({"run.steps": 3})


@dataclass(frozen=True, kw_only=True)
class Endless(LrSchedulePart):
    """Rate that falls with the step and does not read the end."""

    def rate(self, peak: float, first: int, step: int, steps: int) -> float:
        return peak / (1 + step - first)


def test_a_schedule_that_does_not_read_the_end_goes_on_as_it_is() -> None:
    train = TrainConfig(lr=1.0, lr_schedule=Endless(), warmup_steps=0)
    assert continuation(RunConfig(steps=20), train, 40) == (("run.steps=40",), "")
