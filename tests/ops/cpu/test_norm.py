"""RMSNorm in C equals its plain twin, row by row, with vectors of every width."""

import pytest
import torch
from torch.nn import functional as F

from moefold.model.norm import RMSNorm
from moefold.model.transformer import build_model
from moefold.ops.norm import TORCH_RMS_NORM, cpu_rms_norm
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from tests.ops.c_kernels import (
    CPU,
    HALF_STEPS,
    VECTORS,
    WIDEST_AND_NARROWEST,
    assert_same_losses,
    in_each_type,
    needs_compiler,
    recipe,
    same_bits_on_threads,
)

pytestmark = needs_compiler

EPS = 1e-3


@pytest.fixture(scope="module", params=WIDEST_AND_NARROWEST)
def kernel(request, built_with):
    from moefold.ops.cpu.norm import CNorm

    return built_with(CNorm, VECTORS[request.param])


@pytest.fixture
def native():
    from moefold.ops.cpu.norm import CNorm

    return CNorm()


def _given(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """(grad, x, weight): rows of every size."""
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    x *= torch.logspace(-2, 2, x[..., :1].numel(), dtype=torch.float64).view(*shape[:-1], 1)
    weight = torch.randn(shape[-1], dtype=torch.float64, generator=generator)
    return [t.to(dtype) for t in (grad, x, weight)]


def _passes(kernel, grad, x, weight):
    y, scale_N1 = kernel.forward(x, weight, EPS)
    return [y, scale_N1, *kernel.backward(grad, x, weight, scale_N1)]


def _definition(grad, x, weight):
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    y = F.rms_norm(leaves[0], x.shape[-1:], leaves[1], EPS)
    y.backward(grad.double())
    scale_N1 = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt().view(-1, 1)
    return [y, scale_N1, *(leaf.grad for leaf in leaves)]


def _assert_equal(found, grad, x, weight):
    right = _definition(grad, x, weight)
    # Bounds of gradients are made of the parts of their sums, because parts cancel: in the gradient of x all that lies
    # along x, and in the gradient of the weight the rows.
    parts = (grad.double() * weight.double()).abs().amax(-1, keepdim=True) * right[1].view(*x.shape[:-1], 1)
    rows = (grad.double() * x.double()).reshape(-1, x.shape[-1]).abs() * right[1]
    bounds = (right[0].abs(), right[1], parts, rows.sum(0))
    for name, a, e, bound in zip(("y", "scale", "grad_x", "grad_weight"), found, right, bounds, strict=True):
        assert a.dtype == (torch.float32 if name == "scale" else x.dtype)
        assert a.shape == e.shape
        error = (a.double() - e).abs() - HALF_STEPS[a.dtype] * e.abs()
        assert (error <= 1e-6 * bound).all(), (name, float((error / bound).max()))


SHAPES = [(1, 1), (3, 2), (2, 7), (5, 31), (4, 32), (3, 2, 33), (65, 24), (63, 100), (130, 256), (2, 1000), (5000, 3)]


@in_each_type
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_definition(kernel, shape, dtype):
    given = _given(*shape, dtype=dtype)
    _assert_equal(_passes(kernel, *given), *given)


@in_each_type
def test_norm_of_every_width_equals_float64(kernel, dtype):
    for size in range(1, 100):
        given = _given(6, size, dtype=dtype)
        _assert_equal(_passes(kernel, *given), *given)


def test_long_sums_are_as_good_as_in_the_twin(native):
    """The gradient of the weight over many rows, none of which cancels another, and squares of long rows."""
    for shape in ((200_000, 8), (3, 500_000)):
        grad, x, weight = (t.abs() for t in _given(*shape))
        right = _definition(grad, x, weight)
        errors = []
        for each in (native, TORCH_RMS_NORM):
            found = _passes(each, grad, x, weight)
            errors.append([((found[i].double() - right[i]) / right[i]).abs().max() for i in (1, 3)])
        for ours, theirs in zip(*errors, strict=True):
            assert ours < max(theirs, torch.tensor(1e-6))


@in_each_type
def test_memory_may_hold_anything(kernel, monkeypatch, dtype):
    """Results and scratch memory begin as NaN, and the memory after rows too."""
    given = _given(70, 3, 37, dtype=dtype)
    expected = _passes(kernel, *given)

    def empty(like, size, dtype=None):
        return torch.full(size, float("nan"), dtype=dtype or like.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    walled = []
    for t in given[:2]:
        wall = torch.full((72, 3, 40), float("nan"), dtype=dtype)
        inside = wall[1:-1, :, 2:-1]
        inside.copy_(t)
        walled.append(inside)
    for a, e in zip(_passes(kernel, *walled, given[2]), expected, strict=True):
        assert torch.equal(a, e)


@in_each_type
def test_norm_of_rows_of_any_strides_equals_float64(kernel, dtype):
    grad, x, weight = _given(6, 4, 35, dtype=dtype)
    ways = {
        "every second row": lambda t: t.repeat_interleave(2, 1)[:, ::2],
        "turned": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "numbers apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
        "part of the rows": lambda t: torch.cat((t, t), 1)[:, :4],
    }
    for way in ways.values():
        given = way(grad), way(x), weight
        _assert_equal(_passes(kernel, *given), *given)
    alike = _passes(kernel, *map(ways["every second row"], (grad, x)), weight)
    for a, e in zip(alike, _passes(kernel, grad, x, weight), strict=True):
        assert torch.equal(a, e)
    one = torch.ones((), dtype=dtype)
    for grad in (one.expand(6, 4, 35), torch.randn(35).to(dtype).expand(6, 4, 35)):
        given = grad, x, weight
        _assert_equal(_passes(kernel, *given), *given)


@in_each_type
@pytest.mark.parametrize("shape", [(3000, 24), (40, 2000)])
def test_threads_change_no_bit(kernel, shape, dtype):
    given = _given(*shape, dtype=dtype)
    same_bits_on_threads(lambda: _passes(kernel, *given), (1, 2, 3, 2, 3))


@in_each_type
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["grad", "x", "weight"])
def test_nan_arrives(kernel, value, where, dtype):
    """Wherever the twin has none, and nowhere else."""
    given = _given(70, 37, dtype=dtype)
    given[where].view(-1, 37)[-1, 5] = value
    for a, e in zip(_passes(kernel, *given), _passes(TORCH_RMS_NORM, *given), strict=True):
        assert torch.equal(a.isnan(), e.isnan())
        assert torch.equal(a.isinf(), e.isinf())


def test_unsupported_cases_run_in_torch(native):
    for dtype in (torch.float64, torch.float16):
        given = _given(5, 8, dtype=dtype)
        for a, e in zip(_passes(native, *given), _passes(TORCH_RMS_NORM, *given), strict=True):
            assert torch.equal(a, e)
    for shape in ((0, 8), (2, 0, 8)):
        y, scale_N1, grad_x, grad_weight = _passes(native, *_given(*shape))
        assert (y.shape, grad_x.shape, len(scale_N1)) == (shape, shape, 0)
        assert torch.equal(grad_weight, torch.zeros(8))


@in_each_type
def test_it_keeps_the_tensors_of_its_twin(native, dtype):
    kept = []
    for each in (native, None):
        sizes = []

        def pack(t, sizes=sizes):
            sizes.append((t.dtype, t.shape))
            return t

        _, x, weight = (t.requires_grad_() for t in _given(5, 3, 16, dtype=dtype))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            cpu_rms_norm(x, weight, EPS, each)
        kept.append(sizes)
    assert kept[0] == kept[1]


def test_the_choice_is_automatic_and_switchable():
    for dtype in ("float32", "bfloat16"):
        for kernels in ("auto", "c"):
            chosen = select_kernels(recipe(dtype, kernels), CPU)
            assert type(chosen.norm).__name__ == "CNorm"
            assert "norms" in chosen.message
        assert select_kernels(recipe(dtype, "plain"), CPU).norm is None
    assert select_kernels(recipe("float64", "auto"), CPU).norm is None


def test_every_norm_of_a_model_gets_it():
    cfg = recipe("float32", "c", model={"attention.qk_norm": {}})
    model = build_model(cfg)
    chosen = select_kernels(cfg, CPU)
    apply_kernels(model, chosen)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    # Two of a layer, two of its heads, and the last.
    assert len(norms) == 4 * cfg.model.num_layers + 1
    assert all(norm.kernels.norm is chosen.norm for norm in norms)


def test_without_a_compiler_it_is_plain(no_compiler):
    assert select_kernels(recipe("float32", "auto"), CPU).norm is None


CASES = [
    pytest.param({"train": {"recompute": ("norms",)}}, id="one-rank-recompute"),
    pytest.param({"world_size": 2, "tp": 2, "model": {"attention.qk_norm": {}}}, id="tp-heads", marks=pytest.mark.slow),
    pytest.param({"world_size": 2, "zero": 3}, id="zero3", marks=pytest.mark.slow),
]


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
def test_on_and_off_give_the_same_losses(pool, case):
    assert_same_losses(pool, case)
