"""Comparison of a distributed run with the oracle: the largest relative error of every number and tensor, by name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from moefold.config.chosen import chosen_in
from moefold.config.groups.context import ContextPart
from moefold.config.groups.loss import OracleLoss
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.schema import Config
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.dataset import ProgramData
from moefold.data.sampler import Sampler
from moefold.message_text import format_list
from moefold.metrics.moe_metrics import MoELayerMetrics
from moefold.model.transformer import build_model
from moefold.model.weight_init import draw_adapter_outputs, init_weights
from moefold.objectives.recipe_loss import recipe_loss
from moefold.parallel.context_parallel import sequence_positions
from moefold.progress import ProgressCallback, ignore_progress
from moefold.train.step_meter import StepResult
from moefold.verify.distributed_run import DistributedRecord, open_samples
from moefold.verify.no_formula import no_formula
from moefold.verify.oracle import Oracle, OracleBatch, OracleStep, Weights
from moefold.verify.oracle_objectives import objective_of
from moefold.verify.read_record import ReadRecord

ROUNDING_SHARE = 1e-13
"""Largest gradient that counts as rounding, as a share of the largest gradient of its layer."""


TENSOR_PARTS = ("initial", "gradients", "weights")
"""Compared tensors of a record, in the order of their computation."""


@dataclass(frozen=True)
class OracleRecord:
    """Results of the single-process oracle, or of one rank of the same code."""

    initial: Weights
    gradients: Weights
    weights: Weights
    steps: Sequence["OracleStep | StepResult"]
    eval_loss: float
    rounding_gain: float = 0.0
    """Maximum change of a weight by AdamW in all steps, divided by a tiny gradient's magnitude: steps * lr / eps."""
    has_program_objective: bool = False
    """True if the objective was given, instead of the recipe's."""


@dataclass(frozen=True)
class NamedError:
    """Largest relative error of one number or tensor."""

    name: str
    error: float


def run_oracle(
    cfg: Config,
    num_steps: int,
    on_progress: ProgressCallback = ignore_progress,
    *,
    objective: OracleLoss | None = None,
    data: ProgramData | None = None,
) -> OracleRecord:
    """Train some optimizer steps of the oracle in float64 in this process.

    Args:
        objective: the loss of a micro-batch. None means the recipe's loss.
        data: the samples of data.kind="program". None means the recipe's samples.

    Raises:
        NoFormulaError: the oracle has no formula for a kind, key, parameter, buffer or part of a sample.
    """
    on_progress("oracle, building the model")
    dataset = data or open_samples(cfg)
    size = cfg.train.global_batch_size
    model = build_model(cfg)
    buffers = set(model.state_dict()) - dict(model.named_parameters()).keys()
    init_weights(model, cfg.model, cfg.run.seed)
    draw_adapter_outputs(model, cfg.model, cfg.run.seed)
    initial = {name: p.detach().double() for name, p in model.named_parameters()}
    reads = ReadRecord()
    watched = reads.watch(cfg)
    loss = objective or objective_of(recipe_loss(watched.align, watched.train))
    oracle = Oracle(
        cfg, {name: p.clone() for name, p in initial.items()}, token_chunks(cfg.parallel, cfg.train), loss, reads=reads
    )
    if unknown := sorted(buffers - oracle.router.buffers().keys()):
        no_formula(f"the buffer {format_list(unknown)}", "verify/oracle_routing.py")
    initial |= {name: buffer.clone() for name, buffer in oracle.router.buffers().items()}
    steps = []
    for i in range(num_steps):
        on_progress(f"oracle, step {i + 1} of {num_steps}")
        steps.append(oracle.step(oracle_batch(dataset.train, cfg.train, range(i * size, (i + 1) * size))))
    on_progress("oracle, evaluation")
    eval_loss = oracle.evaluate(oracle_batch(dataset.validation, cfg.train, range(size)))
    oracle.check_keys()
    weights = {name: w.detach() for name, w in oracle.weights.items()} | oracle.router.buffers()
    gain = _rounding_amplification(cfg.train, num_steps)
    return OracleRecord(
        initial, steps[0].gradients, weights, tuple(steps), eval_loss, gain, has_program_objective=objective is not None
    )


def one_rank_record(train: TrainConfig, alone: DistributedRecord) -> OracleRecord:
    """Return the results of one rank of the same code, which replace the oracle's."""
    gain = _rounding_amplification(train, len(alone.steps))
    return OracleRecord(alone.initial, alone.gradients, alone.weights, alone.steps, alone.eval_loss, gain)


def _rounding_amplification(train: TrainConfig, num_steps: int) -> float:
    return num_steps * train.lr / chosen_in(train, OptimizerPart).smallest_divisor


def compare_records(oracle: OracleRecord, ranks: Sequence[DistributedRecord]) -> list[NamedError]:
    """Compare every number and tensor of the ranks with the oracle, and return the errors, largest first.

    The error of a tensor is its largest absolute deviation divided by the largest magnitude of the oracle's tensor. The
    error of a number is its relative deviation. The error is infinite if a tensor is missing on one side, has another
    shape, or contains NaN.

    A gradient that is zero (`zero_gradients`), exactly or up to rounding, has no magnitude of its own: its deviation is
    divided by the largest gradient of its layer. If the gradient is only rounding, or the weight is zero, AdamW's share
    of the deviation of the weight is subtracted. The rest is divided by the largest weight of the layer. A number that
    is exactly zero in the oracle, or a tensor of a layer of zeros, is compared by its absolute deviation.

    Raises:
        NoFormulaError: the loss of the ranks is not the oracle's loss.
    """
    for record in ranks:
        if record.program_loss and not oracle.has_program_objective:
            no_formula(f"the loss {record.program_loss} of the program", "verify/oracle_objectives.py")
    errors = []
    for rank, record in enumerate(ranks):
        for i, (actual, expected) in enumerate(zip(record.steps, oracle.steps, strict=True)):
            for term in ("loss", "aux_loss", "z_loss", "mtp_loss", "indexer_loss", "grad_norm"):
                name = f"step {i + 1} {term} (rank {rank})"
                errors.append(NamedError(name, _relative_error(getattr(actual, term), getattr(expected, term))))
            errors += _layer_errors(f"step {i + 1}", f"(rank {rank})", actual.moe_layers, expected.moe_layers)
        errors.append(NamedError(f"eval_loss (rank {rank})", _relative_error(record.eval_loss, oracle.eval_loss)))
    for part, error_scales in _error_scales(oracle).items():
        errors += _tensor_errors(part, getattr(oracle, part), error_scales, [getattr(record, part) for record in ranks])
    return sorted(errors, key=lambda error: -error.error)


def sort_by_cause(differences: Iterable[NamedError], weights: Iterable[str]) -> list[NamedError]:
    """Sort differences by closeness to the cause: tensors by part and layer, then numbers by step.

    A wrong forward pass changes all later layers. A wrong backward pass, with correct losses in the first step, changes
    the gradients of earlier layers, which then come last.

    Args:
        weights: names of parameters and buffers in the order of the model.
    """
    errors = list(differences)
    step_one = [error.name for error in errors if error.name.startswith("step 1 ")]
    direction = 1 if any(not name.startswith("step 1 grad_norm") for name in step_one) else -1
    places = {name: number for number, name in enumerate(weights)}

    def place(error: NamedError) -> tuple[int, int, int]:
        part, name, *words = error.name.split()
        if part in TENSOR_PARTS:
            return TENSOR_PARTS.index(part), places.get(name, -1) * (1 if part == "initial" else direction), 0
        if part != "step":
            return len(TENSOR_PARTS) + 1, 0, 0
        return len(TENSOR_PARTS), int(name), int(words[1]) if words[0] == "layer" else -1

    return sorted(errors, key=place)


def zero_gradients(gradients: Weights) -> list[str]:
    """Return the parameters whose gradient is zero, exactly or up to rounding, compared with others of their layer.

    Such a gradient is mathematically zero, such as for the biases of keys without RoPE: a constant added to all scores
    of a query changes no probability. Or no loss of the step depends on the parameter.
    """
    layer_scales = _layer_scales(gradients)
    return [name for name, x in _scales(gradients).items() if x <= ROUNDING_SHARE * layer_scales[_layer_of(name)]]


def token_chunks(parallel: ParallelConfig, train: TrainConfig) -> list[list[int]]:
    """Return the sequence positions of each (cp, tp) rank, as sharded between sub-layers by sequence parallelism."""
    chunks: list[list[int]] = []
    context = chosen_in(parallel, ContextPart)
    for cp_rank in range(parallel.cp):
        positions = torch.as_tensor(sequence_positions(context, train.seq_len, parallel.cp, cp_rank))
        chunks += [chunk.tolist() for chunk in positions.chunk(parallel.tp)]
    return chunks


def oracle_batch(split: Sampler, train: TrainConfig, indices: Iterable[int]) -> OracleBatch:
    """Build a global batch from the samples of these indices."""
    length = train.seq_len
    reads = ReadRecord()
    read_samples = [split.annotated_sample(index) for index in indices]
    samples = [reads.watch(sample) for sample in read_samples]
    documents = [np.zeros(length + 1) if sample.document_ids is None else sample.document_ids for sample in samples]
    weights = [np.ones(length) if sample.weights is None else sample.weights for sample in samples]
    scales = [np.ones(length) if sample.weight_scale is None else sample.weight_scale for sample in samples]
    no_padding = np.zeros(length + 1, dtype=np.bool_)
    padding = np.stack([no_padding if sample.is_padding is None else sample.is_padding for sample in samples])
    columns = {}
    for kind in ("token_columns", "sample_columns"):
        for name in getattr(samples[0], kind):
            columns[name] = torch.from_numpy(np.stack([getattr(sample, kind)[name] for sample in samples]))
    tokens = np.stack([sample.tokens for sample in samples])
    if unread := sorted({name for sample in read_samples for name in reads.unread(sample)}):
        no_formula(f"{format_list(unread)} of a sample", "verify/compare.py")
    return OracleBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(np.stack(documents)),
        torch.from_numpy(np.stack(weights) * ~(padding[:, 1:] | padding[:, :-1])).double(),
        torch.from_numpy(np.stack(scales)),
        torch.from_numpy(~padding[:, :-1]),
        columns,
    )


def _layer_errors(
    step: str, rank: str, layers: Sequence[MoELayerMetrics], oracle_layers: Sequence[MoELayerMetrics]
) -> list[NamedError]:
    """Return the errors of all metrics of each MoE layer."""
    errors = []
    for actual, expected in zip(layers, oracle_layers, strict=True):
        for field in fields(expected):
            a = getattr(actual, field.name)
            b = getattr(expected, field.name)
            if a is None or b is None:
                error = 0.0 if a is b else float("inf")
            else:
                error = _relative_error(a, b)
            errors.append(NamedError(f"{step} layer {expected.layer} {field.name} {rank}", error))
    return errors


def _layer_of(name: str) -> str:
    """Return the layer of a parameter, or the part of the model outside of layers."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


def _scales(tensors: Weights) -> dict[str, float]:
    """Return the largest magnitude of each tensor."""
    return {name: float(tensor.abs().max()) for name, tensor in tensors.items()}


def _layer_scales(tensors: Weights) -> dict[str, float]:
    """Return the largest magnitude of the tensors of each layer."""
    scales: dict[str, float] = {}
    for name, scale in _scales(tensors).items():
        scales[_layer_of(name)] = max(scale, scales.get(_layer_of(name), 0.0))
    return scales


@dataclass(frozen=True)
class _ErrorScale:
    """Rounding and scale for the deviation of a tensor without its own magnitude."""

    rounding: float
    """Deviation explained by rounding."""
    scale: float
    """Divisor of the rest. 0: none."""


def _error_scales(oracle: OracleRecord) -> dict[str, dict[str, _ErrorScale]]:
    """Return the error scales of initial weights, gradients and weights without their own magnitude."""
    layer_gradients = _layer_scales(oracle.gradients)
    gradient_scales = _scales(oracle.gradients)
    weight_scales = _scales(oracle.weights)
    layer_initial = _layer_scales({name: oracle.initial[name] for name in oracle.gradients})
    scales = _layer_scales({name: oracle.weights[name] for name in oracle.gradients})
    initial = {
        name: _ErrorScale(0.0, layer_initial.get(_layer_of(name), 0.0))
        for name, x in _scales(oracle.initial).items()
        if x == 0
    }
    gradients = {}
    weights = {name: _ErrorScale(0.0, scales.get(_layer_of(name), 0.0)) for name, x in weight_scales.items() if x == 0}
    for name in zero_gradients(oracle.gradients):
        layer = _layer_of(name)
        gradients[name] = _ErrorScale(0.0, layer_gradients[layer])
        # A weight with an exactly zero gradient keeps its own scale: later steps may have a gradient (idle experts).
        if gradient_scales[name] > 0 or weight_scales[name] == 0:
            rounding = ROUNDING_SHARE * layer_gradients[layer] * oracle.rounding_gain
            weights[name] = _ErrorScale(rounding, scales[layer])
    return {"initial": initial, "gradients": gradients, "weights": weights}


def _tensor_errors(
    part: str, expected: Weights, error_scales: Mapping[str, _ErrorScale], actual: Sequence[Weights]
) -> list[NamedError]:
    errors = []
    names = set(expected).union(*actual)
    for name in sorted(names):
        gathered = [tensors[name] for tensors in actual if name in tensors]
        if not gathered or name not in expected:
            errors.append(NamedError(f"{part} {name} (missing on one side)", float("inf")))
        errors += [
            NamedError(f"{part} {name}", _tensor_error(tensor, expected[name], error_scales.get(name)))
            for tensor in gathered
            if name in expected
        ]
    return errors


def _tensor_error(actual: Tensor, expected: Tensor, error_scale: _ErrorScale | None) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    deviation = float((actual.double() - expected).abs().max())
    if error_scale is None:
        return _error_ratio(deviation, float(expected.abs().max()))
    beyond_rounding = deviation - min(deviation, error_scale.rounding)
    return _error_ratio(beyond_rounding, error_scale.scale)


def _relative_error(actual: float, expected: float) -> float:
    return _error_ratio(abs(actual - expected), abs(expected))


def _error_ratio(deviation: float, scale: float) -> float:
    if deviation != deviation:
        return float("inf")
    # Without a magnitude for comparison, the deviation itself is the error.
    return deviation / scale if scale > 0 else deviation
