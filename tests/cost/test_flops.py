"""Parameter and FLOP counts against published numbers, hand-worked ones, and torch's own FLOP counter."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.flops import count_parameters, step_flops_per_token, train_flops_per_token
from moefold.model.block import LayerInputs
from moefold.model.lora import freeze_all_but_adapters
from moefold.model.transformer import build_model
from moefold.ops.rope import NO_ROPE
from tests.models import edit_model, model_of

MIXTRAL_8X7B = model_of(
    {
        "layers": 32,
        "hidden_size": 4096,
        "attention.num_heads": 32,
        "attention.num_kv_heads": 8,
        "ffn.moe.intermediate_size": 14336,
        "vocab_size": 32000,
        "ffn.moe.num_experts": 8,
        "ffn.moe.top_k": 2,
    }
)
MIXTRAL_8X22B = edit_model(
    MIXTRAL_8X7B,
    {
        "layers": 56,
        "hidden_size": 6144,
        "attention.num_heads": 48,
        "ffn.moe.intermediate_size": 16384,
        "vocab_size": 32768,
    },
)
QWEN3_30B_A3B = model_of(
    {
        "layers": 48,
        "hidden_size": 2048,
        "attention.num_heads": 32,
        "attention.num_kv_heads": 4,
        "attention.head_dim": 128,
        "ffn.moe.intermediate_size": 768,
        "vocab_size": 151936,
        "ffn.moe.num_experts": 128,
        "ffn.moe.top_k": 8,
        "attention.qk_norm": {},
    }
)
QWEN3_235B_A22B = edit_model(
    QWEN3_30B_A3B, {"layers": 94, "hidden_size": 4096, "attention.num_heads": 64, "ffn.moe.intermediate_size": 1536}
)
QWEN2_57B_A14B = model_of(
    {
        "layers": 28,
        "hidden_size": 3584,
        "attention.num_heads": 28,
        "attention.num_kv_heads": 4,
        "ffn.moe.intermediate_size": 2560,
        "vocab_size": 151936,
        "ffn.moe.num_experts": 64,
        "ffn.moe.top_k": 8,
        "ffn.moe.shared.intermediate_size": 20480,
        "ffn.moe.shared.gate": True,
        "attention.qkv_bias": True,
    }
)
SMALL = model_of(
    {
        "layers": 3,
        "hidden_size": 12,
        "attention.num_heads": 4,
        "attention.num_kv_heads": 2,
        "attention.head_dim": 5,
        "ffn.dense.intermediate_size": 20,
        "vocab_size": 50,
        "layers.ffn": "dense, 2 moe",
        "ffn.moe.num_experts": 6,
        "ffn.moe.top_k": 2,
        "ffn.moe.intermediate_size": 7,
        "ffn.moe.shared.intermediate_size": 9,
        "ffn.moe.shared.gate": True,
        "attention.qk_norm": {},
        "attention.qkv_bias": True,
    }
)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        # Sizes of published checkpoints (transformers counts the same), and active parameters of their model cards.
        (MIXTRAL_8X7B, 46_702_792_704, 12.9e9),
        (QWEN3_30B_A3B, 30_532_122_624, 3.3e9),
        (QWEN3_235B_A22B, 235_093_634_560, 22e9),
        (QWEN2_57B_A14B, 57_408_658_944, 14e9),
    ],
)
def test_parameters_of_published_models(model: ModelConfig, total: int, active: float) -> None:
    count = count_parameters(model)
    assert count.total == total
    assert count.active == pytest.approx(active, rel=0.025)


def test_parameters_by_hand() -> None:
    count = count_parameters(SMALL)
    assert count.embedding == 50 * 12
    assert count.head == 50 * 12
    assert count.attention == 3 * (12 * 20 + 2 * 12 * 10 + 20 * 12 + 20 + 2 * 10)
    assert count.dense_mlp == 3 * 12 * 20
    assert count.router == 2 * 12 * 6
    assert count.experts == 2 * 6 * 3 * 12 * 7
    assert count.active_experts == 2 * 2 * 3 * 12 * 7
    assert count.shared_experts == 2 * (3 * 12 * 9 + 12)
    assert count.norms == 3 * (2 * 12 + 2 * 5) + 12
    assert count.total == 1200 + 2280 + 720 + 144 + 3024 + 672 + 114
    assert count.active == count.total - 2 * 4 * 3 * 12 * 7


def test_tied_embeddings_count_once_but_the_head_still_works() -> None:
    tied = replace(SMALL, tie_embeddings=True)
    assert count_parameters(SMALL).total - count_parameters(tied).total == 50 * 12
    assert train_flops_per_token(tied, 16) == train_flops_per_token(SMALL, 16)


def test_parts_a_model_lacks_are_zero() -> None:
    dense = edit_model(SMALL, {"layers.ffn": "dense"})
    count = count_parameters(dense)
    assert (count.router, count.experts, count.shared_experts, count.active_experts) == (0, 0, 0, 0)
    assert count.active == count.total
    # A gate without a shared expert has nothing to scale.
    assert count_parameters(edit_model(SMALL, {"ffn.moe.shared": "none"})).shared_experts == 0


def test_mixtral_8x22b_as_in_the_folding_paper() -> None:
    """arXiv:2504.14960: 12*L*h^2*(1 + kv/heads + seq/h + 1.5*(ffn/h)*top_k + V/(2*L*h)), the router left out."""
    layers, hidden, seq_len, vocab = 56, 6144, 4096, 32768
    paper = 12 * layers * hidden**2 * (1 + 8 / 48 + seq_len / hidden + 1.5 * (16384 / hidden) * 2)
    paper += 6 * vocab * hidden
    count = train_flops_per_token(MIXTRAL_8X22B, seq_len)
    assert count.total - 3 * count.router == pytest.approx(paper, rel=1e-12)
    assert count.total / 1e9 == pytest.approx(250.6, abs=0.1)


@pytest.mark.parametrize(("model", "gflops"), [(QWEN3_30B_A3B, 23.0), (QWEN3_235B_A22B, 148.0)])
def test_qwen3_as_in_the_bridge_releases(model: ModelConfig, gflops: float) -> None:
    """Published FLOP counts with half (causal) attention at 4,096 tokens, the router left out."""
    count = train_flops_per_token(model, 4096, causal=True)
    assert (count.total - 3 * count.router) / 1e9 == pytest.approx(gflops, abs=0.05)


def test_flops_by_hand() -> None:
    count = train_flops_per_token(SMALL, 16)
    assert count.attention_projections == 3 * 2 * (12 * (20 + 10 + 10) + 20 * 12)
    assert count.attention_core == 3 * 4 * 16 * 20
    assert count.dense_mlp == 6 * 12 * 20
    assert count.router == 2 * 2 * 12 * 6
    assert count.experts == 2 * 2 * 6 * 12 * 7
    assert count.shared_experts == 2 * (6 * 12 * 9 + 2 * 12)
    assert count.head == 2 * 12 * 50
    assert count.forward == 4320 + 3840 + 1440 + 288 + 2016 + 1344 + 1200
    assert count.total == 3 * count.forward


def test_causal_counts_half_of_the_core_and_nothing_else() -> None:
    full, causal = (train_flops_per_token(SMALL, 16, causal=causal) for causal in (False, True))
    assert replace(full, attention_core=full.attention_core // 2) == causal


def test_a_window_counts_the_keys_that_it_leaves() -> None:
    windowed = replace(edit_model(SMALL, {"layers.attention": "window, full, window"}), sliding_window=4)
    plain, causal = train_flops_per_token(windowed, 16), train_flops_per_token(windowed, 16, causal=True)
    keys = 4 - 4 * 4 / 32
    assert plain.attention_core == 4 * 20 * (2 * keys + 16)
    assert causal.attention_core == 4 * 20 * (2 * keys + 8)
    assert plain.attention_projections == train_flops_per_token(SMALL, 16).attention_projections
    wide = replace(windowed, sliding_window=16)
    assert train_flops_per_token(wide, 16) == train_flops_per_token(SMALL, 16)


def test_biases_and_sinks_are_parameters() -> None:
    added = edit_model(
        SMALL,
        {"attention.output_bias": True, "attention.sinks": True, "ffn.moe.bias": True, "ffn.moe.router.bias": True},
    )
    plain, count = count_parameters(SMALL), count_parameters(added)
    assert count.attention - plain.attention == 3 * (12 + 4)
    assert count.router - plain.router == 2 * 6
    assert count.experts - plain.experts == 2 * 6 * (2 * 7 + 12)
    assert count.active_experts - plain.active_experts == 2 * 2 * (2 * 7 + 12)
    assert count.total - plain.total == 48 + 12 + 312


def test_matches_the_flop_counter_of_torch() -> None:
    """Run the products of SMALL, forward and backward, and compare the count of torch with the formula."""
    seq_len, batch = 8, 2
    with FlopCounterMode(display=False) as forward:
        loss = run_products(SMALL, seq_len, batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    count = train_flops_per_token(SMALL, seq_len)
    assert forward.get_total_flops() == seq_len * batch * count.forward
    assert backward.get_total_flops() == seq_len * batch * 2 * count.forward


def test_frozen_weights_cost_no_gradient_as_torch_counts() -> None:
    """Count torch's operations for a dense layer and its adapters, without the core attention, which it recomputes."""
    model = edit_model(SMALL, {"layers.ffn": "dense", "layers": 1, "attention.qk_norm": "none"})
    cfg = Config(model=model, lora=LoraConfig(rank=2))
    layer = build_model(cfg).layers["0"].double()
    freeze_all_but_adapters(layer)
    x = torch.randn(4, 2, model.hidden_size, dtype=torch.float64, requires_grad=True)
    layer.attention.core_attention = lambda q, k, v, *_: q + 0 * (k.sum() + v.sum())
    with FlopCounterMode(display=False) as counted:
        layer(x, LayerInputs(NO_ROPE)).y.sum().backward()
    count = train_flops_per_token(model, 4)
    # The head is not part of the layer: a product in each pass.
    recipe = replace(cfg, train=TrainConfig(seq_len=4))
    layer_flops = step_flops_per_token(recipe.model, recipe.train, recipe.lora) - 3 * count.attention_core
    # To torch, the sums of the two norms are products: of the squares, and of their gradient.
    norms = 2 * 2 * model.hidden_size
    assert counted.get_total_flops() == 4 * 2 * (layer_flops - 2 * count.head + norms)


def run_products(model: ModelConfig, seq_len: int, batch: int) -> torch.Tensor:
    """The matrix products of a transformer with the sizes of `model`, written out. No masks, norms or activations."""
    tokens, hidden, head_dim = seq_len * batch, model.hidden_size, model.softmax_attention.head_dim
    heads, groups = model.attention.num_heads, model.attention.num_kv_heads

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    def swiglu(x_TH: torch.Tensor, width: int) -> torch.Tensor:
        return ((x_TH @ weight(hidden, width)) * (x_TH @ weight(hidden, width))) @ weight(width, hidden)

    def heads_of(x_TH: torch.Tensor, count: int) -> torch.Tensor:
        projected = (x_TH @ weight(hidden, count * head_dim)).view(batch, seq_len, count, head_dim).transpose(1, 2)
        return projected.repeat_interleave(heads // count, dim=1)

    x_TH = weight(tokens, hidden)
    for layer in model.decoder_layers:
        q, k, v = heads_of(x_TH, heads), heads_of(x_TH, groups), heads_of(x_TH, groups)
        attended = (q @ k.transpose(-1, -2) @ v).transpose(1, 2).reshape(tokens, heads * head_dim)
        x_TH = x_TH + attended @ weight(heads * head_dim, hidden)
        if not layer.ffn.is_routed:
            x_TH = x_TH + swiglu(x_TH, model.ffn.dense.intermediate_size)
            continue
        probs_TE = x_TH @ weight(hidden, model.ffn.moe.num_experts)
        experts_TK = probs_TE.topk(model.ffn.moe.top_k, dim=-1).indices
        routed = torch.zeros_like(x_TH)
        for expert in range(model.ffn.moe.num_experts):
            rows = (experts_TK == expert).any(dim=-1).nonzero().squeeze(-1)
            routed = routed.index_add(
                0, rows, swiglu(x_TH[rows], model.ffn.moe.intermediate_size) * probs_TE[rows, expert, None]
            )
        shared = swiglu(x_TH, model.ffn.moe.shared.intermediate_size) * (x_TH @ weight(hidden, 1))
        x_TH = x_TH + routed + shared
    return (x_TH @ weight(hidden, model.vocab_size)).sum()


LATENT = edit_model(
    SMALL,
    {
        "attention": "mla",
        "attention.q_lora_rank": 6,
        "attention.kv_lora_rank": 5,
        "attention.qk_nope_head_dim": 3,
        "attention.qk_rope_head_dim": 2,
        "attention.v_head_dim": 4,
    },
)


def test_latent_attention_by_hand() -> None:
    """Four heads: 5 dims of queries and keys, 4 of values; latents of 6 and 5 (arXiv:2405.04434 sec. 2.1)."""
    weights = 12 * 6 + 6 * 4 * 5 + 12 * (5 + 2) + 5 * 4 * (3 + 4) + 4 * 4 * 12
    count, flops = count_parameters(LATENT), train_flops_per_token(LATENT, 16)
    assert count.attention == 3 * weights
    assert count.norms == 3 * (2 * 12 + 6 + 5) + 12
    assert flops.attention_projections == 3 * 2 * weights
    assert flops.attention_core == 3 * 2 * 16 * 4 * (5 + 4)
    straight = count_parameters(edit_model(LATENT, {"attention.q_lora_rank": 0}))
    assert count.attention - straight.attention == 3 * (12 * 6 + 6 * 4 * 5 - 12 * 4 * 5)


def test_sparse_attention_by_hand() -> None:
    """Two heads of the indexer of 8 dims, and 6 selected keys. Latent attention is in the space of 6 + 2 dims."""
    sparse = {"attention.indexer.top_k": 6, "attention.indexer.num_heads": 2, "attention.indexer.head_dim": 8}
    dense, latent = train_flops_per_token(MIXTRAL_8X7B, 64), edit_model(LATENT, sparse)
    flops = train_flops_per_token(edit_model(MIXTRAL_8X7B, sparse), 64)
    scores = 2 * 64 * 2 * (8 + 1)
    assert flops.attention_core == 32 * (2 * 6 * 32 * (128 + 128) + scores)
    assert flops.attention_projections - dense.attention_projections == 32 * 2 * 4096 * (2 * 8 + 8 + 2)
    rank, rope = latent.attention.kv_lora_rank, latent.attention.qk_rope_head_dim
    assert train_flops_per_token(latent, 64).attention_core == 3 * (2 * 6 * 4 * (rank + rope + rank) + scores)
    # A layer that shares a selection has no scores and no weights of an indexer.
    shared = edit_model(latent, {"layers.selection": "own, 2 shared"})
    assert train_flops_per_token(shared, 64).attention_core == 3 * 2 * 6 * 4 * (2 * rank + rope) + scores
    assert count_parameters(latent).attention - count_parameters(shared).attention == 2 * (2 * 8 * 6 + (8 + 2) * 12)
    # With fewer keys than are selected, all are read.
    assert train_flops_per_token(latent, 4).attention_core == 3 * (2 * 4 * 4 * (2 * rank + rope) + scores // 16)


def test_multi_token_prediction_by_hand() -> None:
    """Each further token: a layer as the last one, a projection, three norms, and the head once more."""
    further = replace(SMALL, mtp_layers=2)
    plain, count = count_parameters(SMALL), count_parameters(further)
    layer = plain.attention // 3 + (plain.router + plain.experts + plain.shared_experts) // 2 + 2 * 12 + 2 * 5
    assert count.mtp == 2 * (layer + 2 * 12 * 12 + 3 * 12)
    assert count.total == plain.total + count.mtp
    assert count.active == plain.active
    base, flops = train_flops_per_token(SMALL, 16), train_flops_per_token(further, 16)
    once = (base.attention_projections + base.attention_core) // 3 + base.head + 2 * 2 * 12 * 12
    once += (base.router + base.experts + base.shared_experts) // 2
    assert flops.mtp == 2 * once
    assert flops.forward == base.forward + 2 * once
    half = train_flops_per_token(further, 16, causal=True)
    assert flops.mtp - half.mtp == 2 * base.attention_core // 6


def test_does_not_import_torch() -> None:
    code = "import sys, moefold.cost.flops, moefold.cost.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
