"""The forward passes of a step without gradients, whose weights the optimizer perturbs."""

from collections.abc import Callable

import torch
from torch import Tensor

from moefold.config.groups.optimizer import ProjectedGradient
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.parallel_model import ParallelModel
from moefold_experiments.spsa.module import SPSA


class ForwardPasses:
    """Runs the forward passes of steps on a parallel model whose weights `optimizer` perturbs.

    Args:
        model: the model; its MoE layers count their statistics in forward passes from now on.
        optimizer: perturbs and updates the weights.
    """

    def __init__(self, model: ParallelModel, optimizer: SPSA) -> None:
        self._model = model
        self._optimizer = optimizer
        self._losses: list[Tensor] = []
        for layer in model.moe_layers().values():
            layer.losses.counts_without_gradients = True

    def run(self, batch: Batch, step: int, begin_step: Callable[[int, Batch], None]) -> Tensor:
        """Run a batch with the weights of each pass; the weights stay as the last one has them.

        Collective. Routers and losses are the same as in training: statistics of routing come from the last pass.

        Args:
            batch: this rank's shard.
            step: number of the step.
            begin_step: called before each pass.

        Returns:
            This rank's loss terms, [terms], mean of all passes.
        """
        self._losses.clear()
        terms = []
        for number in range(self._optimizer.num_passes):
            self._optimizer.perturb(step, number)
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
        """Return this rank's parts of the losses of the last step, float64 [passes], to be summed over all ranks."""
        return torch.stack(self._losses)

    def project(self, losses: Tensor, step: int) -> ProjectedGradient:
        """Return the gradient of a step along its perturbation.

        Args:
            losses: loss of each pass, summed over all ranks.
            step: number of the step.
        """
        return self._optimizer.project(losses.tolist(), step)

    def update(self, projected_gradient: float) -> None:
        """Set the weights back to their values and update them; local."""
        self._optimizer.projected_gradient = projected_gradient
        self._optimizer.step()

    def restore(self) -> None:
        """Set the weights back to their values; local."""
        self._optimizer.restore()
