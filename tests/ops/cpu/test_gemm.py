"""Products in C equal their definition for every size, stride and mix of types. Losses equal the libraries' losses."""

import ctypes
import mmap
import sys

import pytest
import torch

from moefold.ops.cpu import gemm as c_product
from moefold.ops.cpu.build import CompilerError
from moefold.ops.gemm import TORCH_GEMM
from moefold.parallel.kernels.select import select_kernels
from moefold.verify.distributed_run import run_distributed
from tests.ops.c_kernels import (
    CPU,
    PROCESSORS,
    WITH_AND_WITHOUT_PAIRS,
    assert_same_losses,
    needs_compiler,
    recipe,
    same_bits_on_threads,
)
from tests.slow import slow

pytestmark = needs_compiler

SIZES = ((1, 1, 1), (14, 32, 16), (13, 31, 3), (1, 70, 129), (45, 1, 2), (129, 65, 1), (60, 33, 515), (30, 40, 1030))
"""Rows, columns and depth: fewer and more than panels have, odd depths, and beyond the steps of one sum."""
LAYOUTS = (("rows", "rows"), ("rows", "transposed"), ("transposed", "transposed"), ("apart", "apart"))
EPS = {torch.float32: 3e-6, torch.bfloat16: 2**-8}
"""Relative to the largest value. A bfloat16 is rounded once, to half of that."""


@pytest.fixture(scope="module", params=WITH_AND_WITHOUT_PAIRS)
def gemm(request, built_with):
    from moefold.ops.cpu.gemm import CGemm

    return built_with(CGemm, PROCESSORS[request.param])


@pytest.fixture
def native():
    from moefold.ops.cpu.gemm import CGemm

    return CGemm()


def _matrix(rows: int, columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Values in a layout, between others that must not be read."""
    if layout == "transposed":
        return _matrix(columns, rows, "rows", dtype).t()
    step = 3 if layout == "apart" else 1
    whole = torch.full((rows + 2, step * (columns + 2)), float("nan"), dtype=dtype)
    inner = whole[1:-1, step : step * (columns + 1) : step]
    inner.copy_(torch.randn(rows, columns))
    return inner


def _values(x: torch.Tensor, *, is_narrow: bool) -> torch.Tensor:
    return x.bfloat16().double() if is_narrow else x.double()


def _assert_close(found: torch.Tensor, right: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    error = (found.double() - right).abs().max() / (right if scale is None else scale).abs().max()
    assert error <= EPS[found.dtype], float(error)


@pytest.mark.parametrize(
    ("size", "layouts", "types"),
    [
        # In `make test` each two of size, layouts and types together.
        pytest.param(size, layouts, types, marks=pytest.mark.slow if (i + j + k) % 4 else ())
        for i, size in enumerate(SIZES)
        for j, layouts in enumerate(LAYOUTS)
        for k, types in enumerate(("ff", "bb", "fb", "bf"))
    ],
)
def test_it_equals_the_definition(gemm, size, types, layouts):
    """Over memory full of NaN. Nothing but the result is written."""
    rows, columns, depth = size
    kinds = [torch.float32 if kind == "f" else torch.bfloat16 for kind in types]
    x, w = _matrix(rows, depth, layouts[0], kinds[0]), _matrix(columns, depth, layouts[1], kinds[1])
    is_narrow = "b" in types
    right = _values(x, is_narrow=is_narrow) @ _values(w, is_narrow=is_narrow).t()
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.full((rows + 2, columns + 3), float("nan"), dtype=dtype)
        out = whole[1:-1, 1:-2]
        gemm.matmul_out(out, x, w)
        _assert_close(out, right)
        assert whole.isnan().sum() == whole.numel() - out.numel()
        before = out.double()
        gemm.add_weight_gradient(out, x.t(), w.t())
        _assert_close(out, before + right)
        gemm.matmul_add_out(out, (x, w), (x[:, :1], w[:, :1]))
        first = _values(x[:, :1], is_narrow=is_narrow) @ _values(w[:, :1], is_narrow=is_narrow).t()
        _assert_close(out, right + first)
    _assert_close(gemm.matmul_fp32(x, w), right)
    product = gemm.matmul(x, w)
    assert product.dtype == (torch.bfloat16 if is_narrow else torch.float32)
    _assert_close(product, right)
    _assert_close(gemm.weight_gradient(x.t(), w.t()), right)


def test_a_sum_of_two_products_is_rounded_once(gemm):
    x, w = torch.randn(30, 51).bfloat16(), torch.randn(40, 51).bfloat16()
    out = torch.empty(30, 40, dtype=torch.bfloat16)
    gemm.matmul_add_out(out, (x, w), (-x, w + w))
    exact = torch.empty(30, 40)
    gemm.matmul_add_out(exact, (x, w), (-x, w + w))
    assert torch.equal(out, exact.bfloat16())


def test_weights_in_float32_have_their_values_in_bfloat16(gemm):
    """Every exponent and sign, ties and both infinities are rounded as torch rounds them; also rows of one number."""
    bits = torch.arange(-(2**31), 2**31, 999_983, dtype=torch.int64).to(torch.int32)
    odd = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, -0x00800000, 0x7FC00001, 0x3F80FFFF, 0])
    w = torch.cat((bits, odd.to(torch.int32))).view(torch.float32)
    # Processors that multiply pairs take the smallest numbers for 0.
    w = w[(w.abs() >= 2.0**-125) | (w == 0) | w.isnan()][:, None]
    found, right = gemm.matmul_fp32(torch.ones(1, 1).bfloat16(), w)[0], w[:, 0].bfloat16().float()
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found[~found.isnan()], right[~right.isnan()])


def test_nan_reaches_only_its_row_or_column(gemm):
    x, w = torch.randn(40, 33), torch.randn(50, 33)
    for value in (float("nan"), float("inf")):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = x.to(dtype, copy=True), w.to(dtype, copy=True)
            a[7, 30] = b[44, 2] = value
            found = gemm.matmul(a, b)
            is_number = found.isfinite()
            assert not is_number[7].any()
            assert not is_number[:, 44].any()
            is_number[7], is_number[:, 44] = True, True
            assert is_number.all()


@pytest.mark.parametrize("special", [1e-40, float("nan"), 1.0], ids=["denormal", "nan", "normal"])
def test_results_are_rounded_to_bfloat16_as_torch_rounds_them(gemm, special):
    w = torch.linspace(-3, 4, 64 * 40).exp().view(64, 40)
    w[7, 3] = w[33, 20] = special
    exact = torch.empty(40, 64)
    rounded = torch.empty(40, 64, dtype=torch.bfloat16)
    for out in (exact, rounded):
        gemm.matmul_out(out, torch.eye(40), w)
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_threads_or_on_other_rows(gemm, dtype):
    x, w = torch.randn(300, 700).to(dtype), torch.randn(260, 700).to(dtype)
    (whole,) = same_bits_on_threads(lambda: [gemm.matmul(x, w)], (1, 3, 40))
    assert torch.equal(whole[5:60], gemm.matmul(x[5:60], w))
    assert torch.equal(whole[:, 9:44], gemm.matmul(x, w[9:44]))
    assert torch.equal(whole, gemm.matmul(x.t().contiguous().t(), w.t().contiguous().t()))


def _apart(x: torch.Tensor, width: int) -> torch.Tensor:
    """The same values in rows of a wider matrix, which is NaN elsewhere."""
    whole = torch.full((len(x), width), float("nan"), dtype=x.dtype)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_where_operands_lie(gemm, dtype):
    """Near operands are read where they are, others are packed: distant rows, wide steps, and many columns."""
    x, w = torch.randn(75, 530).to(dtype), torch.randn(1100, 530).to(dtype)
    x_near = (x, x.t().contiguous().t(), _apart(x, 700))
    x_far = (_apart(x, 1200), _apart(x.t(), 900).t())
    w_any = (w, w.t().contiguous().t(), _apart(w.t(), 1200).t())
    right = gemm.matmul(x, w)
    for a in (*x_near, *x_far):
        for b in w_any:
            assert torch.equal(gemm.matmul(a, b), right)
            assert torch.equal(gemm.matmul(a, b[:300]), right[:, :300])
        assert torch.equal(gemm.matmul(a, w[:300].t().contiguous().t()), right[:, :300])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1024, 2051])
def test_chunks_of_a_deep_gradient_have_the_bits_of_one_product(gemm, dtype, depth):
    """Operands whose lines are contiguous are multiplied a chunk of their depth after another, others at once."""
    x, w = torch.randn(37, depth).to(dtype), torch.randn(75, depth).to(dtype)
    found = gemm.matmul_fp32(x.t().contiguous().t(), w.t().contiguous().t())
    assert torch.equal(found, gemm.matmul_fp32(x, w))
    _assert_close(found, x.double() @ w.double().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_two_terms_depends_on_where_operands_lie(gemm, dtype):
    """Each has operands of its own, near or packed."""
    x, w = torch.randn(75, 530).to(dtype), torch.randn(130, 530).to(dtype)
    v, u = torch.randn(75, 77).to(dtype), torch.randn(130, 77).to(dtype)
    right, found = gemm.matmul(x, w), torch.empty(75, 130, dtype=dtype)
    gemm.matmul_add_out(right, (_apart(x, 1200), w), (_apart(v, 1200), u))
    _assert_close(right, x.double() @ w.double().t() + v.double() @ u.double().t())
    for a, b in ((x, w), (x.t().contiguous().t(), w.t().contiguous().t()), (_apart(x, 700), _apart(w.t(), 140).t())):
        for c, d in (
            (v, u),
            (v.t().contiguous().t(), u.t().contiguous().t()),
            (_apart(v, 1200), _apart(u.t(), 9000).t()),
        ):
            gemm.matmul_add_out(found.fill_(float("nan")), (a, b), (c, d))
            assert torch.equal(found, right)


def test_a_term_of_no_depth_adds_nothing(gemm):
    x, w = torch.randn(75, 30), torch.randn(130, 30)
    right, found = gemm.matmul(x, w), torch.empty(75, 130)
    for terms in (((x[:, :0], w[:, :0]), (x, w)), ((x, w), (x[:, :0], w[:, :0]))):
        gemm.matmul_add_out(found.fill_(float("nan")), *terms)
        assert torch.equal(found, right)
    gemm.matmul_add_out(found, (x[:, :0], w[:, :0]), (x[:, :0], w[:, :0]))
    assert not found.any()


def _before_a_forbidden_page(x: torch.Tensor) -> torch.Tensor:
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    block = mmap.mmap(-1, pages + mmap.PAGESIZE)
    forbidden = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(block)) + pages)
    assert ctypes.CDLL(None).mprotect(forbidden, mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(block, dtype=x.dtype, count=x.numel(), offset=pages - size).view(x.shape).copy_(x)


def _reads_what_it_is_given(dtype: torch.dtype) -> None:
    from moefold.ops.cpu.gemm import CGemm

    gemm = CGemm()
    for rows, columns, depth in ((75, 70, 33), (113, 95, 64), (64, 33, 1)):
        x, w = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
        right = gemm.matmul(x, w)
        for a in (_before_a_forbidden_page(x), _before_a_forbidden_page(x.t()).t()):
            for b in (_before_a_forbidden_page(w), _before_a_forbidden_page(w.t()).t()):
                assert torch.equal(gemm.matmul(a, b), right)


@pytest.mark.skipif(sys.platform != "linux", reason="forbids a page as Linux does")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_read_behind_an_operand(pool, dtype):
    """A rank that does dies."""
    pool.run(1, _reads_what_it_is_given, dtype)


@pytest.mark.parametrize("depth", [300_000, 70_000])
def test_operands_beyond_the_scratch_memory_are_cut(native, depth):
    """So deep that one panel is more than a thread's share, and so wide that columns take turns."""
    for rows, columns in ((30, 40), (3, 200)):
        x, w = torch.randn(rows, depth), torch.randn(columns, depth)
        found = native.matmul(x, w)
        error = (found.double() - x.double() @ w.double().t()).norm() / (depth**0.5 * (rows * columns) ** 0.5)
        assert error < 1e-5


def test_the_libraries_multiply_unsupported_cases(native):
    x, w = torch.randn(5, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    assert torch.equal(native.matmul(x, w), TORCH_GEMM.matmul(x, w))
    assert torch.equal(native.weight_gradient(x, x), TORCH_GEMM.weight_gradient(x, x))
    assert native.cast_weight(x, torch.float64) is x
    assert native.padded_rows(5, x) == 5
    for empty in (torch.empty(0, 6), torch.empty(3, 0)):
        out = torch.full((len(empty), 4), float("nan"))
        native.matmul_out(out, empty, torch.empty(4, empty.shape[1]))
        assert torch.equal(out, torch.zeros(len(empty), 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_of_a_result_may_have_a_stride(native, dtype):
    """With operands of one type and of two."""
    for rows in (5, 80):
        x = torch.randn(rows, 6).to(dtype)
        for w in (torch.randn(9, 6), torch.randn(9, 6).to(dtype)):
            right = _values(x, is_narrow=dtype == torch.bfloat16) @ _values(w, is_narrow=dtype == torch.bfloat16).t()
            out = torch.full((9, rows), float("nan"), dtype=dtype).t()
            native.matmul_out(out, x, w)
            _assert_close(out, right)
            native.matmul_add_out(out, (x, w), (x, w))
            _assert_close(out, 2 * right)
            out = torch.ones(9, rows).t()
            native.add_weight_gradient(out, x.t(), w.t())
            _assert_close(out, 1 + right)


def test_sizes_that_do_not_agree_are_refused(native):
    out = torch.empty(70, 5)
    for x, w in (((70, 6), (5, 7)), ((70, 6), (4, 6)), ((69, 6), (5, 6))):
        with pytest.raises(AssertionError, match=r"torch.Size\(\[70, 5\]\)"):
            native.matmul_out(out, torch.ones(x), torch.ones(w))


def test_scratch_memory_is_not_a_tensor(native):
    """The counter of the memory of a layer does not find it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Made(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.numbers += result.numel() if func is torch.ops.aten.empty.memory_format else 0
            return result

    x, out = torch.randn(100, 3000), torch.empty(100, 100)
    with Made() as made:
        native.matmul_out(out, x, x)
    assert made.numbers == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "depth"), [(70, 64), (70, 530), (1120, 1035), (1120, 1040)])
def test_few_rows_have_the_bits_of_many(gemm, dtype, columns, depth):
    """Tokens that are decoded: of every count up to more than a panel, with operands in either layout.

    Whole panels of few rows are streamed, or transposed if the depth is a multiple of a vector, too.
    """
    x, w = torch.randn(40, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    right, wide = gemm.matmul(x, w), gemm.matmul_fp32(x, w)
    mixed = gemm.matmul(x, w.float())
    transposed = w.t().contiguous().t()
    for rows in range(1, 20):
        few = x[3 : 3 + rows]
        assert torch.equal(gemm.matmul(few, w), right[3 : 3 + rows])
        assert torch.equal(gemm.matmul(few, transposed), right[3 : 3 + rows])
        assert torch.equal(gemm.matmul_fp32(few, w), wide[3 : 3 + rows])
        assert torch.equal(gemm.matmul(few, w.float()), mixed[3 : 3 + rows])


def test_weights_are_not_copied_to_another_type(native):
    w = torch.randn(4, 4)
    assert native.cast_weight(w, torch.bfloat16) is w
    assert native.accepts_fp32_weight(w.bfloat16())
    assert not native.accepts_fp32_weight(w)


def test_a_compiler_that_errs_is_found_out(monkeypatch):
    from moefold.ops.cpu.gemm import CGemm

    multiply = CGemm._multiply

    def wrong(self, out, pairs, **adds):
        multiply(self, out, pairs, **adds)
        out[-1, -1] += 1.0

    monkeypatch.setattr(CGemm, "_multiply", wrong)
    with pytest.raises(CompilerError, match="the compiled GEMM kernel is wrong in torch.float32"):
        CGemm()


def test_it_is_chosen_where_the_libraries_leave_instructions_unused(monkeypatch, native):
    from moefold.ops import gemm

    is_wide = native._vector_width >= 8
    for has_own in (True, False):
        monkeypatch.setattr(gemm, "_USES_ONEDNN_FP32", has_own)
        assert native.is_fast(torch.float32) == (has_own and is_wide)
    for has_tiles in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_tiles: has)
        assert native.is_fast(torch.bfloat16) == (not has_tiles and is_wide)
    assert not native.is_fast(torch.float64)
    chosen = select_kernels(recipe("bfloat16", "auto"), CPU)
    assert (type(chosen.gemm).__name__ == "CGemm") == is_wide
    assert "GEMMs" in chosen.message or not is_wide
    assert select_kernels(recipe("bfloat16", "plain"), CPU).gemm is TORCH_GEMM


def _run_in_c(cfg, steps):
    """With products in C for all rows, whatever is fast on this processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_product.CGemm, "is_fast", lambda gemm, dtype: True)
        return run_distributed(cfg, steps)


MAPPINGS = [
    ({"world_size": 1}, {}, "float32"),
    ({"world_size": 2, "tp": 2, "overlap_tp": True}, {}, "bfloat16"),
    ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {"micro_batch_size": 1}, "bfloat16"),
    *slow(
        [
            ({"world_size": 1}, {}, "bfloat16"),
            ({"world_size": 2, "tp": 2, "overlap_tp": True}, {}, "float32"),
            ({"world_size": 2, "pp": 2}, {"recompute": ("moe",)}, "float32"),
            ({"world_size": 2, "pp": 2}, {"recompute": ("moe",)}, "bfloat16"),
            ({"world_size": 4, "tp": 2, "ep": 2, "zero": 3}, {"recompute": ("layer",)}, "float32"),
            ({"world_size": 4, "tp": 2, "ep": 2, "zero": 3}, {"recompute": ("layer",)}, "bfloat16"),
            ({"world_size": 2, "pp": 2, "schedule": "zero-bubble"}, {"micro_batch_size": 1}, "float32"),
        ]
    ),
]


@pytest.mark.parity
@pytest.mark.parametrize(("mapping", "train", "dtype"), MAPPINGS)
def test_on_and_off_give_the_same_losses(pool, mapping, train, dtype):
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert_same_losses(pool, {"train": train, **mapping}, dtype, tolerance, _run_in_c)
