"""Combined meaning of several settings of routing, and code shared by several choices of experts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moefold.config.chosen import chosen_in
from moefold.config.groups.router import BalanceScopePart, ChoicePart
from moefold.config.model import ModelConfig, has_moe_layers
from moefold.config.moe import MoEConfig
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


def aux_coefficient(moe: MoEConfig) -> float:
    """Return the coefficient of the load-balancing loss: `aux_loss` if the scores decide, else 0."""
    return moe.aux_loss if chosen_in(moe, ChoicePart).scores_decide else 0.0


def depends_on_data_parallel_size(model: ModelConfig, moe: MoEConfig) -> bool:
    """Return whether the load-balancing loss depends on dp."""
    accumulates = chosen_in(moe, BalanceScopePart).accumulates
    return accumulates and aux_coefficient(moe) > 0 and has_moe_layers(model)


def no_bias_problems(model: ModelConfig, choice: str, reason: str) -> Iterator[Problem]:
    """Yield the settings of scores that contradict a choice of experts.

    Args:
        choice: value of `moe.choice`.
        reason: reason for the message, such as "reads no score".
    """
    part = model.routed
    if part is None:
        return
    if part.router.expert_bias:
        rule = f"contradicts moe.choice={choice!r}, which {reason}"
        yield Problem("model.ffn.moe.router.expert_bias", True, rule, "choose expert_bias=false, or choice='topk'")
    if part.router.num_groups > 1:
        rule = f"contradicts moe.choice={choice!r}, which {reason}"
        way_out = "leave num_groups and top_groups out, or choose choice='topk'"
        yield Problem("model.ffn.moe.router.num_groups", part.router.num_groups, rule, way_out)


def assign_in_turn(index_T: "Tensor", top_k: int, num_experts: int, *, first: int = 0) -> "Tensor":
    """Assign the experts cyclically to the tokens, starting at `first`: an even load. int64 [T, K]."""
    import torch

    counter_TK = index_T.unsqueeze(1) * top_k + torch.arange(top_k, device=index_T.device)
    return first + counter_TK % (num_experts - first)
