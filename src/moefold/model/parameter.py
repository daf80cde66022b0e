"""How the maths reads a parameter: always as a local tensor, whatever shards it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
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
    return parameter if dtype is None else parameter.to(dtype)
