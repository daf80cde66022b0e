"""Local tensors of parameters, plain or DTensor, for the model's computations."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moefold.ops.quantization.weight_cache import mark_weight, weight_identity


def local_param(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the local shard of a parameter in the compute dtype.

    The gradient of a parameter that is replicated over tp is *partial* on each tp rank, because each computes other
    tokens or heads; `parallel.gradients.sum_replicated_gradients` sums the parts once a step. A sharded parameter gets
    the gradient of its shard.

    Args:
        parameter: a plain tensor, or a DTensor.
        dtype: compute dtype; None: that of the parameter.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    weight = parameter if dtype is None else parameter.to(dtype)
    mark_weight(weight, parameter)
    return weight


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local values, to be read or changed in place without autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor shares the storage of a parameter, or of a cast that `local_param` made."""
    return weight_identity(tensor) is not None
