"""Columns of metrics.jsonl: each metric with its recorded steps, and exponential means."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moefold.metrics.definitions import COUNTS, STEP
from moefold.metrics.expert_counts import Array
from moefold.metrics.reader import MAX_VALUE, NONFINITE, finite_number, nonfinite_of

WEIGHTS = ("0.6", "0.9", "0.97", "0.99", "0.999")
"""Weights of the previous step that a page may request."""
_NEGLIGIBLE = 1e-17


def reach(weight: float) -> int:
    """Return the number of steps after which the weight of a point is below the precision of float64."""
    return math.ceil(math.log(_NEGLIGIBLE) / math.log(weight))


def exponential_mean(steps: Array, values: Array, weight: float) -> Array:
    """Return the mean of all points up to each point, weighted by `weight ** (step - step of the point)`.

    This is the exponential moving average without bias at the start, in steps: distant points have less weight. A value
    that is not finite has no weight, and its own mean is NaN.

    Args:
        steps: ascending, [N].
        values: float64 [..., N], NaN where a value is not finite.
        weight: weight of the previous step, in (0, 1).
    """
    is_finite = np.isfinite(values)
    sums = np.where(is_finite, values, 0.0)
    # Curves without gaps have the same sum of weights.
    totals = np.ones(len(steps)) if is_finite.all() else is_finite.astype(np.float64)
    # After the pass of a distance, each sum covers twice as many points: log2(reach) passes over whole arrays.
    distance = 1
    while distance < min(len(steps), reach(weight)):
        decay = np.exp(math.log(weight) * (steps[distance:] - steps[:-distance]))
        sums[..., distance:] += decay * sums[..., :-distance]
        totals[..., distance:] += decay * totals[..., :-distance]
        distance *= 2
    return np.where(is_finite, sums, np.nan) / np.where(is_finite, totals, 1.0)


MAX_METRICS = 1000
"""Limit of the columns: names in loss_metrics are arbitrary, and each metric takes 12 bytes per step."""
DIGITS = 7
"""Significant digits of the points of a curve. All 17 would double the bytes of an answer."""
LOAD = "expert_load"
"""Key of the list of a line, and name of the column with the maximum over all layers."""
NOT_SCALAR = ("step", LOAD, "moe_layers", "memory_by_part", NONFINITE)
"""Keys of a line for other readers."""
MEASURED = frozenset(metric.name for metric in STEP if metric.unit not in COUNTS)
"""Metrics that are not counts, even if all their values are integers."""
MAX_MEAN_POINTS = 300
"""Maximum points that a smoothed curve adds to the points of its values, to keep its own extremes."""


@dataclass(frozen=True, slots=True)
class ShownCurve:
    """Points of a metric in a range of steps."""

    steps: list[int]
    values: list[float | None]
    """Values, or None if a value is not finite."""
    smoothed: dict[str, list[float | None]]
    """Exponential means by step over all points of the run, by weight, or empty if the metric is not smoothed."""
    num_points: int
    """Number of recorded points in the range, some of which are in `steps`."""
    num_nonfinite: int
    is_zero: bool
    """True if all values of the run are 0."""


class _Column:
    """Metric: rows of the table and values. A value that was not finite is NaN."""

    __slots__ = ("is_count", "rows", "values")

    def __init__(self) -> None:
        self.rows = array("I")
        self.values = array("d")
        self.is_count = True
        """True if all values were integers in the file."""

    def append(self, row: int, value: float) -> None:
        self.rows.append(row)
        self.values.append(value)


class MetricTable:
    """Scalar metrics of a run, in memory at full resolution."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, _Column] = {}
        self.left_out = 0
        """Number of values of metrics beyond `MAX_METRICS`."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of their first appearance. Metrics of a section are "section.name"."""
        return list(self._columns)

    def append(self, step: int, record: Mapping[str, Any]) -> None:
        """Append the metrics of a step. Rows of this or a later step are dropped, as for a restarted run."""
        if self._steps and step <= self._steps[-1]:
            self._rewind(step)
        row = len(self._steps)
        self._steps.append(step)
        for key, value in record.items():
            if value is None or key in NOT_SCALAR:
                continue
            self._add_parts(key, value, row)
        for name in nonfinite_of(record):
            if "[" not in name:  # not an entry of a list
                self._column(name).append(row, np.nan)
        loads = record.get(LOAD)
        if isinstance(loads, list) and loads:
            worst = self._column(LOAD)
            worst.append(row, max(map(finite_number, loads)))
            worst.is_count = False

    def latest(self, name: str) -> tuple[int, float] | None:
        """Return step and value of the last record, NaN if it was not finite, or None if there is none."""
        column = self._columns.get(name)
        if column is None or not column.values:
            return None
        return self._steps[column.rows[-1]], column.values[-1]

    def column(self, name: str) -> tuple[Array, Array]:
        """Return copies of the steps and values of a metric, [N] each. A value that was not finite is NaN."""
        column = self._columns[name]
        return np.array(self._steps)[np.array(column.rows)], np.array(column.values)

    def is_smoothed(self, name: str) -> bool:
        """Return whether a metric is noisy: not a schedule, a held-out mean (of distant steps) or a count."""
        is_held_out = name.rpartition(".")[2].startswith("eval_")
        return not (name == "lr" or is_held_out or (self._columns[name].is_count and name not in MEASURED))

    def curve(self, name: str, first: int, last: int, max_points: int, weights: Sequence[str] = ()) -> ShownCurve:
        """Return a metric between two steps, with about `max_points` points at most, including minima and maxima.

        Values have `DIGITS` digits. One point outside of the range is kept on each side, so that lines reach the edge
        of a picture. Smoothed curves also keep their extremes. Their value at a step does not depend on range and
        number of points.

        Args:
            max_points: maximum points of the values. Each smoothed curve may add as many, up to `MAX_MEAN_POINTS`.
            weights: weights of exponential means by step.
        """
        steps, values = self.column(name)
        inside = slice(int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right")))
        window = slice(max(0, inside.start - 1), inside.stop + 1)
        means = {
            weight: _smoothed(steps, values, window, float(weight))
            for weight in (weights if self.is_smoothed(name) else ())
        }
        kept_rows = downsample(values[window], max_points)
        for mean in means.values():
            kept_rows = np.union1d(kept_rows, downsample(mean, min(max_points, MAX_MEAN_POINTS)))
        return ShownCurve(
            steps=steps[window][kept_rows].tolist(),
            values=_rounded(values[window][kept_rows]),
            smoothed={weight: _rounded(mean[kept_rows]) for weight, mean in means.items()},
            num_points=inside.stop - inside.start,
            num_nonfinite=int(np.isnan(values[inside]).sum()),
            is_zero=not np.any(values),
        )

    def _add_parts(self, name: str, value: Any, row: int) -> None:
        """Add a number, or each number of a section."""
        if isinstance(value, dict):
            for key, inner in value.items():
                self._add_parts(f"{name}.{key}", inner, row)
        else:
            self._add(name, value, row)

    def _add(self, name: str, value: Any, row: int) -> None:
        # Reading a long run spends most of its time here: a float needs no conversion.
        number = value if type(value) is float and -MAX_VALUE <= value <= MAX_VALUE else finite_number(value)
        if number == number:  # not NaN
            column = self._columns.get(name) or self._column(name)
            column.rows.append(row)
            column.values.append(number)
            if column.is_count and type(value) is not int:
                column.is_count = False

    def _column(self, name: str) -> _Column:
        column = self._columns.get(name)
        if column is None:
            column = _Column()
            if len(self._columns) < MAX_METRICS:
                self._columns[name] = column
            else:
                self.left_out += 1
        return column

    def _rewind(self, step: int) -> None:
        num_rows = bisect_left(self._steps, step)
        del self._steps[num_rows:]
        for column in self._columns.values():
            count = bisect_left(column.rows, num_rows)
            del column.rows[count:]
            del column.values[count:]


def _smoothed(steps: Array, values: Array, window: slice, weight: float) -> Array:
    """Return the exponential mean of some rows, from all earlier points with a significant weight."""
    start = (
        int(np.searchsorted(steps, steps[window.start] - reach(weight))) if window.start < len(steps) else window.start
    )
    mean = exponential_mean(steps[start : window.stop], values[start : window.stop], weight)
    return mean[window.start - start :]


def _rounded(values: Array) -> list[float | None]:
    return [None if value != value else float(f"{value:.{DIGITS}g}") for value in values.tolist()]


POINTS_OF_RANGE = 3
"""Number of points for a range: its minimum, its maximum, and its first value that is not finite."""


def downsample(values: Array, max_points: int) -> Array:
    """Return the indices of at most about `max_points` values, ascending, including the first and the last.

    The values are split into ranges of equal length, and each range keeps its smallest, its largest and its first
    non-finite value.

    Args:
        values: float64 [N], NaN where a value is not finite.
        max_points: at least 3.
    """
    count = len(values)
    if count <= max_points:
        return np.arange(count)
    length = -(-count // max(1, max_points // POINTS_OF_RANGE))
    num_ranges = -(-count // length)
    padded = np.full(num_ranges * length, np.nan)
    padded[:count] = values
    table = padded.reshape(num_ranges, length)
    unknown = np.isnan(table)
    starts = np.arange(num_ranges) * length
    picked_rows = np.concatenate(
        [
            starts + np.where(unknown, np.inf, table).argmin(1),
            starts + np.where(unknown, -np.inf, table).argmax(1),
            (starts + unknown.argmax(1))[unknown.any(1)],
            [0, count - 1],
        ]
    )
    return np.unique(picked_rows[picked_rows < count])
