"""Test that linear attention in C equals the recurrence: values, gradients, documents, passed states, runs."""

import pytest
import torch
from torch import Tensor

from moefold.ops.linear_attention import ChunkedLinearAttention, l2_normalize, recurrent_linear_attention
from moefold.parallel.kernels.select import select_kernels
from tests.ops.c_kernels import (
    CPU,
    HALF_STEPS,
    VECTORS,
    assert_same_losses,
    needs_compiler,
    recipe,
    same_bits_on_threads,
)
from tests.verify.linear_cases import DOCUMENTS, HYBRID, TWO_SAMPLES

pytestmark = needs_compiler

KINDS = {"gla": (True, False), "gated_deltanet": (False, True), "kda": (True, True), "retention": (False, False)}
"""Whether there is a decay of each channel, and whether there is the delta rule."""
SHAPES = {
    "one token": (1, 1, 1, 1, 1, 1, 64),
    "several chunks": (150, 1, 1, 2, 16, 32, 64),
    "odd sizes": (45, 2, 2, 4, 17, 5, 7),
}
"""Tokens, samples, key heads, value heads, widths of keys and values, and tokens of a chunk."""
MORE_SHAPES = {
    "wide": (70, 1, 1, 1, 256, 130, 64),
    "chunks of 32": (65, 2, 1, 3, 24, 22, 32),
    "chunks of 33": (100, 1, 2, 2, 48, 16, 33),
    "chunks of 128": (300, 1, 2, 2, 16, 16, 128),
    "longer chunks are cut": (300, 1, 1, 1, 8, 8, 500),
}


@pytest.fixture(
    scope="module", params=["native", *(pytest.param(n, marks=pytest.mark.slow) for n in VECTORS if n != "native")]
)
def kernel(request, built_with):
    from moefold.ops.cpu.linear_attention import CLinearAttention

    return built_with(CLinearAttention, VECTORS[request.param])


def _inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Return random queries, keys and values in a type, and logarithms of decays and write strengths in float32."""
    channels, has_delta = KINDS[kind]
    tokens, samples, groups, heads, keys, values, _ = shape
    generator = torch.Generator().manual_seed(3)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(tokens, samples, *sizes, generator=generator)

    q, k = (l2_normalize(draw(groups, keys)).to(dtype) for _ in range(2))
    # The sums of a chunk have an absolute error in float32, which grows with the decays.
    log_decay = -draw(heads, keys if channels else 1).abs() / 4
    return [q, k, draw(heads, values).to(dtype), log_decay, draw(heads).sigmoid() if has_delta else None]


def _gradients(
    function, inputs: list[Tensor | None], state: Tensor | None, dtype: torch.dtype | None = None, **options
):
    """Return outputs, last states and all gradients, computed in a type."""
    given = [x if x is None or dtype is None else x.to(dtype) for x in (*inputs, state)]
    leaves = [x.clone().requires_grad_() for x in given if x is not None]
    arguments = iter(leaves)
    out, last = function(*(None if x is None else next(arguments) for x in given), **options)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, last)]
    return [out.detach(), last.detach(), *torch.autograd.grad((out, last), leaves, weights)]


def _assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 3e-6) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype in HALF_STEPS
        half_step = HALF_STEPS[ours.dtype] if ours.dtype == torch.bfloat16 else 0.0
        error = (ours.double() - theirs).abs() - half_step * theirs.abs()
        assert error.max() <= tolerance * max(1.0, float(theirs.abs().max())), index


def _state(shape: tuple[int, ...]) -> Tensor:
    _, samples, _, heads, keys, values, _ = shape
    return torch.randn(samples, heads, keys, values, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [*SHAPES.values(), *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE_SHAPES.values())],
)
def test_chunks_equal_the_recurrence(kernel, kind, shape):
    inputs = _inputs(kind, shape)
    expected = _gradients(recurrent_linear_attention, inputs, _state(shape), torch.float64)
    attention = ChunkedLinearAttention(shape[-1], kernel=kernel)
    assert kernel.supports([x for x in inputs if x is not None])
    _assert_close(_gradients(attention, inputs, _state(shape)), expected)


@pytest.mark.parametrize("kind", ["gated_deltanet", "kda"])
def test_bfloat16_is_rounded_once(kernel, kind):
    shape = (50, 2, 1, 2, 9, 12, 32)
    inputs = _inputs(kind, shape, torch.bfloat16)
    expected = _gradients(recurrent_linear_attention, inputs, _state(shape), torch.float64)
    _assert_close(_gradients(ChunkedLinearAttention(32, kernel=kernel), inputs, _state(shape)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_states_of_earlier_segments(kernel, kind):
    """Packed documents in two segments, whose initial states come from transitions and updates."""
    shape = (45, 2, 2, 4, 6, 5, 16)
    inputs = _inputs(kind, shape)
    is_start = torch.zeros(45, 2, dtype=torch.bool)
    for sample, starts in enumerate([[0, 3, 4, 30], [16]]):
        is_start[starts, sample] = True

    def in_segments(*tensors: Tensor | None, kernel=None) -> tuple[Tensor, Tensor]:
        *parts, state = tensors
        outs = []
        for start, stop in ((0, 20), (20, 45)):
            found: list[tuple[Tensor, Tensor]] = []

            def before(transition: Tensor, update: Tensor, state=state, found=found) -> Tensor:
                found.append((transition, update))
                return state

            arguments = [None if x is None else x[start:stop] for x in parts]
            attention = ChunkedLinearAttention(16, before, kernel)
            outs.append(attention(*arguments, is_start_SB=is_start[start:stop])[0])
            transition, update = found[0]
            state = transition @ state + update
        return torch.cat(outs), state

    expected = _gradients(in_segments, inputs, _state(shape), torch.float64)
    whole = _gradients(ChunkedLinearAttention(64), inputs, _state(shape), torch.float64, is_start_SB=is_start)
    for a, b in zip(expected, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    _assert_close(_gradients(in_segments, inputs, _state(shape), kernel=kernel), expected)
    alone = _gradients(ChunkedLinearAttention(16, kernel=kernel), inputs, _state(shape))
    assert (alone[0] - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["gated_deltanet", "kda"])
def test_strong_decays_and_equal_keys(kernel, kind):
    """Decays that underflow give no NaN; of equal keys without decays, the worst system, torch loses as many digits."""
    q, k, v, log_decay, beta = _inputs(kind, (64, 1, 1, 1, 8, 8, 64))
    attention = ChunkedLinearAttention(64, kernel=kernel)
    for found in _gradients(attention, [q, k, v, 400 * log_decay, beta], None):
        assert found.isfinite().all()
    k = k[:1].expand_as(k)
    given = [q, k, v, torch.zeros_like(log_decay), torch.ones_like(beta)]
    state = torch.zeros(1, 1, 8, 8)
    expected = _gradients(recurrent_linear_attention, given, state, torch.float64)
    by_torch = _gradients(ChunkedLinearAttention(64), given, state)
    for ours, theirs, exact in zip(_gradients(attention, given, state), by_torch, expected, strict=True):
        allowed = 3 * (theirs - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (ours - exact).abs().max() <= allowed


@pytest.mark.parametrize("kind", ["gated_deltanet", "kda"])
def test_nan_is_passed_on(kernel, kind):
    inputs = _inputs(kind, (20, 1, 1, 1, 8, 8, 64))
    for index in range(len(inputs)):
        broken = [y.clone() for y in inputs]
        broken[index][5] = float("nan")
        out, _ = ChunkedLinearAttention(64, kernel=kernel)(*broken)
        assert out[5:].isnan().any(), index


def test_the_number_of_threads_changes_no_bit(kernel):
    for kind in ("gated_deltanet", "kda"):
        # Enough work for several threads, see MIN_PARALLEL_WORK in the sources.
        inputs = _inputs(kind, (320, 1, 2, 4, 32, 32, 64))
        state = torch.zeros(1, 4, 32, 32)
        attention = ChunkedLinearAttention(64, kernel=kernel)
        same_bits_on_threads(lambda run=(attention, inputs, state): _gradients(*run), (1, 3))


def test_other_types_and_widths_are_computed_by_torch(kernel):
    inputs = _inputs("gated_deltanet", (5, 1, 1, 1, 4, 4, 64))
    assert not kernel.supports([x.double() for x in inputs])
    wide = _inputs("gated_deltanet", (5, 1, 1, 1, 257, 4, 64))
    assert not kernel.supports(wide)
    out, _ = ChunkedLinearAttention(kernel=kernel)(*(x.double() for x in inputs))
    assert out.dtype == torch.float64


def test_models_with_linear_attention_get_it():
    for model, has_linear in ((HYBRID, True), ({}, False)):
        chosen = select_kernels(recipe("float32", "auto", model=model), CPU)
        assert (chosen.linear_attention is not None) == has_linear
        assert ("linear attention" in chosen.message) == has_linear
    assert select_kernels(recipe("float64", "auto", model=HYBRID), CPU).linear_attention is None
    assert select_kernels(recipe("float32", "plain", model=HYBRID), CPU).linear_attention is None


@pytest.mark.parity
@pytest.mark.parametrize(
    "model",
    [HYBRID, pytest.param(HYBRID | {"linear_attention": "kda"}, marks=pytest.mark.slow)],
    ids=["head", "channel"],
)
def test_a_run_has_the_losses_of_torch_operations(pool, model):
    words = {"world_size": 2, "cp": 2, "model": model | {"vocab_size": 8}, "train": TWO_SAMPLES, "data": DOCUMENTS}
    assert_same_losses(pool, words)
