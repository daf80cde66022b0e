"""Columns of metrics.jsonl: each metric with the steps at which it was recorded. Torch-free."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moefold.board.downsample import downsample
from moefold.metrics.expert_balance import Array, finite_number

MAX_METRICS = 1000
"""Limit of the columns: the names in loss_metrics are free, and each takes 12 bytes a step."""
WORST_LOAD = "worst_expert_load"
"""Column of the largest expert_load of all layers."""
NOT_SCALAR = ("step", "expert_load", "moe_layers", "memory_by_part", "nonfinite")
"""Keys of a line that other readers take."""


class GrowingArray:
    """One-dimensional numpy array with a fast `append`; the capacity doubles.

    Args:
        dtype: dtype of the values.
    """

    def __init__(self, dtype: Any) -> None:
        self._array = np.empty(64, dtype)
        self.count = 0

    def append(self, value: float) -> None:
        """Append one value."""
        if self.count == len(self._array):
            self._array = np.concatenate([self._array, np.empty_like(self._array)])
        self._array[self.count] = value
        self.count += 1

    def truncate(self, count: int) -> None:
        """Keep the first `count` values."""
        self.count = min(self.count, count)

    @property
    def values(self) -> Array:
        """The values, without a copy."""
        return self._array[: self.count]


class _Column:
    """One metric: rows of the table and values, NaN where the value was not finite."""

    def __init__(self) -> None:
        self.rows = GrowingArray(np.uint32)
        self.values = GrowingArray(np.float64)


class MetricTable:
    """The scalar metrics of a run, in memory at full resolution."""

    def __init__(self) -> None:
        self._steps = GrowingArray(np.int64)
        self._columns: dict[str, _Column] = {}
        self.left_out = 0
        """Number of values of metrics beyond `MAX_METRICS`."""

    def __len__(self) -> int:
        return self._steps.count

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of their first appearance; those of a section are "section.name"."""
        return list(self._columns)

    def append(self, step: int, record: Mapping[str, Any]) -> None:
        """Append the metrics of a step; rows of this or a later step are dropped, as by a run that starts over."""
        if self._steps.count and step <= self._steps.values[-1]:
            self._rewind(step)
        nonfinite = record.get("nonfinite")
        lost = nonfinite if isinstance(nonfinite, dict) else {}
        row = self._steps.count
        self._steps.append(step)
        for key, value in record.items():
            if key in NOT_SCALAR:
                continue
            if isinstance(value, dict):
                for name, part in value.items():
                    self._add(f"{key}.{name}", part, row, lost)
            else:
                self._add(key, value, row, lost)
        loads = record.get("expert_load")
        if isinstance(loads, list) and loads:
            worst = float(np.max([finite_number(load) for load in loads]))
            self._column(WORST_LOAD, row, worst)

    def latest(self, name: str) -> float | None:
        """Return the last recorded value; None if there is none or it was not finite."""
        column = self._columns.get(name)
        if column is None or not column.values.count or np.isnan(column.values.values[-1]):
            return None
        return float(column.values.values[-1])

    def column(self, name: str) -> tuple[Array, Array]:
        """Return the steps and values of a metric, [N] each; NaN where the value was not finite."""
        column = self._columns[name]
        return self._steps.values[column.rows.values], column.values.values

    def series(self, name: str, first: int, last: int, max_points: int) -> tuple[list[int], list[float | None]]:
        """Return a metric between two steps, at most about `max_points` points that keep minima and maxima.

        One point outside of the range is kept on each side, so that lines reach the edge of a picture.
        """
        steps, values = self.column(name)
        start = max(0, int(np.searchsorted(steps, first)) - 1)
        end = int(np.searchsorted(steps, last, side="right")) + 1
        steps = steps[start:end]
        values = values[start:end]
        kept = downsample(values, max_points)
        return steps[kept].tolist(), [None if np.isnan(value) else value for value in values[kept].tolist()]

    def _add(self, name: str, value: Any, row: int, lost: Mapping[str, Any]) -> None:
        if name in lost:
            self._column(name, row, np.nan)
            return
        number = finite_number(value)
        if not np.isnan(number):
            self._column(name, row, number)

    def _column(self, name: str, row: int, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= MAX_METRICS:
                self.left_out += 1
                return
            column = self._columns[name] = _Column()
        column.rows.append(row)
        column.values.append(value)

    def _rewind(self, step: int) -> None:
        num_rows = int(np.searchsorted(self._steps.values, step))
        self._steps.truncate(num_rows)
        for column in self._columns.values():
            count = int(np.searchsorted(column.rows.values, num_rows))
            column.rows.truncate(count)
            column.values.truncate(count)
