"""Comparison of a distributed run with the oracle: the largest relative error of every number and tensor, by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.data import ProgramData, Sampler
from moefold.metrics.step_metrics import MoELayerMetrics
from moefold.model.init import draw_adapter_outputs, init_weights
from moefold.model.transformer import build_model
from moefold.parallel.context_parallel import sequence_positions
from moefold.progress import ProgressCallback, ignore_progress
from moefold.verify.distributed_run import DistributedRecord, open_samples
from moefold.verify.oracle import Oracle, OracleBatch, OracleStep, Weights
from moefold.verify.oracle_objectives import OracleObjective, recipe_objective


@dataclass(frozen=True)
class OracleRecord:
    """Results of the single-process oracle."""

    initial: Weights
    gradients: Weights
    weights: Weights
    steps: tuple[OracleStep, ...]
    eval_loss: float


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
    objective: OracleObjective | None = None,
    data: ProgramData | None = None,
) -> OracleRecord:
    """Train `num_steps` steps of the oracle in float64 in this process.

    Args:
        cfg: the recipe.
        num_steps: optimizer steps.
        on_progress: called with what is done next.
        objective: the loss of a micro-batch; None: that of the recipe.
        data: the samples of data.kind="program"; None: those of the recipe.
    """
    on_progress("oracle, building the model")
    dataset = data or open_samples(cfg)
    size = cfg.train.global_batch_size
    model = build_model(cfg)
    init_weights(model, cfg.model, cfg.run.seed)
    draw_adapter_outputs(model, cfg.model, cfg.run.seed)
    initial = {name: p.detach().double() for name, p in model.named_parameters()}
    oracle = Oracle(
        cfg, {name: p.clone() for name, p in initial.items()}, token_chunks(cfg), objective or recipe_objective(cfg)
    )
    initial |= {name: buffer.clone() for name, buffer in oracle.router.buffers().items()}
    steps = []
    for i in range(num_steps):
        on_progress(f"oracle, step {i + 1} of {num_steps}")
        steps.append(oracle.step(oracle_batch(dataset.train, cfg, range(i * size, (i + 1) * size))))
    on_progress("oracle, evaluation")
    eval_loss = oracle.evaluate(oracle_batch(dataset.validation, cfg, range(size)))
    weights = {name: w.detach() for name, w in oracle.weights.items()} | oracle.router.buffers()
    return OracleRecord(initial, steps[0].gradients, weights, tuple(steps), eval_loss)


def compare_records(oracle: OracleRecord, ranks: Sequence[DistributedRecord]) -> list[NamedError]:
    """Compare every number and tensor of the ranks with the oracle; return the errors, largest first.

    The error of a tensor is its largest absolute deviation over the largest magnitude of the oracle's tensor; of a
    number, its relative deviation. A tensor that is missing on one side has an infinite error.
    """
    errors = []
    for rank, record in enumerate(ranks):
        for i, (actual, expected) in enumerate(zip(record.steps, oracle.steps, strict=True)):
            for term in ("loss", "aux_loss", "z_loss", "mtp_loss", "indexer_loss", "grad_norm"):
                name = f"step {i + 1} {term} (rank {rank})"
                errors.append(NamedError(name, _relative_error(getattr(actual, term), getattr(expected, term))))
            errors += _layer_errors(f"step {i + 1}", f"(rank {rank})", actual.moe_layers, expected.moe_layers)
        errors.append(NamedError(f"eval_loss (rank {rank})", _relative_error(record.eval_loss, oracle.eval_loss)))
    for part in ("initial", "gradients", "weights"):
        errors += _tensor_errors(part, getattr(oracle, part), [getattr(record, part) for record in ranks])
    return sorted(errors, key=lambda error: -error.error)


def token_chunks(cfg: Config) -> list[list[int]]:
    """Return the sequence positions of each (cp, tp) rank, as sharded between sub-layers by sequence parallelism."""
    parallel = cfg.parallel
    chunks: list[list[int]] = []
    for cp_rank in range(parallel.cp):
        positions = torch.as_tensor(sequence_positions(parallel.context, cfg.train.seq_len, parallel.cp, cp_rank))
        chunks += [part.tolist() for part in positions.chunk(parallel.tp)]
    return chunks


def oracle_batch(split: Sampler, cfg: Config, indices: Iterable[int]) -> OracleBatch:
    """Build a global batch from the samples of these indices."""
    length = cfg.train.seq_len
    samples = [split.annotated_sample(index) for index in indices]
    documents = [np.zeros(length + 1) if sample.document_ids is None else sample.document_ids for sample in samples]
    weights = [np.ones(length) if sample.weights is None else sample.weights for sample in samples]
    scales = [np.ones(length) if sample.weight_scale is None else sample.weight_scale for sample in samples]
    no_padding = np.zeros(length + 1, dtype=np.bool_)
    padding = np.stack([no_padding if sample.is_padding is None else sample.is_padding for sample in samples])
    columns = {}
    for kind in ("token_columns", "sample_columns"):
        for name in getattr(samples[0], kind):
            columns[name] = torch.from_numpy(np.stack([getattr(sample, kind)[name] for sample in samples]))
    return OracleBatch(
        torch.from_numpy(np.stack([sample.tokens for sample in samples])),
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


def _tensor_errors(part: str, expected: Weights, actual: Sequence[Weights]) -> list[NamedError]:
    errors = []
    names = set(expected).union(*actual)
    for name in sorted(names):
        gathered = [tensors[name] for tensors in actual if name in tensors]
        if not gathered or name not in expected:
            errors.append(NamedError(f"{part} {name} (missing on one side)", float("inf")))
        errors += [
            NamedError(f"{part} {name}", _max_relative_error(tensor, expected[name]))
            for tensor in gathered
            if name in expected
        ]
    return errors


def _max_relative_error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    scale = float(expected.abs().max())
    deviation = float((actual.double() - expected).abs().max())
    return _error_ratio(deviation, scale)


def _relative_error(actual: float, expected: float) -> float:
    return _error_ratio(abs(actual - expected), abs(expected))


def _error_ratio(deviation: float, scale: float) -> float:
    if deviation != deviation:
        return float("inf")
    return deviation / scale if scale > 0 else (0.0 if deviation == 0 else float("inf"))
