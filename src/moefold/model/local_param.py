"""How the maths reads a parameter: always as a local tensor, whatever shards it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_param(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The part of a parameter that this rank computes with, in the compute type.

    A parameter that tensor-parallel ranks hold whole gets a *part* of its gradient on each of them, because each sees
    other tokens or heads; `parallel.gradients.sum_replicated_gradients` adds the parts once a step. A sharded one
    gets its own.

    Args:
        parameter: a plain tensor, or a DTensor.
        dtype: compute type; None keeps the parameter's.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    weight = parameter if dtype is None else parameter.to(dtype)
    setattr(weight.untyped_storage(), _MARK, True)
    return weight


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds, to be read or changed in place without autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor lies in the memory of a parameter, or of a copy that `local_param` made of one."""
    return hasattr(tensor.untyped_storage(), _MARK)


_MARK = "_moefold_is_weight"
"""Attribute of a storage: torch keeps it as long as the memory lives, whichever tensor asks for it."""
