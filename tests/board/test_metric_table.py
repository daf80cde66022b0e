"""Metrics as columns, downsampled with their extremes, and means over ranges of steps."""

import numpy as np
import pytest

from moefold.board import metric_table
from moefold.board.downsample import downsample
from moefold.board.metric_table import MetricTable
from moefold.board.step_ranges import StepRanges


def test_columns_have_the_steps_at_which_a_metric_was_recorded():
    table = MetricTable()
    table.append(1, {"step": 1, "loss": 3.0, "eval_loss": None, "rl": {"reward": 0.5, "text": "x"}, "skipped": "spike"})
    table.append(2, {"step": 2, "loss": None, "eval_loss": 2.5, "nonfinite": {"loss": "nan", "expert_load[0]": "inf"}})
    table.append(5, {"step": 5, "loss": 1.0, "flag": True, "huge": 1e301, "expert_load": [1.5, 2.5]})
    assert table.names == ["loss", "rl.reward", "eval_loss", "worst_expert_load"]
    assert table.series("loss", 0, 10, 100) == ([1, 2, 5], [3.0, None, 1.0])
    assert table.series("eval_loss", 0, 10, 100) == ([2], [2.5])
    assert table.latest("worst_expert_load") == 2.5
    assert table.latest("loss") == 1.0
    assert table.latest("nothing") is None


def test_a_run_that_starts_over_drops_its_later_steps():
    table = MetricTable()
    for step in range(1, 11):
        table.append(step, {"loss": float(step)} | ({"eval_loss": 0.0} if step == 8 else {}))
    table.append(6, {"loss": 60.0})
    table.append(7, {"loss": 70.0})
    assert table.series("loss", 0, 99, 100) == ([1, 2, 3, 4, 5, 6, 7], [1.0, 2.0, 3.0, 4.0, 5.0, 60.0, 70.0])
    assert table.series("eval_loss", 0, 99, 100) == ([], [])
    assert len(table) == 7


def test_a_range_of_steps_has_a_neighbour_on_each_side():
    table = MetricTable()
    for step in range(1, 101):
        table.append(step, {"loss": float(step)})
    assert table.series("loss", 50, 52, 100)[0] == [49, 50, 51, 52, 53]
    assert table.series("loss", 200, 300, 100)[0] == [100]


def test_the_number_of_metrics_is_limited(monkeypatch):
    monkeypatch.setattr(metric_table, "MAX_METRICS", 2)
    table = MetricTable()
    table.append(1, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert (table.names, table.left_out) == (["a", "b"], 1)


@pytest.mark.parametrize("count", [1, 2, 599, 600, 601, 1000, 99_991])
def test_downsampling_keeps_ends_and_extremes(count):
    values = np.sin(np.arange(count) / 50.0)
    spike = count // 3
    values[spike] = 9.0
    if count > 600:
        values[spike + 5] = -9.0
        values[spike + 9] = np.nan
    kept = downsample(values, 600)
    assert len(kept) <= 602
    assert (np.diff(kept) > 0).all()
    assert {0, count - 1, spike} <= set(kept.tolist())
    if count > 600:
        assert {spike + 5, spike + 9} <= set(kept.tolist())
        # Each range keeps its extremes.
        length = -(-count // 200)
        for start in range(0, count, length):
            part = values[start : start + length]
            shown = values[[i for i in kept.tolist() if start <= i < start + length]]
            assert (np.nanmin(shown), np.nanmax(shown)) == (np.nanmin(part), np.nanmax(part))
    else:
        assert len(kept) == count


def test_a_curve_without_finite_values_is_kept():
    assert len(downsample(np.full(10_000, np.nan), 30)) >= 2


@pytest.mark.parametrize("count", [1, 3, 4, 5, 63])
def test_ranges_have_the_means_of_their_records(count):
    ranges = StepRanges((2,), 4)
    for step in range(1, count + 1):
        ranges.append(step, np.array([step, np.nan if step % 2 else 1.0]))
    assert len(ranges) <= 4
    assert ranges.steps[0, 0] == 1
    assert ranges.last_step == count
    for (first, last), (mean, second) in zip(ranges.steps, ranges.means(), strict=True):
        assert mean == np.mean(np.arange(first, last + 1))
        has_even = any(step % 2 == 0 for step in range(first, last + 1))
        assert second == 1.0 if has_even else np.isnan(second)
    assert (ranges.steps[1:, 0] == ranges.steps[:-1, 1] + 1).all()


def test_ranges_past_a_step_that_comes_again_are_dropped():
    ranges = StepRanges((1,), 4)
    for step in (1, 2, 3, 4, 3):
        ranges.append(step, np.array([float(10 * step)]))
    assert ranges.steps.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert ranges.means().tolist() == [[10.0], [20.0], [30.0]]
