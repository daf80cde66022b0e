"""The dense linear layer, through the fastest product that the device has."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.delayed_wgrad import WeightGradStoreProtocol, should_delay
from moefold.ops.gemm import TORCH_GEMM, Gemm


class LinearBackend(Protocol):
    """The three products of a layer, where they are not those of its tensors' type; no autograd."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """X @ w.T, [M, N]."""
        ...

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Grad @ w, [M, K]."""
        ...

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Grad.T @ x, [N, K]."""
        ...


class UnquantizedLinear:
    """In the type of the tensors.

    Args:
        gemm: who multiplies.
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
    """X @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        wgrad_store: takes the gradient of the weight; None: it is computed with that of x.
        linear_backend: of few bits, or by others than the libraries; None: theirs, in the type of x.

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
            # Once for both products.
            grad_MN = ctx.linear_backend.gemm.upcast(grad_MN)
        grad_x = ctx.linear_backend.input_gradient(grad_MN, weight).view_as(x)
        return grad_x, ctx.linear_backend.weight_gradient(grad_MN, x_MK), None


class _DelayedWgradLinear(torch.autograd.Function):
    """As `_Linear`; `tracked_weights` has the differentiable weight, where autograd does not see it."""

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
        held, later, products = ctx.args
        grad_MN = grad.flatten(0, -2)
        later.put(held, lambda: (products.weight_gradient(grad_MN, x.flatten(0, -2)),))
        return products.input_gradient(grad_MN, weight).view_as(x), None, None, None, None
