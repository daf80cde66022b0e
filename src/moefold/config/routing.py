"""Combined meaning of several settings of routing."""

from moefold.config.chosen import chosen_in
from moefold.config.groups.router import BalanceScopePart, ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig


def aux_coefficient(moe: MoEConfig) -> float:
    """Return the coefficient of the load-balancing loss: `aux_loss` if the scores decide, else 0."""
    return moe.aux_loss if chosen_in(moe, ChoicePart).scores_decide else 0.0


def depends_on_data_parallel_size(model: ModelConfig, moe: MoEConfig) -> bool:
    """Return whether the load-balancing loss depends on dp."""
    accumulates = chosen_in(moe, BalanceScopePart).accumulates
    return accumulates and aux_coefficient(moe) > 0 and model.has_moe_layers
