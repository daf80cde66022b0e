"""Local tensors of parameters, plain or DTensor, for the model's computations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefold.comm.private_torch import foreach_copy_, shard_in_graph
from moefold.ops.quantization.weight_cache import mark_weight, weight_identity


def local_param(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the local shard of a parameter in the compute dtype.

    The gradient of a parameter that is replicated over tp is *partial* on each tp rank, because each computes other
    tokens or heads. `parallel.gradients.sum_replicated_gradients` sums the parts once in each step. A sharded parameter
    gets the gradient of its shard.

    Args:
        dtype: compute dtype. None means the parameter's dtype.
    """
    if isinstance(parameter, DTensor):
        parameter = shard_in_graph(parameter)
    copy: CastCopy | None = getattr(parameter, _COPY, None)
    if dtype is None or dtype == parameter.dtype:
        weight = parameter
    elif copy is None or not copy.is_fresh:
        weight = parameter.to(dtype)
    else:
        weight = copy.read(parameter, dtype)
    mark_weight(weight, parameter)
    return weight


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local values, to be read or changed in place without autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def parameter_over(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter without a gradient, with the sharding of `parameter` and the storage of `values`.

    Args:
        parameter: plain, or a DTensor.
        values: values of the local shard, in its shape.
    """
    if isinstance(parameter, DTensor):
        values = DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(values, requires_grad=False)


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor shares the storage of a parameter, or of a cast that `local_param` made."""
    return weight_identity(tensor) is not None


@dataclass
class CastCopy:
    """Copy of one parameter in the compute dtype."""

    values: Tensor | None = None
    """None until the parameter is first read in another dtype than its own."""
    is_fresh: bool = False
    """True if the copy has the values of the parameter. If not, a reader casts the parameter."""

    def read(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `parameter.to(dtype)` without a cast. The gradient of each use is cast before it is added."""
        if self.values is None:
            self.values = parameter.detach().to(dtype)
        assert self.values.dtype == dtype
        return _ReadCopy.apply(parameter, self.values)


class _ReadCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.dtype), None


class CastCopies:
    """Copies of parameters in the compute dtype, cast once in each step instead of at each use in each pass.

    A copy is used only inside `fresh`, because a tensor does not reliably record that it has changed. For example,
    torch's fused AdamW does not raise the version of the weights that it writes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._copies = [(parameter, CastCopy()) for parameter in parameters]
        for parameter, copy in self._copies:
            setattr(parameter, _COPY, copy)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Refresh the copies in place, and use them inside this context. No parameter may change there."""
        pairs = [(copy.values, parameter.detach()) for parameter, copy in self._copies if copy.values is not None]
        if pairs:
            copies, parameters = zip(*pairs, strict=True)
            foreach_copy_(copies, parameters)
        self._set_fresh(True)
        try:
            yield
        finally:
            self._set_fresh(False)

    def drop(self) -> None:
        """Free the copies. From now on, each use of a parameter casts it."""
        for parameter, _ in self._copies:
            delattr(parameter, _COPY)
        self._copies.clear()

    def __len__(self) -> int:
        """Return the number of parameters that may have a copy."""
        return len(self._copies)

    def tensors(self) -> list[Tensor]:
        """Return the copies that exist."""
        return [copy.values for _, copy in self._copies if copy.values is not None]

    def _set_fresh(self, is_fresh: bool) -> None:
        for _, copy in self._copies:
            copy.is_fresh = is_fresh


_COPY = "_moefold_cast_copy"
"""Attribute of a parameter: its `CastCopy`."""
