"""Which part of the model makes what is in memory: names for the ledger, put around the seams of the maths."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.config.schedules import SCHEDULES
from moefold.metrics.ledger import Ledger
from moefold.metrics.memory_by_part import OFFLOADED, PARTS, PIPELINE, POSTPONED
from moefold.model.attention import Attention
from moefold.model.latent_attention import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.norm import AllHeadsNorm, RMSNorm
from moefold.model.steps import Begun, Steps
from moefold.model.transformer import Block, Embedding, Head, Transformer
from moefold.moe.experts import Experts
from moefold.moe.layer import MoELayer
from moefold.moe.router import Router
from moefold.parallel.late_gradients import LateGradients
from moefold.parallel.moments import states_in_memory
from moefold.parallel.parallelize import ParallelModel

METHODS: tuple[tuple[type, str, str], ...] = (
    (RMSNorm, "normalise", "norms"),
    (AllHeadsNorm, "forward", "norms"),
    (Attention, "forward", "attention"),
    (LatentAttention, "forward", "attention"),
    (SwiGLU, "forward", "dense MLP"),
    (Router, "forward", "router"),
    (Experts, "forward", "experts"),
    (Embedding, "forward", "embedding"),
    (Head, "losses", "logits"),
    (Head, "logits", "logits"),
)
"""Methods whose memory belongs to a part; inside, other parts may have theirs."""
STEPS: tuple[tuple[type, str], ...] = ((Block, "residual stream"), (MoELayer, "router"))
"""The same for the steps of modules that may pause."""
DISPATCH_PART = "dispatch buffers"
DISPATCHES = (
    "dispatch_preprocess",
    "dispatch_postprocess",
    "combine_preprocess",
    "combine_postprocess",
    "take_weights",
)
EXCHANGES = ("dispatch_steps", "combine_steps")


@contextmanager
def watched_passes(model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor]) -> Iterator[Ledger]:
    """A ledger of the forward and backward passes of a step, which are to run inside.

    Args:
        model: whose passes they are.
        optimizer: its moments.
        batch: tensors that were there before.
    """
    stages, ledger = model.stages, Ledger()
    settle_states(ledger, stages, optimizer, batch)
    with ledger, _named_parts(model, ledger):
        yield ledger
        # FSDP replaces shards by padded ones at its first step.
        settle_states(ledger, stages, optimizer)
        settle_gradients(ledger, stages)
        ledger.rename_alive(POSTPONED, PIPELINE)


def bytes_by_part(ledger: Ledger) -> list[int]:
    """A rank's row of `MemoryByPart`: the bytes of each part at the peak, and those now."""
    both = ledger.peak().by_part, ledger.current()
    assert all(found.keys() <= set(PARTS) for found in both), both
    return [found.get(part, 0) for found in both for part in PARTS]


@contextmanager
def _named_parts(model: ParallelModel, ledger: Ledger) -> Iterator[None]:
    """Inside, the ledger knows which part of the stages runs, and in which pass."""
    undo: list[tuple[Any, str, Any]] = []
    queues: list[LateGradients] = []

    def replace(owner: Any, method: str, by: Callable[[Any], Any]) -> None:
        undo.append((owner, method, vars(owner).get(method)))
        object.__setattr__(owner, method, by(getattr(owner, method)))

    def label(owner: Any, method: str, part: str, labelled: Any = ledger.labelled) -> None:
        replace(owner, method, partial(labelled, part))

    dispatchers: dict[int, Any] = {}
    for stage in model.stages:
        queues += _watch_postponed(stage, ledger)
        replace(stage, "steps", partial(_watched_steps, stage, ledger))
        for module in stage.modules():
            for kind, method, part in METHODS:
                if isinstance(module, kind):
                    label(module, method, part)
            for kind, part in STEPS:
                if isinstance(module, kind):
                    label(module, "steps", part, ledger.labelled_steps)
            if isinstance(module, Attention | LatentAttention):
                label(module, "core", "core attention")
            if isinstance(module, MoELayer):
                dispatchers[id(module.dispatcher)] = module.dispatcher
                if module.shared is not None:
                    label(module.shared, "forward", "shared experts")
    for dispatcher in dispatchers.values():
        for method in DISPATCHES:
            label(dispatcher, method, DISPATCH_PART)
        for method in EXCHANGES:
            label(dispatcher, method, DISPATCH_PART, ledger.labelled_steps)
    if model.offload is not None:
        label(model.offload.link, "room_on_device", OFFLOADED)
    try:
        yield
    finally:
        for queue in queues:
            queue.left = None
        for owner, method, before in reversed(undo):
            if before is None:
                object.__delattr__(owner, method)
            else:
                object.__setattr__(owner, method, before)


def settle_states(
    ledger: Ledger, stages: list[Transformer], optimizer: torch.optim.Optimizer, others: Iterable[Tensor] = ()
) -> None:
    """Tell the ledger of what is there before a step: weights, moments, and other tensors that stay."""
    for stage in stages:
        ledger.settle("weights", stage.parameters())
        ledger.settle("buffers", stage.buffers())
        if stage.rotation is not None:
            ledger.settle("buffers", (stage.rotation.cos, stage.rotation.sin))
    ledger.settle("optimizer", states_in_memory(optimizer))
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


def _watched_steps(stage: Transformer, ledger: Ledger, steps: Callable[..., Steps[Tensor]]) -> Callable[..., Any]:
    """The steps of a stage; the ledger learns when they run, and when the gradient of their result comes."""

    def before_backward(grad: Tensor) -> None:
        _settle_left(stage, ledger)

    def run(*args: Any, **kwargs: Any) -> Steps[Tensor]:
        if ledger.phase == "before":
            # Torch's stages make room for all that they will get before the first of them runs.
            ledger.settle_unnamed("pipeline buffers")
        # Beside the backward pass of another micro-batch, what that one has made so far is not what it leaves.
        if torch._C._current_graph_task_id() == -1:
            _settle_left(stage, ledger)
        begun = Begun(steps(*args, **kwargs))
        while True:
            ledger.phase = "forward"
            begun.go_on()
            ledger.phase = "backward"
            if begun.is_done:
                break
            yield
        output = begun.finish()
        if output.requires_grad:
            output.register_hook(before_backward)
        return output

    return run


def _watch_postponed(stage: Transformer, ledger: Ledger) -> list[LateGradients]:
    """Name what a backward pass leaves for its weight gradients at its end: a schedule may take it up at once."""
    found: list[LateGradients] = []
    for module in stage.modules():
        queue: Any = getattr(module, "later", None)
        if isinstance(queue, LateGradients) and queue not in found:
            queue.left = partial(_settle_left, stage, ledger)
            found.append(queue)
    return found


def _settle_left(stage: Transformer, ledger: Ledger) -> None:
    """What the passes up to now have left is gradients, or waits for another pass."""
    settle_gradients(ledger, [stage])
    p = stage.cfg.parallel
    if p.pp > 1:
        # What is left without a split backward pass is on its way to the stage before.
        ledger.settle_survivors(POSTPONED if SCHEDULES[p.schedule].splits_backward else PIPELINE)
