"""Modules of MoE layers from the sections of a recipe."""

from typing import Any

from moefold.config.chosen import RoutingSections, chosen
from moefold.config.groups.ffn import RoutedPart
from moefold.config.groups.router import RouterScorePart
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import FusedRouting, Router

Parts = tuple[RoutedPart, RouterScorePart]


def moe_layer(model: ModelConfig, moe: MoEConfig, **settings: Any) -> MoELayer:
    """Return an MoE layer of a model; `settings` as of `MoELayer`."""
    part, score = _parts(model, moe)
    return MoELayer(part, model.hidden_size, moe, score, **settings)


def moe_router(model: ModelConfig, moe: MoEConfig, *, noise_seed: int = 0) -> Router:
    """Return the router of an MoE layer of a model."""
    part, score = _parts(model, moe)
    return Router(part, model.hidden_size, moe, score, noise_seed=noise_seed)


def fused_routing(model: ModelConfig) -> FusedRouting:
    """Return the fused kernel of the routers of a model."""
    return FusedRouting(*_parts(model, MoEConfig()))


def _parts(model: ModelConfig, moe: MoEConfig) -> Parts:
    assert model.routed is not None
    return model.routed, chosen(RoutingSections(model, moe), RouterScorePart)
