"""Attention written out as its definition, in float64, with gradients by autograd: every core must equal it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moefold.model.attention import CausalAttention
from moefold.ops.documents import PackedDocuments


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    starts: Tensor | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[Sq, B, A, D] from q [Sq, B, A, D], k and v [Sk, B, G, D]: each query sees the keys at or before its position.

    `starts`, [Sq, B], is the first position that each query sees, `window` how many keys it sees at most, and `sinks`,
    [A], the logit of one more key for each head, whose value is zero.
    """
    hidden = (key_positions > query_positions[:, None])[None]
    if starts is not None:
        hidden = hidden | (key_positions < starts.t()[:, :, None])
    if window:
        hidden = hidden | (key_positions <= query_positions[:, None] - window)
    share = q.shape[2] // k.shape[2]
    heads = []
    for a in range(q.shape[2]):
        key, value = k[:, :, a // share], v[:, :, a // share]
        scores = torch.einsum("sbd,tbd->bst", q[:, :, a], key) / q.shape[3] ** 0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[a].expand(*scores.shape[:2], 1)), -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[0]]
        heads.append(torch.einsum("bst,tbd->sbd", weights, value))
    return torch.stack(heads, 2)


def with_gradients(attend, grad_out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return [out, dq, dk, dv] of attend(q, k, v), and the gradients of further inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def causal_attention_pairs(given: list[Tensor], window: int, starts: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(ours, by the definition) of the output and each gradient, of given = [grad_out, q, k, v], then sinks if any."""
    positions = torch.arange(len(given[0]))

    def expected(q, k, v, sinks=None):
        return reference_attention(q, k, v, positions, positions, starts, window, sinks)

    def attend(q, k, v, sinks=None):
        return CausalAttention(window)(q, k, v, documents(starts), sinks)

    return zip(with_gradients(attend, *given), with_gradients(expected, *given), strict=True)


def documents(starts: Tensor | None) -> PackedDocuments | None:
    """The documents with these starts, [S, B]."""
    return None if starts is None else PackedDocuments.of_starts(starts)


def random_attention(seed: int, seq_len: int, batch: int, heads: tuple[int, int, int]) -> list[Tensor]:
    """[grad_out, q, k, v] in float64, of heads (A, G, D)."""
    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads, size = heads
    counts = (query_heads, query_heads, kv_heads, kv_heads)
    return [torch.randn(seq_len, batch, n, size, dtype=torch.float64, generator=generator) for n in counts]


def random_sinks(seed: int, heads: int) -> Tensor:
    """Logits of about the size of the greatest score, float64 [A]."""
    return 2 * torch.randn(heads, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + seed))


def relative_errors(given: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Largest difference over the largest value, for each pair."""
    assert [x.shape for x in given] == [y.shape for y in expected]
    return [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(given, expected, strict=True)]


def random_starts(seed: int, seq_len: int, batch: int) -> Tensor:
    """Return documents of random lengths, one with a single token: the start of each token's, int64 [S, B]."""
    generator = torch.Generator().manual_seed(seed)
    is_first = torch.rand(seq_len, batch, generator=generator) < 0.2
    is_first[0] = True
    is_first[4:6] = True
    return (torch.arange(seq_len)[:, None] * is_first).cummax(0).values
