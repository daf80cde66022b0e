"""Which part of the model makes what is in memory: names for the ledger, put around the seams of the maths."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.comm.resumable import Resumable, ResumableTask
from moefold.metrics.memory_breakdown import DELAYED_WGRAD, PARTS, PIPELINE, RELOADED
from moefold.metrics.memory_tracker import MemoryTracker
from moefold.model.attention import Attention
from moefold.model.mla import LatentAttention
from moefold.model.mlp import SwiGLU
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import Router
from moefold.model.norm import FullWidthQKNorm, RMSNorm
from moefold.model.transformer import Block, Embedding, Head, Transformer
from moefold.optim.state_offload import states_on_device
from moefold.parallel.parallelize import ParallelModel
from moefold.parallel.wgrad_store import WeightGradStore
from moefold.topology.schedule_tables import SCHEDULES

TRACKED_METHODS: tuple[tuple[type, str, str], ...] = (
    (RMSNorm, "normalize", "norms"),
    (FullWidthQKNorm, "forward", "norms"),
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
TRACKED_RESUMABLES: tuple[tuple[type, str], ...] = ((Block, "residual stream"), (MoELayer, "router"))
"""The same for the steps of modules that may pause."""
DISPATCH_PART = "dispatch buffers"
DISPATCH_METHODS = (
    "dispatch_preprocess",
    "dispatch_postprocess",
    "combine_preprocess",
    "combine_postprocess",
    "dispatch_probs",
)
ASYNC_DISPATCH_METHODS = ("dispatch_async", "combine_async")


@contextmanager
def track_memory(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor]
) -> Iterator[MemoryTracker]:
    """A ledger of the forward and backward passes of a step, which are to run inside.

    Args:
        model: whose passes they are.
        optimizer: its moments.
        batch: tensors that were there before.
    """
    stages = model.stages
    ledger = MemoryTracker()
    tag_states(ledger, stages, optimizer, batch)
    with ledger, _label_parts(model, ledger):
        yield ledger
        # FSDP replaces shards by padded ones at its first step.
        tag_states(ledger, stages, optimizer)
        tag_gradients(ledger, stages)
        ledger.retag(DELAYED_WGRAD, PIPELINE)


def bytes_by_part(tracker: MemoryTracker) -> list[int]:
    """A rank's row of `MemoryByPart`: the bytes of each part at the peak, and those now."""
    both = tracker.peak().by_part, tracker.current()
    assert all(found.keys() <= set(PARTS) for found in both), both
    return [found.get(part, 0) for found in both for part in PARTS]


@contextmanager
def _label_parts(model: ParallelModel, tracker: MemoryTracker) -> Iterator[None]:
    """Inside, the ledger knows which part of the stages runs, and in which pass."""
    undo: list[tuple[Any, str, Any]] = []
    queues: list[WeightGradStore] = []

    def replace(owner: Any, method: str, by: Callable[[Any], Any]) -> None:
        undo.append((owner, method, vars(owner).get(method)))
        object.__setattr__(owner, method, by(getattr(owner, method)))

    def label(owner: Any, method: str, part: str, labelled: Any = tracker.scoped) -> None:
        replace(owner, method, partial(labelled, part))

    dispatchers: dict[int, Any] = {}
    for stage in model.stages:
        queues += _track_delayed_wgrad(stage, tracker)
        replace(stage, "forward_resumable", partial(_track_forward, stage, tracker))
        for module in stage.modules():
            for kind, method, part in TRACKED_METHODS:
                if isinstance(module, kind):
                    label(module, method, part)
            for kind, part in TRACKED_RESUMABLES:
                if isinstance(module, kind):
                    label(module, "forward_resumable", part, tracker.scoped_resumable)
            if isinstance(module, Attention | LatentAttention):
                label(module, "core_attention", "core attention")
            if isinstance(module, MoELayer):
                dispatchers[id(module.dispatcher)] = module.dispatcher
                if module.shared is not None:
                    label(module.shared, "forward", "shared experts")
    for dispatcher in dispatchers.values():
        for method in DISPATCH_METHODS:
            label(dispatcher, method, DISPATCH_PART)
        for method in ASYNC_DISPATCH_METHODS:
            label(dispatcher, method, DISPATCH_PART, tracker.scoped_resumable)
    if model.offload is not None:
        label(model.offload.copy_engine, "allocate_device", RELOADED)
    try:
        yield
    finally:
        for queue in queues:
            queue.on_backward_end = None
        for owner, method, before in reversed(undo):
            if before is None:
                object.__delattr__(owner, method)
            else:
                object.__setattr__(owner, method, before)


def tag_states(
    tracker: MemoryTracker, stages: list[Transformer], optimizer: torch.optim.Optimizer, others: Iterable[Tensor] = ()
) -> None:
    """Tell the ledger of what is there before a step: weights, moments, and other tensors that stay."""
    for stage in stages:
        tracker.tag("weights", stage.parameters())
        tracker.tag("buffers", stage.buffers())
        if stage.rope is not None:
            tracker.tag("buffers", (stage.rope.cos, stage.rope.sin))
    tracker.tag("optimizer", states_on_device(optimizer))
    tracker.tag("batch", others)


def tag_gradients(tracker: MemoryTracker, stages: list[Transformer]) -> None:
    """Tell the ledger which of the memory is gradients: reduced ones, and sums over micro-batches that are not yet."""
    for stage in stages:
        tracker.tag("gradients", (p.grad for p in stage.parameters() if p.grad is not None))
        for module in stage.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for one in () if group is None else group.fsdp_params:
                unsharded = getattr(one, "_unsharded_param", None)
                tracker.tag(
                    "gradients",
                    (p.grad for p in (one.sharded_param, unsharded) if p is not None and p.grad is not None),
                )
                if one.unsharded_accumulated_grad is not None:
                    tracker.tag("gradients", (one.unsharded_accumulated_grad,))


def _track_forward(
    stage: Transformer, tracker: MemoryTracker, forward_resumable: Callable[..., Resumable[Tensor]]
) -> Callable[..., Any]:
    """The steps of a stage; the ledger learns when they run, and when the gradient of their result comes."""

    def before_backward(grad: Tensor) -> None:
        _tag_survivors(stage, tracker)

    def run(*args: Any, **kwargs: Any) -> Resumable[Tensor]:
        if tracker.phase == "before":
            # Torch's stages make room for all that they will get before the first of them runs.
            tracker.tag_untagged("pipeline buffers")
        # Beside the backward pass of another micro-batch, what that one has made so far is not what it leaves.
        if torch._C._current_graph_task_id() == -1:
            _tag_survivors(stage, tracker)
        begun = ResumableTask(forward_resumable(*args, **kwargs))
        while True:
            tracker.phase = "forward"
            begun.resume()
            tracker.phase = "backward"
            if begun.is_done:
                break
            yield
        output = begun.run_to_end()
        if output.requires_grad:
            output.register_hook(before_backward)
        return output

    return run


def _track_delayed_wgrad(stage: Transformer, tracker: MemoryTracker) -> list[WeightGradStore]:
    """Name what a backward pass leaves for its weight gradients at its end: a schedule may take it up at once."""
    found: list[WeightGradStore] = []
    for module in stage.modules():
        queue: Any = getattr(module, "wgrad_store", None)
        if isinstance(queue, WeightGradStore) and queue not in found:
            queue.on_backward_end = partial(_tag_survivors, stage, tracker)
            found.append(queue)
    return found


def _tag_survivors(stage: Transformer, tracker: MemoryTracker) -> None:
    """What the passes up to now have left is gradients, or waits for another pass."""
    tag_gradients(tracker, [stage])
    p = stage.cfg.parallel
    if p.pp > 1:
        # What is left without a split backward pass is on its way to the stage before.
        tracker.tag_survivors(DELAYED_WGRAD if SCHEDULES[p.schedule].splits_backward else PIPELINE)
