"""Formula of AdamW, one weight at a time."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefold.config.base.param_spec import ParamSpec

if TYPE_CHECKING:
    from moefold.parts.optimizer.adamw.part import AdamW


def update(
    part: "AdamW", spec: ParamSpec, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int
) -> Tensor:
    """Return m / (sqrt(v) + eps), both corrected for their start at 0, plus the decay of a matrix."""
    first = state.setdefault("first", torch.zeros_like(weight))
    second = state.setdefault("second", torch.zeros_like(weight))
    first.mul_(part.beta1).add_((1 - part.beta1) * gradient)
    second.mul_(part.beta2).add_((1 - part.beta2) * gradient.square())
    mean = first / (1 - part.beta1**step)
    rms = (second / (1 - part.beta2**step)).sqrt()
    decay = part.weight_decay if spec.is_matrix else 0.0
    return decay * weight + mean / (rms + part.eps)
