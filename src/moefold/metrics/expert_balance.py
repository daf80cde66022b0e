"""How evenly the experts of a run were used: what `moefold inspect` shows, from whatever the run has written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moefold.data.routing_trace import MANIFEST, TRACE_FOLDER, RoutingTrace
from moefold.errors import ConfigError
from moefold.metrics.expert_counts import COUNTS_FILE, ExpertCounts, read_expert_counts
from moefold.metrics.step_metrics import METRICS_FILE, read_records

Array = np.ndarray[Any, np.dtype[Any]]

_MAX_VALUE = 1e300
_MIN_POSITIVE = np.finfo(np.float64).tiny
_COUNTS_PER_CHUNK = 1 << 22
"""So many counts are in memory as floats, or one step of them."""
_MAX_TRACED_COUNTS = 1 << 28
"""Steps times layers times experts of a trace, whose counts are in memory as 4 bytes each."""
END_WINDOW_DIVISOR = 10
"""What is said of the start and of the end of a run is a mean over this part of its steps: a tenth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSummary:
    """The balance of one MoE layer; start and end are the first and the last tenth of the recorded steps."""

    layer: int
    """Number of the layer in the whole model."""
    load_start: float
    """Copies of the fullest expert of a step over the mean, mean over the start; 1 is perfect balance."""
    load_end: float
    """The same at the end."""
    load_worst: float
    """The largest of all steps."""
    worst_step: int
    """The step that had it."""
    load_cv: float | None
    """Standard deviation over mean of the experts' copies in a step, mean over the end; None without counts."""
    dead_experts: tuple[int, ...] | None
    """Experts that got no copy in the end; None without counts."""
    dropped_fraction: float | None
    """Dropped copies over all of them, mean over the end; None if the run did not write it."""
    router_entropy: float | None
    """Entropy of a token's scores in nats, mean over the end; None if the run did not write it."""
    share: tuple[float, ...] | None
    """Copies of each expert over the mean, in the end; None without counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBalance:
    """The load of every MoE layer over the recorded steps."""

    run_dir: Path
    source: str
    """What the loads were read from."""
    layers: tuple[int, ...]
    """Numbers of the MoE layers in the whole model, L of them."""
    steps: Array
    """Steps of `load` and `counts`, int64 [N], ascending."""
    load: Array
    """Copies of the fullest expert over the mean, float64 [N, L]."""
    counts: Array | None
    """Copies of each expert, [N, L, E]; None if the run wrote neither counts nor a trace."""
    drop_steps: Array
    """Steps of `dropped`, int64 [M]."""
    dropped: Array
    """Dropped copies over all of them, float64 [M, L], NaN where it was not written."""
    entropy: Array
    """Entropy of a token's scores in nats, float64 [M, L], NaN where it was not written."""

    @property
    def cut_short(self) -> str:
        """Says that the loads end before the run's metrics do, by more than their own pace; empty if they do not."""
        last = int(self.steps[-1])
        end = int(self.drop_steps[-1]) if len(self.drop_steps) else 0
        pace = int(self.steps[-1] - self.steps[-2]) if len(self.steps) > 1 else 1
        return f"counts end at step {last} of {end}" if end - last >= pace else ""

    @property
    def num_experts(self) -> int | None:
        """E; None without counts."""
        return None if self.counts is None else int(self.counts.shape[2])

    def shares(self, max_bins: int) -> Array:
        """Copies of each expert over the mean, float64 [bins, L, E], in at most `max_bins` equal spans of steps."""
        assert self.counts is not None, "a run without counts has no shares"
        sums = [self.counts[a:b].sum(0, dtype=np.float64) for a, b in split_into_bins(len(self.steps), max_bins)]
        binned: Array = np.stack(sums)
        means = binned.mean(2, keepdims=True)
        shares: Array = np.divide(binned, means, out=np.zeros_like(binned), where=means > 0)
        return shares

    def summaries(self) -> list[LayerSummary]:
        """Each layer by itself."""
        n = max(1, len(self.steps) // END_WINDOW_DIVISOR)
        last = (self.drop_steps >= self.steps[-n]) & (self.drop_steps <= self.steps[-1])
        return [self._summary(i, n, last) for i in range(len(self.layers))]

    def _summary(self, i: int, n: int, last: Array) -> LayerSummary:
        load = self.load[:, i]
        end = None if self.counts is None else np.asarray(self.counts[-n:, i], dtype=np.float64)
        copies = None if end is None else end.sum(0)
        # A step without any copy has no spread, and no shares.
        cv = None if end is None else float((end.std(1) / np.maximum(end.mean(1), _MIN_POSITIVE)).mean())
        return LayerSummary(
            layer=self.layers[i],
            load_start=float(load[:n].mean()),
            load_end=float(load[-n:].mean()),
            load_worst=float(load.max()),
            worst_step=int(self.steps[load.argmax()]),
            load_cv=cv,
            dead_experts=None if copies is None else tuple(np.flatnonzero(copies == 0).tolist()),
            dropped_fraction=_mean(self.dropped[last, i]),
            router_entropy=_mean(self.entropy[last, i]),
            share=None if copies is None else tuple((copies / np.maximum(copies.mean(), _MIN_POSITIVE)).tolist()),
        )


def split_into_bins(count: int, max_bins: int) -> list[tuple[int, int]]:
    """Cut `count` things into at most `max_bins` spans (first, end) of nearly equal length."""
    bins = min(count, max_bins)
    return [(i * count // bins, (i + 1) * count // bins) for i in range(bins)]


def read_balance(run_dir: Path) -> ExpertBalance:
    """Read the load of a run's experts: from expert_counts.bin, else from its trace, else from metrics.jsonl.

    Raises:
        ConfigError: the folder is no run, has no MoE layer or no step yet, or a file cannot be read.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run {str(run_dir)!r} does not exist; name the run.dir of a training run")
    records = [record for _, record in read_records(run_dir / METRICS_FILE) if record is not None]
    counts = read_expert_counts(run_dir)
    source = COUNTS_FILE
    if counts is None or not len(counts.steps):
        counts = _count_trace(run_dir)
        source = f"{TRACE_FOLDER}/"
    if counts is not None and len(counts.steps):
        steps = counts.steps
        layers = counts.layers
        at_once = max(1, _COUNTS_PER_CHUNK // (counts.counts.shape[1] * counts.counts.shape[2]))
        parts = split_into_bins(len(steps), -(-len(steps) // at_once))
        load = np.concatenate([_max_over_mean(counts.counts[a:b]) for a, b in parts])
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
    """Max over mean of [N, L, E]."""
    whole = np.asarray(counts, dtype=np.float64)
    load: Array = whole.max(2) / np.maximum(whole.mean(2), _MIN_POSITIVE)
    return load


def _count_trace(run_dir: Path) -> ExpertCounts | None:
    """The counts that a run's trace adds up to; None without a trace."""
    if not (run_dir / TRACE_FOLDER / MANIFEST).is_file():
        return None
    trace = RoutingTrace(run_dir, "run")
    shape = trace.shape
    num_counts = len(trace.steps) * len(shape.layers) * shape.num_experts
    if not shape.layers or num_counts > _MAX_TRACED_COUNTS:
        raise ConfigError(
            f"the trace of {str(run_dir)!r} has {len(trace.steps)} steps, {len(shape.layers)} layers and "
            f"{shape.num_experts} experts, of which at least one layer and at most {_MAX_TRACED_COUNTS:,} counts can be shown"
        )
    counts = np.zeros((len(trace.steps), len(shape.layers), shape.num_experts), dtype=np.uint32)
    for i, step in enumerate(trace.steps):
        for j, choices in enumerate(trace.step(step)):
            counts[i, j] = np.bincount(
                shape.check_expert_indices(choices, step, "the trace").ravel(), minlength=shape.num_experts
            )
    return ExpertCounts(layers=shape.layers, steps=np.array(trace.steps, dtype=np.int64), counts=counts)


def _read_load(run_dir: Path, records: list[dict[str, Any]]) -> tuple[Array, tuple[int, ...], Array]:
    """(steps, layers, load) of metrics.jsonl."""
    if not records:
        raise ConfigError(
            f"run {str(run_dir)!r} holds no step of training ({METRICS_FILE}); name the run.dir of a training run"
        )
    rows = [_record_loads(run_dir, record) for record in records]
    if not all(rows):
        raise ConfigError(f"run {str(run_dir)!r} is of a model without MoE layers; there are no experts to inspect")
    if len({len(row) for row in rows}) > 1:
        raise ConfigError(f"{run_dir / METRICS_FILE} is damaged: its steps have loads of different numbers of layers")
    named = [layer.get("layer") for layer in _record_layers(records[-1])]
    numbers = [number for number in named if type(number) is int and number >= 0]
    if not len(numbers) == len(named) == len(rows[-1]):
        numbers = list(range(len(rows[-1])))
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    return steps, tuple(numbers), np.array(rows)


def _record_loads(run_dir: Path, record: dict[str, Any]) -> list[float]:
    found = record.get("expert_load", [])
    if not isinstance(found, list):
        raise ConfigError(f"{run_dir / METRICS_FILE} is damaged: expert_load of step {record['step']} is no list")
    return [_number(load) for load in found]


def _record_layers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a step says of each MoE layer; nothing where it says it in another form."""
    found = record.get("moe_layers")
    is_list = isinstance(found, list) and all(isinstance(layer, dict) for layer in found)
    return found if is_list and found is not None else []


def _read_layers(records: list[dict[str, Any]], num_layers: int) -> tuple[Array, Array, Array]:
    """(steps, dropped, entropy) of metrics.jsonl, which gives all layers one drop rate if not each its own."""
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    dropped, entropy = np.full((2, len(records), num_layers), np.nan)
    for i, record in enumerate(records):
        layers = _record_layers(record)
        if len(layers) == num_layers:
            dropped[i] = [_number(layer.get("dropped_fraction")) for layer in layers]
            entropy[i] = [_number(layer.get("router_entropy")) for layer in layers]
        else:
            dropped[i] = _number(record.get("dropped_fraction"))
    return steps, dropped, entropy


def _number(value: Any) -> float:
    """Return a measurement; NaN for what is none, be it of another type or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_VALUE:
        return np.nan
    return float(value)


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
