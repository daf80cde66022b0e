"""AdamW (arXiv:1711.05101) whose moments rest in bfloat16: the step itself is computed in the type of the weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class NarrowAdamW(torch.optim.Optimizer):
    """As torch.optim.AdamW, with moments of two bytes for each weight instead of four.

    A step widens the moments, updates them, moves the weights by them, and rounds them for the next step. Rounding
    keeps 8 bits: with a decay beyond 0.98 a step would add less than a moment can hold, so the recipe is refused.

    Args:
        groups: as of torch.optim.AdamW, each with lr, weight_decay, betas and eps.
        dtype: of the moments.
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype) -> None:
        super().__init__(groups, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                    "exp_avg": torch.zeros_like(parameter, dtype=dtype),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; local."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        rate, decay, eps = (group[key] for key in ("lr", "weight_decay", "eps"))
        beta1, beta2 = group["betas"]
        weight, grad = local_values(parameter), local_values(gradient)
        moments = [local_values(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        first = moments[0].to(weight.dtype, copy=True).mul_(beta1).add_(grad, alpha=1 - beta1)
        second = moments[1].to(weight.dtype, copy=True).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        for moment, wide in zip(moments, (first, second), strict=True):
            moment.copy_(wide)
        count = float(state["step"])
        spread = second.div_(1 - beta2**count).sqrt_().add_(eps)
        weight.mul_(1 - rate * decay).addcdiv_(first, spread, value=-rate / (1 - beta1**count))


def local_values(tensor: Tensor) -> Tensor:
    """What this rank holds, to be changed in place without autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
