"""Gated linear attention: chunks against the recurrence, states that are passed on, documents, and the convolution."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.linear_attention import (
    ChunkedLinearAttention,
    causal_convolution,
    l2_normalize,
    recurrent_linear_attention,
)

S, B, G, A, D, DV = 45, 2, 2, 4, 6, 5
KINDS = {"gla": (D, False), "gated_deltanet": (1, True), "kda": (D, True), "retention": (1, False)}


def _inputs(kind: str, length: int = S) -> list[Tensor | None]:
    """Return random queries, keys, values, logarithms of the decay and write strengths, in float64."""
    channels, has_delta = KINDS[kind]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (l2_normalize(draw(length, B, G, D)) for _ in range(2))
    v = draw(length, B, A, DV)
    log_decay = -3 * draw(length, B, A, channels).abs()
    beta = draw(length, B, A).sigmoid() if has_delta else None
    return [q, k, v, log_decay, beta]


def _gradients(function, inputs: list[Tensor | None], state: Tensor | None, **options) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (*inputs, state) if x is not None]
    arguments = iter(leaves)
    found = [None if x is None else next(arguments) for x in inputs]
    given = None if state is None else next(arguments)
    out, last = function(*found, given, **options)
    generator = torch.Generator().manual_seed(9)
    grad_out = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    grad_last = torch.randn(last.shape, generator=generator, dtype=out.dtype)
    gradients = torch.autograd.grad((out, last), leaves, (grad_out, grad_last))
    return [out.detach(), last.detach(), *gradients]


def _state() -> Tensor:
    return torch.randn(B, A, D, DV, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 7, 33, 64])
def test_chunks_equal_the_recurrence(kind: str, chunk_size: int) -> None:
    inputs = _inputs(kind)
    expected = _gradients(recurrent_linear_attention, inputs, _state())
    found = _gradients(ChunkedLinearAttention(chunk_size), inputs, _state())
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gla", "gated_deltanet", "kda"])
def test_a_chunk_border_without_the_state_is_noticed(kind: str) -> None:
    inputs = _inputs(kind)
    expected, _ = recurrent_linear_attention(*inputs, torch.zeros_like(_state()))
    parts = [[None if x is None else x[rows] for x in inputs] for rows in (slice(0, 32), slice(32, None))]
    outs = [ChunkedLinearAttention(32)(*part)[0] for part in parts]
    torch.testing.assert_close(outs[0], expected[:32], rtol=0, atol=1e-12)
    assert (outs[1] - expected[32:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["gla", "gated_deltanet", "kda"])
def test_transition_and_update_give_the_state_of_earlier_segments(kind: str) -> None:
    """Three segments by themselves, whose initial states are composed from transitions and updates."""
    inputs = _inputs(kind)
    expected = _gradients(recurrent_linear_attention, inputs, _state())
    bounds = [(0, 20), (20, 27), (27, S)]

    def in_segments(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        *parts, state = tensors
        outs = []
        for start, stop in bounds:
            found: list[tuple[Tensor, Tensor]] = []
            arguments = [None if x is None else x[start:stop] for x in parts]

            def before(transition: Tensor, update: Tensor, state=state, found=found) -> Tensor:
                found.append((transition, update))
                return state

            outs.append(ChunkedLinearAttention(8, before)(*arguments)[0])
            transition, update = found[0]
            state = transition @ state + update
        return torch.cat(outs), state

    for theirs, ours in zip(expected, _gradients(in_segments, inputs, _state()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gla", "gated_deltanet", "kda"])
def test_packed_documents_equal_documents_by_themselves(kind: str) -> None:
    bounds = [[0, 3, 4, 30, S], [0, 16, S]]
    inputs = _inputs(kind)
    is_start = torch.zeros(S, B, dtype=torch.bool)
    expected = torch.zeros(S, B, A, DV, dtype=torch.float64)
    for sample, limits in enumerate(bounds):
        for start, stop in zip(limits, limits[1:], strict=False):
            is_start[start, sample] = True
            alone = [None if x is None else x[start:stop, sample : sample + 1] for x in inputs]
            zeros = torch.zeros(1, A, D, DV, dtype=torch.float64)
            expected[start:stop, sample] = recurrent_linear_attention(*alone, zeros)[0][:, 0]
    for chunk_size in (4, 16, 64):
        out, _ = ChunkedLinearAttention(chunk_size)(*inputs, is_start_SB=is_start)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert (ChunkedLinearAttention(16)(*inputs)[0] - expected).abs().max() > 1e-3


def test_strong_decays_of_channels_do_not_overflow_or_become_nan() -> None:
    q, k, v, log_decay, beta = (x.float() for x in _inputs("kda", 64))
    q.requires_grad_()
    out, _ = ChunkedLinearAttention(64)(q, k, v, 40 * log_decay, beta)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_equal_keys_with_full_write_strength_stay_accurate() -> None:
    """The worst system: every key is the same, no decay, so that powers of the system's matrix would overflow."""
    q, k, v, log_decay, beta = _inputs("gated_deltanet", 64)
    k = k[:1].expand_as(k)
    arguments = (q, k, v, torch.zeros_like(log_decay), torch.ones_like(beta))
    expected, _ = recurrent_linear_attention(*arguments, torch.zeros(B, A, D, DV, dtype=torch.float64))
    torch.testing.assert_close(ChunkedLinearAttention(64)(*arguments)[0], expected, rtol=0, atol=1e-12)


def test_convolution_equals_conv1d_of_each_document() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, B, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    starts = torch.zeros(20, B, dtype=torch.int64)
    starts[2:, 0] = 2
    starts[4:, 0] = 4
    expected = torch.zeros_like(x)
    for sample, limits in enumerate([[0, 2, 4, 20], [0, 20]]):
        for start, stop in zip(limits, limits[1:], strict=False):
            part = x[start:stop, sample].t()
            expected[start:stop, sample] = F.silu(F.conv1d(F.pad(part, (3, 0)), weight.unsqueeze(1), groups=3)).t()
    num_previous = torch.arange(20).unsqueeze(1) - starts
    found = causal_convolution(x, weight, x.new_zeros(3, B, 3), num_previous, F.silu)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    # In two halves, with the last tokens of the first half.
    second = causal_convolution(x[10:], weight, x[7:10], num_previous[10:], F.silu)
    torch.testing.assert_close(second, expected[10:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", [None, F.silu])
def test_a_convolution_in_bfloat16_is_rounded_once(activation) -> None:
    """The taps are added, and activated, in float32."""
    generator = torch.Generator().manual_seed(0)
    x, weight, previous = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((20, B, 3), (3, 4), (3, B, 3))
    )
    num_previous = torch.full((20, B), 5)
    wide = causal_convolution(x.float(), weight.float(), previous.float(), num_previous, activation)
    found = causal_convolution(x, weight, previous, num_previous, activation)
    assert torch.equal(found, wide.bfloat16())
