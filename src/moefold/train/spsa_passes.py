"""The two forward passes of a step of SPSA, and the gradient projected on its perturbation."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.schema import TrainConfig
from moefold.optim.spsa import SPSA, decode_gradient, encode_gradient
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.parallel_model import ParallelModel


@dataclass(frozen=True)
class ProjectedGradient:
    """Gradient of a step, projected on z; equal on all ranks."""

    value: float
    """Its value before rounding: (l+ - l-) / (2 eps)."""
    rounded: float
    """The value of its byte, which the update takes; 0 where the value is not finite."""


class SPSAPasses:
    """Runs the forward passes of steps on a parallel model whose weights `optimizer` perturbs.

    Args:
        model: the model; its MoE layers count their statistics in forward passes from now on.
        optimizer: perturbs and updates the weights.
        train: section of the recipe.
        seed: seed of the run.
    """

    def __init__(self, model: ParallelModel, optimizer: SPSA, train: TrainConfig, seed: int) -> None:
        self._model = model
        self._optimizer = optimizer
        self._train = train
        self._seed = seed
        self._losses: list[Tensor] = []
        for layer in model.moe_layers().values():
            layer.counts_without_gradients = True

    def run(self, batch: Batch, step: int, begin_step: Callable[[int, Batch], None]) -> Tensor:
        """Run a batch with weights + eps z and with weights - eps z, which is where the weights stay.

        Collective. Routers and losses are the same as in training: statistics of routing come from the second pass.

        Args:
            batch: this rank's shard.
            step: number of the step.
            begin_step: called before each pass.

        Returns:
            This rank's loss terms, [terms], mean of both passes.
        """
        self._losses.clear()
        terms = []
        for sign in (1, -1):
            self._optimizer.perturb(step, sign)
            begin_step(step, batch)
            with self._model.cast_copies.fresh(), self._model.weight_cache.step():
                terms.append(self._model.runner.evaluate(batch))
            # The next pass must gather the changed weights.
            reshard_parameters(self._model.stages)
            self._losses.append(self._local_loss(terms[-1]))
        return torch.stack(terms).mean(0)

    def _local_loss(self, terms: Tensor) -> Tensor:
        """Return this rank's part of the loss that a gradient would minimise, 0-dim float64."""
        # All tp ranks compute the same loss terms, and each has its part of the losses of the routers.
        is_counted = self._model.groups.attn.tp.rank == 0
        total = terms.double().sum() if is_counted else torch.zeros((), dtype=torch.float64, device=terms.device)
        for layer in self._model.moe_layers().values():
            total = total + (layer.stats.aux + layer.stats.z).to(total.device)
        return total

    def local_losses(self) -> Tensor:
        """Return this rank's parts of l+ and l- of the last step, float64 [2], to be summed over all ranks."""
        return torch.stack(self._losses)

    def project(self, losses: Tensor, step: int) -> ProjectedGradient:
        """Return the projected gradient of a step.

        Args:
            losses: l+ and l-, summed over all ranks.
            step: number of the step.
        """
        plus, minus = losses.tolist()
        value = (plus - minus) / (2 * self._train.spsa_eps)
        largest = self._train.spsa_max_gradient
        code = encode_gradient(value, largest, self._seed, step) if math.isfinite(value) else 0
        return ProjectedGradient(value, decode_gradient(code, largest))

    def update(self, projected_gradient: float) -> None:
        """Set the weights back to their values and update them; local."""
        self._optimizer.projected_gradient = projected_gradient
        self._optimizer.step()

    def restore(self) -> None:
        """Set the weights back to their values; local."""
        self._optimizer.restore()
