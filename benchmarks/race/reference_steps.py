"""Steps of other implementations on the batch, states and routing of ours: plain torch, transformers, frameworks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.race.other_frameworks import Peer, PeerUnavailableError, build_peer_layer, unavailable_reason
from benchmarks.race.reference_runs import training_step
from benchmarks.race.torch_baseline import ExpertsImplementation, TorchBaseline
from moefold.bench.our_step import LayerStep, ModelStep, StepFunction, forward_backward_step, steer_embedding
from moefold.config.groups.router import aux_coefficient
from moefold.config.schema import Config
from moefold.convert.families.hf_config import families_for
from moefold.errors import ConfigError
from moefold.model.transformer import TORCH_DTYPES, build_model
from moefold.model.weight_init import init_weights


def reference_steps_of(ours: ModelStep | LayerStep) -> "ReferenceModelSteps | ReferenceLayerSteps":
    """Return the builder of the steps that race our step."""
    return ReferenceModelSteps(ours) if isinstance(ours, ModelStep) else ReferenceLayerSteps(ours)


class ReferenceModelSteps:
    """Builder of training steps of whole models: float32 master weights, AdamW, the batch of our step."""

    def __init__(self, ours: ModelStep) -> None:
        self._ours = ours
        self._cfg = ours.cfg
        self._dtype = TORCH_DTYPES[ours.cfg.run.dtype]
        self._hf: tuple[nn.Module, StepFunction] | None = None

    def build_torch_baseline(self, experts: ExpertsImplementation) -> StepFunction:
        """Build the step of the same model, batch and optimizer in plain torch."""
        model = build_model(self._cfg).to_empty(device=self._ours.device)
        init_weights(model, self._cfg.model, self._cfg.run.seed)
        if self._ours.routing == "balanced":
            steer_embedding(
                model.embedding.weight, [x.router.weight for x in model.moe_layers().values()], self._cfg.model
            )
        plain = TorchBaseline(self._cfg, self._dtype, experts)
        return self._training_step(model, lambda: plain.loss(model, self._ours.tokens, self._ours.labels))

    def build_transformers(self, experts: str) -> StepFunction:
        """Build the step of transformers' model with its router loss, in the run's dtype with float32 AdamW."""
        if self._hf is None:
            model: Any = hugging_face_model(self._cfg, self._ours.device, torch.float32)
            if self._ours.routing == "balanced":
                routers = [w for name, w in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
                steer_embedding(model.get_input_embeddings().weight, routers, self._cfg.model)
            masters = [p.detach().clone() for p in model.parameters()]
            model.to(self._dtype)
            step = self._training_step(
                model, lambda: model(input_ids=self._ours.tokens, labels=self._ours.tokens).loss, masters
            )
            self._hf = model, step
        model, step = self._hf

        def run() -> None:
            model.set_experts_implementation(experts)
            step()

        return run

    def build_peer(self, peer: Peer) -> StepFunction:
        """Raise PeerUnavailableError: peers are compared by their MoE layer only."""
        raise PeerUnavailableError(unavailable_reason(peer, self._cfg, "model", self._ours.device))

    def _training_step(
        self, model: nn.Module, loss: Callable[[], Tensor], masters: list[Tensor] | None = None
    ) -> StepFunction:
        """Return forward, backward and AdamW; on float32 master weights if the model has low precision."""
        is_low = self._dtype != torch.float32
        return training_step(model, loss, self._cfg.train.lr, masters if is_low else None)


class ReferenceLayerSteps:
    """Builder of forward and backward of one MoE layer or of a layer stack, with the states of our step."""

    def __init__(self, ours: LayerStep) -> None:
        self._ours = ours
        self._cfg = ours.cfg
        self._dtype = TORCH_DTYPES[ours.cfg.run.dtype]
        self._x_BSH = ours.x.transpose(0, 1).contiguous()
        self._grad_BSH = ours.grad.transpose(0, 1).contiguous()
        self._hf: Any = None

    def build_torch_baseline(self, experts: ExpertsImplementation) -> StepFunction:
        """Build the plain torch step with the same weights and states."""
        plain = TorchBaseline(self._cfg, self._dtype, experts)

        def forward(states: Tensor) -> tuple[Tensor, Tensor]:
            if self._ours.part == "stack":
                return plain.stack(self._ours.model, states)
            return plain.layer(self._ours.first_moe_layer, states)

        return forward_backward_step(forward, self._x_BSH, self._grad_BSH, list(self._ours.module.parameters()))

    def build_transformers(self, experts: str) -> StepFunction:
        """Build the step of transformers' layers of the same sizes."""
        if self._hf is None:
            self._hf = hugging_face_model(self._cfg, self._ours.device, self._dtype)
            if self._ours.routing == "balanced":
                _copy_routers(self._hf, [layer.router.weight for layer in self._ours.model.moe_layers().values()])
        model = self._hf
        body = model.model if self._ours.part == "stack" else model.model.layers[0].mlp

        def forward(states: Tensor) -> Any:
            if self._ours.part == "stack":
                return model.model(inputs_embeds=states, use_cache=False).last_hidden_state
            return body(states)

        step = forward_backward_step(forward, self._x_BSH, self._grad_BSH, list(body.parameters()))

        def run() -> None:
            model.set_experts_implementation(experts)
            step()

        return run

    def build_peer(self, peer: Peer) -> StepFunction:
        """Build the step of a peer's layer with our weights and states.

        Raises:
            PeerUnavailableError: the peer is not installed, or cannot compute this layer.
        """
        if reason := unavailable_reason(peer, self._cfg, self._ours.part, self._ours.device):
            raise PeerUnavailableError(reason)
        layer = build_peer_layer(peer, self._ours.first_moe_layer, self._cfg, self._ours.x)
        return forward_backward_step(layer, self._ours.x, self._ours.grad, list(layer.parameters()))


def hugging_face_model(cfg: Config, device: torch.device, dtype: torch.dtype) -> Any:
    """Create a randomly initialised transformers model with the recipe's sizes and its router loss."""
    import transformers

    family = next(families_for(cfg.model), None)
    if family is None:
        raise ConfigError("transformers has no model that computes this shape")
    keys = family.write(cfg.model)
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
