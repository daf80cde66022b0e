"""Values whose gradient takes another path: around frozen parts of a model, and into losses that are attached.

Frozen parts are computed without a graph, and passed by gradients, so that the layers stay connected. In the warm-up of
indexers (`train.indexer_stage`) only their losses need gradients, and these do not pass through the model. Gradients
still pass from the last layer to the first, because pipelines and FSDP start the backward pass of a stage or layer when
they arrive. Their values mean nothing.
"""

from typing import Any

import torch
from torch import Tensor


def pass_gradient(source: Tensor, value: Tensor) -> Tensor:
    """Return `value`. The backward pass gives its gradient to `source`, of the same shape, instead.

    Without gradients, as in evaluation, `value` is returned unchanged.
    """
    if not (torch.is_grad_enabled() and source.requires_grad):
        return value
    return _PassGradient.apply(source, value)


def connect_loss(source: Tensor, loss: Tensor) -> Tensor:
    """Return `loss`, which was computed from `source` without a graph. The backward pass gives zeros to `source`."""
    if not (torch.is_grad_enabled() and source.requires_grad):
        return loss
    return _ConnectLoss.apply(source, loss)


def attach_aux_loss(x: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Return `x` unchanged. The backward pass through it adds the gradient of `scale * loss`.

    So the loss of any layer is minimised without being passed to the last pipeline stage.
    """
    return _AttachAuxLoss.apply(x, loss, scale)


def without_base(x: Tensor) -> Tensor:
    """Return `x` as a tensor that autograd does not treat as a view: FSDP warns of modules that return views."""
    return x if x._base is None else _WithoutBase.apply(x)


class _PassGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ConnectLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, loss: Tensor) -> Tensor:
        ctx.like = {"dtype": source.dtype, "device": source.device}
        ctx.shape = source.shape
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros(ctx.shape, **ctx.like), None


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.loss_options = {"dtype": loss.dtype, "device": loss.device}
        ctx.loss_shape = loss.shape
        ctx.scale = scale
        # The result has the same storage, but is not a view for autograd: FSDP warns of modules that return views.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full(ctx.loss_shape, ctx.scale, **ctx.loss_options), None


class _WithoutBase(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
