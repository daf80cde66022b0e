"""Rules on what is made again in the backward pass."""

from collections.abc import Iterator

from moefold.config.checks_model import has_dense_layers, has_moe_layers
from moefold.config.schema import RECOMPUTE_PARTS, Config, ModelConfig

INSIDE = {"moe": ("expert_activation", "shared_experts"), "layer": tuple(p for p in RECOMPUTE_PARTS if p != "layer")}
"""What runs again with a part anyway."""


def recompute_faults(cfg: Config) -> Iterator[str]:
    """Every part is one, stands there once, is in the model, and is not inside another."""
    parts = cfg.train.recompute
    for part in dict.fromkeys(parts):
        if part not in RECOMPUTE_PARTS:
            known = ", ".join(map(repr, RECOMPUTE_PARTS))
            yield f"train.recompute has {part!r}, which is no part of a layer; choose from {known}"
        elif parts.count(part) > 1:
            yield f"train.recompute names {part!r} {parts.count(part)} times; name it once"
        elif lack := _lack(part, cfg.model):
            yield f"train.recompute has {part!r}, and {lack}; leave it out"
        elif whole := next((whole for whole in parts if part in INSIDE.get(whole, ())), None):
            yield f"train.recompute has {part!r} and {whole!r}, which makes it again anyway; leave one of them out"


def _lack(part: str, model: ModelConfig) -> str:
    """Why a model has no such part; empty if it has."""
    if part == "mla_up" and model.attention != "mla":
        return "model.attention is not 'mla'"
    if part == "dense_mlp" and not has_dense_layers(model):
        return "no layer of model.layer_pattern is D"
    if part in ("moe", "expert_activation", "shared_experts") and not has_moe_layers(model):
        return "no layer of model.layer_pattern is M"
    if part == "shared_experts" and model.shared_expert_ffn_hidden_size == 0:
        return "model.shared_expert_ffn_hidden_size=0 means none"
    return ""


RECOMPUTE_RULES = (recompute_faults,)
