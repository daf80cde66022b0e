"""Curves of single metrics over the steps of metrics.jsonl: reinforcement learning, attention, sites. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.metrics.expert_balance import Array, finite_number, split_into_bins
from moefold.metrics.step_metrics import METRICS_FILE, read_records

ENDS = 10
"""The start and the end of a curve are means over a tenth of its values."""


@dataclass(frozen=True)
class CurveTable:
    """Metrics of one section of the records, whose curves stand together in a table or picture."""

    title: str
    section: str | None
    """Key of the record whose values they are; None: the record itself."""
    names: Mapping[str, str]
    """Keys of the metrics, with their names in a table or picture."""


CURVE_TABLES = {
    "rl": CurveTable(
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
    "preferences": CurveTable(
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
    "attention": CurveTable(
        "attention",
        None,
        {
            "attention_max_over_mean": "busiest rank",
            "attention_moved_rows": "moved rows",
            "attention_bytes": "bytes sent",
        },
    ),
    "sites": CurveTable(
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
"""Tables of curves by their key in the JSON report of `moefold inspect`."""


@dataclass(frozen=True)
class MetricCurve:
    """One metric over the steps at which it was recorded."""

    name: str
    """Key of the `names` of a `CurveTable`."""
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
    """Read the curves of each table from metrics.jsonl; none of metrics that the run has not.

    Values of other types than numbers count as not recorded.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    found: dict[str, dict[str, dict[float, float]]] = {
        key: {name: {} for name in table.names} for key, table in CURVE_TABLES.items()
    }
    for _, record in read_records(run_dir / METRICS_FILE):
        step = finite_number(None if record is None else record.get("step"))
        for key, curves in found.items():
            section = CURVE_TABLES[key].section
            metrics: Any = record if record is None or section is None else record.get(section)
            if not isinstance(metrics, dict) or np.isnan(step):
                continue
            for name, values in curves.items():
                value = finite_number(metrics.get(name))
                if not np.isnan(value):
                    values[step] = value
    return {
        key: [
            MetricCurve(name, np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
            for name, values in curves.items()
            if values
        ]
        for key, curves in found.items()
    }
