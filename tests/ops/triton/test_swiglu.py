"""The fused gate against float64 and autograd."""

import pytest
import torch

from moefold.ops.swiglu import ClampedSwiGLUActivation, SwiGLUActivation
from moefold.ops.triton.swiglu import activation_backward, activation_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(7, 13), (3, 1030), (0, 8)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "gate", [SwiGLUActivation(), ClampedSwiGLUActivation(alpha=1.702, limit=0.7)], ids=lambda g: type(g).__name__
)
def test_swiglu_and_its_gradients_equal_float64(gate, weighted, shape, dtype):
    clamp = (gate.alpha, gate.limit) if isinstance(gate, ClampedSwiGLUActivation) else None
    g, u, grad = torch.randn(3, *shape, dtype=torch.float64).to(dtype).to(DEVICE).unbind()
    weights = torch.rand(shape[0]).to(DEVICE) if weighted else None
    leaves = [t.double().requires_grad_() for t in (g, u, *([weights] if weighted else []))]
    hidden = gate.forward(*leaves[:2]) * (leaves[2].unsqueeze(1) if weighted else 1.0)
    expected = [hidden.detach(), *torch.autograd.grad(hidden, leaves, grad.double())]
    again, *grads = activation_backward(grad, g, u, weights, clamp)
    if not weighted:
        assert grads.pop() is None
    actual = [activation_forward(g, u, weights, clamp), *grads]
    torch.testing.assert_close(again, actual[0], rtol=0, atol=0)
    for a, e in zip(actual, expected, strict=True):
        scale = e.abs().max().clamp(min=1.0) if e.numel() else 1.0
        torch.testing.assert_close(a.double() / scale, e / scale, rtol=0, atol=TOLERANCE[dtype])
