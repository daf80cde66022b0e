"""Attention and routers replayed from graphs have the gradients of eager ones, with as few graphs as a schedule needs.

The graphs come from `recorded_graphs`: decisions of the host while it recorded them do not change, and a value
that is read after the next replay has overwritten it is wrong.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.model.module_wrapper import wrap_method
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.rope import Rope
from moefold.parallel import graphed_modules
from moefold.parallel.cuda_graphs import shares_storage
from moefold.parallel.graphed_modules import GraphedModule, apply_cuda_graphs, attention_arguments
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups, gather_full_tensors
from tests.parallel.recorded_graphs import CountedRecorders, TapeRecorder
from tests.verify.linear_cases import HYBRID
from tests.verify.recipes import LATENT, tiny

ROPE = Rope(torch.ones(3, 1, 1, 2), torch.zeros(3, 1, 1, 2))


def _train(cfg: Config, graphs: str) -> tuple[list[tuple[float, ...]], float, dict[str, Tensor], int]:
    """Return losses and norms of the steps, the loss of an evaluation, the weights, and the number of captures."""
    model = parallelize(cfg, create_groups(cfg))
    recorders = CountedRecorders()
    if graphs:
        for stage in model.stages:
            apply_cuda_graphs(stage, model.weight_cache, recorders, has_router=graphs == "attention_router")
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, model.groups, model.positions)
    losses = []
    for i in range(3):
        result = training.run(sharder.batch(i * cfg.train.global_batch_size), i + 1)
        losses.append((result.loss, result.grad_norm, result.aux_loss, result.z_loss, *result.expert_load))
        eval_loss = training.evaluate([sharder.batch(0)])
    return losses, eval_loss, gather_full_tensors(model), recorders.count


def _assert_replayed_equals_eager(pool, cfg: Config, graphs: str, captures: list[int]) -> None:
    eager, replayed = (pool.run(cfg.parallel.world_size, _train, cfg, name) for name in ("", graphs))
    assert sorted(count for *_, count in replayed) == sorted(captures)
    for (losses, eval_loss, weights, _), (expected, expected_eval, expected_weights, _) in zip(
        replayed, eager, strict=True
    ):
        assert losses == expected
        assert eval_loss == expected_eval
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("model", "train", "mapping", "captures"),
    [
        # Two layers. Micro-batch after micro-batch: one pair of graphs a layer.
        (LATENT | {"mtp_layers": 1}, {"recompute": ("moe",)}, {}, [3]),
        pytest.param({"attention.qk_norm": {}}, {"micro_batch_size": 2}, {}, [2], marks=pytest.mark.slow),
        pytest.param({}, {}, {"world_size": 2, "zero": 0}, [2, 2], marks=pytest.mark.slow),
        pytest.param(
            {"attention.qkv_bias": True}, {}, {"world_size": 2, "zero": 2, "ep": 2}, [2, 2], marks=pytest.mark.slow
        ),
        # One layer on each rank; the first has two micro-batches between their passes.
        (HYBRID, {}, {"world_size": 2, "pp": 2}, [2, 1]),
        pytest.param(
            {}, {"global_batch_size": 8}, {"world_size": 4, "pp": 2, "zero": 1}, [2, 2, 1, 1], marks=pytest.mark.slow
        ),
    ],
)
def test_training_with_replayed_attention_equals_eager_training(pool, model, train, mapping, captures):
    _assert_replayed_equals_eager(pool, tiny(model=model, train=train, **mapping), "attention", captures)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("model", "moe", "mapping", "captures"),
    [
        # The noise of each step differs, and only the gradients of the chosen probabilities arrive.
        pytest.param({}, {"input_jitter": 0.3, "aux_loss": 0.0, "z_loss": 0.0}, {}, [4], marks=pytest.mark.slow),
        (
            {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True, "ffn.moe.router.bias": True},
            {"input_jitter": 0.3},
            {},
            [4],
        ),
        pytest.param({}, {"choice": "sinkhorn"}, {"world_size": 2, "zero": 2, "ep": 2}, [4, 4], marks=pytest.mark.slow),
        pytest.param(
            {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True},
            {"choice": "quantile"},
            {"world_size": 2, "pp": 2},
            [4, 2],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ffn.moe.router.softmax": "sparsemixer", "ffn.moe.router.softmax.jitter": 0.6},
            {"input_jitter": 0.3},
            {"world_size": 2, "pp": 2},
            [4, 2],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_with_replayed_routers_equals_eager_training(pool, model, moe, mapping, captures):
    _assert_replayed_equals_eager(pool, tiny(model=model, moe=moe, **mapping), "attention_router", captures)


@pytest.mark.parity
def test_routers_of_gathered_weights_in_bfloat16_are_replayed(pool):
    # FSDP gathers the routers in float32, separately from their block in bfloat16.
    cfg = tiny(moe={"input_jitter": 0.3}, world_size=2, zero=1)
    cfg = replace(cfg, run=replace(cfg.run, dtype="bfloat16", kernels="plain"))
    _assert_replayed_equals_eager(pool, cfg, "attention_router", [4, 4])


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor, rope: Rope, document_starts: Tensor | None = None) -> Tensor:
        return x.square() * self.weight + rope.sin.sum()


class _OneGraphOnly(GraphedModule):
    """Reuses the graphs of a micro-batch that is still between its passes."""

    def acquire(self, arguments, weights):
        graphs = super().acquire(arguments, weights)
        self.release(graphs)
        return graphs


def _graph(module: nn.Module, graphed: type[GraphedModule] = GraphedModule, **options) -> None:
    given = {"make_recorder": TapeRecorder, "weight_cache": WeightCache()} | options
    wrap_method(module, "forward", lambda forward: graphed(module, forward, attention_arguments, **given))


def _run_two(graphed: type[GraphedModule]) -> tuple[_Scale, list[Tensor], list[Tensor]]:
    """Return a module, and its inputs and outputs, 1 and 2, after two forward passes."""
    module = _Scale()
    _graph(module, graphed)
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


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor, rope: Rope, documents: None = None) -> tuple[Tensor, Tensor, Tensor]:
        return x * self.weight, x.square(), x.detach().argmax(-1)


def test_an_output_without_gradient_has_gradient_zero():
    module = _TwoOutputs()
    _graph(module)
    for used, gradient in (((0, 1), 7.0), ((0,), 3.0), ((1,), 4.0)):
        x = torch.full((2, 4), 2.0, requires_grad=True)
        outputs = module(x, ROPE)
        assert not outputs[2].requires_grad
        torch.stack([outputs[i] for i in used]).sum().backward()
        assert torch.equal(x.grad, torch.full((2, 4), gradient))


def _copied_weights(monkeypatch, weight_cache: WeightCache) -> list[int]:
    """Return how many tensors each forward pass copies: two in a step, one in the next; gathered weights move."""
    module = _Scale()
    copied = []
    write = graphed_modules.write_inputs

    def counted(statics, tensors):
        copied.append(sum(not shares_storage(a, b) for a, b in zip(statics, tensors, strict=True)))
        write(statics, tensors)

    monkeypatch.setattr(graphed_modules, "write_inputs", counted)
    monkeypatch.setattr(graphed_modules, "local_param", lambda parameter: parameter * 1.0)
    _graph(module, weight_cache=weight_cache)
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


def test_outside_a_step_weights_are_copied_each_time(monkeypatch):
    class NoScope(WeightCache):
        scope = None

    assert _copied_weights(monkeypatch, NoScope()) == [1, 2, 2]


def test_nothing_is_captured_without_gradients():
    module = _Scale()
    recorders = CountedRecorders()
    _graph(module, make_recorder=recorders)
    with torch.no_grad():
        y = module(torch.ones(2, 4), ROPE)
    assert recorders.count == 0
    assert torch.equal(y, torch.full((2, 4), 3.0))


def test_a_graph_of_other_positions_is_refused():
    module = _Scale()
    _graph(module)
    x = torch.ones(2, 4, requires_grad=True)
    module(x, ROPE)
    with pytest.raises(AssertionError, match="positions"):
        module(x, Rope(ROPE.cos, ROPE.sin))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.sum()),
        lambda x: x * torch.tensor(x.sum().tolist()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    ],
)
def test_the_tape_refuses_operators_that_a_gpu_would_wait_for(function):
    x = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match="while a graph is recorded"):
        TapeRecorder().record(lambda: function(x))


def test_a_tape_executes_nothing_until_it_is_replayed_and_freezes_the_host():
    x = torch.tensor([1.0, 2.0])
    total = torch.zeros(2)
    factor = 3.0

    def run() -> torch.Tensor:
        total.add_(x * factor)
        return total * 1

    result, replay = TapeRecorder().record(run)
    assert total.tolist() == [0.0, 0.0]
    assert result.isnan().all()
    factor = 5.0
    x.fill_(2.0)
    replay()
    replay()
    assert total.tolist() == result.tolist() == [12.0, 12.0]
