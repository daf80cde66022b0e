"""Exchanges during the products of tensor parallelism give the same as exchanges before and after them."""

import pytest
import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.model.attention import SelfAttention
from moefold.model.mlp import SwiGLU
from moefold.parallel.parallelize import parallelize
from moefold.parallel.tensor_parallel import AsyncTensorParallel, SequenceParallelTokens
from moefold.topology.layout import fold
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.recipes import tiny
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity

TOKENS, BATCH, HIDDEN, WIDTHS = 3, 2, 5, (4, 1, 6)
"""Tokens of a rank; widths of three products."""


class Postponed:
    """A `WeightGradStoreProtocol` that computes when the test says so."""

    def __init__(self) -> None:
        self.work = []

    def put(self, weights, compute) -> None:
        self.work.append((tuple(weights), compute))

    def run(self) -> None:
        for weights, compute in self.work:
            torch.autograd.backward(weights, compute())


def _numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _results(tokens: SequenceParallelTokens, rank: int, later: Postponed | None) -> list[Tensor]:
    """Outputs of both kinds of products and all gradients, of inputs and weights that differ from rank to rank."""
    x = _numbers(rank, TOKENS, BATCH, HIDDEN).requires_grad_()
    weights = [_numbers(10 + 10 * i + rank, width, HIDDEN).requires_grad_() for i, width in enumerate(WIDTHS)]
    bias = _numbers(50 + rank, WIDTHS[0]).requires_grad_()
    down = _numbers(60 + rank, HIDDEN, sum(WIDTHS)).requires_grad_()
    columns = list(zip(weights, (bias, None, None), strict=True))
    hidden = torch.cat(tokens.all_gather_linear(x, columns, later), -1)
    out = tokens.linear_reduce_scatter(hidden.tanh(), down, later)
    (out.transpose(0, 1) * _numbers(70 + rank, BATCH, TOKENS, HIDDEN)).sum().backward()
    if later is not None:
        assert down.grad is None
        assert all(weight.grad is None for weight in weights)
        later.run()
    gradients = [given.grad for given in (x, *weights, bias, down)]
    assert all(gradient is not None for gradient in gradients)
    return [hidden.detach(), out.detach(), *gradients]


def _both(size: int) -> None:
    tp = ParallelGroups.create(fold(world_size=size, tp=size), torch.device("cpu")).attn.tp
    expected = _results(SequenceParallelTokens(tp), tp.rank, None)
    for later in (None, Postponed()):
        found = _results(AsyncTensorParallel(tp), tp.rank, later)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found[0].shape == (size * TOKENS, BATCH, sum(WIDTHS))


@pytest.mark.parametrize("size", [2, 4, *slow([(3,)])])
def test_equals_exchanges_before_and_behind(pool, size):
    """Also where the gradients of weights are computed later."""
    pool.run(size, _both, size)


def _without_gradients() -> None:
    tp = ParallelGroups.create(fold(world_size=2, tp=2), torch.device("cpu")).attn.tp
    x, weight = _numbers(tp.rank, TOKENS, BATCH, HIDDEN), _numbers(9, 4, HIDDEN).requires_grad_()
    with torch.no_grad():
        (found,) = AsyncTensorParallel(tp).all_gather_linear(x, [(weight, None)], Postponed())
        (expected,) = SequenceParallelTokens(tp).all_gather_linear(x, [(weight, None)])
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_evaluation_makes_no_graph(pool):
    pool.run(2, _without_gradients)


def _kinds(overlaps: bool) -> set[type]:
    cfg = tiny(world_size=2, tp=2, ep=2, overlap_tp=overlaps, model={"layers.ffn": "dense, moe"})
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    (stage,) = parallelize(cfg, groups).stages
    return {type(module.sequence_parallel) for module in stage.modules() if isinstance(module, SelfAttention | SwiGLU)}


def test_overlap_tp_chooses_async_tensor_parallelism(pool):
    found = run_each(pool, 2, _kinds, (False,), (True,))
    assert found == [[{SequenceParallelTokens}] * 2, [{AsyncTensorParallel}] * 2]
