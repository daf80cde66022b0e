"""Choices by value, in groups, balanced and forced, beside lists, published algorithms and hand-worked values."""

import pytest
import torch
from torch import Tensor

from moefold.model.moe.router import mask_to_top_groups, topk_experts
from moefold.model.moe.token_group import MicroBatchGroup
from moefold.parts.choice import SkewedChoice, assign_in_turn, quantile_thresholds, sinkhorn_offsets


def test_the_lower_expert_of_equal_values_wins():
    values = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0], [0.0, 1.0, 0.0, 1.0, 0.0]])
    assert topk_experts(values, 3).tolist() == [[1, 2, 3], [0, 1, 2], [1, 3, 0]]
    many = torch.randint(0, 3, (300, 64)).float()
    expected = many.sort(dim=1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(topk_experts(many, 8), expected)


def test_a_token_never_chooses_an_expert_twice():
    values = torch.full((2, 4), float("-inf"))
    values[1, 2] = 0.0
    assert topk_experts(values, 4).tolist() == [[0, 1, 2, 3], [2, 0, 1, 3]]


def test_choosing_does_not_change_the_values():
    values = torch.randn(3, 4)
    before = values.clone()
    topk_experts(values, 2)
    assert torch.equal(values, before)


@pytest.mark.parametrize("sums_two", [False, True])
def test_only_the_best_groups_stay_open(sums_two):
    # Groups {0,1,2}, {3,4,5}, {6,7,8}: by their best 9, 8, 7; by their two best 9, 14, 13.
    values = torch.tensor([[9.0, 0.0, 0.0, 8.0, 6.0, 1.0, 7.0, 6.0, 6.0]])
    limited = mask_to_top_groups(values, 3, 2, sums_top2=sums_two)
    open_experts = (limited > float("-inf")).nonzero()[:, 1].tolist()
    assert open_experts == ([3, 4, 5, 6, 7, 8] if sums_two else [0, 1, 2, 3, 4, 5])
    assert torch.equal(limited[0, open_experts], values[0, open_experts])


def _megatron_sinkhorn(cost: Tensor, tol: float = 1e-12) -> Tensor:
    """The algorithm of Megatron-LM's `sinkhorn` until it stands still, in float64 and without its epsilon."""
    cost = torch.exp(cost)
    d0, d1 = torch.ones(len(cost), dtype=cost.dtype), torch.ones(cost.shape[1], dtype=cost.dtype)
    error, last = 1e9, d1
    while error > tol:
        d0 = 1 / len(d0) / (d1 * cost).sum(1)
        d1 = 1 / len(d1) / (d0.unsqueeze(1) * cost).sum(0)
        error, last = float((last - d1).abs().mean() / d1.mean()), d1
    return d1 * cost * d0.unsqueeze(1)


def test_sinkhorn_chooses_as_the_scaled_matrix_does_and_evens_the_load():
    logits = torch.randn(200, 8, dtype=torch.float64) + torch.linspace(0, 3, 8, dtype=torch.float64)
    offsets = sinkhorn_offsets(logits, 300, MicroBatchGroup())
    scaled = _megatron_sinkhorn(logits)
    torch.testing.assert_close((logits + offsets).softmax(1), scaled / scaled.sum(1, keepdim=True), rtol=1e-8, atol=0)
    torch.testing.assert_close((logits + offsets).softmax(1).sum(0), torch.full((8,), 25.0, dtype=torch.float64))
    assert torch.equal(topk_experts(logits + offsets, 2), topk_experts(scaled, 2))


def test_sinkhorn_survives_large_logits():
    assert sinkhorn_offsets(2000 * torch.randn(50, 4), 20, MicroBatchGroup()).isfinite().all()


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(64, 2, 8), (10, 1, 3), (5, 3, 4), (1, 1, 2)])
def test_the_threshold_is_the_quantile(num_tokens, top_k, num_experts):
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float64)
    expected = scores.quantile(1 - top_k / num_experts, dim=0)
    torch.testing.assert_close(quantile_thresholds(scores, top_k, MicroBatchGroup()), expected, rtol=1e-14, atol=0)


def test_round_robin_is_perfectly_even():
    ids = assign_in_turn(torch.randperm(24), 3, 8)
    assert ids.flatten().bincount().tolist() == [9] * 8
    assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.parametrize("skew", [0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_skewed_sends_the_given_part_of_the_tokens_to_expert_0(skew, top_k):
    ids = SkewedChoice(share=skew).assign(torch.randperm(400), top_k, 8)
    assert (ids == 0).any(1).sum().item() == pytest.approx(400 * skew, abs=1)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert ids.min() == 0
    assert ids.max() == 7 or (top_k == 1 and skew == 1.0)
