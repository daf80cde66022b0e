"""Exact top-k equals a full sort whatever the scores, the limits and the guess are."""

import pytest
import torch

from moefold.ops.exact_topk import exact_topk, sorted_topk
from tests.ops.c_kernels import VECTORS, needs_compiler
from tests.ops.topk_cases import by_definition, cases
from tests.slow import slow

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sorted_definition_equals_python(dtype):
    for case in cases(30, 14, dtype):
        found = sorted_topk(case.scores, case.k, starts=case.starts, stops=case.stops)
        assert torch.equal(found, by_definition(case))


@pytest.mark.parametrize(("calls", "rows"), [(40, 84), *slow([(120, 280)])])
def test_ten_thousand_cases_equal_a_full_sort(calls, rows):
    compared = 0
    for seed, dtype in enumerate(DTYPES):
        for case in cases(calls, rows, dtype, seed=seed):
            expected = sorted_topk(case.scores, case.k, starts=case.starts, stops=case.stops)
            found = exact_topk(case.scores, case.k, starts=case.starts, stops=case.stops, guess=case.guess)
            assert torch.equal(found, expected)
            compared += len(found)
    assert compared >= 10_000


@needs_compiler
@pytest.mark.parametrize("flags", [VECTORS["avx2"], VECTORS["sse2"]], ids=["avx2", "sse2"])
def test_narrower_vectors_select_the_same(built_with, flags):
    from moefold.ops.cpu.exact_topk import CExactTopk

    kernel = built_with(CExactTopk, flags)
    for dtype in DTYPES:
        for case in cases(30, 14, dtype, seed=2):
            found, _ = kernel(*case)
            assert torch.equal(found, sorted_topk(case.scores, case.k, starts=case.starts, stops=case.stops))


@needs_compiler
def test_threads_strides_and_correlated_rows():
    from moefold.ops.cpu.exact_topk import CExactTopk

    kernel = CExactTopk()
    scores = torch.randn(33, 6000)[:, ::2]
    for row in range(1, len(scores)):
        scores[row] = 0.99 * scores[row - 1] + 0.141 * scores[row]
    expected = sorted_topk(scores, 100)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for view in (scores, scores.contiguous(), scores.expand(33, -1)):
                assert torch.equal(kernel(view, 100, None, None, expected.roll(1, 0))[0], expected)
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_scores_are_sorted(no_compiler):
    from moefold.ops import exact_topk as module

    module.c_kernel.cache_clear()
    try:
        for case in cases(10, 14, torch.float32):
            found = exact_topk(case.scores, case.k, starts=case.starts, stops=case.stops, guess=case.guess)
            assert torch.equal(found, by_definition(case))
        assert module.c_kernel() is None
        with pytest.raises(ValueError, match="NaN"):
            exact_topk(torch.tensor([[1.0, float("nan")]]), 1)
    finally:
        module.c_kernel.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
@pytest.mark.parametrize("width", [1, 50, 1000])
@pytest.mark.parametrize("k", [1, 60])
def test_nan_is_refused_where_it_could_be_selected(dtype, nan, width, k):
    scores = torch.randn(3, width).to(dtype)
    for place in {0, width // 2, width - 1}:
        broken = scores.clone()
        broken[1, place] = nan
        with pytest.raises(ValueError, match="NaN"):
            exact_topk(broken, k, guess=torch.zeros(3, 5, dtype=torch.int32))
        stops = torch.tensor([width, place, width], dtype=torch.int32)
        assert torch.equal(exact_topk(broken, k, stops=stops), sorted_topk(scores, k, stops=stops))


def test_no_rows_and_no_positions():
    assert exact_topk(torch.empty(0, 5), 3).shape == (0, 3)
    assert torch.equal(exact_topk(torch.empty(2, 0), 3), torch.full((2, 3), -1, dtype=torch.int32))
    empty_guess = torch.empty(2, 0, dtype=torch.int32)
    assert exact_topk(torch.ones(2, 4), 3, guess=empty_guess).tolist() == [[0, 1, 2]] * 2
    assert exact_topk(torch.empty(2, 7, device="meta"), 3).shape == (2, 3)


@pytest.mark.parametrize(
    ("scores", "k", "given", "message"),
    [
        (torch.ones(4), 1, {}, r"float32 of shape \[4\]"),
        (torch.ones(1, 4, dtype=torch.float16), 1, {}, "float16"),
        (torch.ones(1, 4), 0, {}, "k=0"),
        (torch.ones(1, 4), 1, {"starts": torch.zeros(1)}, "starts of exact_topk is torch.float32"),
        (torch.ones(1, 4), 1, {"stops": torch.zeros(2, dtype=torch.int32)}, r"stops .* shape \[2\]"),
        (torch.ones(1, 4), 1, {"guess": torch.zeros(1, dtype=torch.int32)}, "guess .* with 2 dims"),
        (torch.ones(1, 4), 1, {"stops": torch.zeros(1, dtype=torch.int32, device="meta")}, "stops .* on meta"),
    ],
)
def test_wrong_arguments_are_refused(scores, k, given, message):
    with pytest.raises(ValueError, match=message):
        exact_topk(scores, k, **given)
