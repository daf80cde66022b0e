"""The router's choice as one kernel, with its gradient; and which recipes it knows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.config.schema import ModelConfig, MoEConfig
from moefold.kernels.triton_router import RouterOptions, RouterOutput, route_backward, route_forward


class FusedRouting:
    """From logits to choices in one pass over them, forwards and backwards.

    Args:
        model: sizes, and what makes a score and a weight.
    """

    def __init__(self, model: ModelConfig) -> None:
        is_softmax = model.router_score == "softmax"
        self._options = RouterOptions(
            top_k=model.top_k,
            is_softmax=is_softmax,
            is_post_softmax=is_softmax and model.router_softmax == "post",
            normalizes_probs=not is_softmax and model.router_normalize,
            scaling_factor=model.router_scaling_factor,
            num_groups=model.num_groups,
            top_groups=model.top_groups,
        )

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> RouterOutput:
        """Choose experts; gradients flow through weights, scores, their sums and the sum of the z-loss.

        Args:
            logits_TE: float32.
            bias_E: added to the scores for the choice alone.
        """
        return RouterOutput(*_Route.apply(logits_TE, bias_E, self._options))


def fused_router_unsupported_reason(model: ModelConfig, moe: MoEConfig) -> str:
    """Why the router of a recipe is computed by plain operations; empty if the kernel knows it."""
    if moe.choice != "topk":
        return f"moe.choice={moe.choice!r}"
    if model.router_score == "sqrtsoftplus":
        return "model.router_score='sqrtsoftplus'"
    if moe.router_dtype != "float32":
        return f"moe.router_dtype={moe.router_dtype!r}"
    if moe.trace_every or moe.replay:
        return "choices are traced or replayed"
    return ""


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: RouterOptions) -> tuple[Tensor, ...]:
        logits_TE = logits_TE.contiguous()
        r = route_forward(logits_TE, bias_E, options)
        ctx.save_for_backward(logits_TE, r.ids_TK)
        ctx.options = options
        ctx.mark_non_differentiable(r.ids_TK, r.tokens_per_expert_E, r.entropy)
        return r.ids_TK, r.probs_TK, r.scores_TE, r.tokens_per_expert_E, r.score_sums_E, r.z_sum, r.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, probs, scores, _, sums, z, _ = grads
        logits_TE, ids_TK = ctx.saved_tensors
        return route_backward(logits_TE, ids_TK, (probs, scores, sums, z), ctx.options), None, None
