"""Benchmarked MoE layer of torchtitan: its `MoE` with our weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from benchmarks.race.routing import softmax_kind
from moefold.config.model import ModelConfig
from moefold.model.moe.layer import MoELayer


def build(ours: MoELayer, model: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """Build a layer that maps [S, B, H] to [S, B, H], with a float32 router."""
    with torch.device("meta"):
        layer: Any = _config(model).build()
    layer.to(dtype).router.float()
    layer.to_empty(device=ours.router.weight.device)
    _copy_weights(ours, layer)
    # On CUDA autocast casts the router's input to float32; CPU autocast does not support float32.
    layer.router.gate.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return layer.train()


def _config(model: ModelConfig) -> Any:
    size = model.hidden_size
    num_experts = model.ffn.moe.num_experts
    has_groups = model.ffn.moe.router.num_groups > 1
    is_softmax = model.ffn.moe.router.kind == "softmax"
    return MoE.Config(
        num_experts=num_experts,
        # Enables the expert bias; the value is only used by its update, which is not part of the layer.
        load_balance_coeff=1e-3 if model.ffn.moe.router.expert_bias else None,
        shared_experts=_shared_expert(model) if model.ffn.moe.shared else None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=num_experts,
            gate=_linear(size, num_experts),
            num_expert_groups=model.ffn.moe.router.num_groups if has_groups else None,
            num_limited_groups=model.ffn.moe.router.top_groups if has_groups else None,
            top_k=model.ffn.moe.top_k,
            score_func=model.ffn.moe.router.kind,
            # The softmax over the chosen logits equals the full softmax normalised over the chosen experts.
            route_norm=softmax_kind(model) == "post" if is_softmax else model.ffn.moe.router.normalize,
            route_scale=model.ffn.moe.router.scaling_factor,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=size, hidden_dim=model.ffn.moe.intermediate_size, num_experts=num_experts
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=num_experts, top_k=model.ffn.moe.top_k),
        ),
    )


def _shared_expert(model: ModelConfig) -> Any:
    size = model.hidden_size
    inner = model.ffn.moe.shared.intermediate_size
    widths = {"w1": _linear(size, inner), "w2": _linear(inner, size), "w3": _linear(size, inner)}
    if model.ffn.moe.shared.gate:
        return SigmoidGatedFeedForward.Config(**widths, gate=_linear(size, 1))
    return FeedForward.Config(**widths)


def _linear(inputs: int, outputs: int) -> Any:
    return Linear.Config(in_features=inputs, out_features=outputs)


@torch.no_grad()
def _copy_weights(ours: MoELayer, theirs: Any) -> None:
    experts = ours.experts
    inner = theirs.routed_experts.inner_experts
    pairs: list[tuple[Tensor, Tensor]] = [
        (theirs.router.gate.weight, ours.router.weight),
        (inner.w1_EFD, experts.w_gate.transpose(1, 2)),
        (inner.w2_EDF, experts.w_down.transpose(1, 2)),
        (inner.w3_EFD, experts.w_up.transpose(1, 2)),
    ]
    shared: Any = ours.shared
    if shared is not None:
        target = theirs.shared_experts
        pairs += [(target.w1.weight, shared.w_gate), (target.w2.weight, shared.w_down), (target.w3.weight, shared.w_up)]
    if ours.shared_gate is not None:
        pairs.append((theirs.shared_experts.gate.weight, ours.shared_gate))
    for target, source in pairs:
        target.copy_(source)
    theirs.tokens_per_expert_E.zero_()
    if ours.router.expert_bias is not None:
        # The buffer is added to float32 scores.
        theirs.expert_bias_E = ours.router.expert_bias.detach().clone()
