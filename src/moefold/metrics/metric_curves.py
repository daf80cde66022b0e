"""Curves of single metrics over the steps of metrics.jsonl: reinforcement learning, attention, sites. numpy only."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.metrics.expert_balance import Array, finite_number, split_into_bins
from moefold.metrics.step_metrics import METRICS_FILE, read_records

RL_CURVES = {
    "reward": "reward",
    "eval_reward": "held-out reward",
    "length_mean": "length, tokens",
    "entropy": "entropy, nats",
    "mismatch_mean": "mismatch, nats",
}
"""Metrics of the key "rl", with their names in a table or picture."""
PREFERENCE_CURVES = {
    "accuracy": "accuracy",
    "margin": "margin, nats",
    "chosen_reward": "chosen, nats",
    "rejected_reward": "rejected, nats",
    "desirable_reward": "desirable, nats",
    "undesirable_reward": "undesirable, nats",
}
"""Metrics of the key "loss_metrics" of a run on preferences, likewise."""
ATTENTION_CURVES = {
    "attention_max_over_mean": "busiest rank",
    "attention_moved_rows": "moved rows",
    "attention_bytes": "bytes sent",
}
"""Metrics of planned attention, likewise."""
SITE_CURVES = {
    "difference": "difference",
    "agreement": "agreement",
    "routing_overlap": "routing overlap",
    "router_distance": "router distance",
    "spike": "loss spike",
}
"""Metrics of the key "sites", likewise."""
ENDS = 10
"""The start and the end of a curve are means over a tenth of its values."""


@dataclass(frozen=True)
class MetricCurve:
    """One metric over the steps at which it was recorded."""

    name: str
    """Key of `RL_CURVES`, `PREFERENCE_CURVES`, `ATTENTION_CURVES` or `SITE_CURVES`."""
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


def read_reward_curves(run_dir: Path) -> list[MetricCurve]:
    """Read the curves of a run of reinforcement learning; none of another run.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    return _read_curves(run_dir, RL_CURVES, "rl")


def read_preference_curves(run_dir: Path) -> list[MetricCurve]:
    """Read the curves of a run on preferences; none of another run.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    return _read_curves(run_dir, PREFERENCE_CURVES, "loss_metrics")


def read_attention_curves(run_dir: Path) -> list[MetricCurve]:
    """Read the curves of a run with documents and planned attention; none of another run.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    return _read_curves(run_dir, ATTENTION_CURVES, None)


def read_site_curves(run_dir: Path) -> list[MetricCurve]:
    """Read the curves of the rounds of a site; none of a run without sites.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    return _read_curves(run_dir, SITE_CURVES, "sites")


def _read_curves(run_dir: Path, names: Iterable[str], section: str | None) -> list[MetricCurve]:
    """Read metrics of a step, or of one of its sections; values of other types count as not recorded."""
    found: dict[str, dict[float, float]] = {name: {} for name in names}
    for _, record in read_records(run_dir / METRICS_FILE):
        metrics: Any = record if record is None or section is None else record.get(section)
        if record is None or not isinstance(metrics, dict):
            continue
        step = finite_number(record.get("step"))
        for name, values in found.items():
            value = finite_number(metrics.get(name))
            if not np.isnan(step) and not np.isnan(value):
                values[step] = value
    return [
        MetricCurve(name, np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for name, values in found.items()
        if values
    ]
