"""Expert balance of a run: the loads of its experts, for `moefold inspect`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.config.sections.moe import TRACE_FOLDER
from moefold.data.routing_trace import MANIFEST, RoutingTrace
from moefold.errors import ConfigError
from moefold.metrics.expert_counts import COUNTS_FILE, Array, ExpertCounts, read_expert_counts
from moefold.metrics.reader import METRICS_FILE, finite_number, read_steps

_MIN_POSITIVE = np.finfo(np.float64).tiny
_COUNTS_PER_CHUNK = 1 << 22
"""Limit of the counts that are converted to floats at a time, at least one step."""
_MAX_TRACED_COUNTS = 1 << 28
"""Limit of steps * layers * experts of a trace, whose counts take 4 bytes each in memory."""
END_WINDOW_DIVISOR = 10
"""Divisor: values for the start and end of a run are means over 1/10 of its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSummary:
    """Balance of one MoE layer. Start and end are the first and the last tenth of the recorded steps."""

    layer: int
    load_start: float
    load_end: float
    load_worst: float
    worst_step: int
    load_cv: float | None
    dead_experts: tuple[int, ...] | None
    dropped_fraction: float | None
    router_entropy: float | None
    share: tuple[float, ...] | None


def shares_of(counts: Array) -> Array:
    """Return each expert's tokens over the mean of its layer, float64 [bins, L, E]."""
    means = counts.mean(2, keepdims=True)
    shares: Array = np.divide(counts, means, out=np.zeros_like(counts), where=means > 0)
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBalance:
    """Load of every MoE layer over the recorded steps."""

    run_dir: Path
    source: str
    """File or folder of the loads."""
    layers: tuple[int, ...]
    """Indices of the L MoE layers in the whole model."""
    steps: Array
    """Steps of `load` and `counts`, int64 [N], ascending."""
    load: Array
    """Routed tokens of the most loaded expert over the mean, float64 [N, L]."""
    counts: Array | None
    """Routed tokens of each expert, [N, L, E], or None if the run wrote no counts and no trace."""
    drop_steps: Array
    """Steps of `dropped`, int64 [M]."""
    dropped: Array
    """Dropped tokens divided by all routed tokens, float64 [M, L]. NaN means not recorded."""
    entropy: Array
    """Entropy of a token's scores in nats, float64 [M, L]. NaN means not recorded."""

    @property
    def cut_short(self) -> str:
        """Message if the loads end before the run's metrics by at least one recording interval, else ""."""
        last = int(self.steps[-1])
        end = int(self.drop_steps[-1]) if len(self.drop_steps) else 0
        interval = int(self.steps[-1] - self.steps[-2]) if len(self.steps) > 1 else 1
        return f"counts end at step {last} of {end}" if end - last >= interval else ""

    @property
    def num_experts(self) -> int | None:
        """Number of experts, E, or None without counts."""
        return None if self.counts is None else int(self.counts.shape[2])

    def shares(self, max_bins: int) -> Array:
        """Return each expert's tokens over the mean, float64 [bins, L, E], in at most `max_bins` step ranges."""
        assert self.counts is not None, "a run without counts has no shares"
        sums = [self.counts[a:b].sum(0, dtype=np.float64) for a, b in split_into_bins(len(self.steps), max_bins)]
        return shares_of(np.stack(sums))

    def summaries(self) -> list[LayerSummary]:
        """Return the summary of each layer."""
        n = max(1, len(self.steps) // END_WINDOW_DIVISOR)
        last = (self.drop_steps >= self.steps[-n]) & (self.drop_steps <= self.steps[-1])
        return [self._summary(i, n, last) for i in range(len(self.layers))]

    def _summary(self, i: int, n: int, last: Array) -> LayerSummary:
        load = self.load[:, i]
        end = None if self.counts is None else np.asarray(self.counts[-n:, i], dtype=np.float64)
        routed_E = None if end is None else end.sum(0)
        # _MIN_POSITIVE: a step without routed tokens has a CV and shares of 0.
        cv = None if end is None else float((end.std(1) / np.maximum(end.mean(1), _MIN_POSITIVE)).mean())
        return LayerSummary(
            layer=self.layers[i],
            load_start=float(load[:n].mean()),
            load_end=float(load[-n:].mean()),
            load_worst=float(load.max()),
            worst_step=int(self.steps[load.argmax()]),
            load_cv=cv,
            dead_experts=None if routed_E is None else tuple(np.flatnonzero(routed_E == 0).tolist()),
            dropped_fraction=_mean(self.dropped[last, i]),
            router_entropy=_mean(self.entropy[last, i]),
            share=None if routed_E is None else tuple((routed_E / np.maximum(routed_E.mean(), _MIN_POSITIVE)).tolist()),
        )


def split_into_bins(count: int, max_bins: int) -> list[tuple[int, int]]:
    """Split range(count) into at most `max_bins` ranges (start, end) of nearly equal length."""
    bins = min(count, max_bins)
    return [(i * count // bins, (i + 1) * count // bins) for i in range(bins)]


def read_balance(run_dir: Path) -> ExpertBalance:
    """Read the expert load of a run from expert_counts.bin, else from its routing trace, else from metrics.jsonl.

    Raises:
        ConfigError: the folder is not a run, has no MoE layer or no step yet, or a file cannot be read.
    """
    if not run_dir.is_dir():
        what = "is not a folder" if run_dir.exists() else "does not exist"
        raise ConfigError(f"run {str(run_dir)!r} {what}; name the run.dir of a training run")
    records = read_steps(run_dir)
    counts = read_expert_counts(run_dir)
    source = COUNTS_FILE
    if counts is None or not len(counts.steps):
        counts = _count_trace(run_dir)

        source = f"{TRACE_FOLDER}/"
    if counts is not None and len(counts.steps):
        steps = counts.steps
        layers = counts.layers
        chunk_steps = max(1, _COUNTS_PER_CHUNK // (counts.counts.shape[1] * counts.counts.shape[2]))
        chunks = split_into_bins(len(steps), -(-len(steps) // chunk_steps))
        load = np.concatenate([_max_over_mean(counts.counts[a:b]) for a, b in chunks])
    else:
        counts = None
        source = METRICS_FILE
        steps, layers, load = _read_load(run_dir, records)
    drop_steps, dropped, entropy = _read_layers(records, len(layers))
    return ExpertBalance(
        run_dir=run_dir,
        source=source,
        layers=layers,
        steps=steps,
        load=load,
        counts=None if counts is None else counts.counts,
        drop_steps=drop_steps,
        dropped=dropped,
        entropy=entropy,
    )


def _max_over_mean(counts: Array) -> Array:
    """Return max over mean along E of counts [N, L, E]."""
    counts_NLE = np.asarray(counts, dtype=np.float64)
    load: Array = counts_NLE.max(2) / np.maximum(counts_NLE.mean(2), _MIN_POSITIVE)
    return load


def _count_trace(run_dir: Path) -> ExpertCounts | None:
    """Return the expert counts of a run's routing trace, or None without a trace."""
    if not (run_dir / TRACE_FOLDER / MANIFEST).is_file():
        return None
    trace = RoutingTrace(run_dir, "run")
    shape = trace.shape
    num_counts = len(trace.steps) * len(shape.layers) * shape.num_routed_experts
    if not shape.layers or num_counts > _MAX_TRACED_COUNTS:
        raise ConfigError(
            f"the trace of {str(run_dir)!r} has {len(trace.steps)} steps, {len(shape.layers)} layers and "
            f"{shape.num_routed_experts} experts; at least one layer and at most {_MAX_TRACED_COUNTS:,} "
            "counts can be shown"
        )
    counts = np.zeros((len(trace.steps), len(shape.layers), shape.num_routed_experts), dtype=np.uint32)
    for i, step in enumerate(trace.steps):
        for j, choices in enumerate(trace.step(step)):
            counts[i, j] = shape.count_experts(choices, step)
    return ExpertCounts(layers=shape.layers, steps=np.array(trace.steps, dtype=np.int64), counts=counts)


def _read_load(run_dir: Path, records: list[dict[str, Any]]) -> tuple[Array, tuple[int, ...], Array]:
    """Return (steps, layers, load) of metrics.jsonl."""
    if not records:
        raise ConfigError(
            f"run {str(run_dir)!r} holds no step of training ({METRICS_FILE}); name the run.dir of a training run"
        )
    rows = [_record_loads(run_dir, record) for record in records]
    if not all(rows):
        raise ConfigError(f"run {str(run_dir)!r} is of a model without MoE layers; there are no experts to inspect")
    if len({len(row) for row in rows}) > 1:
        raise ConfigError(f"{run_dir / METRICS_FILE} is damaged: its steps have loads of different numbers of layers")
    recorded = [layer.get("layer") for layer in _record_layers(records[-1])]
    numbers = [number for number in recorded if type(number) is int and number >= 0]
    if not len(numbers) == len(recorded) == len(rows[-1]):
        numbers = list(range(len(rows[-1])))
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    return steps, tuple(numbers), np.array(rows)


def _record_loads(run_dir: Path, record: dict[str, Any]) -> list[float]:
    loads = record.get("expert_load", [])
    if not isinstance(loads, list):
        raise ConfigError(f"{run_dir / METRICS_FILE} is damaged: expert_load of step {record['step']} is not a list")
    return [finite_number(load) for load in loads]


def _record_layers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `moe_layers` records of a step, or [] for another form."""
    layers = record.get("moe_layers")
    is_list = isinstance(layers, list) and all(isinstance(layer, dict) for layer in layers)
    return layers if is_list and layers is not None else []


def _read_layers(records: list[dict[str, Any]], num_layers: int) -> tuple[Array, Array, Array]:
    """Return (steps, dropped, entropy) of metrics.jsonl. A record without layers has one drop rate for all layers."""
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    dropped, entropy = np.full((2, len(records), num_layers), np.nan)
    for i, record in enumerate(records):
        layers = _record_layers(record)
        if len(layers) == num_layers:
            dropped[i] = [finite_number(layer.get("dropped_fraction")) for layer in layers]
            entropy[i] = [finite_number(layer.get("router_entropy")) for layer in layers]
        else:
            dropped[i] = finite_number(record.get("dropped_fraction"))
    return steps, dropped, entropy


def _mean(values: Array) -> float | None:
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if len(finite) else None
