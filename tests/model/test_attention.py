"""The plain core equals the definition of causal grouped-query attention."""

import pytest
import torch

from moefold.model.attention import AttentionMaskSpec, CausalAttention, SelfAttention, has_long_documents
from moefold.model.layer_cache import CacheSize, CurrentPass
from moefold.ops.block_attention import BlockedWindow
from tests.model.attention_reference import (
    causal_attention_pairs,
    documents,
    random_attention,
    random_sinks,
    random_starts,
    reference_attention,
    relative_errors,
    with_gradients,
)

HEADS = [(4, 4, 8), (4, 2, 8), (6, 1, 5), (8, 4, 16)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_causal_attention_equals_its_definition(heads, batch, dtype, tolerance):
    grad_out, q, k, v = (x.to(dtype) for x in random_attention(0, 37, batch, heads))
    positions = torch.arange(37)
    expected = with_gradients(
        lambda *x: reference_attention(*x, positions, positions), grad_out.double(), q.double(), k.double(), v.double()
    )
    given = with_gradients(CausalAttention(), grad_out, q, k, v)
    assert {x.dtype for x in given} == {dtype}
    assert max(relative_errors(given, expected)) < tolerance


def test_one_token_attends_to_itself():
    grad_out, q, k, v = random_attention(1, 1, 2, (4, 2, 8))
    out, dq, dk, dv = with_gradients(CausalAttention(), grad_out, q, k, v)
    assert torch.equal(out, v.repeat_interleave(2, 2))
    assert dq.abs().max() < 1e-14
    assert dk.abs().max() < 1e-14
    torch.testing.assert_close(dv, grad_out.unflatten(2, (2, 2)).sum(3))


def test_the_future_changes_nothing():
    _, q, k, v = random_attention(2, 12, 2, (4, 2, 8))
    before = CausalAttention()(q, k, v)
    for x in (q, k, v):
        x[7:] += 1.0
    after = CausalAttention()(q, k, v)
    assert torch.equal(before[:7], after[:7])
    assert not torch.isclose(before[7:], after[7:]).all(-1).any()


def test_strides_do_not_matter():
    grad_out, q, k, v = random_attention(3, 9, 3, (4, 2, 8))
    packed = torch.cat((q, k, v), 2).transpose(2, 3).contiguous().transpose(2, 3)
    expected = with_gradients(CausalAttention(), grad_out, q, k, v)
    leaf = packed.requires_grad_()
    out = CausalAttention()(*leaf.split((4, 2, 2), 2))
    (gradient,) = torch.autograd.grad(out, leaf, grad_out)
    torch.testing.assert_close([out.detach(), *gradient.split((4, 2, 2), 2)], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_documents_do_not_see_each_other(heads, dtype, tolerance):
    grad_out, q, k, v = (x.to(dtype) for x in random_attention(4, 37, 2, heads))
    positions, starts = torch.arange(37), random_starts(5, 37, 2)
    expected = with_gradients(
        lambda *x: reference_attention(*x, positions, positions, starts), *(x.double() for x in (grad_out, q, k, v))
    )
    given = with_gradients(lambda *x: CausalAttention()(*x, documents(starts)), grad_out, q, k, v)
    assert max(relative_errors(given, expected)) < tolerance
    assert relative_errors([CausalAttention()(q, k, v)], expected[:1])[0] > 0.1


@pytest.mark.parametrize("window", [0, 1, 5, 36, 37, 50])
@pytest.mark.parametrize("limits", ["sinks", "documents", "sinks and documents", "neither"])
def test_windows_sinks_and_documents(window, limits):
    heads = (4, 2, 8)
    given = random_attention(6, 37, 2, heads)
    starts = random_starts(7, 37, 2) if "documents" in limits else None
    if "sinks" in limits:
        given.append(random_sinks(8, heads[0]))
    for mine, theirs in causal_attention_pairs(given, window, starts):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_sinks_in_narrow_types(dtype, tolerance):
    given = [x.to(dtype) for x in (*random_attention(6, 37, 2, (4, 2, 8)), random_sinks(8, 4))]
    positions = torch.arange(37)
    expected = with_gradients(
        lambda q, k, v, sinks: reference_attention(q, k, v, positions, positions, None, 5, sinks),
        *(x.double() for x in given),
    )
    mine = with_gradients(lambda q, k, v, sinks: CausalAttention(5)(q, k, v, None, sinks), *given)
    assert {x.dtype for x in mine} == {dtype}
    assert max(relative_errors(mine, expected)) < tolerance


@pytest.mark.parametrize(("heads", "window"), [((4, 2, 8), 0), ((2, 2, 8), 2000)])
def test_long_documents_go_one_by_one(heads, window):
    length, borders = 1100, ([0, 1, 700], [0, 513])
    starts = torch.zeros(length, 2, dtype=torch.int64)
    for sample, firsts in enumerate(borders):
        for first in firsts:
            starts[first:, sample] = first
    positions = torch.arange(length)
    inputs = random_attention(6, length, 2, heads)
    assert has_long_documents(documents(starts), inputs[1])
    assert not has_long_documents(documents(random_starts(5, 512, 2)), inputs[1][:512])
    expected = with_gradients(lambda *x: reference_attention(*x, positions, positions, starts), *inputs)
    given = with_gradients(lambda *x: CausalAttention(window)(*x, documents(starts)), *inputs)
    assert max(relative_errors(given, expected)) < 1e-12


def test_a_sink_takes_its_share():
    """If a token sees one key with score 0 and a sink of ln 3, the sink takes three quarters."""
    v = torch.randn(1, 1, 1, 4)
    out = CausalAttention()(torch.zeros_like(v), v, v, None, torch.tensor([3.0]).log())
    torch.testing.assert_close(out, v / 4)


@pytest.mark.parametrize("window", [1, 40, 65, 66, 72])
@pytest.mark.parametrize("limits", ["sinks", "documents", "neither"])
@pytest.mark.parametrize("length", [288, 301])
def test_long_runs_go_tile_by_tile(window, limits, length):
    given = random_attention(6, length, 2, (4, 2, 4))
    starts = random_starts(7, length, 2) if limits == "documents" else None
    if limits == "sinks":
        given.append(random_sinks(8, 4))
    assert isinstance(AttentionMaskSpec(window, documents(starts)).local_mask(0, given[0]), BlockedWindow)
    for mine, theirs in causal_attention_pairs(given, window, starts):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


class Unchanged(SelfAttention):
    """Attention that returns its input."""

    def forward(self, x, rope, documents=None):
        """Return the input."""
        return x


def test_caches_that_are_open_are_not_replaced_and_the_core_attention_comes_back():
    attention, size = Unchanged(window=0), CacheSize(num_pages=1, page_positions=4)
    core = attention.core_attention
    [cache] = attention.open_caches(CurrentPass(), size)
    with pytest.raises(AssertionError, match="open already"):
        attention.open_caches(CurrentPass(), size)
    assert attention.core_attention is cache
    attention.close_caches()
    assert attention.core_attention is core
