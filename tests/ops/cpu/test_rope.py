"""Rotation of heads in C equals the definition. Its plain twin computes the cases that it does not know."""

import pytest
import torch

from moefold.model.transformer import build_model
from moefold.ops.rope import Rope, rotate_halves
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from tests.ops.c_kernels import (
    CPU,
    HALF_STEPS,
    assert_same_losses,
    in_each_type,
    needs_compiler,
    recipe,
    same_bits_on_threads,
)

pytestmark = needs_compiler


@pytest.fixture
def kernel():
    from moefold.ops.cpu.rope import CRope

    return CRope()


def _given(tokens: int, samples: int, heads: int, size: int, turned: int, angles_of: int, dtype: torch.dtype):
    """(x, grad, cos, sin), with angles for each of `angles_of` samples."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(tokens, samples, heads, size, generator=generator).to(dtype) for _ in range(2))
    angles = 6 * torch.rand(tokens, angles_of, 1, turned // 2, dtype=torch.float64, generator=generator)
    both = torch.cat((angles, angles), -1)
    return x, grad, both.cos().to(dtype), both.sin().to(dtype)


def _passes(kernel, x, grad, cos, sin, *, is_interleaved=False):
    leaf = x.detach().requires_grad_()
    y = Rope(cos, sin, is_interleaved, kernel)(leaf)
    y.backward(grad)
    return y.detach(), leaf.grad


def _assert_equal(found, x, grad, cos, sin):
    right = _passes(None, *(t.double() for t in (x, grad, cos, sin)))
    for a, e in zip(found, right, strict=True):
        assert a.dtype == x.dtype
        assert a.shape == e.shape
        error = (a.double() - e).abs() - HALF_STEPS[a.dtype] * e.abs()
        assert error.max() <= 1e-6 * e.abs().max()


SHAPES = [
    (1, 1, 1, 2, 2),
    (3, 2, 1, 6, 6),
    (5, 3, 2, 24, 10),
    (70, 2, 4, 32, 32),
    (9, 2, 3, 100, 66),
    (4, 1, 2, 512, 512),
]


@in_each_type
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_by_sample", [False, True])
def test_it_equals_the_definition_and_rounds_once(kernel, shape, is_by_sample, dtype):
    given = _given(*shape, shape[1] if is_by_sample else 1, dtype)
    _assert_equal(_passes(kernel, *given), *given)


@in_each_type
def test_heads_may_lie_in_any_way(kernel, dtype):
    """Within wider rows, with no number behind them, and with a last stride that is not 1."""
    x, grad, cos, sin = _given(6, 3, 4, 20, 14, 1, dtype)
    expected = _passes(kernel, x, grad, cos, sin)
    walled = []
    for t in (x, grad):
        wall = torch.full((8, 3, 5, 23), float("nan"), dtype=dtype)
        wall[1:-1, :, :-1, 2:-1] = t
        walled.append(wall[1:-1, :, :-1, 2:-1])
    turned = [t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for t in (x, grad)]
    for way in (walled, turned):
        for a, e in zip(_passes(kernel, *way, cos, sin), expected, strict=True):
            assert torch.equal(a, e)


@in_each_type
def test_threads_change_no_bit(kernel, dtype):
    given = _given(200, 3, 8, 32, 32, 1, dtype)
    same_bits_on_threads(lambda: _passes(kernel, *given))


@in_each_type
def test_rope_passes_on_nan_within_its_pair(kernel, dtype):
    x, grad, cos, sin = _given(4, 2, 2, 24, 16, 1, dtype)
    x[1, 0, 1, 3] = float("nan")
    x[2, 1, 0, 20] = float("inf")
    y, _ = _passes(kernel, x, grad, cos, sin)
    # A pair turns together; the values after the pairs stay.
    assert y.isnan().nonzero().tolist() == [[1, 0, 1, 3], [1, 0, 1, 11]]
    assert y.isinf().nonzero().tolist() == [[2, 1, 0, 20]]


def test_unsupported_cases_run_in_torch(kernel):
    for dtype, is_interleaved in ((torch.float64, False), (torch.float32, True)):
        given = _given(5, 2, 2, 12, 8, 1, dtype)
        found, right = (_passes(each, *given, is_interleaved=is_interleaved) for each in (kernel, None))
        assert all(map(torch.equal, found, right))
    x, _, cos, sin = _given(5, 2, 2, 600, 600, 1, torch.float32)
    assert torch.equal(kernel(x, cos, sin, is_interleaved=False), rotate_halves(x, cos, sin))
    for shape in ((0, 2, 2, 12), (3, 0, 2, 12), (3, 2, 0, 12)):
        given = _given(*shape, 8, 1, torch.float32)
        assert [t.shape for t in _passes(kernel, *given)] == [shape, shape]


def test_rotated_tensors_are_not_kept(kernel):
    x, _, cos, sin = _given(5, 2, 2, 12, 8, 1, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):
        kernel(x.requires_grad_(), cos, sin, is_interleaved=False)
    assert kept == []


def test_the_choice_is_automatic_and_reaches_the_model():
    for dtype, kernels, expected in (
        ("float32", "auto", "CRope"),
        ("bfloat16", "c", "CRope"),
        ("bfloat16", "plain", "NoneType"),
        ("float64", "auto", "NoneType"),
    ):
        cfg = recipe(dtype, kernels)
        chosen = select_kernels(cfg, CPU)
        assert type(chosen.rope).__name__ == expected
        assert ("RoPE" in chosen.message) == (expected == "CRope")
        model = build_model(cfg)
        apply_kernels(model, chosen)
        model.set_positions(torch.arange(4))
        assert model.rope.kernel is chosen.rope


@pytest.mark.parity
def test_on_and_off_give_the_same_losses(pool):
    """With context parallelism. The heads of latent attention: test_attention.py."""
    assert_same_losses(pool, {"world_size": 2, "cp": 2})
