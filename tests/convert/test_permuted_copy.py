"""A permuted copy by blocks equals torch's."""

import pytest
import torch

from moefold.convert.weight_sources import copy_permuted

CASES = {
    "same": ((2, 90, 70), (0, 1, 2)),
    "transposed": ((2, 90, 70), (0, 2, 1)),
    "matrix": ((90, 70), (1, 0)),
    "rotated": ((5, 7, 6), (2, 0, 1)),
    "one row": ((1, 1, 70), (0, 2, 1)),
    "empty": ((2, 0, 7), (0, 2, 1)),
}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dims"), CASES.values(), ids=CASES)
def test_a_permuted_copy_equals_the_source(shape, dims, dtype, inner):
    source = torch.randn(shape).permute(dims)
    whole = torch.zeros([size + 2 for size in source.shape], dtype=dtype)
    target = (
        whole[tuple(slice(1, 1 + size) for size in source.shape)] if inner else torch.zeros(source.shape, dtype=dtype)
    )
    copy_permuted(target, source)
    assert torch.equal(target, source.to(dtype))
    assert whole.count_nonzero() == (target.count_nonzero() if inner else 0)


def test_a_dim_of_one_index_may_be_missing():
    source = torch.randn(90, 70)
    target = torch.empty(1, 70, 90)
    copy_permuted(target, source.t())
    assert torch.equal(target[0], source.t())
