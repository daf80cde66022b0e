"""Curves of single metrics over the steps of metrics.jsonl: reinforcement learning, attention, sites. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.metrics.expert_balance import Array, finite_number, split_into_bins
from moefold.metrics.step_metrics import METRICS_FILE, read_records


@dataclass(frozen=True)
class CurveGroup:
    """Metrics of a step, or of one section of its record.

    Attributes:
        title: what they describe.
        section: key of the record; None: the record itself.
        names: name of each metric in a table or picture.
    """

    title: str
    section: str | None
    names: Mapping[str, str]


RL_CURVES = CurveGroup(
    "reinforcement learning",
    "rl",
    {
        "reward": "reward",
        "eval_reward": "held-out reward",
        "length_mean": "length, tokens",
        "entropy": "entropy, nats",
        "mismatch_mean": "mismatch, nats",
    },
)
PREFERENCE_CURVES = CurveGroup(
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
)
ATTENTION_CURVES = CurveGroup(
    "attention",
    None,
    {
        "attention_max_over_mean": "busiest rank",
        "attention_moved_rows": "moved rows",
        "attention_bytes": "bytes sent",
    },
)
"""Of documents with planned attention."""
SITE_CURVES = CurveGroup(
    "rounds of sites",
    "sites",
    {
        "difference": "difference",
        "agreement": "agreement",
        "routing_overlap": "routing overlap",
        "router_distance": "router distance",
        "spike": "loss spike",
    },
)
ENDS = 10
"""The start and the end of a curve are means over a tenth of its values."""


@dataclass(frozen=True)
class MetricCurve:
    """One metric over the steps at which it was recorded."""

    name: str
    """Its key in the record."""
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


def read_curves(run_dir: Path, group: CurveGroup) -> list[MetricCurve]:
    """Read the curves of a run; none of a run without these metrics. Values of other types count as not recorded.

    Raises:
        ConfigError: metrics.jsonl cannot be read.
    """
    found: dict[str, dict[float, float]] = {name: {} for name in group.names}
    for _, record in read_records(run_dir / METRICS_FILE):
        metrics: Any = record if record is None or group.section is None else record.get(group.section)
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
