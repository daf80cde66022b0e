"""How the maths reads a parameter: always as a local tensor, whatever shards it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def local(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The part of a parameter that this rank computes with, in the compute type.

    The loss of the world is the sum of the losses of its ranks, so a parameter that several ranks hold whole gets a *part*
    of its gradient on each: it is declared Partial here and summed where gradients are reduced. A sharded one gets its own.

    Args:
        parameter: a plain tensor, or a DTensor.
        dtype: compute type; None keeps the parameter's.
    """
    if isinstance(parameter, DTensor):
        placements = [Partial() if p.is_replicate() else p for p in parameter.placements]
        parameter = parameter.to_local(grad_placements=placements)
    return parameter if dtype is None else parameter.to(dtype)
