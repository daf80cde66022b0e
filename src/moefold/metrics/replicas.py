"""How far the data-parallel replicas of a step go apart. numpy alone."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


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
