"""Metrics of one optimizer step, and their line in metrics.jsonl.

Includes per-layer MoE metrics (expert balance, router losses), agreement of the data-parallel replicas, and activation
offload. `metrics/definitions.py` has the definition of each number. Needs numpy, not torch.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import LongLineError, bounded_lines, open_regular, parse_json
from moefold.errors import ConfigError
from moefold.metrics.memory_breakdown import MemoryByPart
from moefold.metrics.rank_times import RankTimeMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayerMetrics:
    """Metrics of one MoE layer over the global batch; loads are routed tokens before any is dropped."""

    layer: int
    load: float
    load_cv: float
    dead_experts: int
    dropped_fraction: float
    zero_fraction: float
    router_entropy: float
    aux_loss: float
    z_loss: float
    bias_min: float | None
    bias_max: float | None

    @classmethod
    def from_totals(
        cls,
        layer: int,
        *,
        counts: Sequence[float],
        dropped: float,
        entropy: float,
        top_k: int,
        losses: tuple[float, float],
        bias: Sequence[float] = (),
        zero_counts: Sequence[float] = (),
    ) -> Self:
        """Compute the metrics from sums over the global batch.

        Args:
            layer: layer index.
            counts: routed tokens of each expert.
            dropped: dropped routed tokens.
            entropy: sum over tokens.
            top_k: experts of a token.
            losses: aux loss and z-loss, coefficients included.
            bias: bias of each expert; empty if there is none.
            zero_counts: routed tokens of each zero-computation expert.
        """
        counts_E = np.asarray(counts, dtype=np.float64)
        num_zero = float(sum(zero_counts))
        # A step of padding alone routes nothing, and no token may have chosen an expert with computation.
        num_routed = float(counts_E.sum()) + num_zero or 1.0
        mean = float(counts_E.mean()) or 1.0
        return cls(
            layer=layer,
            load=float(counts_E.max()) / mean,
            load_cv=float(counts_E.std()) / mean,
            dead_experts=int((counts_E == 0).sum()),
            dropped_fraction=dropped / num_routed,
            zero_fraction=num_zero / num_routed,
            router_entropy=entropy * top_k / num_routed,
            aux_loss=losses[0],
            z_loss=losses[1],
            bias_min=min(bias, default=None),
            bias_max=max(bias, default=None),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMetrics:
    """Agreement of the data-parallel replicas in one checked step; None where there is only one replica.

    A dispersion is standard deviation over mean. Loss and dense gradients are compared between the dp replicas, expert
    gradients between the edp replicas. A trend indicates a fault: a replica that diverges raises the dispersions and
    lowers the cosines.
    """

    loss_dispersion: float | None
    grad_norm_dispersion: float | None
    grad_cosine: float | None
    grad_cosine_min: float | None
    expert_grad_norm_dispersion: float | None
    expert_grad_cosine: float | None
    expert_grad_cosine_min: float | None

    @classmethod
    def from_dot_products(
        cls,
        losses: NDArray[np.float64],
        dense: NDArray[np.float64],
        experts: NDArray[np.float64],
        samples: NDArray[np.float64],
        expert_samples: NDArray[np.float64],
    ) -> Self:
        """Compute the metrics from losses and gradient dot products of the replicas.

        They describe losses and gradients per sample; replicas of padding alone are left out.

        Args:
            losses: loss of each replica, in any common unit, [dp].
            dense: dot products of the dense gradients, [dp, dp].
            experts: dot products of the expert gradients, [edp, edp].
            samples: samples of each replica without padding, in any common unit, [dp].
            expert_samples: samples of each replica of the experts, likewise, [edp].
        """
        norm, mean, least = _gradient_agreement(_per_sample(dense, samples))
        expert_norm, expert_mean, expert_least = _gradient_agreement(_per_sample(experts, expert_samples))
        has_samples = samples > 0
        return cls(
            loss_dispersion=_relative_deviation(losses[has_samples] / samples[has_samples]),
            grad_norm_dispersion=norm,
            grad_cosine=mean,
            grad_cosine_min=least,
            expert_grad_norm_dispersion=expert_norm,
            expert_grad_cosine=expert_mean,
            expert_grad_cosine_min=expert_least,
        )


def _per_sample(dot_products: NDArray[np.float64], samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the dot products of the gradients per sample, of the replicas that have samples."""
    has_samples = samples > 0
    counts = samples[has_samples]
    found: NDArray[np.float64] = dot_products[np.ix_(has_samples, has_samples)] / np.outer(counts, counts)
    return found


def _gradient_agreement(dot_products: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    """Return norm dispersion, mean and least pairwise cosine; None if a norm is 0, as without experts."""
    norms = np.sqrt(np.diag(dot_products))
    if len(norms) < 2 or not norms.all():
        return None, None, None
    cosines = (dot_products / np.outer(norms, norms))[np.triu_indices(len(norms), 1)]
    return _relative_deviation(norms), float(cosines.mean()), float(cosines.min())


def _relative_deviation(values: NDArray[np.float64]) -> float | None:
    return float(values.std() / abs(values.mean())) if len(values) > 1 and values.mean() else None


GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadMetrics:
    """Activation offload of one step over all ranks."""

    stored_gib: float
    kept_gib: float
    io_s: float
    waited_s: float

    @classmethod
    def from_sums(cls, sums: Sequence[float], num_ranks: int) -> Self:
        """Compute the metrics from sums over the ranks: bytes stored, bytes kept, transfer seconds, wait seconds."""
        stored_bytes, kept_bytes, io_s, waited_s = sums
        return cls(
            stored_gib=stored_bytes / GIB,
            kept_gib=kept_bytes / GIB,
            io_s=io_s / num_ranks,
            waited_s=waited_s / num_ranks,
        )


MAX_STEP = 2**53
"""Largest step number that float64 represents exactly."""
METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in the run folder: one JSON object per line, one line per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """Numbers of the global batch of one optimizer step, equal on all ranks; `definitions.STEP` defines each."""

    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float = 0.0
    indexer_loss: float = 0.0
    grad_norm: float
    projected_gradient: float | None = None
    lr: float
    expert_load: tuple[float, ...]
    dropped_fraction: float
    moe_layers: tuple[MoELayerMetrics, ...] = ()
    replicas: ReplicaMetrics | None = None
    offload: OffloadMetrics | None = None
    memory_by_part: MemoryByPart | None = None
    attention_max_over_mean: float | None = None
    attention_moved_rows: int | None = None
    attention_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics(StepNumbers):
    """Metrics of one optimizer step, as one rank logs them."""

    step: int
    tokens: int
    tokens_consumed: int
    step_time_s: float
    tokens_per_s: float
    tflops_per_rank: float
    mfu: float | None
    memory_gib: float
    save_s: float = 0.0
    eval_loss: float | None = None
    skipped: str | None = None
    rank_times: RankTimeMetrics | None = None
    loss_terms: dict[str, float] | None = None
    loss_metrics: dict[str, float] | None = None
    rl: dict[str, Any] | None = None
    sites: dict[str, Any] | None = None

    @property
    def worst_expert_load(self) -> float | None:
        """Largest value of expert_load (NaN if one is NaN); None for a model without MoE layers."""
        return max(self.expert_load, key=lambda load: (math.isnan(load), load), default=None)

    def to_record(self) -> dict[str, Any]:
        """Return the values of the line in metrics.jsonl.

        JSON has no NaN and no infinity: such a value is written as null, and the key `nonfinite`, present only then,
        names each value: `{"loss": null, ..., "nonfinite": {"loss": "nan", "expert_load[2]": "inf"}}`.
        """
        nonfinite: dict[str, str] = {}
        from moefold.metrics.definitions import STEP

        names = [definition.name for definition in STEP if hasattr(self, definition.name)]
        record = {name: _to_plain(getattr(self, name), name, nonfinite) for name in names}
        if nonfinite:
            record["nonfinite"] = nonfinite
        return record

    def to_json(self) -> str:
        """Return one line of JSON, without the newline, floats at full precision."""
        return json.dumps(self.to_record(), allow_nan=False)


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each line of a metrics file, without its newline, with its record; None for an invalid (truncated) line.

    A missing file yields nothing.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, or has an overlong line.
    """
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            for line in bounded_lines(file):
                text = line.decode("utf-8", errors="replace").rstrip("\n")
                yield text, parse_step(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; remove it, or name another run") from None
    except LongLineError as error:
        raise ConfigError(f"{path} is not a metrics file: {error}; remove it, or name another run") from None


def _to_plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """Return a JSON-serialisable value; record NaN and infinities in `nonfinite` under their full names."""
    if isinstance(value, tuple):
        return [_to_plain(part, f"{name}[{i}]", nonfinite) for i, part in enumerate(value)]
    if isinstance(value, dict):
        return {key: _to_plain(part, f"{name}.{key}", nonfinite) for key, part in value.items()}
    if isinstance(value, MemoryByPart):
        return asdict(value)
    if isinstance(value, MoELayerMetrics | ReplicaMetrics | RankTimeMetrics | OffloadMetrics):
        return {key: _finite(part, f"{name}.{key}", nonfinite) for key, part in asdict(value).items()}
    return _finite(value, name, nonfinite)


def _finite(value: float | str | None, name: str, nonfinite: dict[str, str]) -> float | str | None:
    if value is None or isinstance(value, str) or math.isfinite(value):
        return value
    nonfinite[name] = str(float(value))
    return None


def parse_step(text: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line of a metrics file; None for an invalid line."""
    try:
        record = parse_json(text)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step <= MAX_STEP else None
