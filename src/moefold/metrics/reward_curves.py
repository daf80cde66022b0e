"""Curves of reinforcement learning from metrics.jsonl: reward, length, entropy, mismatch. numpy only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.metrics.expert_balance import Array, finite_number, split_into_bins
from moefold.metrics.step_metrics import METRICS_FILE, read_records

CURVES = {
    "reward": "reward",
    "eval_reward": "held-out reward",
    "length_mean": "length, tokens",
    "entropy": "entropy, nats",
    "mismatch_mean": "mismatch, nats",
}
"""Metrics of the key "rl", with their names in a table or picture."""
ENDS = 10
"""The start and the end of a curve are means over a tenth of its values."""


@dataclass(frozen=True)
class RewardCurve:
    """One metric over the steps at which it was recorded."""

    name: str
    """Key of `CURVES`."""
    steps: Array
    """Ascending, float64 [N], N at least 1."""
    values: Array
    """[N], finite."""

    def summary(self) -> dict[str, float]:
        """Return mean values at start and end, and the extremes."""
        count = max(1, len(self.values) // ENDS)
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


def read_reward_curves(run_dir: Path) -> list[RewardCurve]:
    """Read the curves of a run of reinforcement learning; none of another run.

    Values of other types count as not recorded.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    found: dict[str, dict[float, float]] = {name: {} for name in CURVES}
    for _, record in read_records(run_dir / METRICS_FILE):
        metrics: Any = None if record is None else record.get("rl")
        if record is None or not isinstance(metrics, dict):
            continue
        step = finite_number(record.get("step"))
        for name, values in found.items():
            value = finite_number(metrics.get(name))
            if not np.isnan(step) and not np.isnan(value):
                values[step] = value
    return [
        RewardCurve(name, np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for name, values in found.items()
        if values
    ]
