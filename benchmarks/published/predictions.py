"""Predictions of published measurements, with the best choice of the values that a source does not print.

    moefold plan-accuracy tests/planner/published/calibration.csv

prints them in a checkout. The errors of rows that the cost model was fitted on are also given for a fit without their
configuration, as `benchmarks/fit_planner.py --unseen` wrote them to `unseen_errors.json`.
"""

import json
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from zlib import crc32

from benchmarks.published.models import load_published_model
from benchmarks.published.rows import PublishedCase, parse_case
from moefold.cost.hardware import GRACE_BLACKWELL, load_device
from moefold.planner import accuracy
from moefold.planner.accuracy import (
    COLUMNS,
    OUT_OF_MEMORY,
    Accuracy,
    MeasuredRow,
    Prediction,
    SkipRowError,
    parse_measured,
    predict_own_run,
)
from moefold.planner.cost_model.step import CostModel
from moefold.planner.cost_model.workload import BytesPerParam, TrainingWorkload
from moefold.planner.mapping import ParallelMapping
from moefold.planner.memory.budget import MemoryModel
from moefold.planner.model_spec import ModelSpec, train_flops
from moefold.planner.search.space import NON_LAYER_STAGE_PARTS
from moefold.topology.layout import divisors

MICRO_BATCHES = (1, 2, 4, 8)
MAX_VIRTUAL_STAGES = 24
SELECTIVE_RECOMPUTE_PARTS = ("norms", "expert_activation", "mla_up", "dense_mlp", "shared_experts")
"""Parts that a source without printed recomputation may recompute, cheapest first."""

STATE_BYTES_CANDIDATES = (BytesPerParam(4, 4, 4), BytesPerParam(4, 4, 2), BytesPerParam(0, 2, 2))
"""Dtypes of the states if a source does not print its optimizer's precision: the first that fits of float32, bfloat16
moments, all bfloat16."""

MAX_OVERESTIMATE = 1.5
"""Estimated memory over the memory of the device up to which a row's recomputation is believed: the run did fit. The
largest excess of such rows is 1.49, in 8 bits, whose smaller saved tensors are not counted. A row above it cannot have
run as it is read: Llama 4 Scout on 256 GB200 without recomputation is at 3.6."""


def validate_predictions(path: Path) -> Accuracy:
    """Predict every row of a table that can be priced, of moefold or of other software.

    Raises:
        ConfigError: the file cannot be read or lacks a column.
    """
    return accuracy.validate_predictions(path, predict_row)


def predict_row(row: MeasuredRow) -> Prediction:
    """Predict a row, of moefold or of other software.

    Raises:
        SkipRowError: it cannot be priced.
    """
    return predict_own_run(row) if row.is_own else predict(parse_case(row))


def row_key(row: MeasuredRow) -> str:
    """Return a short key of a row's cells, without its method and note, for the table of unseen errors."""
    cells = "|".join(row[column] for column in COLUMNS[:-2])
    return f"{crc32(cells.encode()):08x}"


@lru_cache(maxsize=1)
def _unseen_errors() -> dict[str, float]:
    """Return the cross-validated errors in percent that `benchmarks/fit_planner.py --unseen` wrote, by `row_key`."""
    found: dict[str, float] = json.loads((Path(__file__).parent / "unseen_errors.json").read_text(encoding="utf-8"))
    return found


def predict(case: PublishedCase) -> Prediction:
    """Predict one case, with the best choice of the values that its source does not print.

    Raises:
        SkipRowError: no open choice divides the batch, or the value is not a number.
    """
    model_spec = load_published_model(case.model)
    measured = parse_measured(case.row["value"])
    found = _fastest_fitting(model_spec, case)
    predicted: float | str = OUT_OF_MEMORY if found is None else _predicted_metric(model_spec, case, found[0])
    mapping, workload = found or (case.mapping, case.workload)
    return Prediction(
        row=case.row,
        measured=measured,
        predicted=predicted,
        mapping=mapping,
        workload=workload,
        unseen_error_pct=_unseen_errors().get(row_key(case.row)),
    )


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
    return CostModel(load_published_model(model), load_device(gpu), workload)


@lru_cache(maxsize=1024)
def _memory_model(model: str, gpu: str, workload: TrainingWorkload) -> MemoryModel:
    return MemoryModel(load_published_model(model), workload, load_device(gpu))


def _fastest_fitting(model_spec: ModelSpec, case: PublishedCase) -> tuple[ParallelMapping, TrainingWorkload] | None:
    """Return the fastest open choice that fits, or None if none does."""
    cost_model = _cost_model(model_spec.name, case.gpu, case.workload)
    tried = (_first_fitting(model_spec, case, choice) for choice in _open_mappings(model_spec, case))
    return min(filter(None, tried), key=lambda found: cost_model.step_time(found[0]).total_s, default=None)


def _open_mappings(model_spec: ModelSpec, case: PublishedCase) -> list[ParallelMapping]:
    m = case.mapping
    num_experts = model_spec.config.routed.num_experts if model_spec.config.routed else m.ep
    if num_experts % m.ep:
        raise SkipRowError(f"ep={m.ep} does not divide {num_experts} experts")
    local = case.workload.global_batch_size // m.dp
    sizes = [m.mbs] if m.mbs else [size for size in MICRO_BATCHES if local % size == 0]
    if m.mbs and local % m.mbs:
        raise SkipRowError(f"micro-batches of {m.mbs} do not divide {local} samples of a rank")
    if m.pp * max(1, m.vpp) > len(model_spec.layers) + len(NON_LAYER_STAGE_PARTS):
        raise SkipRowError(f"pp={m.pp} with vpp={m.vpp} is more stages than {len(model_spec.layers)} layers make")
    stages = [m.vpp]
    if not m.vpp:
        stages = [v for v in divisors(max(1, len(model_spec.layers) // m.pp)) if v <= MAX_VIRTUAL_STAGES]
    return [replace(m, mbs=size, vpp=vpp) for size, vpp in product(sizes, stages)]


def _first_fitting(
    model_spec: ModelSpec, case: PublishedCase, mapping: ParallelMapping
) -> tuple[ParallelMapping, TrainingWorkload] | None:
    """Return the mapping with least sharding, least recomputation and the highest optimizer precision that fits.

    The recomputation of the row comes first, and may exceed the memory by `MAX_OVERESTIMATE`.
    """
    selective = [SELECTIVE_RECOMPUTE_PARTS[:i] for i in range(len(SELECTIVE_RECOMPUTE_PARTS) + 1)]
    options: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(parts, ()) for parts in selective]
    if not case.is_fully_specified:
        if case.workload.is_megatron and case.gpu in GRACE_BLACKWELL:
            # Recipes for Grace hosts offload activations before they recompute whole blocks.
            options.append((SELECTIVE_RECOMPUTE_PARTS, ("expert_activation",)))
        options += [(("norms", "moe"), ()), (("layer",), ())]
    if case.recompute is not None:
        options.insert(0, (case.recompute, ()))
    all_states = STATE_BYTES_CANDIDATES[:1] if case.is_fully_specified else STATE_BYTES_CANDIDATES
    zeros = (mapping.zero,) if case.is_fully_specified or mapping.pp > 1 else dict.fromkeys((mapping.zero, 3))
    for zero, (parts, offloaded), states in product(zeros, options, all_states):
        offload = tuple(dict.fromkeys((*mapping.offload, *offloaded)))
        tried = replace(mapping, recompute=parts, offload=offload, zero=zero)
        workload = replace(case.workload, state_bytes=states)
        estimate = _memory_model(model_spec.name, case.gpu, workload).estimate(tried)
        if estimate.total <= estimate.capacity * (MAX_OVERESTIMATE if parts == case.recompute else 1.0):
            return tried, workload
    return None
