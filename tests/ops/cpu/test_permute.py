"""The combine in C and its gradients equal torch's, and a token has the same bits whatever the others are."""

import pytest
import torch

from moefold.model.moe.permute import plan_permutation
from moefold.ops.expert_ops import Permutation
from moefold.ops.permute import TORCH_PERMUTE_OPS
from tests.ops.c_kernels import HALF_STEPS, in_each_type, needs_compiler

pytestmark = needs_compiler

NUM_EXPERTS = 5


@pytest.fixture
def ops():
    from moefold.ops.cpu.permute import CPermuteOps

    return CPermuteOps()


def example(
    tokens: int, top_k: int, width: int, dtype: torch.dtype, *, drops: bool = False
) -> tuple[torch.Tensor, Permutation, torch.Tensor]:
    """Rows of experts, their permutation, and weights."""
    generator = torch.Generator().manual_seed(tokens + width)
    ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :top_k]
    kept = torch.rand(tokens, top_k, generator=generator) < 0.7 if drops else None
    permutation = plan_permutation(ids, NUM_EXPERTS, kept)
    rows = torch.randn(len(permutation.token_R), width, generator=generator).to(dtype)
    return rows, permutation, torch.rand(tokens, top_k, generator=generator)


@in_each_type
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 1), (7, 2, 33), (300, 3, 130)])
def test_combine_equals_torch_in_float64(ops, tokens, top_k, width, is_weighted, drops, dtype):
    rows, permutation, weights = example(tokens, top_k, width, dtype, drops=drops)
    found = ops.combine(rows, permutation, weights if is_weighted else None)
    expected = TORCH_PERMUTE_OPS.combine(rows.double(), permutation, weights.double() if is_weighted else None)
    size = TORCH_PERMUTE_OPS.combine(rows.double().abs(), permutation, weights.double() if is_weighted else None)
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= (HALF_STEPS[dtype] + (top_k + 1) * 2.0**-24) * size).all()


@in_each_type
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 1), (7, 2, 33), (300, 3, 130)])
def test_gradients_of_the_combine_equal_torch_in_float64(ops, tokens, top_k, width, drops, dtype):
    rows, permutation, weights = example(tokens, top_k, width, dtype, drops=drops)
    grad = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = ops.combine_backward(grad, rows, permutation, weights)
    wide = grad.double(), rows.double(), permutation, weights.double()
    expected = TORCH_PERMUTE_OPS.combine_backward(*wide)
    assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)
    assert ((found[0].double() - expected[0]).abs() <= HALF_STEPS[dtype] * expected[0].abs()).all()
    sizes = TORCH_PERMUTE_OPS.combine_backward(*(x.abs() if isinstance(x, torch.Tensor) else x for x in wide))[1]
    assert ((found[1].double() - expected[1]).abs() <= (width + 1) * 2.0**-24 * sizes).all()


@in_each_type
def test_bits_of_a_token_do_not_depend_on_other_tokens_or_threads(ops, dtype):
    rows, permutation, weights = example(300, 3, 130, dtype)
    whole = ops.combine(rows, permutation, weights)
    of_rows, of_weights = ops.combine_backward(whole, rows, permutation, weights)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(ops.combine(rows, permutation, weights), whole)
        threaded = ops.combine_backward(whole, rows, permutation, weights)
        assert torch.equal(threaded[0], of_rows)
        assert torch.equal(threaded[1], of_weights)
    finally:
        torch.set_num_threads(before)
    for token in (0, 150, 299):
        single = Permutation(
            torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.arange(3).unsqueeze(0), torch.ones(3), None, None
        )
        alone = ops.combine(rows[permutation.row_TK[token]], single, weights[token : token + 1])
        assert torch.equal(alone[0], whole[token])
        places = permutation.row_TK[token]
        gradients = ops.combine_backward(whole[token : token + 1], rows[places], single, weights[token : token + 1])
        assert torch.equal(gradients[0], of_rows[places])
        assert torch.equal(gradients[1][0], of_weights[token])


def test_float64_and_no_rows_are_left_to_torch(ops):
    rows, permutation, weights = example(7, 2, 33, torch.float64)
    assert ops.combine(rows, permutation, weights.double()).dtype == torch.float64
    rows, permutation, weights = example(7, 2, 33, torch.float32)
    wide = ops.combine(rows, permutation, weights.double())
    assert torch.equal(wide, TORCH_PERMUTE_OPS.combine(rows, permutation, weights.double()))
    empty = plan_permutation(torch.zeros(3, 1, dtype=torch.int64), NUM_EXPERTS, torch.zeros(3, 1, dtype=torch.bool))
    assert torch.equal(ops.combine(rows[:0], empty, None), torch.zeros(3, 33))
    found = ops.combine_backward(wide, rows, permutation, weights.double())
    expected = TORCH_PERMUTE_OPS.combine_backward(wide, rows, permutation, weights.double())
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
