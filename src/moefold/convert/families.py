"""Model families of Hugging Face folders, as data. Torch-free.

A family lists the meaning of the keys of its config.json and maps its tensors; the code that reads and writes folders
is the same for all families. Keys follow the configuration classes of transformers 5, tensor names the files that it
writes. `layouts` lists the layouts of the experts that a folder may have; the first one is the one that is written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.config_fields import (
    AllowedValues,
    ConfigField,
    Constant,
    FirstKDense,
    GatedSharedExpert,
    HeadSize,
    KeyValueHeads,
    MTPLayers,
    MultiHeadKeyValue,
    NormTopKProb,
    NoSlidingWindow,
    QueryLoraRank,
    Renamed,
    RopeParameters,
    RouterGroups,
    SharedExperts,
    SlidingWindowLayers,
    SparseLayers,
    UniformLayers,
)
from moefold.convert.tensor_mapping import (
    InterleavedTensor,
    PerExpertTensors,
    RenamedTensor,
    StackedExperts,
    TensorRule,
)

TensorRules = Mapping[str, TensorRule]


@dataclass(frozen=True)
class Family:
    """One Hugging Face model family.

    Attributes:
        name: its `model_type`.
        architecture: the transformers class that computes it.
        config_fields: the meaning of the keys of config.json.
        layouts: for each layout of the experts, the table of all tensors.
        default_keys: values of keys that config.json lacks, as in the configuration class, for keys whose null means
            something else to `config_fields`.
        has_mtp: whether multi-token prediction (MTP) layers may follow the others.
        ignored_tensors: regular expressions of tensors that some folders hold and that are not read.
    """

    name: str
    architecture: str
    config_fields: tuple[ConfigField, ...]
    layouts: tuple[TensorRules, ...]
    default_keys: Mapping[str, Any] = field(default_factory=dict)
    has_mtp: bool = False
    ignored_tensors: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of a folder is ignored."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored_tensors)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that describe the computation of a model."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for entry in self.config_fields:
            keys |= entry.write(model)
        return keys


def _layer_rules(names: Mapping[str, str]) -> dict[str, TensorRule]:
    return {f"layers.{{l}}.{ours}": RenamedTensor(f"model.layers.{{l}}.{theirs}") for ours, theirs in names.items()}


def _merge_rules(*parts: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    return {ours: row for part in parts for ours, row in part.items()}


_BACKBONE: dict[str, TensorRule] = {
    "embedding.weight": RenamedTensor("model.embed_tokens.weight"),
    "head.norm.weight": RenamedTensor("model.norm.weight"),
    "head.weight": RenamedTensor("lm_head.weight"),
    **_layer_rules(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "attention.wq": "self_attn.q_proj.weight",
            "attention.wk": "self_attn.k_proj.weight",
            "attention.wv": "self_attn.v_proj.weight",
            "attention.wo": "self_attn.o_proj.weight",
        }
    ),
}
_BIASES = _layer_rules({f"attention.b{x}": f"self_attn.{x}_proj.bias" for x in "qkv"})
_HEAD_NORMS = _layer_rules(
    {"attention.query_norm.weight": "self_attn.q_norm.weight", "attention.key_norm.weight": "self_attn.k_norm.weight"}
)
_DENSE_FFN = _layer_rules({f"ffn.w_{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")})
_ROUTER = _layer_rules({"ffn.router.weight": "mlp.gate.weight"})
_SHARED_EXPERT = _layer_rules(
    {
        **{f"ffn.shared.w_{x}": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")},
        "ffn.shared_gate": "mlp.shared_expert_gate.weight",
    }
)
_EXPERTS = "layers.{l}.ffn.experts.w_"
PER_EXPERT: dict[str, TensorRule] = {
    f"{_EXPERTS}{x}": PerExpertTensors(f"model.layers.{{l}}.mlp.experts.{{e}}.{x}_proj.weight")
    for x in ("gate", "up", "down")
}
STACKED_EXPERTS: dict[str, TensorRule] = {
    f"{_EXPERTS}gate": StackedExperts("model.layers.{l}.mlp.experts.gate_up_proj", 0),
    f"{_EXPERTS}up": StackedExperts("model.layers.{l}.mlp.experts.gate_up_proj", 1),
    f"{_EXPERTS}down": StackedExperts("model.layers.{l}.mlp.experts.down_proj"),
}
"""Experts as transformers 5 stacks them in memory; some tools write files in this layout."""

_MIXTRAL_EXPERTS: dict[str, TensorRule] = {
    f"{_EXPERTS}{ours}": PerExpertTensors(f"model.layers.{{l}}.block_sparse_moe.experts.{{e}}.{theirs}.weight")
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


_MLA = _layer_rules(
    {
        "attention.wq_down": "self_attn.q_a_proj.weight",
        "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
        "attention.wq_up": "self_attn.q_b_proj.weight",
        "attention.wkv_down": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.key_value_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.wkv_up": "self_attn.kv_b_proj.weight",
        **{f"ffn.shared.w_{x}": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")},
        "ffn.router.expert_bias": "mlp.gate.e_score_correction_bias",
    }
)


_MTP = _layer_rules(
    {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "projection": "eh_proj.weight",
        "output_norm.weight": "shared_head.norm.weight",
    }
)
"""Tensors that a multi-token prediction (MTP) layer adds to those of an ordinary layer."""

_GPT_OSS = _layer_rules(
    {
        "attention.bo": "self_attn.o_proj.bias",
        "attention.sinks": "self_attn.sinks",
        "ffn.router.weight": "mlp.router.weight",
        "ffn.router.bias": "mlp.router.bias",
        "ffn.experts.w_down": "mlp.experts.down_proj",
        "ffn.experts.b_down": "mlp.experts.down_proj_bias",
    }
)
_GPT_OSS |= {
    f"layers.{{l}}.ffn.experts.{ours}_{kind}": InterleavedTensor(f"model.layers.{{l}}.mlp.experts.{theirs}", part)
    for ours, theirs in (("w", "gate_up_proj"), ("b", "gate_up_proj_bias"))
    for part, kind in enumerate(("gate", "up"))
}


def _sizes(*, norm_eps: float, rope_theta: float, head_size: int = 0) -> tuple[ConfigField, ...]:
    """Return the fields of families with plain attention; the arguments are the family's defaults for absent keys."""
    return (*_backbone_sizes(norm_eps, rope_theta), KeyValueHeads(), HeadSize(head_size))


def _backbone_sizes(norm_eps: float, rope_theta: float) -> tuple[ConfigField, ...]:
    """Return the fields that all families share."""
    return (
        Renamed("num_hidden_layers", "num_layers"),
        Renamed("hidden_size", "hidden_size"),
        Renamed("num_attention_heads", "num_attention_heads"),
        Renamed("vocab_size", "vocab_size"),
        Renamed("rms_norm_eps", "norm_eps", norm_eps),
        Renamed("tie_word_embeddings", "tie_embeddings", False),
        Renamed("initializer_range", "init_std", 0.02),
        RopeParameters(rope_theta),
        AllowedValues("hidden_act", ("silu",)),
    )


_NO_WINDOW: tuple[ConfigField, ...] = (AllowedValues("use_sliding_window", (False, None)), NoSlidingWindow())
_QWEN_EXPERTS: tuple[ConfigField, ...] = (
    SparseLayers(),
    Renamed("intermediate_size", "ffn_hidden_size"),
    Renamed("num_experts_per_tok", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    NormTopKProb(default=False),
)


@dataclass(frozen=True)
class _NumExperts:
    """Field num_experts, which transformers 5 also spells num_local_experts."""

    hf_key: str

    def read(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Read whichever spelling is present."""
        names = [name for name in ("num_experts", "num_local_experts") if hf_config.get(name) is not None]
        return Renamed(names[0] if names else self.hf_key, "num_experts").read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the spelling of the released folders."""
        return {self.hf_key: model.num_experts}


_DEEPSEEK: tuple[ConfigField, ...] = (
    *_backbone_sizes(1e-6, 1e4),
    MultiHeadKeyValue(),
    Constant("attention", "mla"),
    QueryLoraRank(),
    Renamed("kv_lora_rank", "kv_lora_rank"),
    Renamed("qk_nope_head_dim", "qk_nope_head_dim"),
    Renamed("qk_rope_head_dim", "qk_rope_head_dim"),
    Renamed("v_head_dim", "v_head_dim"),
    AllowedValues("attention_bias", (False,)),
    FirstKDense(),
    AllowedValues("moe_layer_freq", (1,)),
    Renamed("intermediate_size", "ffn_hidden_size"),
    Renamed("n_routed_experts", "num_experts"),
    Renamed("num_experts_per_tok", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    SharedExperts(),
)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4),
                UniformLayers("D"),
                Renamed("intermediate_size", "ffn_hidden_size"),
                AllowedValues("attention_bias", (False,)),
                AllowedValues("mlp_bias", (False,)),
            ),
            (_merge_rules(_BACKBONE, _DENSE_FFN),),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                UniformLayers("D"),
                Renamed("intermediate_size", "ffn_hidden_size"),
                Constant("qkv_bias", True),
            ),
            (_merge_rules(_BACKBONE, _BIASES, _DENSE_FFN),),
            default_keys={"num_key_value_heads": 32},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4, head_size=128),
                *_NO_WINDOW,
                UniformLayers("D"),
                Renamed("intermediate_size", "ffn_hidden_size"),
                AllowedValues("attention_bias", (False,)),
                Constant("qk_norm", True),
            ),
            (_merge_rules(_BACKBONE, _HEAD_NORMS, _DENSE_FFN),),
            default_keys={"num_key_value_heads": 32},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            (
                *_sizes(norm_eps=1e-5, rope_theta=1e6),
                UniformLayers("M"),
                _NumExperts("num_local_experts"),
                Renamed("num_experts_per_tok", "top_k", 2),
                Renamed("intermediate_size", "moe_ffn_hidden_size"),
                Constant("router_softmax", "post"),
                AllowedValues("sliding_window", (None,)),
            ),
            (
                _merge_rules(
                    _BACKBONE, _layer_rules({"ffn.router.weight": "block_sparse_moe.gate.weight"}), _MIXTRAL_EXPERTS
                ),
                _merge_rules(_BACKBONE, _ROUTER, STACKED_EXPERTS),
            ),
            default_keys={"num_key_value_heads": 8},
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                *_QWEN_EXPERTS,
                _NumExperts("num_experts"),
                GatedSharedExpert(),
                Renamed("qkv_bias", "qkv_bias", True),
            ),
            tuple(
                _merge_rules(_BACKBONE, _BIASES, _DENSE_FFN, _ROUTER, _SHARED_EXPERT, experts)
                for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={"num_key_value_heads": 16},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                *_QWEN_EXPERTS,
                _NumExperts("num_experts"),
                AllowedValues("attention_bias", (False,)),
                Constant("qk_norm", True),
            ),
            tuple(
                _merge_rules(_BACKBONE, _HEAD_NORMS, _DENSE_FFN, _ROUTER, experts)
                for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={"num_key_value_heads": 4},
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            (
                *_sizes(norm_eps=1e-5, rope_theta=1e4),
                UniformLayers("M"),
                _NumExperts("num_experts"),
                Renamed("num_experts_per_tok", "top_k"),
                Renamed("intermediate_size", "moe_ffn_hidden_size"),
                NormTopKProb(default=False),
                AllowedValues("attention_bias", (False,)),
                AllowedValues("clip_qkv", (None,)),
                Constant("qk_norm", True),
                Constant("qk_norm_width", "all_heads"),
            ),
            tuple(_merge_rules(_BACKBONE, _HEAD_NORMS, _ROUTER, experts) for experts in (PER_EXPERT, STACKED_EXPERTS)),
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            (
                *(
                    entry
                    for entry in _sizes(norm_eps=1e-5, rope_theta=1.5e5, head_size=64)
                    if not isinstance(entry, RopeParameters)
                ),
                RopeParameters(1.5e5, is_required=True),
                SlidingWindowLayers(),
                UniformLayers("M"),
                _NumExperts("num_local_experts"),
                Renamed("num_experts_per_tok", "top_k"),
                Renamed("intermediate_size", "moe_ffn_hidden_size"),
                Constant("router_softmax", "post"),
                AllowedValues("attention_bias", (True,)),
                *(Constant(key, True) for key in ("qkv_bias", "attention_output_bias", "attention_sinks")),
                *(Constant(key, True) for key in ("moe_bias", "router_bias")),
                Constant("moe_activation", "clamped_swiglu"),
                Renamed("swiglu_alpha", "swiglu_alpha", 1.702),
                Renamed("swiglu_limit", "swiglu_limit", 7.0),
            ),
            (_merge_rules(_BACKBONE, _BIASES, _GPT_OSS),),
            default_keys={"num_key_value_heads": 8},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            (
                *_DEEPSEEK,
                Renamed("routed_scaling_factor", "router_scaling_factor", 1.0),
                RouterGroups(has_method=True),
                Constant("rope_interleaved", True),
                Constant("router_softmax", "pre"),
                AllowedValues("norm_topk_prob", (False, None)),
                AllowedValues("scoring_func", ("softmax",)),
            ),
            tuple(
                _merge_rules(_BACKBONE, _MLA, _DENSE_FFN, _ROUTER, experts) for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={"q_lora_rank": 1536, "n_shared_experts": 2},
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (
                *_DEEPSEEK,
                Renamed("routed_scaling_factor", "router_scaling_factor", 2.5),
                RouterGroups(),
                Renamed("rope_interleave", "rope_interleaved", True),
                Renamed("norm_topk_prob", "router_normalize", True),
                Constant("router_score", "sigmoid"),
                Constant("expert_bias", True),
                AllowedValues("scoring_func", ("sigmoid",)),
                AllowedValues("topk_method", ("noaux_tc",)),
                MTPLayers(),
            ),
            tuple(
                _merge_rules(_BACKBONE, _MLA, _MTP, _DENSE_FFN, _ROUTER, experts)
                for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={
                "num_key_value_heads": 128,
                "q_lora_rank": 1536,
                "first_k_dense_replace": 3,
                "n_shared_experts": 1,
                "n_group": 8,
                "topk_group": 4,
            },
            has_mtp=True,
        ),
    )
}
