"""Training step of moefold for benchmarks: for a whole model, one MoE layer or a stack of layers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moefold.bench.shape import BenchPart, BenchRouting
from moefold.comm.groups import ParallelGroups
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.cost.layer_spec import model_weights
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import TORCH_DTYPES, Transformer, module_settings
from moefold.parallel.batch import Batch
from moefold.parallel.kernels.select import apply_kernels, select_kernels
from moefold.parallel.parallelize import parallelize
from moefold.topology.layout import fold
from moefold.train.train_step import TrainingStep

STEER_STRENGTH = 8.0
"""Strength of the steered direction over the noise, so large that the router chooses the intended experts."""


def orthonormal_directions(num_experts: int, hidden_size: int, generator: torch.Generator) -> Tensor:
    """Return E random orthonormal rows, [E, H], with E <= H."""
    assert num_experts <= hidden_size
    matrix = torch.randn(hidden_size, num_experts, generator=generator, device=generator.device)
    return torch.linalg.qr(matrix)[0].t().contiguous()


def balanced_choices(count: int, model: ModelConfig, device: torch.device) -> Tensor:
    """Return balanced choices of K experts for `count` tokens, int64 [count, K]. Expert counts differ by at most 1.

    The experts of a token are consecutive, so with group-limited routing they stay within few groups.
    """
    index = torch.arange(count * model.experts.top_k, device=device)
    return (index % model.experts.num_experts).view(count, model.experts.top_k)


@torch.no_grad()
def balanced_states(count: int, routers: Sequence[Tensor], model: ModelConfig, generator: torch.Generator) -> Tensor:
    """Set the routers' weights so that routing is balanced, and return the random states, [count, H]."""
    rows_EH = orthonormal_directions(model.experts.num_experts, model.hidden_size, generator)
    for router in routers:
        router.copy_(rows_EH)
    noise = torch.randn(count, model.hidden_size, generator=generator, device=generator.device)
    return _add_expert_directions(noise, rows_EH, model)


@torch.no_grad()
def steer_embedding(embedding: Tensor, routers: Sequence[Tensor], model: ModelConfig) -> None:
    """Steer the embedding so that each token id routes to fixed experts, balanced over random tokens."""
    generator = torch.Generator(embedding.device).manual_seed(0)
    rows_EH = orthonormal_directions(model.experts.num_experts, model.hidden_size, generator)
    for router in routers:
        router.copy_(rows_EH)
    embedding.copy_(_add_expert_directions(embedding / embedding.std(), rows_EH, model))


def _add_expert_directions(noise_NH: Tensor, rows_EH: Tensor, model: ModelConfig) -> Tensor:
    ids_NK = balanced_choices(len(noise_NH), model, noise_NH.device)
    strength_K = torch.linspace(STEER_STRENGTH + 1.0, STEER_STRENGTH, model.experts.top_k, device=noise_NH.device)
    chosen_NE = torch.zeros(len(noise_NH), model.experts.num_experts, device=noise_NH.device)
    chosen_NE.scatter_(1, ids_NK, strength_K.expand_as(ids_NK).contiguous())
    return noise_NH + chosen_NE @ rows_EH


StepFunction = Callable[[], object]
"""Forward and backward on a fixed batch, followed by the optimizer step for a whole model."""

OURS = "moefold"


class ModelStep:
    """Training step of a whole model: float32 master weights, AdamW, the same batch. Needs a process group of size 1.

    Attributes:
        tokens: int64 [B, S].
        labels: int64 [B, S].
        first_moe_layer: first MoE layer, once the step is built.
    """

    first_moe_layer: MoELayer

    def __init__(self, cfg: Config, routing: BenchRouting, device: torch.device) -> None:
        self.cfg = cfg
        self.part: BenchPart = "model"
        self.device = device
        self.routing = routing
        generator = torch.Generator().manual_seed(cfg.run.seed)
        shape = (cfg.train.global_batch_size, cfg.train.seq_len + 1)
        samples = torch.randint(cfg.model.vocab_size, shape, generator=generator).to(device)
        self.tokens = samples[:, :-1].contiguous()
        self.labels = samples[:, 1:].contiguous()

    def build(self) -> StepFunction:
        """Build the trainer's full step, with gradient norm, clipping, schedule and metrics. Every degree is 1."""
        model = parallelize(self.cfg, ParallelGroups.create(fold(world_size=1), self.device))
        stage = model.stages[0]
        self.first_moe_layer = next(iter(stage.moe_layers().values()))
        if self.routing == "balanced":
            steer_embedding(
                stage.embedding.weight, [layer.router.weight for layer in stage.moe_layers().values()], self.cfg.model
            )
        training = TrainingStep(model, self.cfg)
        weights = torch.full(self.tokens.shape, 1.0 / self.tokens.numel(), device=self.device)
        sample_ids = torch.arange(len(self.tokens), device=self.device)
        batch = Batch(self.tokens, {"labels": self.labels, "weights": weights, "sample_ids": sample_ids})
        self._result = training.run(batch, 1)

        def step() -> None:
            self._result = training.run(batch, 1)

        return step

    def expert_load(self) -> float:
        """Return routed tokens of the most loaded expert over the mean, in the first MoE layer, of the last step."""
        return self._result.expert_load[0] if self._result.expert_load else 1.0


class LayerStep:
    """Forward and backward of one MoE layer or of a layer stack, in the run's dtype.

    Attributes:
        model: the layers.
        x: hidden states [S, B, H].
        grad: gradient of the output, [S, B, H].
        module: the module that runs: the layers or the first MoE layer.
        first_moe_layer: first MoE layer.
    """

    def __init__(self, cfg: Config, part: BenchPart, routing: BenchRouting, device: torch.device) -> None:
        self.cfg = cfg
        self.part = part
        self.device = device
        self.routing = routing
        self.model = build_layers(cfg, range(cfg.model.num_layers), device)
        layers = self.model.moe_layers()
        generator = torch.Generator(device).manual_seed(cfg.run.seed)
        shape = (cfg.train.seq_len, cfg.train.global_batch_size, cfg.model.hidden_size)
        if routing == "balanced":
            routers = [layer.router.weight for layer in layers.values()]
            states = balanced_states(shape[0] * shape[1], routers, cfg.model, generator).view(shape)
        else:
            states = torch.randn(shape, generator=generator, device=device)
        dtype = TORCH_DTYPES[cfg.run.dtype]
        self.x = states.to(dtype)
        self.grad = torch.randn(shape, generator=generator, device=device).to(dtype)
        self.first_moe_layer = next(iter(layers.values()))
        self.module: nn.Module = self.model if part == "stack" else self.first_moe_layer

    def build(self) -> StepFunction:
        """Build the step of our modules, with the kernels that the trainer uses."""
        return forward_backward_step(
            lambda x: self.module(x), self.x, self.grad, list(self.module.parameters()), self.first_moe_layer
        )

    def expert_load(self) -> float:
        """Return routed tokens of the most loaded expert over the mean, in the first MoE layer, of the last step."""
        counts_E = self.first_moe_layer.stats.tokens_per_expert_E
        return float(counts_E.max() / counts_E.double().mean()) if counts_E.sum() else 1.0


def our_step(
    cfg: Config, part: BenchPart, device: torch.device, routing: BenchRouting = "natural"
) -> ModelStep | LayerStep:
    """Create our step of a part. A whole model needs a process group of size 1."""
    return ModelStep(cfg, routing, device) if part == "model" else LayerStep(cfg, part, routing, device)


def forward_backward_step(
    forward: Callable[[Tensor], Any],
    x: Tensor,
    grad: Tensor,
    parameters: list[nn.Parameter],
    moe_layer: MoELayer | None = None,
) -> StepFunction:
    """Return a forward and backward step from given states and gradient. A second output is a balance loss."""

    def step() -> None:
        if moe_layer is not None:
            moe_layer.begin_step(1)
        leaf = x.detach().requires_grad_()
        y = forward(leaf)
        if isinstance(y, tuple):
            y = y[0]
        torch.autograd.backward(y, grad.view_as(y))
        for parameter in parameters:
            parameter.grad = None

    return step


def build_layers(cfg: Config, layers: Iterable[int], device: torch.device, *, is_whole: bool = False) -> Transformer:
    """Build layers of a shape, by their numbers, with the kernels of the trainer.

    Args:
        is_whole: True: with embedding and head, and float32 weights. False: a middle pipeline stage, from hidden states
            to hidden states, with weights in the dtype of the run and float32 routers.
    """
    with torch.device("meta"):
        model = Transformer(cfg.model, module_settings(cfg), layers, is_first=is_whole, is_last=is_whole)
    if not is_whole:
        model.to(TORCH_DTYPES[cfg.run.dtype])
        for layer in model.moe_layers().values():
            layer.router.to(torch.float32)
    model.to_empty(device=device)
    draw_weights(model, cfg.run, cfg.model)
    apply_kernels(model, select_kernels(cfg, device))
    model.set_positions(torch.arange(cfg.train.seq_len, device=device))
    return model.train()


@torch.no_grad()
def draw_weights(model: Transformer, run: RunConfig, sizes: ModelConfig) -> None:
    """Draw the weights of a model on its device: matrices normal, norms one, biases and buffers zero.

    `moefold.model.weight_init.init_weights` draws on the CPU, which takes a minute for a layer of DeepSeek-V3. The
    speed of a step does not depend on the values.
    """
    weights = model_weights(sizes)
    generator: torch.Generator | None = None
    for name, parameter in model.named_parameters():
        generator = generator or torch.Generator(parameter.device).manual_seed(run.seed)
        if "norm" in name:
            parameter.fill_(1.0)
        elif not weights[name].is_matrix:
            parameter.zero_()
        else:
            parameter.normal_(0.0, sizes.init_std, generator=generator)
    for name, buffer in model.named_buffers():
        assert "inv_freq" not in name
        buffer.zero_()
