"""Metrics as columns, downsampled with their extremes, and means over ranges of steps."""

import json

import numpy as np
import pytest

from moefold.board import metric_table
from moefold.board.expert_tail import StepRanges
from moefold.board.metric_table import WEIGHTS, MetricTable, downsample, exponential_mean


def points(table: MetricTable, name: str, first: int, last: int, max_points: int) -> tuple[list, list]:
    curve = table.curve(name, first, last, max_points)
    return curve.steps, curve.values


def test_columns_have_the_steps_at_which_a_metric_was_recorded():
    table = MetricTable()
    table.append(1, {"step": 1, "loss": 3.0, "eval_loss": None, "rl": {"reward": 0.5, "text": "x"}, "skipped": "spike"})
    table.append(2, {"step": 2, "loss": None, "eval_loss": 2.5, "nonfinite": {"loss": "nan", "expert_load[0]": "inf"}})
    table.append(5, {"step": 5, "loss": 1.0, "flag": True, "huge": 1e301, "expert_load": [1.5, 2.5]})
    assert table.names == ["loss", "rl.reward", "eval_loss", "expert_load"]
    assert points(table, "loss", 0, 10, 100) == ([1, 2, 5], [3.0, None, 1.0])
    assert points(table, "eval_loss", 0, 10, 100) == ([2], [2.5])
    assert table.latest("expert_load") == (5, 2.5)
    assert table.latest("loss") == (5, 1.0)
    assert table.latest("nothing") is None


def test_a_run_that_starts_over_drops_its_later_steps():
    table = MetricTable()
    for step in range(1, 11):
        table.append(step, {"loss": float(step)} | ({"eval_loss": 0.0} if step == 8 else {}))
    table.append(6, {"loss": 60.0})
    table.append(7, {"loss": 70.0})
    assert points(table, "loss", 0, 99, 100) == ([1, 2, 3, 4, 5, 6, 7], [1.0, 2.0, 3.0, 4.0, 5.0, 60.0, 70.0])
    assert points(table, "eval_loss", 0, 99, 100) == ([], [])
    assert len(table) == 7


def test_a_range_of_steps_has_a_neighbour_on_each_side():
    table = MetricTable()
    for step in range(1, 101):
        table.append(step, {"loss": float(step)})
    assert points(table, "loss", 50, 52, 100)[0] == [49, 50, 51, 52, 53]
    assert points(table, "loss", 200, 300, 100)[0] == [100]


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


def reference_mean(steps, values, weight: float) -> np.ndarray:
    """Sum all earlier points for each one."""
    means = np.full(len(values), np.nan)
    for i in np.flatnonzero(np.isfinite(values)):
        known = np.flatnonzero(np.isfinite(values[: i + 1]))
        weights = weight ** (steps[i] - steps[known]).astype(float)
        means[i] = weights @ values[known] / weights.sum()
    return means


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("gap", [1, 7])
def test_the_exponential_mean_is_by_step_and_passes_over_gaps(weight, gap):
    rng = np.random.default_rng(gap)
    steps = np.cumsum(rng.integers(1, gap + 1, 400))
    values = rng.normal(2.0, 1.0, 400)
    values[[0, 5, 6, 300]] = np.nan
    found = exponential_mean(steps, values, float(weight))
    np.testing.assert_allclose(found, reference_mean(steps, values, float(weight)), rtol=1e-12)
    both = exponential_mean(steps, np.stack([values, -values]), float(weight))
    np.testing.assert_allclose(both, [found, -found], rtol=1e-12)
    assert np.isnan(exponential_mean(steps, np.full(400, np.nan), float(weight))).all()


@pytest.mark.parametrize("weight", ["0.9", "0.99"])
def test_a_spike_has_the_same_smoothed_value_at_every_zoom(weight):
    steps = np.arange(1, 10_001)
    values = 2.0 + 0.1 * np.sin(steps)
    values[6199:6211] = 4.5
    table = MetricTable()
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        table.append(step, {"loss": value})
    # The usual recurrence, without bias at the start.
    mean = total = 0.0
    truth = {}
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        mean = float(weight) * mean + (1 - float(weight)) * value
        total = float(weight) * total + (1 - float(weight))
        truth[step] = mean / total
    peak = max(truth, key=lambda step: truth[step])
    assert peak == 6211
    for first, last in ((0, 10_000), (5800, 6800), (6190, 6230)):
        for max_points in (60, 600, 20_000):
            curve = table.curve("loss", first, last, max_points, [weight])
            found = dict(zip(curve.steps, curve.smoothed[weight], strict=True))
            assert found == {step: pytest.approx(truth[step], rel=1e-6) for step in curve.steps}
            assert found[peak] == pytest.approx(truth[peak], rel=1e-6)
            # Between the extremes that are sent, the curve of the mean has no hump that the run has not.
            inside = [value for step, value in found.items() if first <= step <= last]
            assert max(inside) == found[peak]


@pytest.mark.parametrize(
    ("record", "is_smoothed"),
    [
        ({"loss": 2}, True),
        ({"grad_norm": 0.5}, True),
        ({"rl": {"reward": 0.5}}, True),
        ({"loss_metrics": {"accuracy": 0.5}}, True),
        ({"lr": 1e-3}, False),
        ({"eval_loss": 2.5}, False),
        ({"rl": {"eval_reward": 0.5}}, False),
        ({"loss_metrics": {"eval_accuracy": 0.5}}, False),
        ({"tokens": 2048}, False),
        ({"attention_bytes": 2048}, False),
        ({"rank_times": {"slowest_rank": 3}}, False),
        ({"loss_metrics": {"correct_answers": 7}}, False),
    ],
)
def test_schedules_held_out_values_and_counts_are_not_smoothed(record, is_smoothed):
    table = MetricTable()
    for step in (1, 2, 3):
        table.append(step, json.loads(json.dumps(record)))
    (name,) = table.names
    assert table.is_smoothed(name) == is_smoothed
    assert bool(table.curve(name, 0, 9, 100, ["0.9"]).smoothed) == is_smoothed


def test_a_range_counts_its_points_and_those_that_are_not_finite():
    table = MetricTable()
    for step in range(1, 10_001):
        table.append(step, {"loss": None, "aux": 0.0, "nonfinite": {"loss": "nan"}})
    curve = table.curve("loss", 11, 20, 600, ["0.9"])
    assert (curve.num_points, curve.num_nonfinite, curve.is_zero) == (10, 10, False)
    assert set(curve.values) == {None}
    assert table.curve("loss", 0, 20_000, 600).num_nonfinite == 10_000
    assert len(table.curve("loss", 0, 20_000, 600).steps) <= 602
    assert table.curve("aux", 0, 20_000, 600).is_zero
    assert table.curve("loss", 30_000, 40_000, 600, ["0.9"]).num_points == 0
