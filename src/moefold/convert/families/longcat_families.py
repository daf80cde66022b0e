"""Family LongCat-Flash: layers of two attentions, two dense networks and shortcut-connected experts.

A layer of the folder is an MoE layer and a dense layer here. The first dense network is the shared expert of the MoE
layer, and `model.ffn.moe.shortcut` adds the output of its routed experts after the dense layer.
"""

from dataclasses import dataclass
from typing import Any

from moefold.config.base.limits import MAX_LAYERS
from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import AllowedValues, Constants, Renamed, allowed, renamed
from moefold.convert.families.family import (
    Family,
    TensorRules,
    backbone_fields,
    expert_layouts,
    ffn_rules,
    latent_fields,
    layer_rules,
    layouts,
    mla_rules,
)
from moefold.convert.families.known_keys import Json
from moefold.convert.families.rope_fields import RopeParameters


@dataclass(frozen=True)
class LayerPairs:
    """`num_layers`. Each layer is two layers here."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of layers."""
        count = Renamed("num_layers", "layers", 28, minimum=1, maximum=MAX_LAYERS // 2).read(hf_config)["layers"]
        return {"layers": 2 * count, "layers.ffn": ["moe", "dense"] * count, "ffn.moe.shortcut": True}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of pairs. Other patterns do not read back as the same model."""
        return {"num_layers": model.num_layers // 2}


@dataclass(frozen=True)
class ZeroExperts:
    """`zero_expert_num` (null: none) and the kind of these experts."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of experts without computation."""
        AllowedValues("zero_expert_type", ("identity", None)).read(hf_config)
        if hf_config.get("zero_expert_num", 256) is None:
            return {}
        return Renamed("zero_expert_num", "ffn.moe.zero_experts", 256).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number."""
        return {"zero_expert_num": model.ffn.moe.zero_experts, "zero_expert_type": "identity"}


_LAYER = "model.layers.{pair}"
_TENSORS: TensorRules = {
    **mla_rules("self_attn.{half}", _LAYER),
    **ffn_rules("ffn", "mlps.{half}", layer=_LAYER),
    **ffn_rules("ffn.shared", "mlps.{half}", layer=_LAYER),
    **layer_rules(
        {
            "attention_norm.weight": "input_layernorm.{half}.weight",
            "ffn_norm.weight": "post_attention_layernorm.{half}.weight",
            "attention.wo": "self_attn.{half}.o_proj.weight",
            "ffn.router.weight": "mlp.router.classifier.weight",
            "ffn.router.expert_bias": "mlp.router.e_score_correction_bias",
        },
        _LAYER,
    ),
}

LONGCAT_FAMILIES = (
    Family(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        (
            *backbone_fields(1e-5, RopeParameters(1e7, scales_scores=True), layers=LayerPairs()),
            *latent_fields(
                writes_head_dim=True, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
            Renamed("q_lora_rank", "attention.q_lora_rank", 1536),
            Constants(
                {
                    "attention": "mla",
                    "rope.interleaved": True,
                    "attention.scale_latents": True,
                    "ffn.moe.router.softmax": "pre",
                    "ffn.moe.router.expert_bias": True,
                }
            ),
            *allowed(
                mla_scale_q_lora=(True, None),
                mla_scale_kv_lora=(True, None),
                router_bias=(False, None),
                norm_topk_prob=(False, None),
            ),
            # Width of both dense networks of a layer. The first network is a shared expert here.
            Renamed(
                "ffn_hidden_size", "ffn.dense.intermediate_size", 12288, copies=("ffn.moe.shared.intermediate_size",)
            ),
            ZeroExperts(),
            *renamed(
                n_routed_experts=("ffn.moe.num_experts", 512),
                moe_topk=("ffn.moe.top_k", 12),
                expert_ffn_hidden_size=("ffn.moe.intermediate_size", 2048),
                routed_scaling_factor=("ffn.moe.router.scaling_factor", 6.0),
            ),
        ),
        layouts(_TENSORS, experts=expert_layouts("mlp.experts", layer=_LAYER)[:1]),
        # The class of transformers rotates by head_dim, whatever qk_rope_head_dim is.
        default_keys={"head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        ignored_tensors=(
            r"model\.layers\.\d+\.self_attn\.\d+\.rotary_emb\.inv_freq",
            r"model\.mtp\..*",
        ),
        # transformers writes these tensors but does not read them. The published folders lack them.
        zero_expert_tensors=r"model\.layers\.\d+\.mlp\.experts\.(\d{1,9})\.(?:gate|up)_proj\.weight",
    ),
)
"""Families in the order of trial of an export without --family."""
