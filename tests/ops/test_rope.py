"""A rotated pair turns like a complex number, and its gradient equals differences."""

import pytest
import torch

from moefold.ops.rope import rotate_halves


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head", "rotated"), [(8, 8), (12, 4)])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_pair_turns_as_a_complex_number(dtype, head, rotated, samples):
    angle = torch.rand(5, samples, 1, rotated // 2, dtype=torch.float64)
    both = torch.cat((angle, angle), -1)
    x = torch.randn(5, 3, 2, head, dtype=torch.float64).to(dtype).requires_grad_()
    y = rotate_halves(x, both.cos().to(dtype), both.sin().to(dtype))
    half = rotated // 2
    wide = x.detach().double()
    turned = torch.complex(wide[..., :half], wide[..., half:rotated]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag, wide[..., rotated:]), -1)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert (y.double() - expected).norm() <= tolerance * expected.norm()
    # A rotation keeps lengths, so the gradient of half the squared length is the input itself.
    y.backward(y.detach())
    assert (x.grad.double() - wide).norm() <= 2 * tolerance * wide.norm()


def test_gradients_by_differences():
    angle = torch.rand(3, 1, 1, 2, dtype=torch.float64).repeat(1, 1, 1, 2)
    x = torch.randn(3, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate_halves(x, angle.cos(), angle.sin()), x)
