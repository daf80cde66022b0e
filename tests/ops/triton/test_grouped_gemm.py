"""Grouped products against float64: odd sizes, experts without rows, empty rows, results over memory full of NaN."""

import pytest
import torch

from moefold.ops.triton.grouped_gemm import TileConfig, combine_rows, grouped_gemm, grouped_gemm_weight_grad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS = ([3, 0, 18, 1], [0, 0, 5], [0, 0], [16, 32])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""Relative to the largest value: the sum of a few dozen terms, and half a unit in the last of 8 bits."""
CASES = pytest.mark.parametrize("counts", COUNTS)
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))
OTHER = TileConfig(block_m=16, block_n=32, block_k=16, num_warps=4, num_stages=2)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE)


def _poisoned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)


def _sources(num_rows: int, num_values: int) -> torch.Tensor:
    """Rows in any order, some twice, some empty."""
    return torch.randint(-1, num_values, (num_rows,), dtype=torch.int32).to(DEVICE)


def _read(values: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    wide = values.double()
    if source is None:
        return wide
    return wide[source.clamp(min=0).long()] * (source >= 0).double().unsqueeze(1)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.isfinite().all()
    scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])


def _product(rows: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([x @ w[e].double() for e, x in enumerate(rows.split(counts))])


@CASES
@TYPES
@pytest.mark.parametrize(("gathers", "transposed", "tiling"), [(False, False, None), (True, True, OTHER)])
def test_grouped_products_equal_float64(counts, dtype, gathers, transposed, tiling):
    num_rows, depth, width = sum(counts), 20, 35
    x = _random(dtype, 20 if gathers else num_rows, depth)
    w = _random(dtype, len(counts), width, depth).mT if transposed else _random(dtype, len(counts), depth, width)
    source = _sources(num_rows, 20) if gathers else None
    y = _poisoned(dtype, num_rows, width)
    grouped_gemm(x, w, _offsets(counts), source_R=source, tile_config=tiling, out=y)
    _assert_close(y, _product(_read(x, source), w, counts), dtype)


@CASES
@TYPES
def test_a_second_pair_is_added(counts, dtype):
    num_rows = sum(counts)
    x, x2 = _random(dtype, num_rows, 33), _random(dtype, num_rows, 33)
    w, w2 = _random(dtype, len(counts), 33, 19), _random(dtype, len(counts), 33, 19)
    y = _poisoned(dtype, num_rows, 19)
    grouped_gemm(x, w, _offsets(counts), second=(x2, w2), out=y)
    _assert_close(y, _product(x.double(), w, counts) + _product(x2.double(), w2, counts), dtype)


@CASES
@TYPES
@pytest.mark.parametrize("has_second", [False, True])
def test_rows_are_written_to_their_places(counts, dtype, has_second):
    num_rows = sum(counts)
    x, x2 = (_random(dtype, num_rows, 33) for _ in range(2))
    w, w2 = (_random(dtype, len(counts), 33, 19) for _ in range(2))
    target = torch.randperm(num_rows).to(DEVICE, torch.int32)
    y = _poisoned(dtype, num_rows, 19)
    second = (x2, w2) if has_second else None
    grouped_gemm(x, w, _offsets(counts), target_R=target, second=second, out=y)
    expected = _product(x.double(), w, counts)
    if has_second:
        expected = expected + _product(x2.double(), w2, counts)
    _assert_close(y[target.long()], expected, dtype)


@CASES
@TYPES
@pytest.mark.parametrize("tiling", [None, OTHER])
def test_gradients_of_weights(counts, dtype, tiling):
    num_rows, depth, width = sum(counts), 21, 34
    # Slices of wider rows, and rows after the last offset, which are not read.
    x, grad = (_random(dtype, num_rows + 3, size + 5)[:, 5:] for size in (depth, width))
    x[num_rows:] = float("nan")
    out = _poisoned(dtype, len(counts), depth, width)
    grouped_gemm_weight_grad(x, grad, _offsets(counts), tile_config=tiling, out=out)
    pairs = zip(*(values[:num_rows].double().split(counts) for values in (x, grad)), strict=True)
    _assert_close(out, torch.stack([a.T @ b for a, b in pairs]), dtype)


@TYPES
@pytest.mark.parametrize("absent", [False, True])
def test_copies_are_combined(dtype, absent):
    rows = _random(dtype, 24, 41)
    place = torch.randperm(24).view(8, 3).to(DEVICE)
    factors = _random(torch.float32, 8, 3)
    present = torch.rand(8, 3).to(DEVICE) > 0.4 if absent else None
    if present is not None:
        rows[place[~present]] = float("nan")
        place = place.masked_fill(~present, 0)
    y = combine_rows(rows, place, present, factors, out=_poisoned(dtype, 8, 41))
    kept = torch.ones(8, 3, device=DEVICE, dtype=torch.bool) if present is None else present
    values = rows[place].double().masked_fill(~kept.unsqueeze(-1), 0.0)
    _assert_close(y, (values * (factors * kept).double().unsqueeze(-1)).sum(1), dtype)


@TYPES
def test_two_sets_of_rows_are_combined(dtype):
    rows, second = _random(dtype, 24, 41), _random(dtype, 24, 41)
    place = torch.randperm(24).view(8, 3).to(DEVICE)
    y = combine_rows(rows, place, second_RH=second, out=_poisoned(dtype, 8, 41))
    _assert_close(y, (rows.double() + second.double())[place].sum(1), dtype)


def test_a_wrong_matrix_would_be_seen():
    """The tolerance tells the matrix of an expert from the matrix of its neighbour."""
    x, w = _random(torch.bfloat16, 8, 16), _random(torch.bfloat16, 2, 16, 16)
    y = grouped_gemm(x, w.flip(0), _offsets([4, 4]))
    with pytest.raises(AssertionError):
        _assert_close(y, _product(x.double(), w, [4, 4]), torch.bfloat16)
