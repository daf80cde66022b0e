"""Layers of sparse attention: over all keys they are dense, and nothing but the loss reaches an indexer."""

import pytest
import torch

from moefold.config.schema import Config
from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from tests.models import config_of

S = 12
SIZES = {
    "layers": 2,
    "hidden_size": 16,
    "attention.num_heads": 4,
    "attention.num_kv_heads": 2,
    "vocab_size": 32,
    "ffn.moe.num_experts": 4,
    "ffn.moe.intermediate_size": 8,
    "init_std": 0.3,
}
LATENT = {
    "attention": "mla",
    "attention.q_lora_rank": 5,
    "attention.kv_lora_rank": 6,
    "attention.qk_nope_head_dim": 4,
    "attention.qk_rope_head_dim": 2,
    "attention.v_head_dim": 3,
    "rope.interleaved": True,
}
INDEXER = {"attention.indexer.num_heads": 3, "attention.indexer.head_dim": 6}
OPTIONS = {
    "attention.qkv_bias": True,
    "attention.sinks": True,
    "attention.gate": {},
    "attention.qk_norm": {},
    "attention.scale": 0.4,
}


def _model(settings: dict[str, object], train: dict[str, object] | None = None) -> Transformer:
    cfg: Config = config_of(
        {
            "run": {"dtype": "float64"},
            "model": SIZES | settings,
            "train": {"seq_len": S, "micro_batch_size": 2, "global_batch_size": 4} | (train or {}),
            "data": {"kind": "synthetic"},
        }
    )
    model = build_model(cfg).double()
    init_weights(model, cfg.model, 3)
    model.set_positions(torch.arange(S))
    return model


def _tokens() -> torch.Tensor:
    return torch.randint(0, 32, (2, S), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", [{}, OPTIONS, LATENT], ids=["gqa", "options", "mla"])
def test_selecting_all_keys_is_dense_attention(settings):
    dense = _model(settings)(_tokens())
    sparse = _model(settings | INDEXER | {"attention.indexer.top_k": S})(_tokens())
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)
    fewer = _model(settings | INDEXER | {"attention.indexer.top_k": 3})(_tokens())
    # The first tokens see no more than they select.
    torch.testing.assert_close(fewer[:3], dense[:3], rtol=1e-12, atol=1e-12)
    assert (fewer[3:] - dense[3:]).abs().max() > 1e-3


@pytest.mark.parametrize("settings", [{}, LATENT], ids=["gqa", "mla"])
def test_an_indexer_without_a_loss_has_no_gradient(settings):
    model = _model(settings | INDEXER | {"attention.indexer.top_k": 3}, {"indexer_loss": 0.0})
    model(_tokens()).square().sum().backward()
    assert all((p.grad is None) == (".indexer." in name) for name, p in model.named_parameters() if "ffn" not in name)


def test_the_loss_is_counted_once_and_never_in_evaluation():
    model = _model(INDEXER | {"attention.indexer.top_k": 3})
    out = model(_tokens())
    assert [float(indexer.loss_sum) for indexer in model.indexers().values()] == [0.0, 0.0]
    out.sum().backward()
    counted = [float(indexer.loss_sum) for indexer in model.indexers().values()]
    assert min(counted) > 0
    model.eval()(_tokens()).sum().backward()
    assert [float(indexer.loss_sum) for indexer in model.indexers().values()] == counted


@pytest.mark.parametrize("length", [S - 3, S + 5])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_padded_texts_of_any_length_are_evaluated(stage, length):
    model = _model(INDEXER | {"attention.indexer.top_k": 3}, {"indexer_stage": stage}).eval()
    model.set_positions(torch.arange(length))
    tokens = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(1))
    weights = torch.ones(2, length)
    weights[1, 4:] = 0.0
    padded = model(tokens, token_weights=weights)
    expected = model(tokens)
    torch.testing.assert_close(padded[:, 0], expected[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded[:4, 1], expected[:4, 1], rtol=1e-12, atol=1e-12)
