"""Features of training and families of models that run on the pretended device, as keyword arguments of `tiny`.

The first row of each table is fast, the others are slow.
"""

from typing import Any

from moefold.config.base.part import make_part
from tests.verify.feature_cases import GATED, GPT_OSS_MODEL, MLA, SCALED
from tests.verify.recipes import LATENT

Case = dict[str, dict[str, Any]]
SMALL_VOCABULARY = {"vocab_size": 8}
DOCUMENTS = {"document_end": 2}
WINDOW = {"layers.attention": "window, full", "sliding_window": 5}
LINEAR = {
    "layers.attention": "linear, full",
    "linear_attention.num_key_heads": 4,
    "linear_attention.num_value_heads": 4,
    "linear_attention.key_head_dim": 4,
    "linear_attention.value_head_dim": 4,
}
SHORT_CONVOLUTION = {"layers.attention": "linear, full", "linear_attention": "short_convolution"}
SPARSE = {"attention.indexer.top_k": 4, "attention.indexer.num_heads": 2, "attention.indexer.head_dim": 4}
SIGMOID = {"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"}
SHARED = {"ffn.moe.shared.intermediate_size": 16}
HOST = {"offload_min_kib": 0}
SSD = HOST | {"offload_dir": "{folder}"}
FEATURES: dict[str, Case] = {
    "gpt-oss, documents": {"model": GPT_OSS_MODEL, "data": DOCUMENTS},
    "plain": {},
    "documents": {"model": SMALL_VOCABULARY, "data": DOCUMENTS},
    "documents, MLA": {"model": MLA | SMALL_VOCABULARY, "data": DOCUMENTS},
    "window": {"model": WINDOW},
    "window, documents": {"model": WINDOW | SMALL_VOCABULARY, "data": DOCUMENTS},
    "gpt-oss": {"model": GPT_OSS_MODEL},
    "MLA": {"model": LATENT},
    "MTP": {"model": {"mtp_layers": 2}},
    "gated": {"model": GATED},
    "scaled": {"model": SCALED},
    "Muon": {"train": {"optimizer": "muon"}},
    "reset moments": {"train": {"reset_moments_every": 1}},
    "loss in chunks": {"train": {"loss_chunk": 4}},
    "loss in one chunk": {"train": {"loss_chunk": -1}},
    "moments in bfloat16": {
        "train": {"optimizer": make_part("optimizer", "adamw", moment_dtype="bfloat16", beta2=0.98)}
    },
    "recompute layers": {"train": {"recompute": ("layer",)}},
    "recompute parts": {"train": {"recompute": ("norms", "core_attention", "expert_activation")}},
    "recompute MoE": {"train": {"recompute": ("moe",)}},
    "offload layers": {"train": {"offload": ("layer",)} | HOST},
    "offload to files": {"train": {"offload": ("moe", "core_attention"), "offload_to": "ssd"} | SSD},
    "offload norms": {"train": {"offload": ("norms", "expert_activation")} | HOST},
    "moments on the host": {"train": {"offload_optimizer": "host"} | HOST},
    "moments in files": {"train": {"offload_optimizer": "ssd"} | SSD},
    "drop": {"moe": {"capacity_factor": 0.75}},
    "drop and pad": {"moe": {"capacity_factor": 0.75, "pad_to_capacity": True}},
    "drop by position": {"moe": {"capacity_factor": 0.75, "drop_policy": "position"}},
    "Sinkhorn": {"moe": {"choice": "sinkhorn"}},
    "quantile": {"moe": {"choice": "quantile"}, "model": SIGMOID},
    "round robin": {"moe": {"choice": "round_robin"}},
    "skewed": {"moe": {"choice": "skewed"}},
    "jitter": {"moe": {"input_jitter": 0.1}},
    "router in float64": {"moe": {"router_dtype": "float64"}},
    "aux loss of sequences": {"moe": {"aux_kind": "sequence"}},
    "aux loss of a global batch": {"moe": {"aux_kind": "global_batch"}},
    "aux loss of the last batch": {"moe": {"aux_kind": "last_global_batch"}},
    "shared expert": {"model": SHARED | {"ffn.moe.shared.gate": True}},
    "tied": {"model": {"tie_embeddings": True}},
    "latent experts": {"model": {"ffn.moe.latent_size": 6} | SHARED | SIGMOID},
    "zero experts": {"model": {"ffn.moe.zero_experts": 2}},
    "shortcut": {"model": {"ffn.moe.shortcut": True, "layers.ffn": "moe, dense"} | SHARED},
    "groups": {"model": {"ffn.moe.router.num_groups": 4, "ffn.moe.router.top_groups": 2} | SIGMOID},
    "SparseMixer": {"model": {"ffn.moe.router.softmax": "sparsemixer"}},
    "QK norm of all heads": {"model": {"attention.qk_norm": {}, "attention.qk_norm.over": "all_heads"}},
    "Gated DeltaNet": {"model": LINEAR | {"linear_attention": "gated_deltanet", "linear_attention.num_key_heads": 2}},
    "KDA": {"model": LINEAR | {"linear_attention": "kda"}},
    "GLA": {"model": LINEAR | {"linear_attention": "gla"}},
    "short convolution": {"model": SHORT_CONVOLUTION},
    "sparse attention": {"model": SPARSE},
    "chunked attention": {"model": {"layers.attention": "chunk, full", "attention_chunk_size": 8}},
    "LoRA": {"lora": {"rank": 2}},
    "LayerNorm": {"model": {"norm": "layernorm"}},
    "MXFP8": {"train": {"precision": "mxfp8"}},
    "NVFP4": {"train": {"precision": "nvfp4"}},
}
"""Features of one rank, in float32."""

TILED = {
    "hidden_size": 64,
    "attention.head_dim": 16,
    "ffn.moe.intermediate_size": 64,
    "ffn.dense.intermediate_size": 128,
    "init_std": 0.05,
    "layers": 2,
    "ffn.moe.num_experts": 4,
    "vocab_size": 16,
}
"""Sizes that the kernels of GPUs take."""
TILED_MLA = {
    "attention": "mla",
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 16,
    "attention.qk_nope_head_dim": 8,
    "attention.qk_rope_head_dim": 8,
    "attention.v_head_dim": 8,
    "rope.interleaved": True,
}
TILED_GPT_OSS = GPT_OSS_MODEL | {"ffn.moe.activation.limit": 0.1}
TILED_LINEAR = LINEAR | {
    "linear_attention.num_key_heads": 2,
    "linear_attention.key_head_dim": 16,
    "linear_attention.value_head_dim": 16,
}
BFLOAT16: dict[str, Case] = {
    "plain": {},
    "documents": {"model": SMALL_VOCABULARY, "data": DOCUMENTS},
    "MLA": {"model": TILED_MLA},
    "MLA, documents": {"model": TILED_MLA | SMALL_VOCABULARY, "data": DOCUMENTS},
    "gpt-oss": {"model": TILED_GPT_OSS},
    "gpt-oss, documents": {"model": TILED_GPT_OSS | SMALL_VOCABULARY, "data": DOCUMENTS},
    "dense layer, shared expert": {
        "model": {"layers.ffn": "dense, moe", "ffn.moe.shared.intermediate_size": 64, "ffn.moe.shared.gate": True}
        | {"attention.qk_norm": {}}
    },
    "groups": {
        "model": {"ffn.moe.router.num_groups": 4, "ffn.moe.router.top_groups": 2, "ffn.moe.num_experts": 8} | SIGMOID
    },
    "drop": {"moe": {"capacity_factor": 0.75}},
    "drop and pad": {"moe": {"capacity_factor": 0.75, "pad_to_capacity": True}},
    "weights inside the experts": {"moe": {"weight_in_expert": True}},
    "zero experts": {"model": {"ffn.moe.zero_experts": 2}},
    "loss in chunks": {"train": {"loss_chunk": 16}},
    "recompute": {"train": {"recompute": ("norms", "expert_activation", "core_attention")}},
    "FP8": {"train": {"precision": "fp8-blockwise"}},
    "FP8 dispatch": {"moe": {"dispatch_precision": "fp8-blockwise"}},
    "Gated DeltaNet": {"model": TILED_LINEAR | {"linear_attention": "gated_deltanet"}},
    "KDA": {"model": TILED_LINEAR | {"linear_attention": "kda", "linear_attention.num_key_heads": 4}},
    "GLA": {"model": TILED_LINEAR | {"linear_attention": "gla", "linear_attention.num_key_heads": 4}},
    "sparse attention": {
        "model": {"attention.indexer.top_k": 8, "attention.indexer.num_heads": 2, "attention.indexer.head_dim": 16}
    },
    "MTP, tied": {"model": {"mtp_layers": 1, "tie_embeddings": True}},
    "latent experts": {"model": {"ffn.moe.latent_size": 32, "ffn.moe.shared.intermediate_size": 64}},
}
"""Features in bfloat16, whose kernels are interpreted."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss": GPT_OSS_MODEL,
    "plain": {},
    "MLA": LATENT,
    "gated": GATED,
    "scaled": SCALED,
    "window": WINDOW,
    "chunked attention": {"layers.attention": "chunk, full", "attention_chunk_size": 8},
    "Gated DeltaNet": LINEAR | {"linear_attention": "gated_deltanet"},
    "KDA": LINEAR | {"linear_attention": "kda"},
    "GLA": LINEAR | {"linear_attention": "gla"},
    "short convolution": SHORT_CONVOLUTION,
    "sparse attention": SPARSE,
    "zero experts": {"ffn.moe.zero_experts": 2},
    "groups": {"ffn.moe.router.num_groups": 4, "ffn.moe.router.top_groups": 2} | SIGMOID,
}
"""Models of the generation engine."""
