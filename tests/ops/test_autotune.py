"""The tuner measures each octave of row counts once, skips candidates that raise, and several ranks choose the same."""

import logging

import pytest

from moefold.ops import autotune
from moefold.ops.autotune import Autotuner, TuningKey, merge_times

SHAPE = (64, True)


class Timed:
    """Candidates with given times for each call, and a record of the timed ones; a time of None: it raises."""

    def __init__(self, first=1.0, second=2.0):
        self.times = {"first": first, "second": second}
        self.timed = []
        self.seconds = 0.0
        self.candidates = {name: (lambda name=name: name) for name in self.times}

    def timer(self, candidate):
        name = candidate()
        self.timed.append(name)
        self.seconds += 1.0
        if self.times[name] is None:
            raise RuntimeError(f"no kernel\nfor {name}")
        return self.times[name]

    def tuner(self, **settings):
        return Autotuner(is_enabled=True, timer=self.timer, clock=lambda: self.seconds, **settings)


@pytest.fixture
def timed():
    return Timed()


def choose(tuner, timed, num_rows, shape=SHAPE, op="product"):
    return tuner.choose(TuningKey(op, num_rows, shape), timed.candidates)


def test_an_octave_is_measured_once(timed):
    tuner = timed.tuner()
    assert choose(tuner, timed, 1024) == "first"
    timed.times["first"] = 3.0
    assert choose(tuner, timed, 2047) == "first"
    assert choose(tuner, timed, 2048) == "second"
    assert choose(tuner, timed, 1024, shape=(65, True)) == "second"
    assert timed.timed == ["first", "second"] * 3


def test_after_its_time_it_takes_the_choice_of_the_nearest_octave(timed, monkeypatch):
    monkeypatch.setattr(autotune, "MAX_MEASURING_S", 4.0)
    tuner = timed.tuner()
    choose(tuner, timed, 16)
    timed.times["first"] = 3.0
    choose(tuner, timed, 256)
    timed.timed.clear()
    choices = {rows: choose(tuner, timed, rows) for rows in (0, 1, 32, 64, 128, 10**6)}
    assert choices == {0: "first", 1: "first", 32: "first", 64: "first", 128: "second", 10**6: "second"}
    # Another operation has no measured octave: it takes its default.
    assert choose(tuner, timed, 16, shape=(65, True)) == "first"
    assert not timed.timed


def test_nothing_is_measured_where_runs_must_repeat(timed):
    timed.times["first"] = 3.0
    assert choose(Autotuner(is_enabled=False, timer=timed.timer), timed, 1024) == "first"
    assert not timed.timed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_candidate_that_raises_is_named_and_not_chosen(caplog, num_ranks):
    timed = Timed(first=None)
    tuner = timed.tuner(num_ranks=num_ranks)
    with caplog.at_level(logging.WARNING):
        assert choose(tuner, timed, 1024) == "second"
    assert caplog.messages == ["product: 'first' is not used, as it raises RuntimeError: no kernel"]
    tuner.settle(lambda own: [own])
    assert choose(tuner, timed, 1024) == "second"
    assert timed.timed == ["first", "second"]


def test_without_a_candidate_that_runs_the_operation_is_named(caplog):
    timed = Timed(first=None, second=None)
    tuner = timed.tuner()
    with pytest.raises(RuntimeError, match="product: 64, True: none of first, second runs"):
        choose(tuner, timed, 1024)
    # It measures again, and not as if it were still inside of a measurement.
    timed.times["first"] = 1.0
    assert choose(tuner, timed, 1024) == "first"
    assert choose(tuner, timed, 1024) == "first"


def test_recorded_times_are_not_measured_again(timed):
    tuner = timed.tuner()
    tuner.recall({"product: 64, True": {11: {"first": 2.0, "second": 1.0}}})
    assert choose(tuner, timed, 1024) == "second"
    assert not timed.timed


def test_recorded_times_of_other_candidates_do_not_count(timed):
    tuner = timed.tuner()
    tuner.recall({"product: 64, True": {11: {"first": 2.0, "removed": 1.0}}})
    assert choose(tuner, timed, 1024) == "first"
    assert timed.timed == ["first", "second"]


def test_several_ranks_run_the_default_and_then_the_fastest_on_the_slowest_rank():
    ranks = [Timed(2.0, 1.0), Timed(2.0, 3.0)]
    tuners = [timed.tuner(num_ranks=2) for timed in ranks]
    for tuner, timed in zip(tuners, ranks, strict=True):
        assert choose(tuner, timed, 1024) == "first"
    # A size that only one rank computes is chosen the same on the other.
    ranks[1].times["second"] = 0.5
    assert choose(tuners[1], ranks[1], 1024, op="weights") == "first"
    own = [tuner._measured for tuner in tuners]
    settled = [tuner.settle(lambda _: own) for tuner in tuners]
    assert settled[0] == settled[1] == {
        "product: 64, True": {11: {"first": 2.0, "second": 3.0}},
        "weights: 64, True": {11: {"first": 2.0, "second": 0.5}},
    }  # fmt: skip
    for tuner, timed in zip(tuners, ranks, strict=True):
        assert choose(tuner, timed, 1024) == "first"
        assert choose(tuner, timed, 1024, op="weights") == "second"
        timed.timed.clear()
        # Nothing is measured any more: the nearest octave, else the default.
        assert choose(tuner, timed, 10, op="weights") == "second"
        assert choose(tuner, timed, 10, op="other") == "first"
        assert not timed.timed


def test_a_nested_operation_is_timed_with_its_fastest_candidate(timed):
    timed.times["first"] = 3.0
    tuner = timed.tuner(num_ranks=2)
    nested = []
    outer = {"one": lambda: nested.append(choose(tuner, timed, 8)) or "second", "two": lambda: "first"}
    assert tuner.choose(TuningKey("outer", 8, ()), outer) == "one"
    assert nested == ["second"]
    # Outside of the measurement, all ranks run the default until they settle.
    assert choose(tuner, timed, 8) == "first"


def test_ranks_with_other_candidates_keep_the_default():
    one = {"product": {4: {"first": 2.0, "second": 1.0}, 5: {"first": 2.0, "second": 1.0}}}
    other = {"product": {4: {"first": 2.0}, 5: {"first": 2.0, "second": float("inf")}}}
    assert merge_times([one, other, one]) == {"product": {5: {"first": 2.0, "second": float("inf")}}}


def test_ranks_that_serve_measure_nothing(timed):
    timed.times["first"] = 3.0
    tuner = timed.tuner(num_ranks=2)
    tuner.stop_measuring()
    assert choose(tuner, timed, 1024) == "first"
    assert not timed.timed
