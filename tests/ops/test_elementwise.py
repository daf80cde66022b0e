"""Sigmoid, SiLU and softplus: torch's values and gradients, and the same bits wherever an element lies."""

import pytest
import torch
from torch.nn import functional as F

from moefold.ops.elementwise import sigmoid, silu, softplus

FUNCTIONS = [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)]


@pytest.mark.parametrize(("found", "expected"), FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_torchs(found, expected, dtype):
    x = torch.cat((torch.linspace(-30, 18, 1001), torch.tensor([0.0, -100.0, 100.0, -1e30, 1e30])))
    grad = torch.linspace(-2, 3, len(x)).to(dtype)
    results = []
    for function in (found, expected):
        leaf = x.to(dtype).requires_grad_()
        y = function(leaf)
        y.backward(grad)
        results.append((y.detach(), leaf.grad))
    for a, e in zip(*results, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("function", [sigmoid, silu, softplus], ids=lambda f: f.__name__)
def test_no_bit_depends_on_the_place(function):
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 5
    before = torch.get_num_threads()
    try:
        whole = function(x)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(function(x), whole)
            for first, stop in ((0, 1), (5, 12), (3, 36), (17, 70_001)):
                assert torch.equal(function(x[first:stop].clone()), whole[first:stop])
    finally:
        torch.set_num_threads(before)


def test_elementwise_functions_pass_on_nan():
    for function, _ in FUNCTIONS:
        assert function(torch.tensor([float("nan")])).isnan().all()
