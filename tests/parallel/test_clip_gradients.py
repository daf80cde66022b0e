"""Gradients are clipped by their global norm as in torch, and only where the norm is above the limit."""

import math

import pytest
import torch
from torch import nn

from moefold.parallel.gradients import clip_gradients, needs_clip


def parameters(scale: float) -> dict[str, nn.Parameter]:
    """Return two weights with gradients of the norm `scale`, and one without a gradient."""
    generator = torch.Generator().manual_seed(0)
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in {"a": (3, 4), "b": (5,), "c": (2,)}.items()}
    grads = {name: torch.randn(named[name].shape, generator=generator) for name in "ab"}
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
    for name, grad in grads.items():
        named[name].grad = grad * (scale / norm)
    return named


@pytest.mark.parametrize(("norm", "is_clipped"), [(0.0, False), (0.999, False), (1.001, True), (50.0, True)])
def test_the_gradients_are_the_ones_that_torch_clips(norm, is_clipped):
    ours, expected = parameters(norm), parameters(norm)
    assert needs_clip(norm, 1.0) == is_clipped
    clip_gradients(ours, torch.tensor(norm, dtype=torch.float64), 1.0)
    torch.nn.utils.clip_grad_norm_(expected.values(), 1.0)
    for name in "ab":
        torch.testing.assert_close(ours[name].grad, expected[name].grad, rtol=1e-6, atol=0)
    assert ours["c"].grad is None


def test_a_limit_of_zero_clips_nothing():
    ours, before = parameters(50.0), parameters(50.0)
    clip_gradients(ours, torch.tensor(50.0, dtype=torch.float64), 0.0)
    assert all(torch.equal(ours[name].grad, before[name].grad) for name in "ab")


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_not_taken_for_a_small_one(norm):
    assert needs_clip(norm, 1.0)
