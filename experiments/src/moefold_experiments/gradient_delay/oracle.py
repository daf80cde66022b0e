"""Formula of the delay, one weight at a time: x(t+1) = x(t) - u(t) - c * (u(t) - u(t-1)).

u(t) is what the optimizer subtracts for the gradient of step t - 1. It has the learning rate of step t in it, so the
change is a function of the rate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefold.config.base.param_spec import ParamSpec

Change = Tensor | Callable[[float], Tensor]


def delayed(update: Callable[..., Tensor], correction: float) -> Callable[..., Change]:
    """Return the update of one weight by the gradient of the step before.

    Args:
        update: what the optimizer subtracts at learning rate 1.
        correction: the factor c.
    """
    pending: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}

    def formula(spec: ParamSpec, weight: Tensor, gradient: Tensor, state: dict[str, Any], step: int) -> Change:
        previous = pending.get(spec.name)
        pending[spec.name] = gradient
        if previous is None:
            return torch.zeros_like(weight)
        # The first step has no update to count, and a reset empties the state.
        state["updates"] = state.get("updates", 0) + 1
        found = update(spec, weight, previous, state, state["updates"])

        def corrected(rate: float) -> Tensor:
            now = rate * found
            change = now + correction * (now - last.get(spec.name, 0.0))
            last[spec.name] = now
            return change

        return corrected

    return formula
