"""The softmax of routers in C: values, gradient, and bits that do not depend on the other rows."""

import pytest
import torch

from tests.ops.c_kernels import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def kernel():
    from moefold.ops.cpu.router import CSoftmax

    return CSoftmax()


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 8), (300, 129), (2, 3, 37), (0, 4)])
def test_softmax_and_its_gradient(kernel, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(10).requires_grad_()
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    y = kernel(x)
    expected = x.detach().double().requires_grad_()
    torch.testing.assert_close(y.double(), expected.softmax(-1), rtol=2e-6, atol=1e-9)
    y.backward(grad)
    expected.softmax(-1).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), expected.grad, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_by_itself_and_among_others(kernel):
    x = torch.randn(2000, 37, generator=torch.Generator().manual_seed(2))
    together = kernel(x)
    assert all(torch.equal(kernel(x[i : i + 1])[0], together[i]) for i in range(0, 2000, 97))
    assert torch.equal(kernel(x.t().contiguous().t()), together)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_softmax_is_nan_as_in_torch(kernel, value):
    x = torch.zeros(3, 20)
    x[1, 17] = value
    assert torch.equal(kernel(x).isnan(), x.softmax(-1).isnan())


def test_a_logit_of_minus_infinity_has_no_weight(kernel):
    x = torch.zeros(1, 4)
    x[0, 2] = float("-inf")
    y = kernel(x)
    assert y[0, 2] == 0
    torch.testing.assert_close(y, x.softmax(-1))


def test_a_row_of_only_minus_infinity_is_nan_as_in_torch(kernel):
    x = torch.zeros(3, 9)
    x[1] = float("-inf")
    assert torch.equal(kernel(x).isnan(), x.softmax(-1).isnan())


def test_other_dtypes_are_computed_by_torch(kernel):
    x = torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(kernel(x), x.softmax(-1))
