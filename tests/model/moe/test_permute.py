"""Copies go to the rows of their experts, come back weighted, and gradients follow."""

import pytest
import torch

from moefold.model.moe.permute import (
    order_by_expert,
    permute,
    plan_permutation,
    reorder,
    reorder_permutation,
    unpermute,
)

T, K, E, H = 9, 3, 5, 4


def _case(kind: str):
    """(ids, kept, slots): every copy, some dropped, none left, padded, all experts chosen."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    some = torch.rand(T, K, generator=generator) < 0.6
    return {
        "all": (ids, None, None),
        "dropped": (ids, some, None),
        "none": (ids, torch.zeros_like(some), None),
        "padded": (ids, some, T),
        "none padded": (ids, torch.zeros_like(some), 2),
        "foreign ids": (torch.where(some, ids, ids - 100), some, None),
        "one expert": (torch.full((T, 1), 2), None, None),
        "every expert": (torch.arange(E).expand(T, E), None, None),
    }[kind]


KINDS = ["all", "dropped", "none", "padded", "none padded", "foreign ids", "one expert", "every expert"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_kept_copies_sorted_by_expert(kind):
    ids, kept, slots = _case(kind)
    x = torch.arange(1.0, T + 1).unsqueeze(1).expand(T, H)
    permutation = plan_permutation(ids, E, kept, slots)
    expected, counts = [], []
    for expert in range(E):
        tokens = [
            t + 1.0
            for t in range(T)
            for k in range(ids.shape[1])
            if (kept is None or kept[t, k]) and ids[t, k] == expert
        ]
        expected += tokens + [0.0] * (slots - len(tokens) if slots is not None else 0)
        counts.append(slots if slots is not None else len(tokens))
    rows = permute(x, permutation)
    assert rows[:, 0].tolist() == expected
    assert rows.shape == (sum(counts), H)
    assert permutation.tokens_per_expert_E.tolist() == counts


@pytest.mark.parametrize("kind", KINDS)
def test_unpermute_sums_the_weighted_copies(kind):
    ids, kept, slots = _case(kind)
    top_k = ids.shape[1]
    probs = torch.rand(T, top_k, dtype=torch.float64, requires_grad=True)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    permutation = plan_permutation(ids, E, kept, slots)
    scale = torch.arange(1.0, E + 1, dtype=torch.float64)
    rows = permute(x, permutation) * scale.repeat_interleave(permutation.tokens_per_expert_E).unsqueeze(1)
    out = unpermute(rows, permutation, probs)
    mask = torch.ones(T, top_k, dtype=torch.float64) if kept is None else kept.double()
    factor = (probs * mask * scale[ids.clamp(0, E - 1)]).sum(1, keepdim=True)
    torch.testing.assert_close(out, x * factor, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(out)
    for actual, expected in zip(
        torch.autograd.grad(out, (x, probs), grad), torch.autograd.grad(x * factor, (x, probs), grad), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_empty_rows_get_no_gradient_and_are_not_read():
    ids, kept, slots = _case("padded")
    permutation = plan_permutation(ids, E, kept, slots)
    rows = torch.randn(E * slots, H, dtype=torch.float64)
    probs = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    clean = unpermute(rows, permutation, probs)
    empty = ~permutation.non_padding_R
    spoilt = rows.clone()
    spoilt[empty] = 1e300
    spoilt.requires_grad_()
    out = unpermute(spoilt, permutation, probs)
    assert torch.equal(out, clean)
    out.sum().backward()
    assert spoilt.grad[empty].abs().max() == 0
    assert spoilt.grad[~empty].abs().min() > 0
    assert probs.grad.abs().max() < 1e3


def test_bfloat16_copies_are_weighed_in_float32():
    ids, _, _ = _case("all")
    permutation = plan_permutation(ids, E)
    rows = torch.randn(T * K, H).bfloat16().requires_grad_()
    probs = torch.rand(T, K, requires_grad=True)
    out = unpermute(rows, permutation, probs)
    expected = (rows.float()[permutation.row_TK] * probs.unsqueeze(-1)).sum(1)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    out.sum().backward()
    assert (rows.grad.dtype, probs.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(probs.grad, rows.detach().float()[permutation.row_TK].sum(-1), rtol=1e-6, atol=1e-6)


def test_rows_of_several_sources_are_sorted_by_expert():
    counts = torch.tensor([[2, 0, 1], [0, 0, 3], [1, 2, 0]])
    arrived = torch.tensor([s * 10 + e for s in range(3) for e in range(3) for _ in range(counts[s, e])])
    order, inverse = order_by_expert(counts, 9)
    assert arrived[order].tolist() == [0, 0, 20, 21, 21, 2, 12, 12, 12]
    assert torch.equal(arrived[order][inverse], arrived)
    rows = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(reorder(rows, order, inverse), rows[order])
    assert torch.autograd.gradcheck(lambda x: reorder(x, order, inverse), rows)
    assert [len(x) for x in order_by_expert(torch.zeros(2, 3, dtype=torch.int64), 0)] == [0, 0]


@pytest.mark.parametrize("kept", [None, torch.tensor([[True, False], [False, True], [True, True]])])
def test_rearranged_rows_still_belong_to_their_copies(kept):
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]])
    x, probs = torch.arange(3.0).view(3, 1), torch.rand(3, 2)
    permutation = plan_permutation(ids, 3, kept)
    rows = permute(x, permutation)
    order = torch.arange(len(rows)).flip(0)
    rearranged = reorder_permutation(permutation, order)
    assert torch.equal(permute(x, rearranged), rows[order])
    assert torch.equal(unpermute(rows[order], rearranged, probs), unpermute(rows, permutation, probs))


def test_no_rows_can_be_rearranged():
    permutation = plan_permutation(torch.tensor([[1, 0]]), 2, torch.tensor([[False, False]]))
    assert reorder_permutation(permutation, torch.empty(0, dtype=torch.int64)) is permutation
