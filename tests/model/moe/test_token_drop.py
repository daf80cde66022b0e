"""Experts keep the tokens that their policy chooses, up to their capacity."""

import pytest
import torch

from moefold.config.base.part_registry import find_part
from moefold.model.moe.token_drop import CapacityPolicy, keep_within_capacity
from moefold.model.moe.token_group import MicroBatchGroup

PROBS, POSITION = (find_part("drop", kind)() for kind in ("probs", "position"))
FULL_SEQUENCE, SUB_SEQUENCE = (find_part("drop_scope", kind)() for kind in ("full_sequence", "sub_sequence"))


def _random_routing(num_tokens: int, top_k: int, num_experts: int, levels: int):
    """Ids, weights with many ties, and shuffled keys."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    probs = torch.randint(1, levels + 1, (num_tokens, top_k)).double() / levels
    return ids, probs, torch.randperm(num_tokens) * 3


@pytest.mark.parametrize("policy", [PROBS, POSITION], ids=lambda policy: policy.kind)
@pytest.mark.parametrize("capacity", [1, 4, 100])
def test_kept_tokens_equal_sorting_by_hand(policy, capacity):
    torch.manual_seed(0)
    ids, probs, keys = _random_routing(40, 3, 5, levels=4)
    kept = keep_within_capacity(ids, probs, keys, 5, capacity, policy)
    for expert in range(5):
        queue = [(t, k) for t in range(40) for k in range(3) if ids[t, k] == expert]
        queue.sort(key=lambda i: (-probs[i].item() if policy is PROBS else 0.0, keys[i[0]].item()))
        assert {i for i in queue if kept[i]} == set(queue[:capacity])


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float64, 1e-13), (torch.float32, 2e-7)])
def test_rounding_does_not_choose_among_equals(dtype, noise):
    """A tie is broken by key however its probabilities were rounded, and distinct values stay distinct."""
    torch.manual_seed(4)
    ids, probs, keys = _random_routing(60, 3, 5, levels=3)
    expected = keep_within_capacity(ids, probs.to(dtype), keys, 5, 7, PROBS)
    for _ in range(5):
        rounded = (probs * (1 + noise * (2 * torch.rand_like(probs) - 1))).to(dtype)
        assert torch.equal(keep_within_capacity(ids, rounded, keys, 5, 7, PROBS), expected)
    apart = 0.3 * (1 + 1e-4 * torch.randperm(60).to(dtype)).unsqueeze(1)
    kept = keep_within_capacity(torch.zeros(60, 1, dtype=torch.int64), apart, keys, 5, 7, PROBS)
    assert kept.flatten().nonzero().flatten().tolist() == sorted(apart.flatten().topk(7).indices.tolist())


def test_position_keeps_exactly_the_first():
    ids = torch.zeros(6, 1, dtype=torch.int64)
    probs = torch.linspace(0.1, 0.6, 6).unsqueeze(1)
    keys = torch.tensor([5, 4, 3, 2, 1, 0])
    assert keep_within_capacity(ids, probs, keys, 2, 2, POSITION).flatten().tolist() == [False] * 4 + [True] * 2
    assert keep_within_capacity(ids, probs, torch.arange(6), 2, 2, PROBS).flatten().tolist() == [False] * 4 + [True] * 2
    assert (
        keep_within_capacity(ids, probs, torch.arange(6), 2, 2, POSITION).flatten().tolist() == [True] * 2 + [False] * 4
    )


def test_the_order_of_the_rows_does_not_matter():
    torch.manual_seed(1)
    ids, probs, keys = _random_routing(30, 2, 4, levels=2)
    shuffle = torch.randperm(30)
    for policy in (PROBS, POSITION):
        kept = keep_within_capacity(ids, probs, keys, 4, 5, policy)
        assert torch.equal(
            keep_within_capacity(ids[shuffle], probs[shuffle], keys[shuffle], 4, 5, policy), kept[shuffle]
        )


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "factor", "expected"),
    [(2048, 2, 8, 1.0, 512), (2048, 2, 8, 1.25, 640), (3, 1, 8, 1.0, 1), (1, 1, 64, 0.1, 1), (10, 2, 8, 1.0, 3)],
)
def test_capacity(num_tokens, top_k, num_experts, factor, expected):
    assert CapacityPolicy(factor, PROBS, FULL_SEQUENCE).capacity(num_tokens, top_k, num_experts) == expected


def test_slots_hold_whatever_one_rank_can_keep():
    rule = CapacityPolicy(8.0, PROBS, FULL_SEQUENCE)
    assert rule.capacity(6, 2, 4) == 24
    assert rule.padded_capacity(6, 2, 4, MicroBatchGroup()) == 6
    assert CapacityPolicy(1.0, PROBS, SUB_SEQUENCE).padded_capacity(6, 2, 4, MicroBatchGroup()) == 3


def test_scopes_agree_on_one_rank_and_weights_need_no_gradient():
    torch.manual_seed(2)
    ids, probs, keys = _random_routing(20, 2, 4, levels=3)
    probs.requires_grad_()
    kept = [
        CapacityPolicy(0.7, PROBS, scope).keep_mask(ids, probs, keys, 4, MicroBatchGroup())
        for scope in (FULL_SEQUENCE, SUB_SEQUENCE)
    ]
    assert torch.equal(*kept)
    assert kept[0].sum() < 40
    assert not kept[0].requires_grad
