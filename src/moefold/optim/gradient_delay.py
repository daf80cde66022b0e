"""Delay of gradients by one step, with the correction at the level of updates (arXiv:2606.30634).

Step t computes the gradient of the weights x_t, and the optimizer takes the gradient of step t - 1, which belongs to
x_(t-1). Let u_t be what the optimizer subtracts at step t: rate, moments and weight decay are applied. Then, with u = 0
before the first update,

    x_(t+1) = x_t - u_t - c * (u_t - u_(t-1)).

Every operation is element by element on this rank's shards, so that any mapping gives the same weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moefold.model.local_param import local_tensor
from moefold.optim.states import LAST_UPDATE, PENDING_GRADIENT


class GradientDelay:
    """Optimizer steps with the gradients of the step before; local, but for what the optimizer communicates.

    The pending gradient, and with a correction the last update, are in `optimizer.state`, in the type of the weights
    and sharded as they are: checkpoints contain them like moments. `has_pending` tells whether there is a pending
    gradient: it is False before the first step only.

    Args:
        optimizer: the optimizer, whose state is extended.
        parameters: its parameters, by name.
        correction: the factor c; 0: none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], correction: float
    ) -> None:
        self._optimizer = optimizer
        self._parameters = tuple(parameters.values())
        self._correction = correction
        self.has_pending = False
        for parameter in self._parameters:
            optimizer.state[parameter][PENDING_GRADIENT] = torch.zeros_like(parameter.data)
            if correction:
                optimizer.state[parameter][LAST_UPDATE] = torch.zeros_like(parameter.data)

    @torch.no_grad()
    def step(self) -> bool:
        """Keep the gradients of this step, and update the weights with the pending ones.

        Returns:
            Whether the weights were updated; False at the first step, which has no pending gradient.
        """
        for parameter in self._parameters:
            self._exchange_gradient(parameter)
        if not self.has_pending:
            self.has_pending = True
            return False
        if not self._correction:
            self._optimizer.step()
            return True
        weights = [local_tensor(parameter.data) for parameter in self._parameters]
        last_updates = [local_tensor(self._optimizer.state[p][LAST_UPDATE]) for p in self._parameters]
        updates = [weight.clone() for weight in weights]
        self._optimizer.step()
        for weight, update, last in zip(weights, updates, last_updates, strict=True):
            update.sub_(weight)
            # c * (u_t - u_(t-1)), computed in the buffer of u_(t-1), which then receives u_t.
            weight.sub_(torch.sub(update, last, out=last).mul_(self._correction))
            last.copy_(update)
        return True

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
