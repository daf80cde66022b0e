"""The plain implementation gives the same numbers as our step: their times could not be compared otherwise."""

import pytest
import torch

from benchmarks.race.torch_baseline import TorchBaseline, baseline_unsupported_reason
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.recipe import load_config
from tests.bench.small_sizes import SIZES
from tests.models import edit_model

KINDS = {
    "mixtral": [],
    "qwen3": ["model.attention.qk_norm={}", "model.attention.head_dim=16"],
    "qwen2": [
        "model.ffn.moe.router.softmax=pre",
        "model.attention.qkv_bias=true",
        "model.ffn.moe.shared.intermediate_size=40",
        "model.ffn.moe.shared.gate=true",
    ],
    "yarn": ["model.rope.scaling=yarn", "model.rope.scaling.factor=4", "model.rope.scaling.original_seq_len=8"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_ours(kind):
    cfg = load_config(None, [*SIZES, "run.dtype=float64", *KINDS[kind]])
    model = build_model(cfg).double()
    init_weights(model, cfg.model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases are zero and norms one at first, which would hide a parameter that is left out.
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if "w_" not in name else 0.02)
    model.set_positions(torch.arange(16))
    tokens, labels = torch.randint(64, (2, 2, 16)).unbind(0)
    weights = torch.full(tokens.shape, 1 / tokens.numel(), dtype=torch.float64)

    model(tokens, labels=labels, weights=weights).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    TorchBaseline(cfg, torch.float64, "loop").loss(model, tokens, labels).backward()
    for name, parameter in model.named_parameters():
        # Its router and its loss are float32, as a textbook has them.
        assert (parameter.grad - ours[name]).norm() <= 2e-6 * ours[name].norm(), name


def test_it_names_what_it_cannot_compute():
    plain = load_config(None, SIZES).model
    assert baseline_unsupported_reason(plain, with_attention=True) == ""
    assert "router" in baseline_unsupported_reason(
        edit_model(plain, {"ffn.moe.router": "sigmoid"}), with_attention=False
    )
    latent = load_config(None, ["model.preset=deepseek-v3"]).model
    assert "grouped-query" in baseline_unsupported_reason(
        edit_model(
            latent,
            {
                "ffn.moe.router": "softmax",
                "ffn.moe.router.num_groups": 1,
                "ffn.moe.router.top_groups": 1,
                "ffn.moe.router.expert_bias": False,
            },
        ),
        with_attention=True,
    )
    for rope in ({"rope.interleaved": True}, {"attention.rope_fraction": 0.5}, {"layers.position": "rope, nope"}):
        assert "RoPE" in baseline_unsupported_reason(edit_model(plain, rope), with_attention=True)
