"""Sparse attention and the indexer's loss equal their definitions over dense masks, gradients included."""

import pytest
import torch
from torch import Tensor

from moefold.metrics.memory_tracker import MemoryTracker
from moefold.ops import sparse_attention as ops
from moefold.ops.sparse_attention import (
    IndexTensors,
    VisibleKeys,
    attention_sums,
    select_keys,
    selected_index_loss,
    sparse_attention,
    visible_index_loss,
)

S, B, A, G, D, J, K = 9, 2, 4, 2, 6, 3, 4
SCALE = 0.3
WEIGHTS = torch.tensor([[0.5, 0.0], [1.0, 0.25], [0.0, 2.0]], dtype=torch.float64).repeat(3, 1)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.fixture(params=[1 << 18, 40], ids=["one block", "blocks of one query"])
def block_elements(request, monkeypatch) -> None:
    monkeypatch.setattr(ops, "MAX_BLOCK_ELEMENTS", {"cpu": request.param, "cuda": 0})


def _index() -> IndexTensors:
    return IndexTensors(_random(S, B, J, D), _random(S, B, J), _random(S, B, D))


def _causal() -> VisibleKeys:
    stops_S = torch.arange(1, S + 1, dtype=torch.int32)
    return VisibleKeys(torch.zeros(S, B, dtype=torch.int32), stops_S[:, None].expand(S, B))


def _scores(index: IndexTensors) -> Tensor:
    """I[t, s] = sum over j of w[t, j] ReLU(q[t, j] . k[s]), [S, B, N]."""
    dots = torch.einsum("sbjd,nbd->sbjn", index.query, index.key).relu()
    return torch.einsum("sbj,sbjn->sbn", index.weight, dots)


def _mask(selected_SBK: Tensor) -> Tensor:
    """Which keys are selected, bool [S, B, N]."""
    return (selected_SBK.unsqueeze(-1) == torch.arange(S)).any(2)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask_SBN: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [S, B, A, Dv] and the probabilities summed over the heads [S, B, N]."""
    repeats = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("sbad,nbad->basn", q, keys) * SCALE
    scores = scores.masked_fill(~mask_SBN.transpose(0, 1).unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(B, -1, S, 1)), -1)
    probs = scores.softmax(-1)[..., :S]
    return torch.einsum("basn,nbae->sbae", probs, values), probs.sum(1).transpose(0, 1)


def _divergence(index: IndexTensors, mask_SBN: Tensor, sums_SBN: Tensor) -> Tensor:
    log_probs = _scores(index).masked_fill(~mask_SBN, -torch.inf).log_softmax(-1)
    target = (sums_SBN / sums_SBN.sum(-1, keepdim=True)).detach()
    terms = torch.where(mask_SBN, target * (target.log() - log_probs), 0.0).nan_to_num()
    return sum(WEIGHTS[t, b] * terms[t, b][mask_SBN[t, b]].sum() for t in range(S) for b in range(B))


def _assert_same_gradients(found: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.rand_like(expected)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), tensors, retain_graph=True) for x in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("block_elements")
@pytest.mark.parametrize("top_k", [K, S + 3])
def test_selection_equals_a_sort(top_k):
    index = _index()
    selected = select_keys(index, _causal(), top_k)
    scores = _scores(index).detach()
    for t in range(S):
        for b in range(B):
            best = sorted(range(t + 1), key=lambda s: (-float(scores[t, b, s]), s))[:top_k]
            expected = sorted(best) + [-1] * (min(top_k, S) - len(best))
            assert selected[t, b].tolist() == expected


def test_a_score_that_is_not_a_number_comes_last():
    index = _index()
    index.key.data[2] = torch.nan
    selected = select_keys(index, _causal(), K)
    assert not (selected[5:] == 2).any()
    assert (selected[2, :, 2] == 2).all()


@pytest.mark.usefixtures("block_elements")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_latent", [False, True])
def test_attention_equals_the_masked_one(is_latent, has_sinks):
    q, k = _random(S, B, A, D), _random(S, B, 1 if is_latent else G, D)
    v = None if is_latent else _random(S, B, G, D)
    width = D - 2 if is_latent else D
    sinks = _random(A) if has_sinks else None
    index = _index()
    selected = select_keys(index, _causal(), K)
    out, sums = sparse_attention(q, k, v, selected, value_dim=width, scale=SCALE, sinks=sinks)
    expected, all_sums = _dense(q, k, k[..., :width] if v is None else v, _mask(selected), sinks)
    _assert_same_gradients(out, expected, [x for x in (q, k, v, sinks) if x is not None])
    assert not sums.requires_grad
    present = selected >= 0
    torch.testing.assert_close(sums[present], all_sums.gather(2, selected.clamp(min=0).long())[present])
    # No gradient reaches the indexer through the selection.
    assert torch.autograd.grad(out.sum(), [*vars(index).values()], allow_unused=True) == (None, None, None)


def test_attention_over_all_keys_is_dense():
    q, k, v = _random(S, B, A, D), _random(S, B, G, D), _random(S, B, G, D)
    selected = select_keys(_index(), _causal(), S)
    out, _ = sparse_attention(q, k, v, selected, value_dim=D, scale=D**-0.5)
    heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    _assert_same_gradients(out, dense.permute(2, 0, 1, 3), [q, k, v])


@pytest.mark.usefixtures("block_elements")
def test_loss_over_selected_keys():
    q, k = _random(S, B, A, D), _random(S, B, G, D)
    index = _index()
    selected = select_keys(index, _causal(), K)
    _, sums = sparse_attention(q, k, k, selected, value_dim=D, scale=SCALE)
    loss = selected_index_loss(index, selected, sums / sums.sum(-1, keepdim=True), WEIGHTS)
    mask = _mask(selected)
    _assert_same_gradients(loss, _divergence(index, mask, _dense(q, k, k, mask, None)[1]), [*vars(index).values()])


@pytest.mark.parametrize("has_sinks", [False, True])
def test_loss_over_visible_keys(has_sinks):
    q, k = _random(S, B, A, D), _random(S, B, G, D)
    sinks = _random(A) if has_sinks else None
    index = _index()
    mask = torch.ones(S, S, dtype=torch.bool).tril()[:, None].expand(S, B, S)
    sums = attention_sums(q, k, mask.transpose(0, 1), SCALE, sinks)
    expected = _dense(q, k, k, mask, sinks)[1]
    torch.testing.assert_close(sums, expected)
    loss = visible_index_loss(index, mask.transpose(0, 1), (sums / sums.sum(-1, keepdim=True)).detach(), WEIGHTS)
    _assert_same_gradients(loss, _divergence(index, mask, expected), [*vars(index).values()])


def test_memory_is_bounded_by_blocks_of_queries(monkeypatch):
    """Copies of the selected keys exist for one block of queries at a time."""
    monkeypatch.setattr(ops, "MAX_BLOCK_ELEMENTS", {"cpu": 1 << 14, "cuda": 0})
    length, top_k = 1024, 256
    q, k = torch.randn(length, 1, 1, 8, requires_grad=True), torch.randn(length, 1, 1, 8, requires_grad=True)
    selected = torch.arange(top_k, dtype=torch.int32).expand(length, 1, top_k).contiguous()
    with MemoryTracker() as tracker:
        out, _ = sparse_attention(q, k, k, selected, value_dim=8, scale=1.0)
        out.sum().backward()
    copies = 4 * 2 * length * top_k * 8
    assert tracker.peak(lambda part: True).total < copies / 4
