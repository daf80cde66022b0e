"""Parts of `train.recompute`: which part contains which, and which a model has."""

from collections.abc import Sequence
from functools import cache

from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.model import ModelConfig

COMMON_PARTS = ("norms", "core_attention", "dense_mlp", "expert_activation", "shared_experts", "moe", "layer")
"""Parts of a layer under every attention."""
NETWORK_PARTS = frozenset({"dense_mlp", "expert_activation", "shared_experts", "moe"})
"""Parts of feed-forward networks. Each network has some (`FeedForwardPart.recompute_parts`)."""


@cache
def part_owners() -> dict[str, str]:
    """Return the kind of the only attention that has a part, by part."""
    parts = {kind: find_part("attention", kind).own_recompute_parts for kind in built_in_kinds("attention")}
    return {part: kind for kind, own in parts.items() for part in own}


@cache
def recompute_parts() -> tuple[str, ...]:
    """Return the parts of a layer that can be recomputed in the backward pass (activation checkpointing)."""
    before = COMMON_PARTS.index("core_attention") + 1
    return (*COMMON_PARTS[:before], *part_owners(), *COMMON_PARTS[before:])


def is_implied(part: str, container: str) -> bool:
    """Return whether a part is recomputed with another one anyway."""
    return part in {"moe": ("expert_activation", "shared_experts")}.get(container, ()) or part != container == "layer"


def containing_part(part: str, parts: Sequence[str]) -> str | None:
    """Return the first of `parts` that contains another part, or None."""
    return next((container for container in parts if is_implied(part, container)), None)


def missing_reason(part: str, model: ModelConfig) -> str:
    """Return why a model lacks a part, or "" if it has it."""
    owner = None if part in COMMON_PARTS else part_owners().get(part)
    is_of_attention = part == "core_attention" or owner is not None
    if is_of_attention and not model.has_softmax_attention:
        return f"all layers of model.layers={model.layers!r} have linear attention"
    if is_of_attention and model.selected_keys:
        return f"the sparse attention of model.attention.indexer.top_k={model.selected_keys} does not have it as a part"
    if owner is not None and not any(part in layer.attention.recompute_parts for layer in model.decoder_layers):
        return f"model.attention is not {owner!r}"
    if part == "dense_mlp" and not model.has_dense_layers:
        return "no layer of model.layers is 'dense'"
    if part in ("moe", "expert_activation", "shared_experts") and not model.has_moe_layers:
        return "no layer of model.layers is 'moe'"
    if part == "shared_experts" and model.experts.shared_width == 0:
        return "model.ffn.moe.shared is none"
    if part == "norms" and not model.decoder_layers[0].residual.norms_input:
        return f"model.residual={model.decoder_layers[0].residual.kind!r} has no norms of inputs"
    return ""
