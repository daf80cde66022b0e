"""Delay of gradients by one step, with the correction at the level of updates (arXiv:2606.30634).

Step t computes the gradient of the weights x_t, and the optimizer takes the gradient of step t - 1, which belongs to
x_(t-1). Let u_t be what the optimizer subtracts at step t: rate, moments and weight decay are applied. Then, with u = 0
before the first update,

    x_(t+1) = x_t - u_t - c * (u_t - u_(t-1)).

Every operation is element by element on this rank's shards, so that any mapping gives the same weights.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_sum
from moefold.model.local_param import local_tensor
from moefold.optim.build import OptimizerRun
from moefold_experiments.gradient_delay.part import LAST_UPDATE, PENDING_GRADIENT


def delay_steps(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    run: OptimizerRun,
    names: Sequence[str],
    correction: float,
) -> torch.optim.Optimizer:
    """Return an optimizer whose `step` applies the gradients of the step before; local.

    The pending gradient, and with a correction the last update, are in `optimizer.state`, in the type of the weights
    and sharded as they are: checkpoints contain them as they do moments. NaN stands for a gradient that is not there
    yet, so that a resume finds out whether there is one.

    Args:
        optimizer: the optimizer, which is extended in place.
        parameters: its parameters, by name.
        run: the ranks of the stage.
        names: the states that the delay adds.
        correction: the factor c; 0: none.
    """
    for parameter in parameters.values():
        for name in names:
            value = float("nan") if name == PENDING_GRADIENT else 0.0
            optimizer.state[parameter][name] = torch.full_like(parameter.data, value)
    delay = _Delay(optimizer, parameters, run, correction)
    optimizer.kept_states = frozenset(names)  # type: ignore[attr-defined]
    optimizer.step = delay.step  # type: ignore[method-assign, assignment]
    return optimizer


class _Delay:
    """The steps of an optimizer whose states `delay_steps` has extended."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        run: OptimizerRun,
        correction: float,
    ) -> None:
        self._optimizer = optimizer
        self._update = optimizer.step
        self._parameters = tuple(parameters.values())
        self._stage = run.stage
        self._correction = correction
        self._has_pending = False

    @torch.no_grad()
    def step(self, closure: None = None) -> bool:
        """Keep the gradients of this step, and update the weights with the pending ones.

        Collective over the stage in the first steps of a process, up to the first update.

        Returns:
            Whether the weights were updated; False at the first step, which has no pending gradient.
        """
        assert closure is None
        self._has_pending = self._has_pending or self._find_pending()
        for parameter in self._parameters:
            self._exchange_gradient(parameter)
        if not self._has_pending:
            return False
        if not self._correction:
            self._update()
            return True
        weights = [local_tensor(parameter.data) for parameter in self._parameters]
        last_updates = [local_tensor(self._optimizer.state[p][LAST_UPDATE]) for p in self._parameters]
        updates = [weight.clone() for weight in weights]
        self._update()
        for weight, update, last in zip(weights, updates, last_updates, strict=True):
            update.sub_(weight)
            # c * (u_t - u_(t-1)), computed in the buffer of u_(t-1), which then receives u_t.
            weight.sub_(torch.sub(update, last, out=last).mul_(self._correction))
            last.copy_(update)
        return True

    def _find_pending(self) -> bool:
        """Return whether the ranks of the stage have pending gradients; where there are none, zero their place."""
        missing = torch.zeros((), dtype=torch.float64)
        for parameter in self._parameters:
            pending = local_tensor(self._optimizer.state[parameter][PENDING_GRADIENT])
            missing = missing.to(pending.device) + pending.isnan().sum()
            pending.nan_to_num_(nan=0.0)
        if self._stage is not None:
            missing = all_reduce_sum(missing, self._stage)
        return float(missing) == 0

    def _exchange_gradient(self, parameter: nn.Parameter) -> None:
        """Exchange the values of the gradient of this step and of the pending one."""
        if parameter.grad is None:
            # The optimizer does not update it either.
            return
        pending = local_tensor(self._optimizer.state[parameter][PENDING_GRADIENT])
        gradient = local_tensor(parameter.grad)
        now: Tensor = gradient.clone()
        gradient.copy_(pending)
        pending.copy_(now)
