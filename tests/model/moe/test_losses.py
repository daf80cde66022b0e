"""The auxiliary losses equal hand-worked values, and parts of shards sum to the whole, with its gradient."""

import math

import pytest
import torch

from moefold.model.gradient_paths import attach_aux_loss, without_base
from moefold.model.moe.losses import GlobalBatchLoad, count_tokens_per_expert, local_load_balancing_loss, local_z_sum


def test_even_load_costs_one_and_one_hot_load_costs_the_number_of_experts():
    even = torch.full((8, 4), 0.25)
    assert local_load_balancing_loss(even, torch.tensor([[4, 4, 4, 4]]), 8).item() == pytest.approx(1.0)
    collapsed = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)
    assert local_load_balancing_loss(collapsed, torch.tensor([[8, 0, 0, 0]]), 8).item() == pytest.approx(4.0)


def test_load_balancing_and_z_loss_by_hand():
    # f = (3/4, 1/4), P = (0.6, 0.4): 2 * (0.75*0.6 + 0.25*0.4) = 1.1
    scores = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5], [0.7, 0.3]], dtype=torch.float64)
    assert local_load_balancing_loss(scores, torch.tensor([[3, 1]]), 4).item() == pytest.approx(1.1)
    logits = torch.log(torch.tensor([[1.0, 1.0], [2.0, 6.0]], dtype=torch.float64))
    assert local_z_sum(logits).item() / 2 == pytest.approx((math.log(2) ** 2 + math.log(8) ** 2) / 2)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_parts_of_shards_sum_to_the_whole(shards):
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    routed = torch.tensor([9, 3, 0, 7, 5])

    def whole(logits):
        share = routed.double() / 24
        return 5 * (share * logits.softmax(-1).mean(0)).sum() + logits.logsumexp(-1).square().mean()

    def parts(logits):
        return sum(
            local_load_balancing_loss(x.softmax(-1), routed.unsqueeze(0), 12) + local_z_sum(x) / 12
            for x in logits.chunk(shards)
        )

    torch.testing.assert_close(parts(logits), whole(logits), rtol=1e-13, atol=0)
    (expected,) = torch.autograd.grad(whole(logits), logits)
    (actual,) = torch.autograd.grad(parts(logits), logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


def test_attach_changes_the_gradient_and_nothing_else():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    attached = attach_aux_loss(x, 3.0 * (weight**2).sum())
    # FSDP warns of modules that return views.
    assert attached._base is None
    assert without_base(attached.view_as(attached))._base is None
    assert torch.equal(attached, x)
    # However large the gradient that arrives, the attached loss counts once.
    (1000.0 * attached.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1000.0), rtol=0, atol=0)
    torch.testing.assert_close(weight.grad, 6.0 * weight.detach(), rtol=1e-15, atol=0)


def test_the_loss_of_each_sample_by_itself_is_averaged_over_samples():
    # Two samples of two positions, sequence-first: rows are (s0 b0), (s0 b1), (s1 b0), (s1 b1).
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)
    ids = torch.tensor([[0], [1], [0], [1]])
    routed = count_tokens_per_expert(ids, 2, num_groups=2)
    assert routed.tolist() == [[2, 0], [0, 2]]
    # 2 * (1 * 0.8 + 0) and 2 * (0 + 1 * 0.7), although the load of the micro-batch is even.
    assert local_load_balancing_loss(scores, routed, 4).item() == pytest.approx((1.6 + 1.4) / 2)
    assert count_tokens_per_expert(ids, 2).tolist() == [[2, 2]]
    assert local_load_balancing_loss(scores, count_tokens_per_expert(ids, 2), 4).item() == pytest.approx(1.0)


def test_the_running_load_counts_each_round_once_however_often_it_comes():
    load = GlobalBatchLoad(3, 2)
    rounds = [torch.tensor([[1, 2]]), torch.tensor([[10, 20]]), torch.tensor([[100, 200]])]
    seen = [load.add_micro_batch(counts, torch.tensor(i)).tolist() for i, counts in enumerate(rounds)]
    assert seen == [[[1, 2]], [[11, 22]], [[111, 222]]]
    # Recomputed in the order of backward passes: nothing changes.
    assert [load.add_micro_batch(rounds[i], torch.tensor(i)).tolist() for i in (2, 0, 1)] == [seen[2], seen[0], seen[1]]
    # The next step overwrites before it reads.
    assert load.add_micro_batch(torch.tensor([[5, 5]]), torch.tensor(0)).tolist() == [[5, 5]]
