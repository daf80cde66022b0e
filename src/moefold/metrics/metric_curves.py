"""Curves of single metrics over the steps of metrics.jsonl: reinforcement learning, attention, sites. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moefold.metrics.expert_balance import Array, finite_number, split_into_bins
from moefold.metrics.step_metrics import METRICS_FILE, read_records


@dataclass(frozen=True)
class CurveGroup:
    """Metrics that are shown together."""

    title: str
    section: str
    """Key of a record that holds them; empty: the record itself."""
    names: Mapping[str, str]
    """The metrics, with their names in a table or picture."""


CURVE_GROUPS = {
    "rl": CurveGroup(
        "reinforcement learning",
        "rl",
        {
            "reward": "reward",
            "eval_reward": "held-out reward",
            "length_mean": "length, tokens",
            "entropy": "entropy, nats",
            "mismatch_mean": "mismatch, nats",
        },
    ),
    "preferences": CurveGroup(
        "preferences",
        "loss_metrics",
        {
            "accuracy": "accuracy",
            "margin": "margin, nats",
            "chosen_reward": "chosen, nats",
            "rejected_reward": "rejected, nats",
            "desirable_reward": "desirable, nats",
            "undesirable_reward": "undesirable, nats",
        },
    ),
    "attention": CurveGroup(
        "attention",
        "",
        {
            "attention_max_over_mean": "busiest rank",
            "attention_moved_rows": "moved rows",
            "attention_bytes": "bytes sent",
        },
    ),
    "sites": CurveGroup(
        "rounds of sites",
        "sites",
        {
            "difference": "difference",
            "agreement": "agreement",
            "routing_overlap": "routing overlap",
            "router_distance": "router distance",
            "spike": "loss spike",
        },
    ),
}
"""The groups by their keys in `moefold inspect --json`."""
ENDS = 10
"""The start and the end of a curve are means over a tenth of its values."""


@dataclass(frozen=True)
class MetricCurve:
    """One metric over the steps at which it was recorded."""

    name: str
    title: str
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


def read_metric_curves(run_dir: Path) -> dict[str, list[MetricCurve]]:
    """Read the curves of a run, by the key of their group; values of other types count as not recorded.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    found: dict[tuple[str, str], dict[float, float]] = {
        (key, name): {} for key, group in CURVE_GROUPS.items() for name in group.names
    }
    for _, record in read_records(run_dir / METRICS_FILE):
        step = np.nan if record is None else finite_number(record.get("step"))
        if record is None or np.isnan(step):
            continue
        for (key, name), values in found.items():
            section = CURVE_GROUPS[key].section
            metrics = record.get(section) if section else record
            value = finite_number(metrics.get(name)) if isinstance(metrics, dict) else np.nan
            if not np.isnan(value):
                values[step] = value
    curves: dict[str, list[MetricCurve]] = {key: [] for key in CURVE_GROUPS}
    for (key, name), values in found.items():
        if values:
            steps = sorted(values)
            title = CURVE_GROUPS[key].names[name]
            curves[key].append(MetricCurve(name, title, np.array(steps), np.array([values[step] for step in steps])))
    return curves
