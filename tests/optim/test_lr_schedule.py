"""The learning-rate schedule: hand-worked values, end points, continuity, and the corners of short runs."""

import itertools
import math
import subprocess
import sys

import pytest

from moefold.config.schema import TrainConfig
from moefold.optim.lr_schedule import learning_rate

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def train_config(**changes: object) -> TrainConfig:
    return TrainConfig(**{"lr": 1.0, "min_lr": 0.2, "warmup_steps": 4, **changes})


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
