"""RMS norm on a CPU equals float64 in values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from moefold.ops.norm import cpu_rms_norm

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(7, 24), (3, 2, 5, 16), (0, 8)])
def test_values_and_gradients_equal_float64(dtype, shape):
    exact = [torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)]
    grad = torch.randn(shape, dtype=torch.float64)
    narrow = [t.to(dtype).requires_grad_() for t in exact]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    found = cpu_rms_norm(*narrow, 1e-5)
    expected = F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5)
    found.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).double())
    assert found.dtype == dtype
    # FSDP warns of a module whose output is a view.
    assert not found._is_view()
    for ours, theirs in ((found, expected), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))):
        assert (ours.double() - theirs).norm() <= TOLERANCES[dtype] * theirs.norm()


def test_rows_may_have_a_stride_and_eps_counts():
    x = torch.randn(4, 6, 8, dtype=torch.float64).transpose(0, 1)[:, ::2]
    weight = torch.randn(8, dtype=torch.float64)
    torch.testing.assert_close(cpu_rms_norm(x, weight, 0.5), F.rms_norm(x, (8,), weight, 0.5))
