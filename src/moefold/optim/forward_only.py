"""Optimizers without gradients: a step updates the weights from the losses of forward passes that it perturbs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class ProjectedGradient:
    """Gradient of a step along its perturbation; equal on all ranks."""

    value: float
    """Its value before rounding."""
    rounded: float
    """The value that the update takes; 0 where the value is not finite."""


class ForwardOnlyOptimizer(torch.optim.Optimizer, ABC):
    """Optimizer that a step asks to perturb the weights before each of its forward passes; all methods are local.

    After the passes a step calls `step`, which updates the weights, or `restore`.
    """

    num_passes: ClassVar[int]
    """Forward passes of a step."""
    projected_gradient = 0.0
    """Gradient along the perturbation, which the next call of `step` applies."""

    @abstractmethod
    def perturb(self, step_number: int, number: int) -> None:
        """Set the weights of a pass.

        Args:
            step_number: number of the step.
            number: number of the pass, from 0.
        """

    @abstractmethod
    def project(self, losses: Sequence[float], step_number: int) -> ProjectedGradient:
        """Return the gradient of a step.

        Args:
            losses: loss of each pass over the global batch.
            step_number: number of the step.
        """

    @abstractmethod
    def restore(self) -> None:
        """Set the weights back to their values before the step, without an update."""
