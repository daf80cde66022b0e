"""Family LongCat-Flash: layers of two attentions, two dense networks and shortcut-connected experts. Torch-free.

A layer of the folder is two layers here, an MoE layer and a dense one: the first dense network is the shared expert of
the MoE layer, and `model.moe_shortcut` adds the output of its routed experts after the dense layer.
"""

from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.config.patterns import MAX_LAYERS
from moefold.convert.config_fields import AllowedValues, Constant, LatentHeadSizes, MultiHeadKeyValue, Renamed, is_int
from moefold.convert.family import SILU, Family, TensorRules
from moefold.convert.key_reader import Json
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import PerExpertTensors, RenamedTensor, TensorRule
from moefold.errors import ConfigError


@dataclass(frozen=True)
class LayerPairs:
    """`num_layers`, each of which is two layers here."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of layers."""
        count = hf_config.get("num_layers", 28)
        if not is_int(count) or not 1 <= count <= MAX_LAYERS // 2:
            raise ConfigError(f"config.json has num_layers={count!r}, which should be 1 to {MAX_LAYERS // 2}")
        return {"num_layers": 2 * count, "layer_pattern": "MD", "moe_shortcut": True}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number of pairs; other patterns read back as another model."""
        return {"num_layers": model.num_layers // 2}


@dataclass(frozen=True)
class DenseWidth:
    """`ffn_hidden_size`: width of both dense networks of a layer, the first of which is a shared expert here."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read both widths."""
        found = Renamed("ffn_hidden_size", "ffn_hidden_size", 12288).read(hf_config)
        return found | {"shared_expert_ffn_hidden_size": found["ffn_hidden_size"]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the width; two different ones read back as another model."""
        return {"ffn_hidden_size": model.ffn_hidden_size}


@dataclass(frozen=True)
class ZeroExperts:
    """`zero_expert_num`, null for none, and their kind."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number of experts without computation."""
        AllowedValues("zero_expert_type", ("identity", None)).read(hf_config)
        if hf_config.get("zero_expert_num", 256) is None:
            return {}
        return Renamed("zero_expert_num", "zero_experts", 256).read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number."""
        return {"zero_expert_num": model.zero_experts, "zero_expert_type": "identity"}


_LAYER = "model.layers.{pair}"


def _layer_rules(names: dict[str, str]) -> dict[str, TensorRule]:
    """Return the rules of tensors that each half of a layer has, by its number in the layer."""
    return {f"layers.{{l}}.{ours}": RenamedTensor(f"{_LAYER}.{theirs}") for ours, theirs in names.items()}


_TENSORS: TensorRules = {
    "embedding.weight": RenamedTensor("model.embed_tokens.weight"),
    "head.norm.weight": RenamedTensor("model.norm.weight"),
    "head.weight": RenamedTensor("lm_head.weight"),
    **_layer_rules(
        {
            "attention_norm.weight": "input_layernorm.{half}.weight",
            "ffn_norm.weight": "post_attention_layernorm.{half}.weight",
            "attention.wq_down": "self_attn.{half}.q_a_proj.weight",
            "attention.query_norm.weight": "self_attn.{half}.q_a_layernorm.weight",
            "attention.wq_up": "self_attn.{half}.q_b_proj.weight",
            "attention.wkv_down": "self_attn.{half}.kv_a_proj_with_mqa.weight",
            "attention.key_value_norm.weight": "self_attn.{half}.kv_a_layernorm.weight",
            "attention.wkv_up": "self_attn.{half}.kv_b_proj.weight",
            "attention.wo": "self_attn.{half}.o_proj.weight",
            "ffn.router.weight": "mlp.router.classifier.weight",
            "ffn.router.expert_bias": "mlp.router.e_score_correction_bias",
            **{f"ffn.w_{x}": f"mlps.{{half}}.{x}_proj.weight" for x in ("gate", "up", "down")},
            **{f"ffn.shared.w_{x}": f"mlps.{{half}}.{x}_proj.weight" for x in ("gate", "up", "down")},
        }
    ),
    **{
        f"layers.{{l}}.ffn.experts.w_{x}": PerExpertTensors(f"{_LAYER}.mlp.experts.{{e}}.{x}_proj.weight")
        for x in ("gate", "up", "down")
    },
}

LONGCAT_FAMILIES = (
    Family(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        (
            LayerPairs(),
            Renamed("hidden_size", "hidden_size"),
            Renamed("num_attention_heads", "num_attention_heads"),
            Renamed("vocab_size", "vocab_size"),
            Renamed("rms_norm_eps", "norm_eps", 1e-5),
            Renamed("tie_word_embeddings", "tie_embeddings", False),
            Renamed("initializer_range", "init_std", 0.02),
            RopeParameters(1e7, scales_scores=True),
            AllowedValues("hidden_act", SILU),
            MultiHeadKeyValue(),
            Constant("attention", "mla"),
            LatentHeadSizes(writes_head_dim=True),
            Constant("rope_interleaved", True),
            Constant("mla_scale_latents", True),
            AllowedValues("mla_scale_q_lora", (True, None)),
            AllowedValues("mla_scale_kv_lora", (True, None)),
            AllowedValues("attention_bias", (False,)),
            Renamed("q_lora_rank", "q_lora_rank", 1536),
            Renamed("kv_lora_rank", "kv_lora_rank", 512),
            Renamed("qk_nope_head_dim", "qk_nope_head_dim", 128),
            Renamed("qk_rope_head_dim", "qk_rope_head_dim", 64),
            Renamed("v_head_dim", "v_head_dim", 128),
            DenseWidth(),
            Renamed("n_routed_experts", "num_experts", 512),
            ZeroExperts(),
            Renamed("moe_topk", "top_k", 12),
            Renamed("expert_ffn_hidden_size", "moe_ffn_hidden_size", 2048),
            Renamed("routed_scaling_factor", "router_scaling_factor", 6.0),
            Constant("router_softmax", "pre"),
            Constant("expert_bias", True),
            AllowedValues("router_bias", (False, None)),
            AllowedValues("norm_topk_prob", (False, None)),
        ),
        (_TENSORS,),
        # Its class rotates by head_dim, whatever qk_rope_head_dim is.
        default_keys={"head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        ignored_tensors=(
            r"model\.layers\.\d+\.self_attn\.\d+\.rotary_emb\.inv_freq",
            r"model\.mtp\..*",
        ),
        # transformers writes them, and does not read them; the published folders have none.
        zero_expert_tensors=r"model\.layers\.\d+\.mlp\.experts\.(\d{1,9})\.(?:gate|up)_proj\.weight",
    ),
)
"""Families in the order in which an export without --family tries them."""
