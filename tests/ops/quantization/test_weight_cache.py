"""Quantised weights are cached within a step, only for weights, and for each view of them."""

import pytest
import torch

from moefold.model.local_param import local_param
from moefold.ops.quantization.weight_cache import WeightCache


@pytest.fixture
def calls():
    return []


@pytest.fixture
def double(calls):
    def function(weight):
        calls.append(weight)
        return weight * 2

    return function


def test_a_view_of_a_weight_is_computed_once_a_step(calls, double):
    cache = WeightCache()
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    with cache.step():
        for _ in range(3):
            assert torch.equal(cache.get(local_param(parameter).t(), double), parameter.t() * 2)
            assert torch.equal(cache.get(local_param(parameter)[1:], double), parameter[1:] * 2)
    assert len(calls) == 2


def test_casts_of_a_weight_share_the_result_and_dtypes_do_not(calls, double):
    cache = WeightCache()
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    with cache.step():
        results = [cache.get(local_param(parameter, dtype), double) for dtype in (torch.bfloat16, torch.float64) * 2]
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float64] * 2
    assert len(calls) == 2


def test_weights_that_are_written_between_two_steps_are_read_again(double):
    """Also if no version counter says so, as after a load of a checkpoint or FSDP's all-gather."""
    cache = WeightCache()
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    for _ in range(2):
        with cache.step():
            assert torch.equal(cache.get(local_param(parameter), double), parameter * 2)
        version = parameter._version
        parameter.data.add_(1.0)
        assert parameter._version == version
        assert torch.equal(cache.get(local_param(parameter), double), parameter * 2), "outside of a step"


def test_storage_that_is_freed_and_filled_again_is_read_again_in_the_next_step(double):
    """FSDP resizes the storage of a gathered weight to 0 and back. The storage object and its identity stay."""
    cache = WeightCache()
    gathered = torch.nn.Parameter(torch.ones(4))
    for value in (1.0, 3.0):
        with torch.no_grad():
            gathered.untyped_storage().resize_(0)
            gathered.untyped_storage().resize_(16)
            gathered.data.fill_(value)
        with cache.step():
            assert torch.equal(cache.get(local_param(gathered), double), torch.full((4,), 2 * value))


def test_other_tensors_and_a_disabled_cache_are_not_cached(calls, double):
    received = torch.randn(4)
    cache = WeightCache()
    with cache.step():
        cache.get(received, double)
        cache.get(received, double)
    assert len(calls) == 2
    disabled = WeightCache(is_enabled=False)
    weight = local_param(torch.nn.Parameter(torch.randn(4)))
    with disabled.step():
        disabled.get(weight, double)
        disabled.get(weight, double)
    assert len(calls) == 4


def test_a_step_that_fails_leaves_nothing(calls, double):
    cache = WeightCache()
    weight = local_param(torch.nn.Parameter(torch.randn(4)))

    def fail(weight):
        raise RuntimeError(double(weight))

    for _ in range(2):
        with pytest.raises(RuntimeError), cache.step():
            cache.get(weight, fail)
    with cache.step():
        cache.get(weight, double)
    assert len(calls) == 3
