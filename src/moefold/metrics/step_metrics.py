"""Numbers of a step: MoE layers, replicas, times of ranks, activation offload, memory of a process.

`metrics/definitions.toml` has the definition of each number. The module needs numpy, not torch.
"""

import resource
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moefold.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayerMetrics:
    """Metrics of one MoE layer over the global batch. Loads are routed tokens before drops."""

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
            counts: routed tokens of each expert.
            entropy: sum over tokens.
            losses: aux loss and z-loss, including coefficients.
            bias: bias of each expert. Empty: no bias.
            zero_counts: routed tokens of each zero-computation expert.
        """
        counts_E = np.asarray(counts, dtype=np.float64)
        num_zero = float(sum(zero_counts))
        # A step with only padding routes nothing, and possibly no token has chosen an expert with computation.
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
    """Agreement of the data-parallel replicas in one checked step. Fields are None for a single replica.

    A dispersion is standard deviation over mean. Loss and dense gradients are compared between the dp replicas, expert
    gradients between the edp replicas. A trend indicates a fault: divergence raises the dispersions and lowers the
    cosines.
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

        The metrics describe losses and gradients per sample. Replicas with only padding are ignored.

        Args:
            losses: loss of each replica, in any common unit, [dp].
            dense: dot products of the dense gradients, [dp, dp].
            experts: dot products of the expert gradients, [edp, edp].
            samples: samples of each replica without padding, in any common unit, [dp].
            expert_samples: the same of each replica of the experts, [edp].
        """
        norm, mean, minimum = _gradient_agreement(_per_sample(dense, samples))
        expert_norm, expert_mean, expert_least = _gradient_agreement(_per_sample(experts, expert_samples))
        has_samples = samples > 0
        return cls(
            loss_dispersion=_relative_deviation(losses[has_samples] / samples[has_samples]),
            grad_norm_dispersion=norm,
            grad_cosine=mean,
            grad_cosine_min=minimum,
            expert_grad_norm_dispersion=expert_norm,
            expert_grad_cosine=expert_mean,
            expert_grad_cosine_min=expert_least,
        )


def _per_sample(dot_products: NDArray[np.float64], samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the dot products of the gradients per sample, of the replicas that have samples."""
    has_samples = samples > 0
    counts = samples[has_samples]
    return dot_products[np.ix_(has_samples, has_samples)] / np.outer(counts, counts)


def _gradient_agreement(dot_products: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    """Return norm dispersion, mean and minimum pairwise cosine, or None if a norm is 0, such as without experts."""
    norms = np.sqrt(np.diag(dot_products))
    if len(norms) < 2 or not norms.all():
        return None, None, None
    cosines = (dot_products / np.outer(norms, norms))[np.triu_indices(len(norms), 1)]
    return _relative_deviation(norms), float(cosines.mean()), float(cosines.min())


def _relative_deviation(values: NDArray[np.float64]) -> float | None:
    return float(values.std() / abs(values.mean())) if len(values) > 1 and values.mean() else None


def offload_metrics(sums: Sequence[float], num_ranks: int) -> dict[str, float]:
    """Compute `metrics.definitions.OFFLOAD` from sums over ranks: bytes stored and kept, transfer and wait seconds."""
    stored_bytes, kept_bytes, io_s, waited_s = sums
    return {
        "stored_gib": stored_bytes / GIB,
        "kept_gib": kept_bytes / GIB,
        "io_s": io_s / num_ranks,
        "waited_s": waited_s / num_ranks,
    }


COMPUTE = 0
DATA = 1
COMM = 2
"""Columns COMPUTE, DATA and COMM of the times of a rank in one step, in seconds."""
NUM_TIMES = 3


def rank_time_metrics(times: NDArray[np.float64]) -> dict[str, float] | None:
    """Compute `metrics.definitions.RANK_TIMES` from times, [ranks, (own, data, wait)]. Return None if all are 0."""
    if not times.any():
        return None
    compute = times[:, COMPUTE]
    return {
        "own_min_s": float(compute.min()),
        "own_median_s": float(np.median(compute)),
        "own_max_s": float(compute.max()),
        "slowest_rank": int(compute.argmax()),
        "data_max_s": float(times[:, DATA].max()),
        "wait_min_s": float(times[:, COMM].min()),
        "wait_median_s": float(np.median(times[:, COMM])),
    }


_PROCESS_STATUS = Path("/proc/self/status")


def peak_memory_gib(device_type: str) -> float:
    """Return the peak memory of this process in GiB, since it started. `device_type` is "cuda" or "cpu".

    On `cuda` this is the peak of allocated tensor bytes on the current device (`torch.cuda.max_memory_allocated`),
    which the recipe's sizes determine. The caching allocator's unused blocks, the CUDA context and NCCL's buffers need
    additional memory, so leave a reserve.

    On `cpu` this is the peak resident set of the process, including code and libraries (about 0.3 GiB for torch),
    because torch has no CPU tensor statistics. Linux reports it as VmHWM in /proc. Elsewhere it comes from `getrusage`,
    where a child process inherits its parent's peak.
    """
    if device_type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated()) / GIB
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    return peak_bytes / GIB


WINDOW_STEPS = 16
REPORT_SLOW_STEPS = 12
RECOVERED_SLOW_STEPS = 4
"""Limits of slow steps among the last WINDOW_STEPS steps: a rank is reported as slow after REPORT_SLOW_STEPS of them,
and has recovered with at most RECOVERED_SLOW_STEPS."""
MIN_IMPACT = 0.05
"""Minimum excess time of a slow rank, as a fraction of the step."""
Array = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Stragglers:
    """Detector of ranks whose own time exceeds `factor` times the median of their stage in most steps of a window.

    Times of single steps vary widely on a shared machine, so slow steps are counted: a long pause counts once. For an
    even number of ranks the lower median is used, so that one of two ranks can be detected. A rank is reported once,
    and again only after it has recovered.
    """

    def __init__(self, factor: float, stages: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        self._factor = factor
        self._stages = [list(stage) for stage in stages]
        self._hosts = list(hosts)
        self._slow: deque[Flags] = deque(maxlen=WINDOW_STEPS)
        self._window_times: deque[Array] = deque(maxlen=WINDOW_STEPS)
        self._reported: set[int] = set()

    def update(self, times: Array) -> list[dict[str, Any]]:
        """Add the times of one step, [ranks, (own, data, wait)], and return a record for each newly detected rank."""
        if not times.any():
            return []
        compute = times[:, COMPUTE]
        data = times[:, DATA]
        median = np.zeros(len(compute))
        for stage in self._stages:
            median[stage] = np.sort(compute[stage])[(len(stage) - 1) // 2]
        has_impact = compute - median > MIN_IMPACT * (compute + times[:, COMM])
        self._slow.append((compute > self._factor * median) & has_impact)
        self._window_times.append(np.stack([compute, data, median], axis=1))
        counts = np.sum(self._slow, axis=0)
        self._reported -= set(np.flatnonzero(counts <= RECOVERED_SLOW_STEPS).tolist())
        new = [rank for rank in np.flatnonzero(counts >= REPORT_SLOW_STEPS).tolist() if rank not in self._reported]
        self._reported |= set(new)
        return [self._record(rank, int(counts[rank])) for rank in new]

    def _record(self, rank: int, slow_steps: int) -> dict[str, Any]:
        own_s, data_s, median_s = np.median([step[rank] for step in self._window_times], axis=0).tolist()
        return {
            "kind": "straggler",
            "action": "log",
            "rank": rank,
            "host": self._hosts[rank],
            "own_s": own_s,
            "data_s": data_s,
            "median_s": median_s,
            "ranks": next(len(stage) for stage in self._stages if rank in stage),
            "slow_steps": slow_steps,
            "steps": len(self._window_times),
        }


def describe_straggler(record: dict[str, Any]) -> str:
    """Return a straggler record as a log line."""
    return (
        f"rank {record['rank']} ({record['host']}) is slow in {record['slow_steps']} of {record['steps']} steps: "
        f"{record['own_s']:.3g} s of its own work a step, {record['own_s'] / record['median_s']:.2f} times the median "
        f"of the {record['ranks']} ranks of its stage; {record['data_s']:.2g} s of it for data"
    )
