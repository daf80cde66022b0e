"""The router's GEMMs by bfloat16 parts have the error of float32 GEMMs, and the input is saved in its own dtype."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from moefold.comm.private_torch import TorchDispatchMode
from moefold.ops.split_gemm import UpcastLinear, split_fp32, upcast_linear

BOTH = pytest.mark.parametrize("splits", [False, True], ids=["upcast", "parts"])


def _case(num_tokens=300, num_experts=24, hidden=256):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    # Magnitudes of many orders, as a float32 weight may have.
    w = torch.randn(num_experts, hidden, generator=generator) * 10 ** torch.randn(num_experts, 1, generator=generator)
    grad = torch.randn(num_tokens, num_experts, generator=generator) ** 5
    return x.requires_grad_(), w.requires_grad_(), grad


def test_the_parts_of_a_split_float32_add_up_exactly():
    x = torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))
    x[:4] = torch.tensor([0.0, 1.0, -(1 - 2**-24), 1 + 2**-23])
    assert split_fp32(x).double().sum(0).equal(x.double())


@BOTH
def test_results_have_the_error_of_float32(splits):
    """Errors against float64, over the sum of absolute products, which bounds a float32 GEMM's."""
    x, w, grad = _case()
    y = UpcastLinear.apply(x, w, splits)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
    x64, w64, grad64 = x.detach().double(), w.detach().double(), grad.double()
    assert (y.dtype, grad_x.dtype, grad_w.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    for found, left, right in ((y, x64, w64.t()), (grad_w, grad64.t(), x64)):
        error = (found.double() - left @ right).abs() / (left.abs() @ right.abs())
        assert error.max() <= 2**-21
    # The gradient of x is rounded once, from a value of the same error.
    expected = grad64 @ w64
    assert ((grad_x.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-21 * (grad64.abs() @ w64.abs())).all()


def test_two_parts_would_not_be_enough(monkeypatch):
    monkeypatch.setattr("moefold.ops.split_gemm.NUM_PARTS", 2)
    x, w, _ = _case()
    error = (UpcastLinear.apply(x, w, True) - x.double() @ w.double().t()).abs() / (
        x.double().abs() @ w.double().abs().t()
    )
    assert error.max() > 2**-21


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64)])
def test_gradients_in_other_dtypes(dtypes):
    x, w, grad = _case(7, 5, 6)
    x, w = x.detach().to(dtypes[0]).requires_grad_(), w.detach().to(dtypes[1]).requires_grad_()
    found = torch.autograd.grad(upcast_linear(x, w), (x, w), grad.double())
    expected = torch.autograd.grad(x.double() @ w.t(), (x, w), grad.double())
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtypes[0] == torch.float32 else 1e-12, atol=1e-12)


@BOTH
def test_the_operands_are_saved_as_they_are(splits):
    x, w, _ = _case()
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        UpcastLinear.apply(x, w, splits)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr(), w.data_ptr()]


class _Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            assert {arg.dtype for arg in args[:2]} == {torch.bfloat16}
            self.shapes.append((tuple(args[0].shape), tuple(args[1].shape)))
        return func(*args, **(kwargs or {}))


def test_a_gpu_multiplies_bfloat16_only():
    x, w, grad = (tensor.detach().to("meta").requires_grad_() for tensor in _case(64, 8, 32))
    with _Products() as products:
        torch.autograd.grad(upcast_linear(x, w), (x, w), grad)
    assert products.shapes == [((64, 32), (32, 24)), ((24, 64), (64, 32)), ((64, 48), (48, 32))]
