"""Which dense model makes which model with experts, and when the two start equal. Torch-free.

Whether an upcycled model can be exported: said when it is made, not when it is trained. Torch-free.
"""

import math
from dataclasses import replace
from typing import Any

from moefold.checkpoint.checkpoint_dir import model_differences, model_sizes
from moefold.config.schema import ModelConfig
from moefold.convert.families import FAMILIES
from moefold.convert.hf_config import families_for, family_unsupported_reason

MOE_KEYS = (
    "layer_pattern",
    "num_experts",
    "top_k",
    "moe_ffn_hidden_size",
    "router_softmax",
    "router_score",
    "router_normalize",
    "router_scaling_factor",
    "num_groups",
    "top_groups",
    "expert_bias",
    "moe_bias",
    "router_bias",
    "shared_expert_ffn_hidden_size",
    "shared_expert_gate",
)
"""Keys of [model] that a dense model says nothing of. Its activation is that of the experts."""


def granularity(dense_width: int, model: ModelConfig) -> int:
    """Slices that the feed-forward layer of a dense model is cut into."""
    return dense_width // model.moe_ffn_hidden_size


def upcycle_scale(model: ModelConfig, slices: int) -> float:
    """The factor that makes the chosen copies of a slice add up to one, for equal logits of all experts.

    Of weights that are made to sum to 1, each slice gets 1/slices, whatever the logits are; other weights are those of
    equal logits.
    """
    copies = model.top_k / slices
    if _sums_to_one(model):
        return slices / model.router_scaling_factor
    weight = {"softmax": 1 / model.num_experts, "sigmoid": 0.5, "sqrtsoftplus": math.sqrt(math.log(2))}
    return 1 / (copies * weight[model.router_score] * model.router_scaling_factor)


def preserves_outputs(model: ModelConfig) -> bool:
    """Whether the upcycled model promises to compute at first what the dense one does."""
    # Without the weights summing to 1, only equal logits have a weight that is known.
    router = model.upcycle_router == "zero" or (model.upcycle_router == "group" and _sums_to_one(model))
    return router and model.upcycle_noise == 0 and model.upcycle_scaling


def dense_unsupported_reason(dense: ModelConfig) -> str:
    """Why a model is none that experts can be made of; empty if it is one."""
    if "M" in dense.layer_kinds:
        return "it has experts already; name a dense model, or set checkpoint.init_from"
    return ""


def upcycle_unsupported_reason(dense: ModelConfig, model: ModelConfig) -> str:
    """Why a dense model cannot become a model with experts; empty if it can."""
    if fault := dense_unsupported_reason(dense):
        return fault
    width, inner = dense.ffn_hidden_size, model.moe_ffn_hidden_size
    if width % inner:
        return f"model.moe_ffn_hidden_size={inner} must divide its feed-forward width {width}"
    slices = width // inner
    if model.num_experts % slices or model.top_k % slices:
        return (
            f"its width {width} is {slices} experts of model.moe_ffn_hidden_size={inner}, so model.num_experts="
            f"{model.num_experts} and model.top_k={model.top_k} must be multiples of {slices}"
        )
    comparable = replace(model, **{key: getattr(dense, key) for key in MOE_KEYS})
    if "D" not in model.layer_kinds:
        comparable = replace(comparable, ffn_hidden_size=width)
    different = model_differences(model_sizes(dense), comparable)
    return f"it is of another shape: {different}" if different else ""


def _sums_to_one(model: ModelConfig) -> bool:
    return model.router_softmax == "post" if model.router_score == "softmax" else model.router_normalize


def export_message(model: ModelConfig) -> str:
    """That no family of Hugging Face models computes what a model with experts does, and what makes it one; else "".

    Layers of multi-token prediction do not count: an export can leave them out.
    """
    plain = replace(model, mtp_layers=0)
    if families_for(plain):
        return ""
    lacks = "no family of Hugging Face models computes what this model does, so moefold export cannot write it"
    for change in _candidate_changes(plain):
        if able := families_for(replace(plain, **change)):
            words = " ".join(f"model.{key}={_format_value(value)}" for key, value in change.items())
            return f"{lacks}; with {words} it is {able[0].name}"
    reasons = {family.name: family_unsupported_reason(family, plain) for family in FAMILIES.values()}
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    return f"{lacks}; the nearest is {nearest}: {reasons[nearest]}"


def _candidate_changes(model: ModelConfig) -> list[dict[str, Any]]:
    """Settings of the experts that an upcycled model may take on."""
    width = model.shared_expert_ffn_hidden_size or model.moe_ffn_hidden_size
    # The weight of a single choice that sums to 1 is 1, and its router would learn nothing.
    return [
        *([{"router_softmax": "post"}] if model.top_k > 1 else []),
        {"shared_expert_ffn_hidden_size": width, "shared_expert_gate": True},
    ]


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
