"""Columns of metrics.jsonl: each metric with the steps at which it was recorded. Torch-free."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

from moefold.board.downsample import downsample
from moefold.metrics.expert_balance import Array, finite_number

MAX_METRICS = 1000
"""Limit of the columns: the names in loss_metrics are free, and each takes 12 bytes a step."""
DIGITS = 7
"""Significant digits of the points of a curve; all 17 would double the bytes of an answer."""
WORST_LOAD = "worst_expert_load"
"""Column of the largest expert_load of all layers."""
NOT_SCALAR = ("step", "expert_load", "moe_layers", "memory_by_part", "nonfinite")
"""Keys of a line that other readers take."""


class _Column:
    """One metric: rows of the table and values, NaN where the value was not finite."""

    def __init__(self) -> None:
        self.rows = array("I")
        self.values = array("d")

    def append(self, row: int, value: float) -> None:
        self.rows.append(row)
        self.values.append(value)


class MetricTable:
    """The scalar metrics of a run, in memory at full resolution."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, _Column] = {}
        self.left_out = 0
        """Number of values of metrics beyond `MAX_METRICS`."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of their first appearance; those of a section are "section.name"."""
        return list(self._columns)

    def append(self, step: int, record: Mapping[str, Any]) -> None:
        """Append the metrics of a step; rows of this or a later step are dropped, as by a run that starts over."""
        if self._steps and step <= self._steps[-1]:
            self._rewind(step)
        row = len(self._steps)
        self._steps.append(step)
        for key, value in record.items():
            if value is None or key in NOT_SCALAR:
                continue
            if isinstance(value, dict):
                for name, part in value.items():
                    self._add(f"{key}.{name}", part, row)
            else:
                self._add(key, value, row)
        nonfinite = record.get("nonfinite")
        for name in nonfinite if isinstance(nonfinite, dict) else ():
            if "[" not in name:  # not an entry of a list
                self._column(name).append(row, np.nan)
        loads = record.get("expert_load")
        if isinstance(loads, list) and loads:
            self._column(WORST_LOAD).append(row, max(map(finite_number, loads)))

    def latest(self, name: str) -> float | None:
        """Return the last recorded value; None if there is none or it was not finite."""
        column = self._columns.get(name)
        if column is None or not column.values or np.isnan(column.values[-1]):
            return None
        return column.values[-1]

    def column(self, name: str) -> tuple[Array, Array]:
        """Return copies of the steps and values of a metric, [N] each; NaN where the value was not finite."""
        column = self._columns[name]
        return np.array(self._steps)[np.array(column.rows)], np.array(column.values)

    def series(self, name: str, first: int, last: int, max_points: int) -> tuple[list[int], list[float | None]]:
        """Return a metric between two steps, at most about `max_points` points that keep minima and maxima.

        Values have `DIGITS` digits. One point outside of the range is kept on each side, so that lines reach the edge
        of a picture.
        """
        steps, values = self.column(name)
        start = max(0, int(np.searchsorted(steps, first)) - 1)
        end = int(np.searchsorted(steps, last, side="right")) + 1
        steps = steps[start:end]
        values = values[start:end]
        kept = downsample(values, max_points)
        shown = [None if np.isnan(value) else float(f"{value:.{DIGITS}g}") for value in values[kept].tolist()]
        return steps[kept].tolist(), shown

    def _add(self, name: str, value: Any, row: int) -> None:
        number = finite_number(value)
        if number == number:  # not NaN
            self._column(name).append(row, number)

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
