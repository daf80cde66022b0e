"""Small random models of every family, made by transformers, as folders on disk."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")

SIZES = {
    "vocab_size": 66,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN_EXPERTS = {"intermediate_size": 20, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 36, "rope_parameters": LLAMA3, "head_dim": 8}),
    "llama-tied": ("Llama", {"intermediate_size": 36, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"intermediate_size": 36, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"intermediate_size": 36, "head_dim": 10}),
    "mixtral": ("Mixtral", {"intermediate_size": 20, "num_local_experts": 6, "head_dim": 8}),
    "mixtral-tied": ("Mixtral", {"intermediate_size": 20, "num_local_experts": 6, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}),
    "qwen2-moe-normed": (
        "Qwen2Moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 4, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 6}),
}
MODEL_NAMES = tuple(MODELS)


def make_model(name: str, **sizes: Any) -> Any:
    """A random model of transformers in float32; no norm is 1 and no bias 0."""
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, **more, **sizes}, attn_implementation="eager", experts_implementation="eager"
    )
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            elif "mlp.experts" in parameter_name or parameter_name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 0.3)
    return model


def save_model(model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Save as transformers does, and give the model the rounded weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    # A copy: a model turned to bfloat16 and back has lost the precision of its rotary frequencies.
    copy.deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of transformers."""
    with torch.no_grad():
        return model(input_ids=tokens).logits


def tokens_of(count: int, length: int, vocab_size: int = 66) -> torch.Tensor:
    """int64 [count, length], the same every time."""
    return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(7))
