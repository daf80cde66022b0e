"""Predicted against published throughput, row by row. Torch-free."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf
from pathlib import Path

from moefold.parallel.layout import divisors
from moefold.plan.device import load_device
from moefold.plan.flop_count import train_flops
from moefold.plan.mapping import ParallelMapping
from moefold.plan.memory import MemoryModel
from moefold.plan.model_name import load_model_spec
from moefold.plan.published import OUT_OF_MEMORY, PublishedCase, PublishedRow, SkipRowError, parse_case, read_rows
from moefold.plan.shape import ModelSpec
from moefold.plan.space import NON_LAYER_STAGE_PARTS
from moefold.plan.step_time import CostModel
from moefold.plan.workload import BytesPerParam, TrainingWorkload

MICRO_BATCHES = (1, 2, 4, 8)
MAX_VIRTUAL_STAGES = 24
SELECTIVE_RECOMPUTE_PARTS = ("norms", "expert_activation", "mla_up", "dense_mlp", "shared_experts")
"""What authors who do not print their recomputation may have run again, cheapest first."""

STATE_BYTES_CANDIDATES = (BytesPerParam(4, 4, 4), BytesPerParam(4, 4, 2), BytesPerParam(0, 2, 2))
"""Types of the states, where a source does not print its optimizer's precision: the first that fits of float32,
bfloat16 moments, all bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One row, measured and predicted; a number, or OOM."""

    row: PublishedRow
    measured: float | str
    predicted: float | str
    mapping: ParallelMapping
    workload: TrainingWorkload
    """With the types of the states that the mapping was found to fit with."""

    @property
    def precision(self) -> str:
        """Of the products."""
        return self.workload.precision

    @property
    def error_pct(self) -> float | None:
        """Of the prediction over the measurement; None where one of them is OOM."""
        if isinstance(self.measured, str) or isinstance(self.predicted, str):
            return None
        return (self.predicted / self.measured - 1) * 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """All rows of a table."""

    predictions: tuple[Prediction, ...]
    skipped: dict[str, int]
    """Rows that were not priced, by reason."""

    @property
    def mean_abs_error_pct(self) -> float | None:
        """Over the rows with a number on both sides."""
        return mean_abs_error_pct(self.predictions)

    @property
    def by_gpu_precision(self) -> dict[str, dict[str, float | int | None]]:
        """Rows and mean absolute error for each device and precision."""
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for prediction in self.predictions:
            groups[f"{prediction.row['gpu']} {prediction.precision}"].append(prediction)
        return {
            name: {"rows": len(group), "mean_abs_error_pct": mean_abs_error_pct(group)}
            for name, group in sorted(groups.items())
        }

    @property
    def memory_mistakes(self) -> tuple[Prediction, ...]:
        """Rows that ran and are predicted not to fit, and the other way round."""
        return tuple(p for p in self.predictions if isinstance(p.measured, str) != isinstance(p.predicted, str))

    def as_dict(self) -> dict[str, object]:
        """In the form of `moefold plan-accuracy --json`."""
        return {
            "rows": [_row_as_dict(prediction) for prediction in self.predictions],
            "mean_abs_error_pct": self.mean_abs_error_pct,
            "by_gpu_precision": self.by_gpu_precision,
            "num_skipped": sum(self.skipped.values()),
            "skipped": self.skipped,
        }


def mean_abs_error_pct(predictions: Sequence[Prediction]) -> float | None:
    """Mean of the absolute errors there are; None where there are none."""
    errors = [abs(p.error_pct) for p in predictions if p.error_pct is not None]
    return sum(errors) / len(errors) if errors else None


def validate_predictions(path: Path) -> Accuracy:
    """Predict every row of a table that has a complete mapping.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    predictions, skipped = [], Counter[str]()
    for row in read_rows(path):
        try:
            predictions.append(predict(parse_case(row)))
        except SkipRowError as reason:
            skipped[str(reason)] += 1
    return Accuracy(predictions=tuple(predictions), skipped=dict(skipped.most_common()))


def predict(case: PublishedCase) -> Prediction:
    """Price one case, with the best of what its source leaves open.

    Raises:
        SkipRowError: no choice of what is open divides the batch, or the value is no number.
    """
    shape, measured = load_model_spec(case.model), _parse_measured(case.row["value"])
    found = _fastest_fitting(shape, case)
    predicted: float | str = OUT_OF_MEMORY if found is None else _predicted_metric(shape, case, found[0])
    mapping, workload = found or (case.mapping, case.workload)
    return Prediction(
        row=case.row,
        measured=measured,
        predicted=predicted,
        mapping=mapping,
        workload=workload,
    )


def _parse_measured(text: str) -> float | str:
    if text.upper() == OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    try:
        number = float(text)
    except ValueError:
        raise SkipRowError(f"value {text!r} is no number") from None
    if not 0 < number < inf:
        raise SkipRowError(f"value {text!r} is no speed: it must be a number above 0, or {OUT_OF_MEMORY}")
    return number


def _predicted_metric(model_spec: ModelSpec, case: PublishedCase, mapping: ParallelMapping) -> float:
    tokens = _cost_model(model_spec.name, case.gpu, case.workload).step_time(mapping).tokens_per_s_per_gpu
    w = case.workload
    flops = case.published_flops_per_token or train_flops(
        model_spec, w.seq_len, causal=w.counts_causal_attention, router=False, mtp=w.runs_mtp
    )
    if case.row["metric"] == "tokens_per_s_per_gpu":
        return tokens
    if case.row["metric"] == "tflops_per_gpu":
        return tokens * flops / 1e12
    return tokens * flops / load_device(case.gpu).peak("bf16") * 100


@lru_cache(maxsize=512)
def _cost_model(model: str, gpu: str, workload: TrainingWorkload) -> CostModel:
    return CostModel(load_model_spec(model), load_device(gpu), workload)


@lru_cache(maxsize=1024)
def _memory_model(model: str, gpu: str, workload: TrainingWorkload) -> MemoryModel:
    return MemoryModel(load_model_spec(model), workload, load_device(gpu))


def _fastest_fitting(model_spec: ModelSpec, case: PublishedCase) -> tuple[ParallelMapping, TrainingWorkload] | None:
    """The fastest of the open choices that fits; None where none does."""
    pricer = _cost_model(model_spec.name, case.gpu, case.workload)
    fitting = [
        found
        for choice in _open_mappings(model_spec, case)
        if (found := _first_fitting(model_spec, case, choice)) is not None
    ]
    return min(fitting, key=lambda found: pricer.step_time(found[0]).total_s) if fitting else None


def _open_mappings(model_spec: ModelSpec, case: PublishedCase) -> list[ParallelMapping]:
    m, batch = case.mapping, case.workload.global_batch_size
    local = batch // m.dp
    sizes = [m.mbs] if m.mbs else [size for size in MICRO_BATCHES if local % size == 0]
    if m.mbs and local % m.mbs:
        raise SkipRowError(f"micro-batches of {m.mbs} do not divide {local} samples of a rank")
    if m.pp * max(1, m.vpp) > len(model_spec.layers) + len(NON_LAYER_STAGE_PARTS):
        raise SkipRowError(f"pp={m.pp} with vpp={m.vpp} is more stages than {len(model_spec.layers)} layers make")
    most = min(MAX_VIRTUAL_STAGES, len(model_spec.layers) // m.pp)
    stages = [m.vpp] if m.vpp else [1, *(v for v in divisors(max(1, len(model_spec.layers) // m.pp)) if 1 < v <= most)]
    return [replace(m, mbs=size, vpp=vpp) for size, vpp in product(sizes, stages)]


def _first_fitting(
    model_spec: ModelSpec, case: PublishedCase, mapping: ParallelMapping
) -> tuple[ParallelMapping, TrainingWorkload] | None:
    """The mapping with the least sharding, the least recomputation and the widest optimizer under which it fits."""
    ways = [SELECTIVE_RECOMPUTE_PARTS[:i] for i in range(len(SELECTIVE_RECOMPUTE_PARTS) + 1)]
    if not case.is_fully_specified:
        ways += [("norms", "moe"), ("layer",)]
    if case.recompute is not None:
        ways.insert(0, case.recompute)
    all_states = STATE_BYTES_CANDIDATES[:1] if case.is_fully_specified else STATE_BYTES_CANDIDATES
    zeros = (mapping.zero,) if case.is_fully_specified or mapping.pp > 1 else dict.fromkeys((mapping.zero, 3))
    for zero, parts, states in product(zeros, ways, all_states):
        tried = replace(mapping, recompute=parts, zero=zero)
        workload = replace(case.workload, state_bytes=states)
        if _memory_model(model_spec.name, case.gpu, workload).estimate(tried).fits:
            return tried, workload
    return None


def _row_as_dict(prediction: Prediction) -> dict[str, object]:
    row = prediction.row
    return {
        "source": row["source"],
        "model": row["model"],
        "gpu": row["gpu"],
        "metric": row["metric"],
        "measured": prediction.measured,
        "predicted": prediction.predicted,
        "error_pct": prediction.error_pct,
    }
