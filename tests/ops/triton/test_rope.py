"""Turning heads in one pass equals the plain operations in float64, forwards and backwards."""

import pytest
import torch

from moefold.model.rope import build_rope
from moefold.ops.triton.rope import apply_rope
from tests.models import edit_model
from tests.verify.recipes import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bfloat16: cosines and results are rounded to 8 bits each."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "width", "rotary", "interleaved", "by_sample"),
    [(3, 16, 1.0, False, False), (9, 12, 0.5, True, True), (1, 6, 1.0, True, False)],
)
def test_rotated_heads_and_gradients_equal_float64(heads, width, rotary, interleaved, by_sample, dtype):
    model = edit_model(
        tiny().model, {"attention.head_dim": width, "attention.rope_fraction": rotary, "rope.interleaved": interleaved}
    )
    positions = torch.randint(0, 50, (5, 2) if by_sample else (5,))
    # A slice of wider rows, as latent attention gives.
    x = torch.randn(5, 2, heads, width + 3, dtype=torch.float64).to(dtype).to(DEVICE)[..., 3:].requires_grad_()
    narrow = build_rope(model.rope_settings, positions.to(DEVICE), dtype, apply_rope)
    assert narrow.cos.shape[-1] == round(width * rotary)
    wide = x.detach().double().requires_grad_()
    actual, expected = narrow(x), build_rope(model.rope_settings, positions.to(DEVICE), torch.float64)(wide)
    grad = torch.randn_like(expected).to(dtype)
    found = [actual, *torch.autograd.grad(actual, x, grad)]
    wanted = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
