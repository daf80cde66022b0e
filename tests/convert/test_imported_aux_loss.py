"""router_aux_loss_coef of a folder as moe.aux_loss of the recipe."""

import pytest
import torch

from moefold.config.load import config_from_dict
from moefold.convert.import_folder import imported_aux_loss
from moefold.model.moe.losses import count_tokens_per_expert, local_load_balancing_loss

L, T, E, K = 3, 40, 6, 2


def test_it_adds_the_gradient_of_transformers():
    """Layers with equal logits have equal loads, where both losses have the same gradient; only a constant differs."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = {"num_layers": L + 1, "layer_pattern": "DM3", "ffn.moe.num_experts": E, "ffn.moe.top_k": K}
    model = config_from_dict({"model": layers}).model
    coefficient = 0.02
    ours = imported_aux_loss({"router_aux_loss_coef": coefficient}, model)
    assert ours == pytest.approx(coefficient * K / L)
    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
    theirs = [logits_TE.clone().requires_grad_() for _ in range(L)]
    value = coefficient * mixtral.load_balancing_loss_func(tuple(theirs), E, K)
    value.backward()
    mine_TE = logits_TE.clone().requires_grad_()
    scores_TE = mine_TE.softmax(1)
    counts = count_tokens_per_expert(scores_TE.topk(K).indices, E)
    loss = ours * local_load_balancing_loss(scores_TE, counts, T)
    loss.backward()
    assert (L * loss).item() == pytest.approx(value.item(), rel=1e-5)
    for layer in theirs:
        torch.testing.assert_close(mine_TE.grad, layer.grad, rtol=1e-4, atol=1e-8)


def test_a_folder_without_experts_or_without_the_key_has_none():
    model = config_from_dict({"model": {"layer_pattern": "D"}}).model
    assert imported_aux_loss({"router_aux_loss_coef": 0.1}, model) is None
    assert imported_aux_loss({}, config_from_dict({"model": {"layer_pattern": "M"}}).model) is None
