"""Linear layer with the fastest GEMM of the device."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.delayed_wgrad import WeightGradSink, WeightGradStoreProtocol, weight_grad_sink
from moefold.ops.gemm import TORCH_GEMM, Gemm


class LinearBackend(Protocol):
    """The three GEMMs of a linear layer, for other number formats than the tensors' dtype, without autograd."""

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Compute x @ w.T, [M, N]."""

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Compute grad @ w, [M, K]."""

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Compute grad.T @ x, [N, K]."""


class UnquantizedLinear:
    """Linear GEMMs in the dtype of the tensors."""

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


class Fp32OutputLinear:
    """Linear GEMMs of operands in one dtype with a result in float32 at least, whose gradient is rounded to it."""

    def __init__(self, gemm: Gemm) -> None:
        self._gemm = gemm

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Compute x @ w.T, [M, N], in float32 at least."""
        return self._gemm.matmul_fp32(x_MK, w_NK)

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Compute grad @ w, [M, K], in the dtype of the operands."""
        gemm = self._gemm
        grad_x = gemm.matmul(gemm.upcast(grad_MN.to(w_NK.dtype)), gemm.upcast(w_NK).t())
        return grad_x.to(w_NK.dtype)

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Compute grad.T @ x, [N, K], in the dtype of the operands."""
        gemm = self._gemm
        grad_w = gemm.weight_gradient(gemm.upcast(grad_MN.to(x_MK.dtype)), gemm.upcast(x_MK))
        return grad_w.to(x_MK.dtype)


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
        wgrad_store: receives the delayed weight gradient, or None if it is computed with the gradient of x.
        linear_backend: low-precision or other GEMMs. None means torch's, in the dtype of x.

    Returns:
        [..., N].
    """
    wgrad_sink, (tracked_weight,) = weight_grad_sink(wgrad_store, x, (weight,))
    if not wgrad_sink.is_delayed and linear_backend is None and not TORCH_GEMM.is_faster_than_torch_mm(x):
        return F.linear(x, weight, bias)
    linear_backend = linear_backend or UNQUANTIZED_LINEAR
    if torch.is_grad_enabled():
        y: Tensor = _Linear.apply(x, tracked_weight, linear_backend, wgrad_sink)
    else:
        y = linear_backend.forward(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, linear_backend: LinearBackend, wgrad_sink: WeightGradSink
    ) -> Tensor:
        # The gradient of a frozen weight is not computed, and its input not saved.
        ctx.has_wgrad = wgrad_sink.is_delayed or ctx.needs_input_grad[1]
        ctx.save_for_backward(x if ctx.has_wgrad else None, weight)
        ctx.args = linear_backend, wgrad_sink
        # Not a view: an in-place operation on a view would remove the hook of an FSDP module, and torch warns.
        return linear_backend.forward(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        linear_backend, wgrad_sink = ctx.args
        grad_MN = grad.flatten(0, -2)
        if isinstance(linear_backend, UnquantizedLinear) and not wgrad_sink.is_delayed:
            # Upcast once for both GEMMs. A delayed GEMM keeps the gradient in its own precision.
            grad_MN = linear_backend.gemm.upcast(grad_MN)
        grad_x = linear_backend.input_gradient(grad_MN, weight).unflatten(0, grad.shape[:-1])
        if not ctx.has_wgrad:
            return grad_x, None, None, None
        grad_weights = wgrad_sink.resolve(lambda: [linear_backend.weight_gradient(grad_MN, x.flatten(0, -2))], 1)
        return grad_x, *grad_weights, None, None
