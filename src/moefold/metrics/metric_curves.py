"""Curves of single metrics over the steps of metrics.jsonl: reinforcement learning, attention, sites. numpy only."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moefold.metrics.definitions import SHOWN, TABLES, title_of
from moefold.metrics.expert_balance import END_WINDOW_DIVISOR, split_into_bins
from moefold.metrics.expert_counts import Array
from moefold.metrics.reader import read_records, value_of


@dataclass(frozen=True)
class MetricCurve:
    """Metric over its recorded steps."""

    name: str
    title: str
    steps: Array
    """Recorded steps, ascending, float64 [N]. N is at least 1."""
    values: Array
    """Finite values, [N]."""

    def summary(self) -> dict[str, float]:
        """Return mean values at start and end, and the extremes."""
        count = max(1, len(self.values) // END_WINDOW_DIVISOR)
        return {
            "start": float(self.values[:count].mean()),
            "end": float(self.values[-count:].mean()),
            "min": float(self.values.min()),
            "max": float(self.values.max()),
        }

    def binned(self, max_bins: int) -> tuple[Array, Array]:
        """Return means over at most `max_bins` ranges of recorded steps: steps and values, [bins] each."""
        edges = split_into_bins(len(self.values), max_bins)
        steps, values = (np.array([x[a:b].mean() for a, b in edges]) for x in (self.steps, self.values))
        return steps, values


def read_metric_curves(run_dir: Path) -> dict[str, list[MetricCurve]]:
    """Read the curves of a run by the keys of their tables. Values of other types are ignored."""
    series: dict[str, dict[int, float]] = {path: {} for path, places in SHOWN.items() if places.table}
    for record in read_records(run_dir):
        for path, values in series.items():
            if not np.isnan(value := value_of(record, path)):
                values[record["step"]] = value
    curves: dict[str, list[MetricCurve]] = {table: [] for table in TABLES}
    for path, values in series.items():
        if values:
            steps = sorted(values)
            points = np.array(steps, dtype=np.float64), np.array([values[step] for step in steps])
            curves[SHOWN[path].table].append(MetricCurve(path.rpartition(".")[2], title_of(path), *points))
    return curves
