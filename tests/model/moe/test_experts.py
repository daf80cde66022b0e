"""Each expert works only on its rows; all implementations agree; every weight always gets a gradient."""

import pytest
import torch

from moefold.model.moe.dispatch.base import ExpertInput
from moefold.model.moe.experts import Experts, fused_experts
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights
from moefold.ops.swiglu import ClampedSwiGLUActivation, SwiGLUActivation
from moefold.ops.torch_experts import GroupedMMExpertOps, leaves_empty_experts_unwritten
from tests.model.moe.reference import swiglu
from tests.model.moe.reference_experts import reference_experts

COUNTS = [[3, 0, 5, 2], [0, 0, 0, 7], [1, 1, 1, 1], [0, 0, 0, 0]]


def _tensors(rows: int, dtype: torch.dtype, hidden: int = 8, ffn: int = 16, scale: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, hidden), (4, hidden, ffn), (4, hidden, ffn), (4, ffn, hidden)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) * scale for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def _looped(x, weights, counts, *extra, probs_R=None):
    return fused_experts(x, weights, ExpertOptions(counts, *extra), SequentialExpertOps(), probs_R)


def _grouped(x, weights, counts, *extra, probs_R=None):
    return fused_experts(x, weights, ExpertOptions(counts, *extra), GroupedMMExpertOps(), probs_R)


def _reference(x, weights, counts, *extra, probs_R=None):
    return reference_experts(x, weights, ExpertOptions(counts, *extra), probs_R)


def looped_swiglu(x, gate, up, down, counts):
    return _looped(x, ExpertWeights(gate, up, down), counts)


def grouped_swiglu(x, gate, up, down, counts):
    return _grouped(x, ExpertWeights(gate, up, down), counts)


def reference_swiglu(x, gate, up, down, counts):
    return _reference(x, ExpertWeights(gate, up, down), counts)


def _expected(x, gate, up, down, counts):
    parts = [swiglu(rows, gate[e], up[e], down[e]) for e, rows in enumerate(x.split(counts))]
    return torch.cat(parts)


CLAMPED = ClampedSwiGLUActivation(alpha=1.702, limit=0.7)
COLUMNS = slice(2, 6)
"""Those that the bias of the down projection belongs to, as on a rank of etp."""


def _with_biases(rows: int, dtype: torch.dtype, scale: float = 1.0):
    """As `_tensors`, with the biases of the three projections; many values lie beyond the limits of the gate."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 16), (4, 16), (4, 4)]
    biases = [torch.randn(shape, dtype=torch.float64, generator=generator) * scale for shape in shapes]
    return [*_tensors(rows, dtype, scale=scale), *(b.to(dtype).requires_grad_() for b in biases)]


def _clamped(x, gate, up, down, gate_bias, up_bias, down_bias, counts):
    """gpt-oss, spelled out."""
    parts = []
    for e, rows in enumerate(x.split(counts)):
        g = torch.minimum(rows @ gate[e] + gate_bias[e], torch.tensor(0.7, dtype=x.dtype))
        u = (rows @ up[e] + up_bias[e]).clamp(-0.7, 0.7)
        y = ((u + 1) * g / (1 + torch.exp(-1.702 * g))) @ down[e]
        parts.append(y + torch.nn.functional.pad(down_bias[e], (2, 2)))
    return torch.cat(parts)


def _looped_clamped(x, *rest):
    return _looped(x, ExpertWeights(*rest[:-1]), rest[-1], CLAMPED, COLUMNS)


def _grouped_clamped(x, *rest):
    return _grouped(x, ExpertWeights(*rest[:-1]), rest[-1], CLAMPED, COLUMNS)


def _reference_clamped(x, *rest):
    return _reference(x, ExpertWeights(*rest[:-1]), rest[-1], CLAMPED, COLUMNS)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("experts", [_looped_clamped, _reference_clamped])
def test_clamped_experts_with_biases_equal_the_definition(experts, counts):
    tensors = _with_biases(sum(counts), torch.float64)
    actual = _with_gradients(experts, tensors, counts)
    for a, e in zip(actual, _with_gradients(_clamped, tensors, counts), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", COUNTS[:3])
def test_grouped_clamped_experts_equal_the_loop(counts):
    tensors = _with_biases(sum(counts), torch.float32)
    looped = _with_gradients(_looped_clamped, tensors, counts)
    for a, e in zip(_with_gradients(_grouped_clamped, tensors, counts), looped, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [SwiGLUActivation(), CLAMPED], ids=lambda gate: type(gate).__name__)
def test_a_gates_own_gradient_equals_autograd(gate):
    g, u, grad = torch.randn(3, 40, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [g.clone().requires_grad_(), u.clone().requires_grad_()]
    hidden = gate.forward(*leaves)
    expected = [hidden.detach(), *torch.autograd.grad(hidden, leaves, grad)]
    for a, e in zip(gate.backward(grad.clone(), g, u), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    assert (g.abs() > 0.7).any()
    assert (g < 0).any()


def _with_gradients(function, tensors, counts):
    y = function(*tensors, counts)
    grad = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, tensors, grad)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("experts", [looped_swiglu, reference_swiglu])
def test_experts_equal_the_definition(experts, counts):
    tensors = _tensors(sum(counts), torch.float64)
    actual = _with_gradients(experts, tensors, counts)
    expected = _with_gradients(_expected, tensors, counts)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def _weighed_inside(apply, extra):
    """Experts that apply the weights of the rows themselves. The weights are the first tensor."""
    return lambda weights, x, *rest: apply(x, ExpertWeights(*rest[:-1]), rest[-1], *extra, probs_R=weights)


def _weighed_outside(apply, extra):
    return lambda weights, x, *rest: apply(x, ExpertWeights(*rest[:-1]), rest[-1], *extra) * weights.unsqueeze(1)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("experts", [_looped, _reference])
def test_weights_inside_the_experts_equal_weights_on_their_results(experts, counts, has_bias):
    extra = (CLAMPED, COLUMNS) if has_bias else ()
    make = _with_biases if has_bias else _tensors
    weights = torch.rand(sum(counts), dtype=torch.float64).requires_grad_()
    tensors = [weights, *make(sum(counts), torch.float64)]
    actual = _with_gradients(_weighed_inside(experts, extra), tensors, counts)
    expected = _with_gradients(_weighed_outside(_looped, extra), tensors, counts)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", COUNTS[:3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_grouped_kernel_weighs_inside_as_the_loop_does(counts, has_bias):
    extra = (CLAMPED, COLUMNS) if has_bias else ()
    make = _with_biases if has_bias else _tensors
    tensors = [torch.rand(sum(counts)).requires_grad_(), *make(sum(counts), torch.float32)]
    looped = _with_gradients(_weighed_inside(_looped, extra), tensors, counts)
    grouped = _with_gradients(_weighed_inside(_grouped, extra), tensors, counts)
    for a, e in zip(grouped, looped, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [40, 17, 1, 130]])
def test_padded_products_with_weights_in_bfloat16(counts):
    tensors = [torch.rand(sum(counts)).requires_grad_(), *_tensors(sum(counts), torch.bfloat16, 32, 48, scale=0.3)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    actual = _with_gradients(_weighed_inside(_looped, ()), tensors, counts)
    for a, e in zip(actual, _with_gradients(_weighed_outside(_looped, ()), exact, counts), strict=True):
        assert (a.double() - e).norm() <= 2e-2 * e.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [40, 17, 1, 130]])
def test_padded_products_equal_the_definition(dtype, tolerance, counts):
    tensors = _tensors(sum(counts), dtype, hidden=32, ffn=48, scale=0.3)
    actual = _with_gradients(looped_swiglu, tensors, counts)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    for a, e in zip(actual, _with_gradients(_expected, exact, counts), strict=True):
        assert a.dtype == dtype
        assert (a.double() - e).norm() <= tolerance * e.norm()


@pytest.mark.parametrize("counts", COUNTS[:3])
def test_grouped_kernel_equals_the_loop(counts):
    tensors = _tensors(sum(counts), torch.float32)
    looped = _with_gradients(looped_swiglu, tensors, counts)
    grouped = _with_gradients(grouped_swiglu, tensors, counts)
    for a, e in zip(grouped, looped, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


class _UnwrittenGradients:
    """A grouped_mm that leaves NaN in the weight gradient of an expert without rows."""

    def __call__(self, a, b, offs):
        if b.dim() == 3:
            return torch.cat([x @ w for x, w in zip(a.split(_counts(offs)), b, strict=True)])
        parts = zip(a.split(_counts(offs), 1), b.split(_counts(offs)), strict=True)
        return torch.stack([x @ g if x.shape[1] else torch.full((len(a), b.shape[1]), torch.nan) for x, g in parts])


def _counts(offs):
    return offs.diff(prepend=offs.new_zeros(1)).tolist()


@pytest.mark.parametrize("counts", COUNTS[:2])
def test_gradients_that_grouped_mm_leaves_unwritten_are_zeroed(counts):
    tensors = _tensors(sum(counts), torch.float32)
    found = {}
    for needs_zeroing in (False, True):
        ops = GroupedMMExpertOps(_UnwrittenGradients(), lambda device, needs=needs_zeroing: needs)
        options = ExpertOptions(counts)
        found[needs_zeroing] = _with_gradients(
            lambda x, *rest, ops=ops, options=options: fused_experts(x, ExpertWeights(*rest[:-1]), options, ops),
            tensors,
            counts,
        )
    assert all(grad[counts.index(0)].isnan().all() for grad in found[False][2:])
    for a, e in zip(found[True], _with_gradients(reference_swiglu, tensors, counts), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_only_devices_that_leave_gradients_unwritten_zero_them(monkeypatch):
    for capability, expected in (((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert leaves_empty_experts_unwritten(torch.device("cuda")) is expected
    assert not leaves_empty_experts_unwritten(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 7], [40, 17, 1, 130]])
def test_grouped_kernel_equals_the_loop_on_cuda(counts):
    tensors = [t.detach().cuda().requires_grad_() for t in _tensors(sum(counts), torch.bfloat16, 64, 32, scale=0.3)]
    looped = _with_gradients(looped_swiglu, tensors, counts)
    grouped = _with_gradients(grouped_swiglu, tensors, counts)
    for a, e in zip(grouped, looped, strict=True):
        assert (a.double() - e.double()).norm() <= 2e-2 * e.double().norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_expert_without_rows_gets_a_zero_gradient(dtype):
    experts = Experts(4, 8, 16).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 8, dtype=dtype, requires_grad=True)
    experts(ExpertInput(x, [0, 5, 0, 0])).sum().backward()
    for parameter in experts.parameters():
        norms = parameter.grad.flatten(1).norm(dim=1)
        assert (norms > 0).tolist() == [False, True, False, False]
    for parameter in experts.parameters():
        parameter.grad = None
    experts(ExpertInput(x[:0], [0, 0, 0, 0])).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in experts.parameters())


def test_wide_weights_count_as_rounded_ones():
    wide = Experts(4, 32, 48)
    for parameter in wide.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    narrow = Experts(4, 32, 48).to(torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    x, counts = torch.randn(62, 32).to(torch.bfloat16), [40, 17, 0, 5]
    found, expected = (_gradients_of(experts, x, counts) for experts in (wide, narrow))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    for a, e in zip(found[2:], expected[2:], strict=True):
        assert a.dtype == torch.float32
        # Theirs are rounded to bfloat16, once.
        torch.testing.assert_close(a, e.float(), rtol=2**-8, atol=1e-6)


def _gradients_of(experts, x, counts):
    x = x.clone().requires_grad_()
    y = experts(ExpertInput(x, counts))
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return [y, x.grad, *(parameter.grad for parameter in experts.parameters())]


def test_rows_and_counts_must_agree():
    with pytest.raises(AssertionError):
        ExpertInput(torch.zeros(3, 4), [1, 1])


def test_weights_are_declared_on_the_default_device():
    with torch.device("meta"):
        experts = Experts(4, 8, 16)
    assert {p.device.type for p in experts.parameters()} == {"meta"}
    assert [tuple(p.shape) for p in experts.parameters()] == [(4, 8, 16), (4, 8, 16), (4, 16, 8)]
