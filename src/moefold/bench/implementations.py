"""Benchmarked implementations of a shape's step: moefold, plain torch, transformers and installed frameworks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from moefold.bench.dispatch import balanced_states, steer_embedding
from moefold.bench.layers import build_layers
from moefold.bench.other_frameworks import PEERS, Peer, PeerUnavailableError, build_peer_layer, unavailable_reason
from moefold.bench.shape import BenchPart, BenchRouting
from moefold.bench.torch_baseline import ExpertsImplementation, TorchBaseline, baseline_unsupported_reason
from moefold.comm.groups import ParallelGroups
from moefold.comm.torch_compat import foreach_copy_
from moefold.config.routing import aux_coefficient
from moefold.config.schema import Config
from moefold.convert.hf_config import families_for
from moefold.errors import ConfigError
from moefold.extras import install_command
from moefold.model.init import init_weights
from moefold.model.moe.layer import MoELayer
from moefold.model.transformer import TORCH_DTYPES, build_model
from moefold.parallel.batch import Batch
from moefold.parallel.parallelize import parallelize
from moefold.topology.layout import fold
from moefold.train.train_step import TrainingStep

StepFunction = Callable[[], object]
"""Forward and backward on a fixed batch; for a whole model with the optimizer step."""

OURS = "moefold"
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Experts implementations of transformers for training; the faster one is compared.

batched_mm is left out: it copies the experts' weights for each token (23 GiB at the small shape) and is slower.
"""


@dataclass(frozen=True)
class Competitors:
    """Implementations of one comparison.

    Attributes:
        steps: step functions by name, `OURS` included.
        peers: names of the third-party frameworks among them.
        absent: implementations that are left out, each with the reason.
        first_moe_layer: first MoE layer of our model.
        expert_load: returns routed tokens of the most loaded expert over the mean, in the first MoE layer.
    """

    steps: dict[str, StepFunction]
    peers: list[str]
    absent: list[str]
    first_moe_layer: MoELayer
    expert_load: Callable[[], float]


def build_competitors(cfg: Config, part: BenchPart, routing: BenchRouting, device: torch.device) -> Competitors:
    """Build all implementations. A whole model needs a process group of size 1.

    Raises:
        ConfigError: transformers is missing, or has no such model.
    """
    if find_spec("transformers") is None:
        raise ConfigError(f"moefold bench compares with transformers, which is missing: {install_command('hf')}")
    builder = _step_builder(cfg, part, routing, device)
    steps: dict[str, StepFunction] = {OURS: builder.build_moefold()}
    unsupported = baseline_unsupported_reason(cfg.model, with_attention=part != "layer")
    kinds: tuple[ExpertsImplementation, ...] = ("loop", "grouped_mm") if device.type == "cuda" else ("loop",)
    for kind in () if unsupported else kinds:
        steps[f"plain torch, {kind}"] = builder.build_torch_baseline(kind)
    for experts in EXPERTS_IMPLEMENTATIONS:
        steps[f"transformers, {experts}"] = builder.build_transformers(experts)
    absent = [f"plain torch: {unsupported}"] if unsupported else []
    peers: dict[str, StepFunction] = {}
    for peer in PEERS:
        try:
            peers[peer.title] = builder.build_peer(peer)
        except PeerUnavailableError as reason:
            absent.append(f"{peer.name}: {reason}")
    return Competitors(steps | peers, list(peers), absent, builder.first_moe_layer, builder.expert_load)


def build_moefold_step(cfg: Config, part: BenchPart, device: torch.device) -> StepFunction:
    """Build our step only, with natural routing. A whole model needs a process group of size 1."""
    return _step_builder(cfg, part, "natural", device).build_moefold()


def _step_builder(
    cfg: Config, part: BenchPart, routing: BenchRouting, device: torch.device
) -> "_ModelSteps | LayerSteps":
    return (_ModelSteps if part == "model" else LayerSteps)(cfg, part, routing, device)


class _ModelSteps:
    """Builder of training steps of whole models: float32 master weights, AdamW, the same batch."""

    first_moe_layer: MoELayer

    def __init__(self, cfg: Config, part: BenchPart, routing: BenchRouting, device: torch.device) -> None:
        self._cfg = cfg
        self._device = device
        self._routing = routing
        self._dtype = TORCH_DTYPES[cfg.run.dtype]
        self._hf: tuple[nn.Module, StepFunction] | None = None
        generator = torch.Generator().manual_seed(cfg.run.seed)
        shape = (cfg.train.global_batch_size, cfg.train.seq_len + 1)
        samples = torch.randint(cfg.model.vocab_size, shape, generator=generator).to(device)
        self._tokens = samples[:, :-1].contiguous()
        self._labels = samples[:, 1:].contiguous()

    def build_moefold(self) -> StepFunction:
        """Build the trainer's full step, with gradient norm, clipping, schedule and metrics; every degree is 1."""
        model = parallelize(self._cfg, ParallelGroups.create(fold(world_size=1), self._device))
        stage = model.stages[0]
        self.first_moe_layer = next(iter(stage.moe_layers().values()))
        if self._routing == "balanced":
            steer_embedding(
                stage.embedding.weight, [layer.router.weight for layer in stage.moe_layers().values()], self._cfg.model
            )
        training = TrainingStep(model, self._cfg)
        weights = torch.full(self._tokens.shape, 1.0 / self._tokens.numel(), device=self._device)
        sample_ids = torch.arange(len(self._tokens), device=self._device)
        batch = Batch(self._tokens, {"labels": self._labels, "weights": weights, "sample_ids": sample_ids})
        self._result = training.run(batch, 1)

        def step() -> None:
            self._result = training.run(batch, 1)

        return step

    def expert_load(self) -> float:
        """Return the expert load of our last step."""
        return self._result.expert_load[0] if self._result.expert_load else 1.0

    def build_torch_baseline(self, experts: ExpertsImplementation) -> StepFunction:
        """Build the step of the same model, batch and optimizer in plain torch."""
        model = build_model(self._cfg).to_empty(device=self._device)
        init_weights(model, self._cfg.model, self._cfg.run.seed)
        if self._routing == "balanced":
            steer_embedding(
                model.embedding.weight, [x.router.weight for x in model.moe_layers().values()], self._cfg.model
            )
        plain = TorchBaseline(self._cfg, self._dtype, experts)
        return self._training_step(model, lambda: plain.loss(model, self._tokens, self._labels))

    def build_transformers(self, experts: str) -> StepFunction:
        """Build the step of transformers' model with its router loss, in the run's dtype with float32 AdamW."""
        if self._hf is None:
            model: Any = hugging_face_model(self._cfg, self._device, torch.float32)
            if self._routing == "balanced":
                routers = [w for name, w in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
                steer_embedding(model.get_input_embeddings().weight, routers, self._cfg.model)
            masters = [p.detach().clone() for p in model.parameters()]
            model.to(self._dtype)
            step = self._training_step(model, lambda: model(input_ids=self._tokens, labels=self._tokens).loss, masters)
            self._hf = model, step
        model, step = self._hf

        def run() -> None:
            model.set_experts_implementation(experts)
            step()

        return run

    def build_peer(self, peer: Peer) -> StepFunction:
        """Raise PeerUnavailableError: peers are compared by their MoE layer only."""
        raise PeerUnavailableError(unavailable_reason(peer, self._cfg, "model", self._device))

    def _training_step(
        self, model: nn.Module, loss: Callable[[], Tensor], masters: list[Tensor] | None = None
    ) -> StepFunction:
        """Return forward, backward and AdamW; on float32 master weights if the model has low precision."""
        parameters: list[Tensor] = list(model.parameters())
        if masters is None or self._dtype == torch.float32:
            optimizer = torch.optim.AdamW(parameters, lr=self._cfg.train.lr, fused=True)

            def step() -> None:
                loss().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            return step
        optimizer = torch.optim.AdamW(masters, lr=self._cfg.train.lr, fused=True)

        @torch.no_grad()
        def update() -> None:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            foreach_copy_(parameters, masters)

        def mixed_step() -> None:
            loss().backward()
            update()

        return mixed_step


class LayerSteps:
    """Builder of forward and backward of one MoE layer or of a layer stack, in the run's dtype."""

    def __init__(self, cfg: Config, part: BenchPart, routing: BenchRouting, device: torch.device) -> None:
        self._cfg = cfg
        self._part = part
        self._device = device
        self._dtype = TORCH_DTYPES[cfg.run.dtype]
        self._model = build_layers(cfg, range(cfg.model.num_layers), device)
        layers = self._model.moe_layers()
        generator = torch.Generator(device).manual_seed(cfg.run.seed)
        shape = (cfg.train.seq_len, cfg.train.global_batch_size, cfg.model.hidden_size)
        if routing == "balanced":
            routers = [layer.router.weight for layer in layers.values()]
            states = balanced_states(shape[0] * shape[1], routers, cfg.model, generator).view(shape)
        else:
            states = torch.randn(shape, generator=generator, device=device)
        self._routing = routing
        self._x = states.to(self._dtype)
        self._grad = torch.randn(shape, generator=generator, device=device).to(self._dtype)
        self.first_moe_layer = next(iter(layers.values()))
        self._module: nn.Module = self._model if part == "stack" else self.first_moe_layer
        self._hf: Any = None

    def build_moefold(self) -> StepFunction:
        """Build the step of our modules, with the kernels that the trainer uses."""
        parameters = list(self._module.parameters())
        return _forward_backward_step(lambda x: self._module(x), self._x, self._grad, parameters, self.first_moe_layer)

    def expert_load(self) -> float:
        """Return the expert load of our last step."""
        counts_E = self.first_moe_layer.stats.tokens_per_expert_E
        return float(counts_E.max() / counts_E.double().mean()) if counts_E.sum() else 1.0

    def build_torch_baseline(self, experts: ExpertsImplementation) -> StepFunction:
        """Build the plain torch step with the same weights and states."""
        plain = TorchBaseline(self._cfg, self._dtype, experts)
        x = self._x.transpose(0, 1).contiguous()
        grad = self._grad.transpose(0, 1).contiguous()

        def forward(states: Tensor) -> tuple[Tensor, Tensor]:
            if self._part == "stack":
                return plain.stack(self._model, states)
            return plain.layer(self.first_moe_layer, states)

        return _forward_backward_step(forward, x, grad, list(self._module.parameters()))

    def build_transformers(self, experts: str) -> StepFunction:
        """Build the step of transformers' layers of the same sizes."""
        if self._hf is None:
            self._hf = hugging_face_model(self._cfg, self._device, self._dtype)
            if self._routing == "balanced":
                _copy_routers(self._hf, [layer.router.weight for layer in self._model.moe_layers().values()])
        model = self._hf
        x = self._x.transpose(0, 1).contiguous()
        grad = self._grad.transpose(0, 1).contiguous()
        body = model.model if self._part == "stack" else model.model.layers[0].mlp

        def forward(states: Tensor) -> Any:
            if self._part == "stack":
                return model.model(inputs_embeds=states, use_cache=False).last_hidden_state
            return body(states)

        step = _forward_backward_step(forward, x, grad, list(body.parameters()))

        def run() -> None:
            model.set_experts_implementation(experts)
            step()

        return run

    def build_peer(self, peer: Peer) -> StepFunction:
        """Build the step of a peer's layer with our weights and states.

        Raises:
            PeerUnavailableError: the peer is not installed, or cannot compute this layer.
        """
        if reason := unavailable_reason(peer, self._cfg, self._part, self._device):
            raise PeerUnavailableError(reason)
        layer = build_peer_layer(peer, self.first_moe_layer, self._cfg, self._x)
        return _forward_backward_step(layer, self._x, self._grad, list(layer.parameters()))


def hugging_face_model(cfg: Config, device: torch.device, dtype: torch.dtype) -> Any:
    """Create a randomly initialised transformers model with the recipe's sizes and its router loss."""
    import transformers

    families = families_for(cfg.model)
    if not families:
        raise ConfigError("transformers has no model that computes this shape")
    keys = families[0].write(cfg.model)
    keys |= {
        "max_position_embeddings": cfg.train.seq_len,
        "output_router_logits": True,
        "router_aux_loss_coef": aux_coefficient(cfg.moe),
        "use_cache": False,
    }
    config = transformers.AutoConfig.for_model(**keys)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


@torch.no_grad()
def _copy_routers(theirs: nn.Module, ours: Sequence[Tensor]) -> None:
    routers = [w for name, w in theirs.named_parameters() if name.endswith(("mlp.gate.weight", "router.weight"))]
    for target, source in zip(routers, ours, strict=True):
        target.copy_(source)


def _forward_backward_step(
    forward: Callable[[Tensor], Any],
    x: Tensor,
    grad: Tensor,
    parameters: list[nn.Parameter],
    moe_layer: MoELayer | None = None,
) -> StepFunction:
    def step() -> None:
        if moe_layer is not None:
            moe_layer.begin_step(1)
        leaf = x.detach().requires_grad_()
        y = forward(leaf)
        if isinstance(y, tuple):
            # The second element is a balance loss or its inputs.
            y = y[0]
        torch.autograd.backward(y, grad.view_as(y))
        for parameter in parameters:
            parameter.grad = None

    return step
