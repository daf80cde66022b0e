"""An optimizer of the example package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.optimizer import OptimizerPart, StateSpec
from moefold.model.local_param import local_tensor
from moefold.optim.build import OptimizerRun


@dataclass(frozen=True, kw_only=True)
class MomentumSgd(OptimizerPart):
    """Stochastic gradient descent with momentum; weight decay on all parameters."""

    interface: ClassVar[int] = 1

    momentum: float = 0.9
    """Factor of the momentum of the step before."""
    weight_decay: float = 0.1
    """Decay of all parameters, relative to the learning rate."""

    def states(self, weight: ParamSpec) -> tuple[StateSpec, ...]:
        """Return the momentum, in the type of the weights."""
        return (StateSpec("momentum"),)

    def traffic(self, weight: ParamSpec) -> float:
        """Return the bytes that an update moves for each number: norm 4, gradient 4, momentum and weight 8, copy 2."""
        return 26

    def build(self, parameters: Mapping[str, nn.Parameter], run: OptimizerRun) -> torch.optim.Optimizer:
        """Build the optimizer; the ranks of the stage need not meet, as each updates its own shards."""
        return MomentumSgdOptimizer(self, parameters, run)

    def formula(self) -> Callable[..., Tensor]:
        """Return the step that is subtracted from a weight at learning rate 1."""

        def update(spec: ParamSpec, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
            state["momentum"] = self.momentum * state.get("momentum", 0) + gradient + self.weight_decay * weight
            return state["momentum"]

        return update


class MomentumSgdOptimizer(torch.optim.Optimizer):
    """Updates the shards of this rank."""

    def __init__(self, part: MomentumSgd, parameters: Mapping[str, nn.Parameter], run: OptimizerRun) -> None:
        super().__init__([{"params": list(parameters.values()), "lr": run.lr}], {})
        self.state_store = run.store
        self._part = part
        for parameter in parameters.values():
            self.state[parameter] = {"momentum": self.state_store.zeros(parameter, parameter.dtype)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; local."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            moments = self.state_store.prefetch([[self.state[p]["momentum"]] for p in parameters])
            for parameter, (momentum,) in zip(parameters, moments, strict=True):
                weight = local_tensor(parameter)
                gradient = local_tensor(parameter.grad).add(weight, alpha=self._part.weight_decay)
                momentum.mul_(self._part.momentum).add_(gradient)
                weight.add_(momentum, alpha=-group["lr"])
