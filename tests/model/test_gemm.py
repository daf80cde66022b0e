"""Row counts are rounded up a little, and products are right for every type and stride."""

import pytest
import torch

from moefold.model.gemm import LEAST_ROWS, STEPS_PER_OCTAVE, multiplies_wide, padded_rows, product, widened


def test_few_row_counts_occur_and_little_is_wasted():
    like = torch.empty(0)
    padded = [padded_rows(n, like) for n in range(1, 5000)]
    assert all(n <= p < n + LEAST_ROWS or p <= n * (1 + 1 / STEPS_PER_OCTAVE) for n, p in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded)) <= STEPS_PER_OCTAVE * 9
    assert all(padded_rows(p, like) == p for p in padded)


def test_float64_rows_are_left_alone():
    assert padded_rows(37, torch.empty(0, dtype=torch.float64)) == 37


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_product(dtype, tolerance, transposed):
    x = torch.randn(33, 20, dtype=torch.float64).to(dtype)
    w = torch.randn(7, 20, dtype=torch.float64).to(dtype)
    x, w = (t.t().contiguous().t() if flip else t for t, flip in zip((x, w), transposed, strict=True))
    expected = x.double() @ w.double().t()
    assert (product(x, w).double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wide_types_are_not_widened(dtype):
    x = torch.randn(3, 4, dtype=dtype)
    assert not multiplies_wide(x)
    assert widened(x) is x


def test_a_wide_product_of_bfloat16_rounds_once():
    x, w = torch.randn(64, 512).bfloat16(), torch.randn(32, 512).bfloat16()
    wide = widened(x) @ widened(w).t()
    assert (product(x, w).float() - wide.float()).abs().max() <= 2**-8 * wide.float().abs().max()
    if multiplies_wide(x):
        assert product(x, w).equal(product(x.float(), w.float()).bfloat16())
