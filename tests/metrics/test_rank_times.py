"""Who is slower than the others, by hand."""

import numpy as np
import pytest

from moefold.metrics.rank_times import (
    REPORT_SLOW_STEPS,
    WINDOW_STEPS,
    Stragglers,
    describe_straggler,
    rank_time_metrics,
)
from moefold.metrics.writer import to_record
from tests.metrics.example import STEP


def times(*own: float) -> np.ndarray:
    return np.array([[one, one / 10, 1.0 - one] for one in own])


def test_rank_times_have_min_median_max_and_slowest_rank():
    found = rank_time_metrics(times(0.2, 0.5, 0.3, 0.4))
    assert found is not None
    assert (found["own_min_s"], found["own_median_s"], found["own_max_s"]) == pytest.approx((0.2, 0.35, 0.5))
    assert found["slowest_rank"] == 1
    assert found["data_max_s"] == pytest.approx(0.05)
    assert (found["wait_min_s"], found["wait_median_s"]) == pytest.approx((0.5, 0.65))
    assert rank_time_metrics(np.zeros((4, 3))) is None
    assert to_record(STEP | {"rank_times": found})["rank_times"]["slowest_rank"] == 1


def stragglers(*stages: list[int], factor: float = 1.5) -> Stragglers:
    return Stragglers(factor, stages, [f"host{rank}" for rank in range(sum(map(len, stages)))])


def test_a_rank_is_named_after_so_many_slow_steps_and_once():
    watch = stragglers([0, 1, 2, 3])
    found = [watch.update(times(0.2, 0.2, 0.31, 0.2)) for _ in range(3 * WINDOW_STEPS)]
    assert [len(records) for records in found] == [0] * (REPORT_SLOW_STEPS - 1) + [1] + [0] * (
        3 * WINDOW_STEPS - REPORT_SLOW_STEPS
    )
    (record,) = found[REPORT_SLOW_STEPS - 1]
    assert (record["rank"], record["host"]) == (2, "host2")
    assert describe_straggler(record) == (
        "rank 2 (host2) is slow in 12 of 12 steps: 0.31 s of its own work a step, 1.55 times the median of the 4 ranks "
        "of its stage; 0.031 s of it for data"
    )


def test_some_steps_as_fast_as_the_others_do_not_hide_it():
    watch = stragglers([0, 1])
    found = [watch.update(times(0.2 if step % 4 == 0 else 0.4, 0.2)) for step in range(3 * WINDOW_STEPS)]
    assert sum(map(len, found)) == 1
    assert len(found[WINDOW_STEPS - 1]) == 1


def test_as_many_slow_as_fast_steps_name_no_rank():
    watch = stragglers([0, 1])
    assert not any(watch.update(times(0.2 if step % 2 else 0.9, 0.2)) for step in range(5 * WINDOW_STEPS))


def test_long_pauses_name_no_rank():
    watch = stragglers([0, 1, 2, 3])
    steps = [times(*(9.0 if step % 3 == rank else 0.2 for rank in range(4))) for step in range(5 * WINDOW_STEPS)]
    assert not any(map(watch.update, steps))


def test_rank_is_named_again_only_after_long_recovery():
    watch = stragglers([0, 1])
    slow, well = times(0.4, 0.2), times(0.2, 0.2)
    assert sum(len(watch.update(slow)) for _ in range(WINDOW_STEPS)) == 1
    # About half of the steps are slow: too many for an outlier, too few for a slow rank.
    assert not any(watch.update(slow if step % 2 else well) for step in range(2 * WINDOW_STEPS))
    assert not any(watch.update(slow) for _ in range(WINDOW_STEPS))
    assert not any(watch.update(well) for _ in range(WINDOW_STEPS))
    assert sum(len(watch.update(slow)) for _ in range(WINDOW_STEPS)) == 1


def test_slowness_without_effect_on_the_step_names_no_rank():
    watch = stragglers([0, 1])
    assert not any(watch.update(np.array([[0.02, 0.0, 0.98], [0.01, 0.0, 0.99]])) for _ in range(2 * WINDOW_STEPS))


def test_stages_are_judged_by_themselves_and_one_of_two_is_named():
    watch = stragglers([0, 2], [1, 3])
    for _ in range(REPORT_SLOW_STEPS - 1):
        watch.update(times(0.1, 0.9, 0.1, 0.5))
    assert [record["rank"] for record in watch.update(times(0.1, 0.9, 0.1, 0.5))] == [1]


def test_untimed_steps_name_no_rank():
    watch = stragglers([0, 1])
    assert [watch.update(np.zeros((2, 3))) for _ in range(10)] == [[]] * 10
