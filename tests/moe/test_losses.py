"""The auxiliary losses equal hand-worked values, and parts of shards sum to the whole, with its gradient."""

import math

import pytest
import torch

from moefold.moe.losses import attach, load_balancing_part, z_part


def test_even_load_costs_one_and_one_hot_load_costs_the_number_of_experts():
    even = torch.full((8, 4), 0.25)
    assert load_balancing_part(even, torch.tensor([4, 4, 4, 4]), 8, 2).item() == pytest.approx(1.0)
    collapsed = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)
    assert load_balancing_part(collapsed, torch.tensor([8, 0, 0, 0]), 8, 1).item() == pytest.approx(4.0)


def test_hand_worked_values():
    # f = (3/4, 1/4), P = (0.6, 0.4): 2 * (0.75*0.6 + 0.25*0.4) = 1.1
    scores = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5], [0.7, 0.3]], dtype=torch.float64)
    assert load_balancing_part(scores, torch.tensor([3, 1]), 4, 1).item() == pytest.approx(1.1)
    logits = torch.log(torch.tensor([[1.0, 1.0], [2.0, 6.0]], dtype=torch.float64))
    assert z_part(logits, 2).item() == pytest.approx((math.log(2) ** 2 + math.log(8) ** 2) / 2)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_parts_of_shards_sum_to_the_whole(shards):
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    routed = torch.tensor([9, 3, 0, 7, 5])

    def whole(logits):
        share = routed.double() / 24
        return 5 * (share * logits.softmax(-1).mean(0)).sum() + logits.logsumexp(-1).square().mean()

    def parts(logits):
        return sum(load_balancing_part(x.softmax(-1), routed, 12, 2) + z_part(x, 12) for x in logits.chunk(shards))

    torch.testing.assert_close(parts(logits), whole(logits), rtol=1e-13, atol=0)
    (expected,) = torch.autograd.grad(whole(logits), logits)
    (actual,) = torch.autograd.grad(parts(logits), logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


def test_attach_changes_the_gradient_and_nothing_else():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    attached = attach(x, 3.0 * (weight**2).sum())
    assert torch.equal(attached, x)
    # However large the gradient that arrives, the attached loss counts once.
    (1000.0 * attached.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1000.0), rtol=0, atol=0)
    torch.testing.assert_close(weight.grad, 6.0 * weight.detach(), rtol=1e-15, atol=0)
