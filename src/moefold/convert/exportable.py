"""Whether an upcycled model can be exported: said when it is made, not when it is trained. Torch-free."""

from dataclasses import replace
from typing import Any

from moefold.config.schema import ModelConfig
from moefold.convert.families import FAMILIES
from moefold.convert.hf_config import families_for, family_unsupported_reason


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
