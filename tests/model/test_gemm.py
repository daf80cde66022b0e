"""Row counts are rounded up a little, and products are right for every type and stride."""

import pytest
import torch

from moefold.model.gemm import LEAST_ROWS, LIBRARY, STEPS_PER_OCTAVE, multiplies_wide, rounded_rows


def test_few_row_counts_occur_and_little_is_wasted():
    padded = [rounded_rows(n) for n in range(1, 5000)]
    assert all(n <= p < n + LEAST_ROWS or p <= n * (1 + 1 / STEPS_PER_OCTAVE) for n, p in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded)) <= STEPS_PER_OCTAVE * 9
    assert all(rounded_rows(p) == p for p in padded)


def test_float64_rows_are_left_alone():
    assert LIBRARY.padded_rows(37, torch.empty(0, dtype=torch.float64)) == 37


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_product(dtype, tolerance, transposed):
    x = torch.randn(33, 20, dtype=torch.float64).to(dtype)
    w = torch.randn(7, 20, dtype=torch.float64).to(dtype)
    x, w = (t.t().contiguous().t() if flip else t for t, flip in zip((x, w), transposed, strict=True))
    expected = x.double() @ w.double().t()
    assert (LIBRARY.product(x, w).double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wide_types_are_not_widened(dtype):
    x = torch.randn(3, 4, dtype=dtype)
    assert not multiplies_wide(x)
    assert LIBRARY.widened(x) is x


def test_a_wide_product_of_bfloat16_rounds_once():
    x, w = torch.randn(64, 512).bfloat16(), torch.randn(32, 512).bfloat16()
    wide = LIBRARY.widened(x) @ LIBRARY.widened(w).t()
    assert (LIBRARY.product(x, w).float() - wide.float()).abs().max() <= 2**-8 * wide.float().abs().max()
    if multiplies_wide(x):
        assert LIBRARY.product(x, w).equal(LIBRARY.product(x.float(), w.float()).bfloat16())


def test_a_weight_of_many_rows_is_multiplied_in_parts():
    x, w = torch.randn(8, 20).bfloat16(), torch.randn(2500, 20).bfloat16()
    for weight in (w, w.t().contiguous().t()):
        assert _error(LIBRARY.product(x, weight), x.double() @ w.double().t()) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_operand_that_is_widened_already_changes_nothing(dtype):
    x, w, grad = (torch.randn(size).to(dtype) for size in ((9, 20), (300, 20), (9, 300)))
    assert LIBRARY.product(LIBRARY.widened(x), w).equal(LIBRARY.product(x, w))
    assert LIBRARY.weight_gradient(LIBRARY.widened(grad), x).equal(LIBRARY.weight_gradient(grad, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wide_product_is_not_rounded_to_the_type_of_its_operands(dtype):
    x, w = torch.randn(64, 512).to(dtype), torch.randn(700, 512).to(dtype)
    y, expected = LIBRARY.wide_product(x, w), x.double() @ w.double().t()
    assert y.dtype == torch.promote_types(dtype, torch.float32)
    is_rounded = dtype == torch.bfloat16 and not multiplies_wide(x)
    assert _error(y, expected) <= (1e-2 if is_rounded else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_is_added_where_it_belongs(dtype):
    x, grad = torch.randn(33, 20).to(dtype), torch.randn(33, 7).to(dtype)
    total = torch.ones(20, 7, dtype=torch.promote_types(dtype, torch.float32))
    LIBRARY.add_weight_gradient(total, LIBRARY.widened(x), LIBRARY.widened(grad))
    assert _error(total, 1 + x.double().t() @ grad.double()) <= (1e-2 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(33, 20, 7), (16, 8, 40)])
def test_products_where_they_belong(dtype, rows, hidden, inner):
    """Results land in a slice of a larger tensor, and padded rows stay out."""
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    x, grad = torch.randn(rows, hidden).to(dtype), torch.randn(rows, inner).to(dtype)
    w = torch.randn(hidden, inner).to(dtype)
    assert _error(LIBRARY.weight_gradient(x, grad), x.double().t() @ grad.double()) <= tolerance
    whole = torch.full((3, hidden, inner), float("nan"), dtype=dtype)
    LIBRARY.weight_gradient_into(whole[1], LIBRARY.widened(x), LIBRARY.widened(grad))
    assert _error(whole[1], x.double().t() @ grad.double()) <= tolerance
    for padding in (0, 3):
        padded = torch.cat((grad, torch.full((padding, inner), 5.0, dtype=dtype)))
        out = torch.full((rows + 2, hidden), float("nan"), dtype=dtype)
        LIBRARY.product_into(out[1:-1], LIBRARY.widened(padded), LIBRARY.widened(w))
        assert _error(out[1:-1], grad.double() @ w.double().t()) <= tolerance
        LIBRARY.two_products_into(
            out[1:-1], (LIBRARY.widened(padded), LIBRARY.widened(w)), (LIBRARY.widened(padded), LIBRARY.widened(2 * w))
        )
        assert _error(out[1:-1], 3 * (grad.double() @ w.double().t())) <= tolerance
        assert out[[0, -1]].isnan().all()


def _error(found, expected):
    return (found.double() - expected).norm() / expected.norm()
