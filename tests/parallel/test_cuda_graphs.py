"""Attention replayed from graphs has the gradients of eager attention, with as few graphs as the schedule needs.

The graphs are those of `recorded_graphs`: a value that is read after the next replay has overwritten it is wrong.
"""

import pytest
import torch
from torch import Tensor, nn

from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.model.module_wrapper import wrap_method
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.rope import Rope
from moefold.parallel import cuda_graphs
from moefold.parallel.cuda_graphs import GraphedModule, apply_cuda_graphs
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups, gather_full_tensors
from tests.parallel.recorded_graphs import RecordingCapture
from tests.verify.recipes import LATENT, tiny

ROPE = Rope(torch.ones(3, 1, 1, 2), torch.zeros(3, 1, 1, 2))


def _train(cfg: Config, has_graphs: bool) -> tuple[list[tuple[float, float]], float, dict[str, Tensor], int]:
    """Return losses and norms of the steps, the loss of an evaluation, the weights, and the number of captures."""
    model = parallelize(cfg, create_groups(cfg))
    capture = RecordingCapture()
    if has_graphs:
        for stage in model.stages:
            apply_cuda_graphs(stage, model.weight_cache, capture)
    training = TrainingStep(model, cfg)
    data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    sharder = BatchSharder(data.train, cfg, model.groups, model.positions)
    losses = []
    for i in range(3):
        result = training.run(sharder.batch(i * cfg.train.global_batch_size), i + 1)
        losses.append((result.loss, result.grad_norm))
        eval_loss = training.evaluate([sharder.batch(0)])
    return losses, eval_loss, gather_full_tensors(model), capture.count


@pytest.mark.parity
@pytest.mark.parametrize(
    ("model", "train", "mapping", "captures"),
    [
        # Two layers. Micro-batch after micro-batch: one pair of graphs a layer.
        ({}, {}, {}, [2]),
        (LATENT | {"mtp_layers": 1}, {"recompute": ("moe",)}, {}, [3]),
        ({"qk_norm": True}, {"micro_batch_size": 2}, {}, [2]),
        ({}, {}, {"world_size": 2, "zero": 0}, [2, 2]),
        ({"qkv_bias": True}, {}, {"world_size": 2, "zero": 2, "ep": 2}, [2, 2]),
        # One layer on each rank, of which the first has two micro-batches between their passes.
        ({}, {}, {"world_size": 2, "pp": 2}, [2, 1]),
        ({}, {"global_batch_size": 8}, {"world_size": 4, "pp": 2, "zero": 1}, [2, 2, 1, 1]),
    ],
)
def test_replayed_training_equals_eager_training(pool, model, train, mapping, captures):
    cfg = tiny(model=model, train=train, **mapping)
    eager, replayed = (pool.run(cfg.parallel.world_size, _train, cfg, has_graphs) for has_graphs in (False, True))
    assert sorted(count for *_, count in replayed) == sorted(captures)
    for (losses, eval_loss, weights, _), (expected, expected_eval, expected_weights, _) in zip(
        replayed, eager, strict=True
    ):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        assert eval_loss == pytest.approx(expected_eval, rel=1e-12)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-10, atol=1e-12)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor, rope: Rope, document_starts: Tensor | None = None) -> Tensor:
        return x.square() * self.weight + rope.sin.sum()


class _OneGraphOnly(GraphedModule):
    """Reuses the graphs of a micro-batch that is still between its passes."""

    def acquire(self, x, weights):
        graphs = super().acquire(x, weights)
        self.release(graphs)
        return graphs


def _run_two(graphed: type[GraphedModule]) -> tuple[_Scale, list[Tensor], list[Tensor]]:
    """Return a module, and its inputs and outputs, 1 and 2, after two forward passes."""
    module = _Scale()
    wrap_method(module, "forward", lambda forward: graphed(module, forward, RecordingCapture(), WeightCache()))
    inputs = [torch.full((2, 4), value, requires_grad=True) for value in (1.0, 2.0)]
    return module, inputs, [module(x, ROPE) for x in inputs]


def test_micro_batches_between_their_passes_have_graphs_of_their_own():
    module, inputs, outputs = _run_two(GraphedModule)
    for x, y, gradient in zip(inputs, outputs, (6.0, 12.0), strict=True):
        assert torch.equal(y, x.square() * 3)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((2, 4), gradient))
    assert torch.equal(module.weight.grad, torch.full((4,), 2.0 * (1 + 4)))


def test_shared_graphs_would_give_wrong_results_and_gradients():
    _, inputs, outputs = _run_two(_OneGraphOnly)
    outputs[0].sum().backward()
    assert torch.equal(outputs[0], torch.full((2, 4), 12.0))
    assert torch.equal(inputs[0].grad, torch.full((2, 4), 12.0))


def _copied_weights(monkeypatch, weight_cache: WeightCache) -> list[int]:
    """Return how many tensors each forward pass copies: two in a step, one in the next; gathered weights move."""
    module = _Scale()
    copied = []
    write = cuda_graphs._write

    def counted(statics, tensors):
        copied.append(sum(a.data_ptr() != b.data_ptr() for a, b in zip(statics, tensors, strict=True)))
        write(statics, tensors)

    monkeypatch.setattr(cuda_graphs, "_write", counted)
    monkeypatch.setattr(cuda_graphs, "local_param", lambda parameter: parameter * 1.0)
    wrap_method(module, "forward", lambda forward: GraphedModule(module, forward, RecordingCapture(), weight_cache))
    for factor, num_micro_batches in ((3.0, 2), (5.0, 1)):
        with torch.no_grad():
            module.weight.fill_(factor)
        with weight_cache.step():
            for _ in range(num_micro_batches):
                x = torch.full((2, 4), 2.0, requires_grad=True)
                y = module(x, ROPE)
                assert torch.equal(y, torch.full((2, 4), 4 * factor))
                y.sum().backward()
                assert torch.equal(x.grad, torch.full((2, 4), 4 * factor))
    return copied


@pytest.mark.parametrize("is_enabled", [True, False])
def test_gathered_weights_are_copied_once_a_step(monkeypatch, is_enabled):
    # The weights of the first micro-batch are at their fixed address already.
    assert _copied_weights(monkeypatch, WeightCache(is_enabled=is_enabled)) == [1, 1, 2]


def test_outside_of_a_step_weights_are_copied_each_time(monkeypatch):
    class NoScope(WeightCache):
        scope = None

    assert _copied_weights(monkeypatch, NoScope()) == [1, 2, 2]


def test_nothing_is_captured_without_gradients():
    module = _Scale()
    capture = RecordingCapture()
    wrap_method(module, "forward", lambda forward: GraphedModule(module, forward, capture, WeightCache()))
    with torch.no_grad():
        y = module(torch.ones(2, 4), ROPE)
    assert capture.count == 0
    assert torch.equal(y, torch.full((2, 4), 3.0))
