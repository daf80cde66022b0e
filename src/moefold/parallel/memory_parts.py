"""Which part of the model makes what is in memory: names for the ledger, put around the seams of the maths."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moefold.metrics.ledger import Ledger
from moefold.model.attention import Attention
from moefold.model.latent_attention import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.norm import AllHeadsNorm, RMSNorm
from moefold.model.transformer import Block, Embedding, Head, Transformer
from moefold.moe.experts import Experts
from moefold.moe.layer import MoELayer
from moefold.moe.router import Router

METHODS: tuple[tuple[type, str, str], ...] = (
    (RMSNorm, "normalise", "norms"),
    (AllHeadsNorm, "forward", "norms"),
    (Attention, "forward", "attention"),
    (LatentAttention, "forward", "attention"),
    (Block, "forward", "residual stream"),
    (SwiGLU, "forward", "dense MLP"),
    (Router, "forward", "router"),
    (MoELayer, "forward", "router"),
    (Experts, "forward", "experts"),
    (Embedding, "forward", "embedding"),
    (Head, "losses", "logits"),
    (Head, "logits", "logits"),
)
"""Methods whose memory belongs to a part; inside, other parts may have theirs."""
POSTPONED, PIPELINE = "postponed gradients", "pipeline"
"""What a backward pass leaves for another one, and what is sent or was received."""
STATES = ("weights", "gathered weights", "gradients", "optimizer", "buffers", "batch")
NOT_ACTIVATIONS = (*STATES, "workspace", "pipeline buffers", "other")
DISPATCHES = (
    "dispatch_preprocess",
    "dispatch_postprocess",
    "combine_preprocess",
    "combine_postprocess",
    "take_weights",
)
EXCHANGES = ("dispatch_steps", "combine_steps")


@contextmanager
def named_parts(stages: list[Transformer], ledger: Ledger) -> Iterator[None]:
    """Inside, the ledger knows which part of the stages runs, and in which pass."""
    undo: list[tuple[Any, str, Any]] = []
    handles = []

    def label(owner: Any, method: str, part: str, labelled: Any = ledger.labelled) -> None:
        undo.append((owner, method, vars(owner).get(method)))
        object.__setattr__(owner, method, labelled(part, getattr(owner, method)))

    dispatchers: dict[int, Any] = {}
    for stage in stages:
        handles += _watch_passes(stage, ledger)
        for module in stage.modules():
            for kind, method, part in METHODS:
                if isinstance(module, kind):
                    label(module, method, part)
            if isinstance(module, Attention | LatentAttention):
                label(module, "core", "core attention")
            if isinstance(module, MoELayer):
                dispatchers[id(module.dispatcher)] = module.dispatcher
                if module.shared is not None:
                    label(module.shared, "forward", "shared experts")
    for dispatcher in dispatchers.values():
        for method in DISPATCHES:
            label(dispatcher, method, "dispatch buffers")
        for method in EXCHANGES:
            label(dispatcher, method, "dispatch buffers", ledger.labelled_steps)
    try:
        yield
    finally:
        for owner, method, before in reversed(undo):
            if before is None:
                object.__delattr__(owner, method)
            else:
                object.__setattr__(owner, method, before)
        for handle in handles:
            handle.remove()


def settle_states(
    ledger: Ledger, stages: list[Transformer], optimizer: torch.optim.Optimizer, others: Iterable[Tensor] = ()
) -> None:
    """Tell the ledger of what is there before a step: weights, moments, and other tensors that stay."""
    for stage in stages:
        ledger.settle("weights", stage.parameters())
        ledger.settle("buffers", stage.buffers())
        if stage.rotation is not None:
            ledger.settle("buffers", (stage.rotation.cos, stage.rotation.sin))
    ledger.settle("optimizer", (x for state in optimizer.state.values() for x in state.values()))
    ledger.settle("batch", others)


def settle_gradients(ledger: Ledger, stages: list[Transformer]) -> None:
    """Tell the ledger which of the memory is gradients: reduced ones, and sums over micro-batches that are not yet."""
    for stage in stages:
        ledger.settle("gradients", (p.grad for p in stage.parameters() if p.grad is not None))
        for module in stage.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for one in () if group is None else group.fsdp_params:
                unsharded = getattr(one, "_unsharded_param", None)
                ledger.settle(
                    "gradients",
                    (p.grad for p in (one.sharded_param, unsharded) if p is not None and p.grad is not None),
                )
                if one.unsharded_accumulated_grad is not None:
                    ledger.settle("gradients", (one.unsharded_accumulated_grad,))


def _watch_passes(stage: Transformer, ledger: Ledger) -> list[Any]:
    """Let the ledger know when a forward pass of the stage begins, when it ends, and when its gradient comes."""

    def between() -> None:
        settle_gradients(ledger, [stage])
        ledger.settle_survivors(POSTPONED)

    def before_forward(module: nn.Module, args: Any) -> None:
        if ledger.phase == "before":
            # Torch's stages make room for all that they will get before the first of them runs.
            ledger.settle_unnamed("pipeline buffers")
        between()
        ledger.phase = "forward"

    def before_backward(grad: Tensor) -> None:
        between()
        ledger.phase = "backward"

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        ledger.phase = "backward"
        if output.requires_grad:
            output.register_hook(before_backward)

    return [stage.register_forward_pre_hook(before_forward), stage.register_forward_hook(after_forward)]
