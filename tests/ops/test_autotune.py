"""The tuner measures each octave of row counts during its first calls, and never waits for a measurement later."""

import pytest
import torch

from moefold.ops.autotune import NUM_MEASURING_CALLS, Autotuner, TuningKey

CUDA = torch.device("cuda")
SHAPE = (64, True)


class Timed:
    """Candidates whose times are given for each call, and what was timed."""

    def __init__(self):
        self.times = {"first": 1.0, "second": 2.0}
        self.timed = []
        self.candidates = {name: (lambda name=name: name) for name in self.times}

    def timer(self, candidate):
        name = candidate()
        self.timed.append(name)
        return self.times[name]


@pytest.fixture
def timed():
    return Timed()


def choose(tuner, timed, num_rows, shape=SHAPE, device=CUDA):
    return tuner.choose(TuningKey("product", num_rows, shape), timed.candidates, device)


def test_an_octave_is_measured_once(timed):
    tuner = Autotuner(is_enabled=True, timer=timed.timer)
    assert choose(tuner, timed, 1024) == "first"
    timed.times["first"] = 3.0
    assert choose(tuner, timed, 2047) == "first"
    assert choose(tuner, timed, 2048) == "second"
    assert choose(tuner, timed, 1024, shape=(65, True)) == "second"
    assert timed.timed == ["first", "second"] * 3


def test_later_calls_take_the_choice_of_the_nearest_octave(timed):
    tuner = Autotuner(is_enabled=True, timer=timed.timer)
    choose(tuner, timed, 16)
    timed.times["first"] = 3.0
    choose(tuner, timed, 256)
    for _ in range(NUM_MEASURING_CALLS - 2):
        choose(tuner, timed, 16)
    timed.timed.clear()
    choices = {rows: choose(tuner, timed, rows) for rows in (0, 1, 32, 64, 128, 10**6)}
    assert choices == {0: "first", 1: "first", 32: "first", 64: "first", 128: "second", 10**6: "second"}
    assert not timed.timed
    # Another shape has calls of its own.
    choose(tuner, timed, 16, shape=(65, True))
    assert timed.timed == ["first", "second"]


@pytest.mark.parametrize(("is_enabled", "device"), [(False, CUDA), (True, torch.device("cpu"))])
def test_nothing_is_measured_where_runs_must_repeat_or_without_cuda(timed, is_enabled, device):
    tuner = Autotuner(is_enabled=is_enabled, timer=timed.timer)
    timed.times["first"] = 3.0
    assert choose(tuner, timed, 1024, device=device) == "first"
    assert not timed.timed
