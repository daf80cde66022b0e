"""Agreement of the data-parallel replicas: dispersion of losses and norms, cosines of gradients."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


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
