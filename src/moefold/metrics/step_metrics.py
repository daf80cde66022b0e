"""What is known about one optimizer step, and the line of metrics.jsonl that it becomes.

What one MoE layer did in one optimizer step: the balance of its experts and the terms of its router.

How far the data-parallel replicas of a step go apart. numpy alone.

What leaving memory between the passes brought in a step, and what it cost.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
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
    """Over the whole global batch; loads are copies before any is dropped."""

    layer: int
    """Number of the layer in the whole model."""
    load: float
    """Copies of the fullest expert over the mean; 1 is perfect balance."""
    load_cv: float
    """Coefficient of variation of the copies of the experts: standard deviation over mean; 0 is perfect balance."""
    dead_experts: int
    """Experts that no token chose."""
    dropped_fraction: float
    """Dropped copies over all of them."""
    router_entropy: float
    """Mean over the tokens of the entropy of their scores, in nats; ln(num_experts) where all experts score alike."""
    aux_loss: float
    """Load-balancing loss of this layer as it was optimised, its coefficient included."""
    z_loss: float
    """Router z-loss of this layer as it was optimised, its coefficient included."""
    bias_min: float | None
    """Smallest expert bias that this step routed with; None without model.expert_bias."""
    bias_max: float | None
    """Largest expert bias that this step routed with; None without model.expert_bias."""

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
    ) -> Self:
        """Make them of sums over the global batch.

        Args:
            layer: its number.
            counts: copies of each expert.
            dropped: copies dropped.
            entropy: sum over tokens.
            top_k: copies of a token.
            losses: aux and z as optimised.
            bias: of each expert; empty if there is none.
        """
        counts_E = np.asarray(counts, dtype=np.float64)
        copies = float(counts_E.sum())
        mean = copies / len(counts_E)
        return cls(
            layer=layer,
            load=float(counts_E.max()) / mean,
            load_cv=float(counts_E.std()) / mean,
            dead_experts=int((counts_E == 0).sum()),
            dropped_fraction=dropped / copies,
            router_entropy=entropy * top_k / copies,
            aux_loss=losses[0],
            z_loss=losses[1],
            bias_min=min(bias, default=None),
            bias_max=max(bias, default=None),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMetrics:
    """Of one checked step; a dispersion is a standard deviation over the mean. None where there is one replica alone.

    Loss and dense gradients are compared between the dp replicas, those of the experts between the edp replicas. All
    are healthy as long as they stay as they are: a replica that computes something else raises the dispersions and
    lowers the cosines.
    """

    loss_dispersion: float | None
    grad_norm_dispersion: float | None
    grad_cosine: float | None
    """Mean over the pairs of replicas of the cosine of their gradients, before they are added up."""
    grad_cosine_min: float | None
    """Cosine of the two replicas that agree least."""
    expert_grad_norm_dispersion: float | None
    expert_grad_cosine: float | None
    expert_grad_cosine_min: float | None

    @classmethod
    def from_dot_products(
        cls, losses: NDArray[np.float64], dense: NDArray[np.float64], experts: NDArray[np.float64]
    ) -> Self:
        """Make them of what each replica has.

        Args:
            losses: loss of each replica, in any common unit, [dp].
            dense: scalar products of the dense gradients, [dp, dp].
            experts: scalar products of the gradients of the experts, [edp, edp].
        """
        norm, mean, least = _gradient_agreement(dense)
        expert_norm, expert_mean, expert_least = _gradient_agreement(experts)
        return cls(
            loss_dispersion=_relative_deviation(losses),
            grad_norm_dispersion=norm,
            grad_cosine=mean,
            grad_cosine_min=least,
            expert_grad_norm_dispersion=expert_norm,
            expert_grad_cosine=expert_mean,
            expert_grad_cosine_min=expert_least,
        )


def _gradient_agreement(dot_products: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    """Dispersion of the norms, mean and least cosine of the pairs; None where a norm is 0, as without experts."""
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
    """Of all ranks."""

    stored_gib: float
    """What left memory, the sum over the ranks."""
    kept_gib: float
    """What should have and stayed, for want of room or of time; the sum over the ranks."""
    io_s: float
    """Time in which a rank carried bytes, out and back: the mean over the ranks."""
    waited_s: float
    """Time in which a rank's training stood still for that: the mean. What is left of io_s was hidden."""

    @classmethod
    def from_sums(cls, sums: Sequence[float], num_ranks: int) -> Self:
        """Make them of sums over the ranks: bytes stored and kept, seconds of carrying and of waiting."""
        stored_bytes, kept_bytes, io_s, waited_s = sums
        return cls(
            stored_gib=stored_bytes / GIB,
            kept_gib=kept_bytes / GIB,
            io_s=io_s / num_ranks,
            waited_s=waited_s / num_ranks,
        )


MAX_STEP = 2**53
"""Steps are whole numbers that floats hold too."""
METRICS_FILE = "metrics.jsonl"
"""Name of the metrics inside the run folder: one JSON object a line, one line a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The measurements of one optimizer step. Equal on all ranks where they are of the global batch; one rank logs."""

    step: int
    """Optimizer step, 1-based."""
    loss: float
    """Mean language-model cross-entropy per token of the global batch, in nats."""
    aux_loss: float
    """Load-balancing loss as it was optimised: the sum over layers, times its coefficient."""
    z_loss: float
    """Router z-loss as it was optimised: the sum over layers, times its coefficient."""
    mtp_loss: float = 0.0
    """Loss of the further tokens as it was optimised: the mean over the depths, times its coefficient."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens trained on so far, those before a resume included."""
    step_time_s: float
    """Time of this step, without evaluation and saving."""
    tokens_per_s: float
    """Tokens of the global batch over step_time_s."""
    tflops_per_rank: float
    """Model TFLOP/s of one rank, full attention: `metrics.flops.train_flops_per_token`."""
    mfu: float | None
    """tflops_per_rank over the device's peak, 0 to 1; None where the peak is unknown."""
    memory_gib: float
    """Peak memory per rank, the largest over all ranks."""
    expert_load: tuple[float, ...]
    """For each MoE layer: tokens of its fullest expert over the mean of its experts; 1 is perfect balance."""
    dropped_fraction: float
    """Dropped token copies over all of them; 0 without a capacity factor."""
    save_s: float = 0.0
    """Time that saving checkpoints has kept training waiting since the step before, outside step_time_s."""
    moe_layers: tuple[MoELayerMetrics, ...] = ()
    """Each MoE layer by itself, in the order of the model."""
    eval_loss: float | None = None
    """Mean cross-entropy per held-out token, in nats; None except on evaluation steps."""

    skipped: str | None = None
    """Why this step changed nothing: "nonfinite" or "spike"; None for a step that did. faults.jsonl knows more."""

    replicas: ReplicaMetrics | None = None
    """How far the data-parallel replicas go apart; None except on steps that faults.replica_check_every checks."""

    offload: OffloadMetrics | None = None
    """What train.offload took out of memory, and what it cost; None where everything stays."""

    memory_by_part: MemoryByPart | None = None
    """Bytes by part of the model for each rank; None except on steps that metrics.memory_every measures."""

    rank_times: RankTimeMetrics | None = None
    """What ranks spend on their own work and on waiting for others; None with one rank or faults.straggler_factor=0."""

    @property
    def worst_expert_load(self) -> float | None:
        """The largest of expert_load (NaN if one is NaN); None for a model without MoE layers."""
        return max(self.expert_load, key=lambda load: (math.isnan(load), load), default=None)

    def to_json(self) -> str:
        """Return one line of JSON, without the newline, floats at full precision.

        JSON has no NaN and no infinity: such a value is written as null, and the key `nonfinite`, present only then,
        tells what each was: `{"loss": null, ..., "nonfinite": {"loss": "nan", "expert_load[2]": "inf"}}`.
        """
        nonfinite: dict[str, str] = {}
        record = {field.name: _to_plain(getattr(self, field.name), field.name, nonfinite) for field in fields(self)}
        if nonfinite:
            record["nonfinite"] = nonfinite
        return json.dumps(record, allow_nan=False)


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each line of a metrics file with the record it holds, None where it holds none: a torn write, for example.

    Lines come without their newline. A file that does not exist has no lines.

    Raises:
        ConfigError: it cannot be read, is no regular file, or has a line that no run writes.
    """
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            for line in bounded_lines(file):
                text = line.decode("utf-8", errors="replace").rstrip("\n")
                yield text, _parse(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; remove it, or name another run") from None
    except LongLineError as error:
        raise ConfigError(f"{path} is no file of metrics: {error}; remove it, or name another run") from None


def _to_plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """A value as JSON knows it; what it does not know goes into `nonfinite` under its full name."""
    if isinstance(value, tuple):
        return [_to_plain(part, f"{name}[{i}]", nonfinite) for i, part in enumerate(value)]
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


def _parse(text: str) -> dict[str, Any] | None:
    try:
        record = parse_json(text)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step <= MAX_STEP else None
