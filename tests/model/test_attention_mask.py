"""The keys that a query sees, pair by pair."""

import pytest
import torch

from moefold.model.attention import AttentionMaskSpec
from moefold.ops.documents import AttentionChunks, PackedDocuments
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


def test_a_mask_is_needed_if_window_or_documents_limit_attention():
    assert not AttentionMaskSpec().needs_mask(8)
    assert not AttentionMaskSpec(8).needs_mask(8)
    assert AttentionMaskSpec(7).needs_mask(8)
    assert AttentionMaskSpec(0, documents(STARTS)).needs_mask(8)
    assert [AttentionMaskSpec(3).in_window(d) for d in (0, 2, 3)] == [True, True, False]
    assert AttentionMaskSpec().in_window(10**9)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 50])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_begin_with_their_document(chunk_size, has_documents):
    """A query attends to a key of its document if both have the same quotient of their position in it."""
    starts_SB = torch.tensor([[0] * 5 + [5] * 6, [0] * 11]).t() if has_documents else None
    documents = None if starts_SB is None else PackedDocuments.of_starts(starts_SB)
    found = AttentionChunks(chunk_size).divide(documents, 11, 2, torch.device("cpu"))
    first_SB = torch.zeros(11, 2, dtype=torch.int64) if starts_SB is None else starts_SB
    position_SB = torch.arange(11)[:, None] - first_SB
    expected_SB = first_SB + position_SB // chunk_size * chunk_size
    if found is None:
        assert bool((expected_SB == 0).all())
        return
    assert torch.equal(found.starts_SB, expected_SB)
    assert found.bounds == PackedDocuments.of_starts(expected_SB).bounds
