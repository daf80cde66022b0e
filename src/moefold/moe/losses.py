"""The auxiliary losses of a router, each defined once over a whole micro-batch.

A rank computes its *part*: the parts of all ranks that share the micro-batch sum to the value, and the sum of their
gradients is its gradient. So neither depends on the mapping.
"""

from typing import Any

import torch
from torch import Tensor


def load_balancing_part(scores_TE: Tensor, routed_E: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """My part of E * sum_e f_e P_e (arXiv:2101.03961 eq. 4); 1 where the load is even.

    f_e is the share of the copies of the micro-batch that chose expert e, before any is dropped, and has no gradient;
    P_e is the mean score of e over its tokens.

    Args:
        scores_TE: softmax over all experts of my tokens.
        routed_E: copies that chose each expert, over all tokens of the micro-batch.
        num_tokens: tokens of the micro-batch.
        top_k: K.
    """
    num_experts = scores_TE.shape[1]
    share_E = routed_E.to(scores_TE.dtype) / (num_tokens * top_k)
    return num_experts / num_tokens * torch.dot(share_E, scores_TE.sum(0))


def z_part(logits_TE: Tensor, num_tokens: int) -> Tensor:
    """My part of the mean over tokens of logsumexp(logits)^2 (arXiv:2202.08906 eq. 5)."""
    return logits_TE.logsumexp(-1).square().sum() / num_tokens


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """`x` unchanged, but whoever differentiates through it adds `loss` to what is minimised.

    A loss of any layer thus takes part without a way to the last pipeline stage.
    """
    return _Attach.apply(x, loss)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_options = {"dtype": loss.dtype, "device": loss.device}
        ctx.loss_shape = loss.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(ctx.loss_shape, **ctx.loss_options)
