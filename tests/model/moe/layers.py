"""Modules of MoE layers from the sections of a recipe."""

from typing import Any

from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import FusedRouting, Router


def moe_layer(model: ModelConfig, moe: MoEConfig, **settings: Any) -> MoELayer:
    """Return an MoE layer of a model; `settings` as of `MoELayer`."""
    return MoELayer(model.experts, model.hidden_size, moe, **settings)


def moe_router(model: ModelConfig, moe: MoEConfig, *, noise_seed: int = 0) -> Router:
    """Return the router of an MoE layer of a model."""
    return Router(model.experts, model.hidden_size, moe, noise_seed=noise_seed)


def fused_routing(model: ModelConfig) -> FusedRouting:
    """Return the fused kernel of the routers of a model."""
    return FusedRouting(model.experts)
