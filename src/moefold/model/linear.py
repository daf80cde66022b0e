"""The dense linear layer, through the fastest product that the device has."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.gemm import LIBRARY, Gemm
from moefold.model.later import Later, can_wait


class Products(Protocol):
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


class FullProducts:
    """In the type of the tensors.

    Args:
        gemm: who multiplies.
    """

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `Products`."""
        return self.gemm.product(x_MK, w_NK)

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `Products`."""
        return self.gemm.product(grad_MN, w_NK.t())

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `Products`."""
        return self.gemm.weight_gradient(grad_MN, x_MK)


FULL = FullProducts(LIBRARY)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    later: Later | None = None,
    products: Products | None = None,
) -> Tensor:
    """X @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].
        later: takes the gradient of the weight; None: it is computed with that of x.
        products: of few bits, or by others than the libraries; None: theirs, in the type of x.

    Returns:
        [..., N].
    """
    if can_wait(later, x, weight):
        y: Tensor = _LaterLinear.apply(x, weight.detach(), (weight,), later, products or FULL)
    elif products is not None or LIBRARY.multiplies_itself(x):
        y = _Linear.apply(x, weight, products or FULL)
    else:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.forward(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_MN, x_MK = grad.flatten(0, -2), x.flatten(0, -2)
        if isinstance(ctx.products, FullProducts):
            # Once for both products.
            grad_MN = ctx.products.gemm.widened(grad_MN)
        grad_x = ctx.products.input_gradient(grad_MN, weight).view_as(x)
        return grad_x, ctx.products.weight_gradient(grad_MN, x_MK), None


class _LaterLinear(torch.autograd.Function):
    """As `_Linear`; `held` has the differentiable weight, where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: tuple[Tensor], later: Later, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = held, later, products
        return products.forward(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        held, later, products = ctx.args
        grad_MN = grad.flatten(0, -2)
        later.postpone(held, lambda: (products.weight_gradient(grad_MN, x.flatten(0, -2)),))
        return products.input_gradient(grad_MN, weight).view_as(x), None, None, None, None
