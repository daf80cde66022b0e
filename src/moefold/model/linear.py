"""Linear layer with the fastest GEMM of the device."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.delayed_wgrad import WeightGradStoreProtocol, should_delay
from moefold.ops.gemm import TORCH_GEMM, Gemm


class LinearBackend(Protocol):
    """The three GEMMs of a linear layer, for other number formats than the tensors' dtype; no autograd."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Compute x @ w.T, [M, N]."""
        ...

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Compute grad @ w, [M, K]."""
        ...

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Compute grad.T @ x, [N, K]."""
        ...


class UnquantizedLinear:
    """Linear GEMMs in the dtype of the tensors.

    Args:
        gemm: GEMM backend.
    """

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `LinearBackend`."""
        return self.gemm.matmul(x_MK, w_NK)

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `LinearBackend`."""
        return self.gemm.matmul(grad_MN, w_NK.t())

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `LinearBackend`."""
        return self.gemm.weight_gradient(grad_MN, x_MK)


UNQUANTIZED_LINEAR = UnquantizedLinear(TORCH_GEMM)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    wgrad_store: WeightGradStoreProtocol | None = None,
    linear_backend: LinearBackend | None = None,
) -> Tensor:
    """Compute x @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        wgrad_store: receives the delayed weight gradient; None: it is computed with that of x.
        linear_backend: low-precision or other GEMMs; None: torch's, in the dtype of x.

    Returns:
        [..., N].
    """
    if should_delay(wgrad_store, x, weight):
        y: Tensor = _DelayedWgradLinear.apply(
            x, weight.detach(), (weight,), wgrad_store, linear_backend or UNQUANTIZED_LINEAR
        )
    elif linear_backend is not None or TORCH_GEMM.is_faster_than_torch_mm(x):
        y = _Linear.apply(x, weight, linear_backend or UNQUANTIZED_LINEAR)
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear_backend: LinearBackend) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linear_backend = linear_backend
        return linear_backend.forward(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_MN = grad.flatten(0, -2)
        x_MK = x.flatten(0, -2)
        if isinstance(ctx.linear_backend, UnquantizedLinear):
            # Upcast once for both GEMMs.
            grad_MN = ctx.linear_backend.gemm.upcast(grad_MN)
        grad_x = ctx.linear_backend.input_gradient(grad_MN, weight).view_as(x)
        return grad_x, ctx.linear_backend.weight_gradient(grad_MN, x_MK), None


class _DelayedWgradLinear(torch.autograd.Function):
    """Linear layer with a delayed weight gradient; autograd does not see the differentiable `tracked_weights`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        tracked_weights: tuple[Tensor],
        wgrad_store: WeightGradStoreProtocol,
        linear_backend: LinearBackend,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = tracked_weights, wgrad_store, linear_backend
        return linear_backend.forward(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        tracked_weights, wgrad_store, linear_backend = ctx.args
        grad_MN = grad.flatten(0, -2)
        wgrad_store.put(tracked_weights, lambda: (linear_backend.weight_gradient(grad_MN, x.flatten(0, -2)),))
        return linear_backend.input_gradient(grad_MN, weight).view_as(x), None, None, None, None
