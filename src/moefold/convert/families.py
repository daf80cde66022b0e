"""The families of models that Hugging Face folders may hold: data. Torch-free.

A family is a list of what the keys of its config.json mean, and a table of its tensors. Everything else is one engine
for all. The keys are those of the configuration classes of transformers 5; the names of tensors are those of the files
that it writes. `layouts` holds the ways in which the experts may lie in a folder, the one that is written first.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moefold.config.schema import ModelConfig
from moefold.convert.config_key import (
    AllHeads,
    AllLayers,
    Always,
    Entry,
    FirstDense,
    FullAttention,
    FurtherLayers,
    GatedSharedExpert,
    HeadSize,
    KeyValueHeads,
    Only,
    QueryLatent,
    Rope,
    RouterGroups,
    Same,
    SharedExperts,
    SparseLayers,
    TopKNormalised,
    WindowLayers,
)
from moefold.convert.tensor_row import AllExperts, EachExpert, Equal, Interleaved, Row

Table = Mapping[str, Row]


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: its `model_type`.
        architecture: the class of transformers that computes it.
        entries: what the keys of config.json mean.
        layouts: for each layout of the experts, the table of all tensors.
        absent: what keys mean that a config.json lacks, as the configuration class has it, where the entries read
            null as something else.
        has_mtp: whether layers of multi-token prediction may follow the others.
        unused: tensors that some folders hold and nothing reads, as regular expressions.
    """

    name: str
    architecture: str
    entries: tuple[Entry, ...]
    layouts: tuple[Table, ...]
    absent: Mapping[str, Any] = field(default_factory=dict)
    has_mtp: bool = False
    unused: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of a folder is one that nothing reads."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that say what is computed."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for entry in self.entries:
            keys |= entry.write(model)
        return keys


def _layer(rows: Mapping[str, str]) -> dict[str, Row]:
    return {f"layers.{{l}}.{ours}": Equal(f"model.layers.{{l}}.{theirs}") for ours, theirs in rows.items()}


def _table(*parts: Mapping[str, Row]) -> dict[str, Row]:
    return {ours: row for part in parts for ours, row in part.items()}


_BACKBONE: dict[str, Row] = {
    "embedding.weight": Equal("model.embed_tokens.weight"),
    "head.norm.weight": Equal("model.norm.weight"),
    "head.weight": Equal("lm_head.weight"),
    **_layer(
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
_BIASES = _layer({f"attention.b{x}": f"self_attn.{x}_proj.bias" for x in "qkv"})
_HEAD_NORMS = _layer(
    {"attention.query_norm.weight": "self_attn.q_norm.weight", "attention.key_norm.weight": "self_attn.k_norm.weight"}
)
_DENSE_FFN = _layer({f"ffn.w_{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")})
_ROUTER = _layer({"ffn.router.weight": "mlp.gate.weight"})
_SHARED_EXPERT = _layer(
    {
        **{f"ffn.shared.w_{x}": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")},
        "ffn.shared_gate": "mlp.shared_expert_gate.weight",
    }
)
_EXPERTS = "layers.{l}.ffn.experts.w_"
EACH_EXPERT: dict[str, Row] = {
    f"{_EXPERTS}{x}": EachExpert(f"model.layers.{{l}}.mlp.experts.{{e}}.{x}_proj.weight")
    for x in ("gate", "up", "down")
}
ALL_EXPERTS: dict[str, Row] = {
    f"{_EXPERTS}gate": AllExperts("model.layers.{l}.mlp.experts.gate_up_proj", 0),
    f"{_EXPERTS}up": AllExperts("model.layers.{l}.mlp.experts.gate_up_proj", 1),
    f"{_EXPERTS}down": AllExperts("model.layers.{l}.mlp.experts.down_proj"),
}
"""How transformers 5 has the experts in memory; some tools write them so."""

_MIXTRAL_EXPERTS: dict[str, Row] = {
    f"{_EXPERTS}{ours}": EachExpert(f"model.layers.{{l}}.block_sparse_moe.experts.{{e}}.{theirs}.weight")
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


_LATENT = _layer(
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


_FURTHER_TOKEN = _layer(
    {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "projection": "eh_proj.weight",
        "output_norm.weight": "shared_head.norm.weight",
    }
)
"""What a layer of multi-token prediction has beside those of an ordinary one."""

_GPT_OSS = _layer(
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
    f"layers.{{l}}.ffn.experts.{ours}_{kind}": Interleaved(f"model.layers.{{l}}.mlp.experts.{theirs}", part)
    for ours, theirs in (("w", "gate_up_proj"), ("b", "gate_up_proj_bias"))
    for part, kind in enumerate(("gate", "up"))
}


def _sizes(*, norm_eps: float, rope_theta: float, head_size: int = 0) -> tuple[Entry, ...]:
    """What the families with plain attention have, with what an absent key means in this one."""
    return (*_backbone_sizes(norm_eps, rope_theta), KeyValueHeads(), HeadSize(head_size))


def _backbone_sizes(norm_eps: float, rope_theta: float) -> tuple[Entry, ...]:
    """What all families have."""
    return (
        Same("num_hidden_layers", "num_layers"),
        Same("hidden_size", "hidden_size"),
        Same("num_attention_heads", "num_attention_heads"),
        Same("vocab_size", "vocab_size"),
        Same("rms_norm_eps", "norm_eps", norm_eps),
        Same("tie_word_embeddings", "tie_embeddings", False),
        Same("initializer_range", "init_std", 0.02),
        Rope(rope_theta),
        Only("hidden_act", ("silu",)),
    )


_NO_WINDOW: tuple[Entry, ...] = (Only("use_sliding_window", (False, None)), FullAttention())
_QWEN_EXPERTS: tuple[Entry, ...] = (
    SparseLayers(),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("num_experts_per_tok", "top_k"),
    Same("moe_intermediate_size", "moe_ffn_hidden_size"),
    TopKNormalised(default=False),
)


@dataclass(frozen=True)
class _NumExperts:
    """num_experts, which transformers 5 also spells num_local_experts."""

    written: str

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Either."""
        names = [name for name in ("num_experts", "num_local_experts") if theirs.get(name) is not None]
        return Same(names[0] if names else self.written, "num_experts").read(theirs)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The one that the released folders have."""
        return {self.written: model.num_experts}


_DEEPSEEK: tuple[Entry, ...] = (
    *_backbone_sizes(1e-6, 1e4),
    AllHeads(),
    Always("attention", "mla"),
    QueryLatent(),
    Same("kv_lora_rank", "kv_lora_rank"),
    Same("qk_nope_head_dim", "qk_nope_head_dim"),
    Same("qk_rope_head_dim", "qk_rope_head_dim"),
    Same("v_head_dim", "v_head_dim"),
    Only("attention_bias", (False,)),
    FirstDense(),
    Only("moe_layer_freq", (1,)),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("n_routed_experts", "num_experts"),
    Same("num_experts_per_tok", "top_k"),
    Same("moe_intermediate_size", "moe_ffn_hidden_size"),
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
                AllLayers("D"),
                Same("intermediate_size", "ffn_hidden_size"),
                Only("attention_bias", (False,)),
                Only("mlp_bias", (False,)),
            ),
            (_table(_BACKBONE, _DENSE_FFN),),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                AllLayers("D"),
                Same("intermediate_size", "ffn_hidden_size"),
                Always("qkv_bias", True),
            ),
            (_table(_BACKBONE, _BIASES, _DENSE_FFN),),
            absent={"num_key_value_heads": 32},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4, head_size=128),
                *_NO_WINDOW,
                AllLayers("D"),
                Same("intermediate_size", "ffn_hidden_size"),
                Only("attention_bias", (False,)),
                Always("qk_norm", True),
            ),
            (_table(_BACKBONE, _HEAD_NORMS, _DENSE_FFN),),
            absent={"num_key_value_heads": 32},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            (
                *_sizes(norm_eps=1e-5, rope_theta=1e6),
                AllLayers("M"),
                _NumExperts("num_local_experts"),
                Same("num_experts_per_tok", "top_k", 2),
                Same("intermediate_size", "moe_ffn_hidden_size"),
                Always("router_softmax", "post"),
                Only("sliding_window", (None,)),
            ),
            (
                _table(_BACKBONE, _layer({"ffn.router.weight": "block_sparse_moe.gate.weight"}), _MIXTRAL_EXPERTS),
                _table(_BACKBONE, _ROUTER, ALL_EXPERTS),
            ),
            absent={"num_key_value_heads": 8},
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
                Same("qkv_bias", "qkv_bias", True),
            ),
            tuple(
                _table(_BACKBONE, _BIASES, _DENSE_FFN, _ROUTER, _SHARED_EXPERT, experts)
                for experts in (EACH_EXPERT, ALL_EXPERTS)
            ),
            absent={"num_key_value_heads": 16},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (
                *_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                *_QWEN_EXPERTS,
                _NumExperts("num_experts"),
                Only("attention_bias", (False,)),
                Always("qk_norm", True),
            ),
            tuple(
                _table(_BACKBONE, _HEAD_NORMS, _DENSE_FFN, _ROUTER, experts) for experts in (EACH_EXPERT, ALL_EXPERTS)
            ),
            absent={"num_key_value_heads": 4},
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            (
                *_sizes(norm_eps=1e-5, rope_theta=1e4),
                AllLayers("M"),
                _NumExperts("num_experts"),
                Same("num_experts_per_tok", "top_k"),
                Same("intermediate_size", "moe_ffn_hidden_size"),
                TopKNormalised(default=False),
                Only("attention_bias", (False,)),
                Only("clip_qkv", (None,)),
                Always("qk_norm", True),
                Always("qk_norm_width", "all_heads"),
            ),
            tuple(_table(_BACKBONE, _HEAD_NORMS, _ROUTER, experts) for experts in (EACH_EXPERT, ALL_EXPERTS)),
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            (
                *(
                    entry
                    for entry in _sizes(norm_eps=1e-5, rope_theta=1.5e5, head_size=64)
                    if not isinstance(entry, Rope)
                ),
                Rope(1.5e5, is_required=True),
                WindowLayers(),
                AllLayers("M"),
                _NumExperts("num_local_experts"),
                Same("num_experts_per_tok", "top_k"),
                Same("intermediate_size", "moe_ffn_hidden_size"),
                Always("router_softmax", "post"),
                Only("attention_bias", (True,)),
                *(Always(key, True) for key in ("qkv_bias", "attention_output_bias", "attention_sinks")),
                *(Always(key, True) for key in ("moe_bias", "router_bias")),
                Always("moe_activation", "clamped_swiglu"),
                Same("swiglu_alpha", "swiglu_alpha", 1.702),
                Same("swiglu_limit", "swiglu_limit", 7.0),
            ),
            (_table(_BACKBONE, _BIASES, _GPT_OSS),),
            absent={"num_key_value_heads": 8},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            (
                *_DEEPSEEK,
                Same("routed_scaling_factor", "router_scaling_factor", 1.0),
                RouterGroups(has_method=True),
                Always("rope_interleaved", True),
                Always("router_softmax", "pre"),
                Only("norm_topk_prob", (False, None)),
                Only("scoring_func", ("softmax",)),
            ),
            tuple(_table(_BACKBONE, _LATENT, _DENSE_FFN, _ROUTER, experts) for experts in (EACH_EXPERT, ALL_EXPERTS)),
            absent={"q_lora_rank": 1536, "n_shared_experts": 2},
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (
                *_DEEPSEEK,
                Same("routed_scaling_factor", "router_scaling_factor", 2.5),
                RouterGroups(),
                Same("rope_interleave", "rope_interleaved", True),
                Same("norm_topk_prob", "router_normalize", True),
                Always("router_score", "sigmoid"),
                Always("expert_bias", True),
                Only("scoring_func", ("sigmoid",)),
                Only("topk_method", ("noaux_tc",)),
                FurtherLayers(),
            ),
            tuple(
                _table(_BACKBONE, _LATENT, _FURTHER_TOKEN, _DENSE_FFN, _ROUTER, experts)
                for experts in (EACH_EXPERT, ALL_EXPERTS)
            ),
            absent={
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
