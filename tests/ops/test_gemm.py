"""Row counts are rounded up a little, and products are right for every type and stride."""

import pytest
import torch

from moefold.comm.private_torch import TorchDispatchMode
from moefold.ops.gemm import MIN_PADDED_ROWS, PADDED_SIZES_PER_DOUBLING, TORCH_GEMM, is_faster_in_fp32, round_up_rows


def test_few_row_counts_occur_and_little_is_wasted():
    padded = [round_up_rows(n) for n in range(1, 5000)]
    assert all(
        n <= p < n + MIN_PADDED_ROWS or p <= n * (1 + 1 / PADDED_SIZES_PER_DOUBLING) for n, p in enumerate(padded, 1)
    )
    assert padded == sorted(padded)
    assert len(set(padded)) <= PADDED_SIZES_PER_DOUBLING * 9
    assert all(round_up_rows(p) == p for p in padded)


def test_float64_rows_are_not_changed():
    assert TORCH_GEMM.padded_rows(37, torch.empty(0, dtype=torch.float64)) == 37


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_matmul_of_each_layout_equals_float64(dtype, tolerance, transposed):
    x = torch.randn(33, 20, dtype=torch.float64).to(dtype)
    w = torch.randn(7, 20, dtype=torch.float64).to(dtype)
    x, w = (t.t().contiguous().t() if flip else t for t, flip in zip((x, w), transposed, strict=True))
    expected = x.double() @ w.double().t()
    assert (TORCH_GEMM.matmul(x, w).double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wide_types_are_not_widened(dtype):
    x = torch.randn(3, 4, dtype=dtype)
    assert not is_faster_in_fp32(x)
    assert TORCH_GEMM.upcast(x) is x


def test_a_wide_product_of_bfloat16_rounds_once():
    x, w = torch.randn(64, 512).bfloat16(), torch.randn(32, 512).bfloat16()
    wide = TORCH_GEMM.upcast(x) @ TORCH_GEMM.upcast(w).t()
    assert (TORCH_GEMM.matmul(x, w).float() - wide.float()).abs().max() <= 2**-8 * wide.float().abs().max()
    if is_faster_in_fp32(x):
        assert TORCH_GEMM.matmul(x, w).equal(TORCH_GEMM.matmul(x.float(), w.float()).bfloat16())


def test_a_weight_of_many_rows_is_multiplied_in_parts():
    x, w = torch.randn(8, 20).bfloat16(), torch.randn(2500, 20).bfloat16()
    for weight in (w, w.t().contiguous().t()):
        assert _error(TORCH_GEMM.matmul(x, weight), x.double() @ w.double().t()) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_operand_that_is_widened_already_changes_nothing(dtype):
    x, w, grad = (torch.randn(size).to(dtype) for size in ((9, 20), (300, 20), (9, 300)))
    assert TORCH_GEMM.matmul(TORCH_GEMM.upcast(x), w).equal(TORCH_GEMM.matmul(x, w))
    assert TORCH_GEMM.weight_gradient(TORCH_GEMM.upcast(grad), x).equal(TORCH_GEMM.weight_gradient(grad, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wide_product_is_not_rounded_to_the_type_of_its_operands(dtype):
    x, w = torch.randn(64, 512).to(dtype), torch.randn(700, 512).to(dtype)
    y, expected = TORCH_GEMM.matmul_fp32(x, w), x.double() @ w.double().t()
    assert y.dtype == torch.promote_types(dtype, torch.float32)
    is_rounded = dtype == torch.bfloat16 and not is_faster_in_fp32(x)
    assert _error(y, expected) <= (1e-2 if is_rounded else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_is_added_where_it_belongs(dtype):
    x, grad = torch.randn(33, 20).to(dtype), torch.randn(33, 7).to(dtype)
    total = torch.ones(20, 7, dtype=torch.promote_types(dtype, torch.float32))
    TORCH_GEMM.add_weight_gradient(total, TORCH_GEMM.upcast(x), TORCH_GEMM.upcast(grad))
    assert _error(total, 1 + x.double().t() @ grad.double()) <= (1e-2 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(33, 20, 7), (16, 8, 40)])
def test_products_where_they_belong(dtype, rows, hidden, inner):
    """Results land in a slice of a larger tensor, and padded rows stay out."""
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    x, grad = torch.randn(rows, hidden).to(dtype), torch.randn(rows, inner).to(dtype)
    w = torch.randn(hidden, inner).to(dtype)
    assert _error(TORCH_GEMM.weight_gradient(x, grad), x.double().t() @ grad.double()) <= tolerance
    whole = torch.full((3, hidden, inner), float("nan"), dtype=dtype)
    TORCH_GEMM.weight_gradient_out(whole[1], TORCH_GEMM.upcast(x), TORCH_GEMM.upcast(grad))
    assert _error(whole[1], x.double().t() @ grad.double()) <= tolerance
    for padding in (0, 3):
        padded = torch.cat((grad, torch.full((padding, inner), 5.0, dtype=dtype)))
        out = torch.full((rows + 2, hidden), float("nan"), dtype=dtype)
        TORCH_GEMM.matmul_out(out[1:-1], TORCH_GEMM.upcast(padded), TORCH_GEMM.upcast(w))
        assert _error(out[1:-1], grad.double() @ w.double().t()) <= tolerance
        TORCH_GEMM.matmul_add_out(
            out[1:-1],
            (TORCH_GEMM.upcast(padded), TORCH_GEMM.upcast(w)),
            (TORCH_GEMM.upcast(padded), TORCH_GEMM.upcast(2 * w)),
        )
        assert _error(out[1:-1], 3 * (grad.double() @ w.double().t())) <= tolerance
        assert out[[0, -1]].isnan().all()


class _RecordOps(TorchDispatchMode):
    """Records operators and the dtypes of their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((str(func), result.dtype))
        return result


def test_a_gpu_returns_the_float32_accumulator_in_one_operation():
    x, w = torch.empty(64, 512, device="meta").bfloat16(), torch.empty(700, 512, device="meta").bfloat16()
    with _RecordOps() as ops:
        y = TORCH_GEMM.matmul_fp32(x, w)
    assert (y.shape, y.dtype) == ((64, 700), torch.float32)
    assert [call for call in ops.calls if "mm" in call[0]] == [("aten.mm.dtype", torch.float32)]
    assert {dtype for _, dtype in ops.calls if dtype != torch.bfloat16} == {torch.float32}


def test_a_gpu_adds_a_gradient_in_float32(monkeypatch):
    """Without a GPU: the operands and the sum that torch's operation gets, with its definition in its place."""

    def addmm(total, x, grad, *, out_dtype, out):
        assert (total.dtype, out_dtype) == (torch.float32, torch.float32)
        assert (x.dtype, grad.dtype) == (torch.bfloat16, torch.bfloat16)
        return out.copy_(total + x.float() @ grad.float())

    monkeypatch.setattr("moefold.ops.gemm._supports_fp32_output", lambda x, w: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    x, grad = torch.randn(300, 20).bfloat16(), torch.randn(300, 7).bfloat16()
    total = torch.ones(20, 7)
    TORCH_GEMM.add_weight_gradient(total, x, grad)
    assert _error(total, 1 + x.double().t() @ grad.double()) <= 2e-6


def _error(found, expected):
    return (found.double() - expected).norm() / expected.norm()
