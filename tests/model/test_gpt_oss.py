"""gpt-oss (sinks, windows, biases everywhere, clamped SwiGLU, YaRN) against transformers: logits and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from tests.models import config_of

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")

KIND = {
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "attention.sinks": True,
    "layers.attention": "window, full",
    "ffn.moe.bias": True,
    "ffn.moe.activation": "clamped_swiglu",
    "ffn.moe.router.bias": True,
    "norm.eps": 1e-5,
    "rope.theta": 150000.0,
    "rope.scaling": "yarn",
    "rope.scaling.truncate": False,
    "init_std": 0.3,
}
"""Settings of every model of this family, whatever its sizes."""
SIZES: list[dict[str, Any]] = [
    {"attention.num_heads": 4, "attention.num_kv_heads": 2, "sliding_window": 7, "layers": 3},
    {
        "attention.num_heads": 6,
        "attention.num_kv_heads": 1,
        "sliding_window": 1,
        "attention.head_dim": 10,
        "ffn.moe.activation.limit": 0.5,
    },
    {
        "attention.num_heads": 3,
        "attention.num_kv_heads": 3,
        "sliding_window": 24,
        "ffn.moe.num_experts": 5,
        "ffn.moe.top_k": 3,
    },
    {
        "attention.num_heads": 8,
        "attention.num_kv_heads": 4,
        "sliding_window": 3,
        "layers.attention": "2 full, window",
        "layers": 4,
    },
]
SEQ_LEN = 24


def _model(sizes: dict[str, Any]) -> dict[str, Any]:
    common = {
        "layers": 2,
        "hidden_size": 32,
        "attention.head_dim": 8,
        "vocab_size": 64,
        "ffn.moe.num_experts": 6,
        "ffn.moe.top_k": 2,
        "ffn.moe.intermediate_size": 20,
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_seq_len": 12,
        "ffn.moe.activation.limit": 2.0,
    }
    return common | KIND | sizes


def _ours(model: dict[str, Any]) -> Transformer:
    train = {"seq_len": SEQ_LEN, "global_batch_size": 2, "micro_batch_size": 2}
    cfg = config_of({"run": {"dtype": "float32", "seed": 5}, "model": model, "train": train})
    ours = build_model(cfg)
    init_weights(ours, cfg.model, cfg.run.seed)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.dim() == 1 or ".b_" in name:
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    ours.set_positions(torch.arange(SEQ_LEN))
    return ours.eval()


def _theirs(model: dict[str, Any], windows: tuple[int, ...]) -> torch.nn.Module:
    config = transformers.GptOssConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn.moe.intermediate_size"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["attention.num_heads"],
        num_key_value_heads=model["attention.num_kv_heads"],
        head_dim=model["attention.head_dim"],
        num_local_experts=model["ffn.moe.num_experts"],
        num_experts_per_tok=model["ffn.moe.top_k"],
        sliding_window=model["sliding_window"],
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        swiglu_limit=model["ffn.moe.activation.limit"],
        max_position_embeddings=96,
        rope_parameters={
            "rope_type": "yarn",
            "rope.theta": model["rope.theta"],
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 12,
        },
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return transformers.GptOssForCausalLM(config).float().eval()


def _their_tensor(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a name of transformers; fails on a name that nothing answers."""
    whole = {"embed_tokens.weight": "embedding.weight", "norm.weight": "head.norm.weight"}
    short = name.removeprefix("model.")
    if short in whole:
        return weights[whole[short]]
    if name == "lm_head.weight":
        return weights["head.weight"]
    _, layer, rest = short.split(".", 2)
    prefix = f"layers.{layer}."
    simple = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.sinks": "attention.sinks",
        "mlp.router.weight": "ffn.router.weight",
        "mlp.router.bias": "ffn.router.bias",
        "mlp.experts.down_proj": "ffn.experts.w_down",
        "mlp.experts.down_proj_bias": "ffn.experts.b_down",
    }
    for letter in "qkvo":
        simple[f"self_attn.{letter}_proj.weight"] = f"attention.w{letter}"
        simple[f"self_attn.{letter}_proj.bias"] = f"attention.b{letter}"
    if rest in simple:
        return weights[prefix + simple[rest]]
    kind = {"mlp.experts.gate_up_proj": "w", "mlp.experts.gate_up_proj_bias": "b"}[rest]
    # Gate and up columns take turns.
    pair = [weights[f"{prefix}ffn.experts.{kind}_{part}"] for part in ("gate", "up")]
    return torch.stack(pair, -1).flatten(-2)


@pytest.mark.parametrize("sizes", SIZES)
def test_logits_and_gradients_equal_transformers(sizes):
    model = _model(sizes)
    ours = _ours(model)
    theirs = _theirs(model, [layer.window for layer in ours.config.decoder_layers])
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(_their_tensor(name, weights))
    tokens = torch.randint(64, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    logits = ours(tokens[:, :-1]).transpose(0, 1)
    expected = theirs(input_ids=tokens[:, :-1]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
    for output in (logits, expected):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert len(list(theirs.named_parameters())) == len(gradients) - 2 * len(ours.layers)
    for name, parameter in theirs.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        assert float((_their_tensor(name, gradients) - parameter.grad).abs().max()) <= 1e-4 * scale, name
