"""Muon orthogonalises the matrices of layers as its oracle does and leaves the rest to AdamW."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from moefold.config.base.part import make_part
from moefold.config.chosen import chosen
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.train import TrainConfig
from moefold.cost.layer_spec import model_weights
from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.optim.states import named_moments, set_learning_rate
from moefold.parts.optimizer.muon.module import logical_matrices, newton_schulz
from moefold.parts.optimizer.muon.oracle import matrix_indices
from moefold.parts.optimizer.muon.oracle import newton_schulz as oracle_newton_schulz
from moefold.parts.optimizer.muon.part import MUON_GROUPS, Muon
from tests.models import edit_model, model_of
from tests.optim.alone import build_alone

MODEL = model_of(
    {
        "layers": 2,
        "hidden_size": 16,
        "attention.num_heads": 2,
        "attention.num_kv_heads": 1,
        "ffn.dense.intermediate_size": 24,
        "ffn.moe.intermediate_size": 8,
        "ffn.moe.num_experts": 3,
        "layers.ffn": "dense, moe",
        "ffn.moe.shared.intermediate_size": 8,
        "ffn.moe.shared.gate": True,
        "mtp_layers": 1,
        "vocab_size": 32,
    }
)
LATENT = model_of(
    {
        "attention": "mla",
        "attention.q_lora_rank": 8,
        "attention.kv_lora_rank": 6,
        "attention.num_heads": 3,
        "attention.qk_nope_head_dim": 4,
    }
)


@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (10, 4), (1, 7)])
def test_singular_values_end_near_one_and_singular_vectors_stay(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    result = newton_schulz(matrix, 5)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    diagonal = left.T @ result @ right.T
    assert (diagonal - diagonal.diag().diag()).abs().max() < 1e-9
    assert ((diagonal.diag() > 0.3) & (diagonal.diag() < 1.3))[values / values.norm() > 2e-3].all()
    torch.testing.assert_close(result, oracle_newton_schulz(matrix, 5), rtol=1e-11, atol=1e-11)


def test_a_matrix_without_a_gradient_stays_where_it_is():
    assert not newton_schulz(torch.zeros(3, 4), 5).any()


def _part(model: ModelConfig, *groups: str) -> Muon:
    train = TrainConfig(optimizer=make_part("optimizer", "muon", groups=groups or MUON_GROUPS))
    return chosen(Config(model=model, train=train), Muon)


BY_GROUP = {
    "attention": {"attention.wq", "attention.wk", "attention.wv", "attention.wo"},
    "dense_mlp": {"ffn.w_gate", "ffn.w_up", "ffn.w_down"},
    "experts": {"ffn.experts.w_gate", "ffn.experts.w_up", "ffn.experts.w_down"},
    "shared_experts": {"ffn.shared.w_gate", "ffn.shared.w_up", "ffn.shared.w_down"}
    | {"ffn.latent_down.weight", "ffn.latent_up.weight"},
    "router": {"ffn.router.weight"},
    "mtp": {"projection"},
}


def test_groups_take_the_matrices_of_the_layers_and_nothing_else():
    cfg = Config(model=edit_model(MODEL, {"ffn.moe.latent_size": 4}))
    names = [name for name, _ in build_model(cfg).named_parameters()]
    weights = model_weights(cfg.model)
    assert set(BY_GROUP) == set(MUON_GROUPS)
    taken = set()
    for group, expected in BY_GROUP.items():
        part = _part(cfg.model, group)
        found = {name for name in names if part.gathers(weights[name])}
        assert {name.split(".", 2)[-1] for name in found} == expected
        taken |= found
    assert taken == {name for name in names if _part(cfg.model).gathers(weights[name])}
    rest = {name.split(".", 2)[-1] if name.startswith("layers") else name for name in set(names) - taken}
    norms = {"attention_norm.weight", "ffn_norm.weight", "embedding_norm.weight", "hidden_norm.weight"}
    assert rest == norms | {
        "output_norm.weight", "ffn.shared_gate", "embedding.weight", "head.weight", "head.norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "left"),
    [
        ({"linear_attention": "gated_deltanet"}, "wa wb conv_q conv_k conv_v"),
        ({"linear_attention": "kda"}, "wb conv_q conv_k conv_v"),
        ({"linear_attention": "gla"}, ""),
        ({"linear_attention": "short_convolution"}, "conv"),
        ({"layers.attention": "full", "attention.gate": {}, "attention.gate.per": "head"}, "wg"),
        ({"layers.attention": "full", "attention.gate": {}}, ""),
    ],
)
def test_matrices_of_one_row_a_head_and_convolutions_are_left_to_adamw(model, left):
    cfg = edit_model(MODEL, {"layers.attention": "linear", "attention.num_kv_heads": 2} | model)
    part = _part(cfg)
    weights = [weight for weight in model_weights(cfg).values() if weight.part == "attention" and weight.is_matrix]
    assert {weight.name.rpartition(".")[2] for weight in weights if not part.gathers(weight)} == set(left.split())


@pytest.mark.parametrize(("name", "rows"), [("wkv_down", 6 + 16), ("wkv_up", 3 * (4 + 32)), ("wq_up", 5)])
def test_logical_matrices_equal_the_oracle(name, rows):
    whole = torch.arange(rows * 2.0).view(rows, 2)
    spec = replace(model_weights(LATENT)[f"layers.0.attention.{name}"], shape=(rows, 2))
    views = logical_matrices(spec, whole)
    mine = [part.flatten(0, -2) for part in views]
    theirs = [whole[index] for index in matrix_indices(spec)]
    assert len(mine) == len(theirs) == (1 if name == "wq_up" else 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    # They are views: a write to one is a write to the parameter.
    assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in views)


def parameters() -> dict[str, nn.Parameter]:
    cfg = Config(model=MODEL)
    model = build_model(cfg)
    init_weights(model, cfg.model, 0)
    return dict(model.named_parameters())


def test_the_root_mean_square_of_an_update_is_as_in_adamw():
    given = parameters()
    optimizer = build_alone(
        given, TrainConfig(optimizer=make_part("optimizer", "muon", weight_decay=0.0), lr=1.0), model=MODEL
    )
    before = {name: p.detach().clone() for name, p in given.items()}
    torch.manual_seed(1)
    for parameter in given.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name in ("layers.0.ffn.w_up", "layers.0.attention.wo"):
        assert float((given[name] - before[name]).square().mean().sqrt().detach()) == pytest.approx(0.2, rel=0.2)
    # The first step of Adam moves each weight by the rate.
    moved = (given["embedding.weight"] - before["embedding.weight"]).detach().abs()
    assert float(moved.mean()) == pytest.approx(1.0, rel=1e-3)


def test_one_rate_sets_both_and_moments_have_names():
    given = parameters()
    optimizer = build_alone(given, TrainConfig(optimizer=make_part("optimizer", "muon", weight_decay=0.5)), model=MODEL)
    set_learning_rate(optimizer, 0.1)
    for parameter in given.values():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in given.items()}
    optimizer.step()
    for name, parameter in given.items():
        decays = parameter.dim() > 1
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0))
    moments = named_moments(optimizer, given)
    assert {name for name in moments if "wq" in name} == {f"layers.{i}.attention.wq.momentum" for i in range(3)}
    assert {name for name in moments if "head.norm" in name} == {
        "head.norm.weight.exp_avg",
        "head.norm.weight.exp_avg_sq",
    }
