"""The short convolution in C equals its plain twin: values, gradients, documents and every type."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.linear_attention import causal_convolution
from tests.ops.c_kernels import HALF_STEPS, VECTORS, in_each_type, needs_compiler, same_bits_on_threads

pytestmark = needs_compiler

SHAPES = [(1, 1, 1, 4), (2, 1, 5, 4), (9, 2, 33, 3), (40, 3, 130, 4), (5, 2, 16, 1), (3, 1, 7, 8)]
"""Tokens, samples, channels and taps."""


@pytest.fixture(
    scope="module", params=["native", *(pytest.param(n, marks=pytest.mark.slow) for n in VECTORS if n != "native")]
)
def kernel(request, built_with):
    from moefold.ops.cpu.convolution import CConvolution

    return built_with(CConvolution, VECTORS[request.param])


def _gradients(tensors: list[Tensor], num_previous_SB: Tensor, activation, kernel=None) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = causal_convolution(*leaves, num_previous_SB, activation, kernel)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights, materialize_grads=True)]


@in_each_type
@pytest.mark.parametrize("activation", [None, F.silu], ids=["none", "silu"])
def test_it_equals_the_definition(kernel, activation, dtype):
    for tokens, samples, channels, taps in SHAPES:
        generator = torch.Generator().manual_seed(tokens)
        shapes = ((tokens, samples, channels), (channels, taps), (taps - 1, samples, channels))
        given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        # Documents begin at other tokens in each sample; the first one of the last sample began before the tokens.
        starts = torch.arange(tokens).unsqueeze(1) + torch.arange(samples) * 2
        num_previous_SB = starts % torch.arange(3, 3 + samples)
        assert kernel.supports(given[0], given[1])
        found = _gradients(given, num_previous_SB, activation, kernel)
        expected = _gradients([x.double() for x in given], num_previous_SB, activation)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            error = (ours.double() - theirs).abs() - HALF_STEPS[dtype] * theirs.abs()
            assert error.numel() == 0 or error.max() <= 2e-6 * max(1.0, float(theirs.abs().max()))


def test_the_number_of_threads_changes_no_bit(kernel):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in ((700, 2, 300), (300, 4), (3, 2, 300))]
    num_previous_SB = torch.arange(700).unsqueeze(1).expand(-1, 2)
    same_bits_on_threads(lambda: _gradients(given, num_previous_SB, F.silu, kernel), (1, 3))


def test_other_types_taps_and_activations_are_computed_by_torch(kernel):
    x, weight = torch.randn(4, 1, 3), torch.randn(3, 4)
    assert not kernel.supports(x.double(), weight.double())
    assert not kernel.supports(x, torch.randn(3, 9))
    previous = torch.zeros(3, 1, 3)
    num_previous_SB = torch.arange(4).unsqueeze(1)
    found = causal_convolution(x, weight, previous, num_previous_SB, torch.tanh, kernel)
    assert torch.equal(found, causal_convolution(x, weight, previous, num_previous_SB, torch.tanh))
