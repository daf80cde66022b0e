"""A backward pass in two parts gives the same as in one part, and the second part computes only weight gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from moefold.model.linear import linear
from moefold.model.moe.experts import fused_experts
from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.expert_ops import ExpertOptions, ExpertWeights
from moefold.ops.torch_experts import GroupedMMExpertOps
from moefold.parallel.wgrad_store import WeightGradStore

COUNTS = [3, 0, 5, 2]
Layer = Callable[..., Tensor]


def _dense(x: Tensor, weight: Tensor, bias: Tensor, *, later: WeightGradStore | None) -> Tensor:
    return linear(x, weight, bias, later)


def _sliced(x: Tensor, weight: Tensor, bias: Tensor, *, later: WeightGradStore | None) -> Tensor:
    """Through a view and a cast, as weights of few query groups and of mixed precision are."""
    return linear(x, weight.to(torch.float64)[2:5], bias[2:5], later)


def _looped(x: Tensor, *weights: Tensor, later: WeightGradStore | None) -> Tensor:
    return fused_experts(x, ExpertWeights(*weights), ExpertOptions(COUNTS), SequentialExpertOps(), wgrad_store=later)


def _grouped(x: Tensor, *weights: Tensor, later: WeightGradStore | None) -> Tensor:
    return fused_experts(x, ExpertWeights(*weights), ExpertOptions(COUNTS), GroupedMMExpertOps(), wgrad_store=later)


DENSE = ((6, 8), (5, 8), (5,))
EXPERTS = ((10, 8), (4, 8, 16), (4, 8, 16), (4, 16, 8))
BIASED = (*EXPERTS, (4, 16), (4, 16), (4, 8))
CASES: tuple[tuple[Layer, Sequence[tuple[int, ...]], torch.dtype], ...] = (
    (_dense, DENSE, torch.float64),
    (_dense, DENSE, torch.float32),
    (_sliced, DENSE, torch.float64),
    (_looped, EXPERTS, torch.float64),
    (_looped, BIASED, torch.float64),
    (_looped, BIASED, torch.float32),
    (_grouped, EXPERTS, torch.float32),
    (_grouped, BIASED, torch.float32),
)


def _tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("layer", "shapes", "dtype"), CASES)
def test_both_parts_together_are_the_whole(layer, shapes, dtype):
    x, *weights = _tensors(shapes, dtype)
    layer(x, *weights, later=None).square().sum().backward()
    expected = [x.grad, *(weight.grad for weight in weights)]
    x, *weights = _tensors(shapes, dtype)
    late = WeightGradStore(nn.Module(), reduces_each_micro_batch=False)
    # Two micro-batches are under way; the gradients of the second come first.
    runs = []
    for _ in range(2):
        layer(x, *weights, later=late).square().sum().backward()
        runs.append(late())
    torch.testing.assert_close(x.grad, 2 * expected[0], rtol=1e-6, atol=0)
    matrices = [weight for weight in weights if weight.dim() > 1 and weight.shape[-2:] != (4, 16)]
    assert all(weight.grad is None for weight in matrices if layer is not _grouped or weight.dim() == 3)
    for run in reversed(runs):
        run()
    for weight, wanted in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(weight.grad, 2 * wanted, rtol=2e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


def test_nothing_is_postponed_without_a_backward_pass():
    x, weight, bias = _tensors(DENSE, torch.float64)
    late = WeightGradStore(nn.Module(), reduces_each_micro_batch=False)
    with torch.no_grad():
        linear(x, weight, bias, late)
    linear(x.detach(), weight, bias, late).sum().backward()
    assert weight.grad is not None


def test_postponed_work_runs_once():
    x, weight, bias = _tensors(DENSE, torch.float64)
    late = WeightGradStore(nn.Module(), reduces_each_micro_batch=False)
    linear(x, weight, bias, late).sum().backward()
    run = late()
    late()()
    assert weight.grad is None
    run()
    once = weight.grad.clone()
    run()
    assert torch.equal(weight.grad, once)
