"""What a query sees, pair by pair."""

import pytest
import torch

from moefold.model.attention import AttentionMaskSpec
from tests.model.attention_reference import documents

STARTS = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 7]]).t()


@pytest.mark.parametrize("window", [0, 1, 3, 8])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["one document", "documents"])
def test_mask_follows_the_definition(window, starts):
    queries, keys = torch.tensor([1, 6, 7, 2]), torch.tensor([0, 1, 2, 5, 6, 7])
    sight = AttentionMaskSpec(window, documents(starts))
    mask = sight.mask(queries, keys)
    assert mask.shape == (1 if starts is None else 2, 4, 6)
    for b in range(mask.shape[0]):
        for i, p in enumerate(queries.tolist()):
            for j, k in enumerate(keys.tolist()):
                seen = k <= p and (window == 0 or p - k < window)
                if starts is not None:
                    seen = seen and k >= starts[p, b]
                assert mask[b, i, j] == seen
                assert not seen or sight.in_window(p - k)


def test_limits():
    assert not AttentionMaskSpec().needs_mask(8)
    assert not AttentionMaskSpec(8).needs_mask(8)
    assert AttentionMaskSpec(7).needs_mask(8)
    assert AttentionMaskSpec(0, documents(STARTS)).needs_mask(8)
    assert [AttentionMaskSpec(3).in_window(d) for d in (0, 2, 3)] == [True, True, False]
    assert AttentionMaskSpec().in_window(10**9)
