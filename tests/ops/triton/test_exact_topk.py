"""The Triton kernel of exact top-k equals a full sort, and reports rows with NaN."""

import pytest
import torch

from moefold.ops.exact_topk import sorted_topk
from moefold.ops.triton.exact_topk import triton_exact_topk
from tests.ops.topk_cases import Case, cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("dtype", "calls", "rows"),
    [
        (torch.float32, 10, 2),
        (torch.bfloat16, 4, 1),
        pytest.param(torch.float32, 42, 28, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 42, 28, marks=pytest.mark.slow),
    ],
)
def test_rows_and_guesses_of_all_kinds(dtype, calls, rows):
    for case in cases(calls, rows, dtype, seed=3):
        expected = sorted_topk(case.scores, case.k, starts=case.starts, stops=case.stops)
        given = Case(*(value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in case))
        found, has_nan = triton_exact_topk(*given)
        assert torch.equal(found.cpu(), expected)
        assert not has_nan.any()


def test_rows_with_nan_are_reported():
    scores = torch.randn(5, 150)
    scores[1, 149] = float("nan")
    scores[3, 7] = -float("nan")
    stops = torch.tensor([150, 150, 150, 150, 0], dtype=torch.int32)
    _, has_nan = triton_exact_topk(scores.to(DEVICE), 4, None, stops.to(DEVICE), None)
    assert has_nan.tolist() == [False, True, False, True, False]
