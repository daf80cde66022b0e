"""Memory attribution by part: wrap the methods of modules so that the memory tracker tags allocations by part."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moefold.comm.resumable import Resumable, ResumableTask
from moefold.comm.torch_compat import fsdp_param_group, fsdp_parameters, is_in_backward
from moefold.metrics.memory_breakdown import DELAYED_WGRAD, PARTS, PIPELINE, RELOADED
from moefold.metrics.memory_tracker import MemoryTracker
from moefold.model.attention import SelfAttention
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
    (SelfAttention, "forward", "attention"),
    (SwiGLU, "forward", "dense MLP"),
    (Router, "forward", "router"),
    (Experts, "forward", "experts"),
    (Embedding, "forward", "embedding"),
    (Head, "losses", "logits"),
    (Head, "logits", "logits"),
)
"""Methods whose allocations belong to a part; calls inside may belong to other parts."""
TRACKED_RESUMABLES: tuple[tuple[type, str], ...] = ((Block, "residual stream"), (MoELayer, "router"))
"""The same for resumable forward methods."""
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
    """Track the memory of the forward and backward passes of a step inside this context.

    Args:
        model: the model to track.
        optimizer: the optimizer that holds the moments.
        batch: tensors allocated before the step.
    """
    stages = model.stages
    tracker = MemoryTracker()
    tag_states(tracker, stages, optimizer, batch)
    with tracker, _label_parts(model, tracker):
        yield tracker
        # FSDP replaces shards by padded ones at its first step.
        tag_states(tracker, stages, optimizer)
        tag_gradients(tracker, stages)
        tracker.retag(DELAYED_WGRAD, PIPELINE)


def bytes_by_part(tracker: MemoryTracker) -> list[int]:
    """Return a rank's row of `MemoryByPart`: the bytes of each part at the peak, then the current ones."""
    both = tracker.peak().by_part, tracker.current()
    assert all(found.keys() <= set(PARTS) for found in both), both
    return [found.get(part, 0) for found in both for part in PARTS]


@contextmanager
def _label_parts(model: ParallelModel, tracker: MemoryTracker) -> Iterator[None]:
    """Tag allocations inside this context by part and pass."""
    undo: list[tuple[Any, str, Any]] = []
    wgrad_stores: list[WeightGradStore] = []

    def replace(owner: Any, method: str, by: Callable[[Any], Any]) -> None:
        undo.append((owner, method, vars(owner).get(method)))
        object.__setattr__(owner, method, by(getattr(owner, method)))

    def label(owner: Any, method: str, part: str, scoped: Any = tracker.scoped) -> None:
        replace(owner, method, partial(scoped, part))

    dispatchers: dict[int, Any] = {}
    for stage in model.stages:
        wgrad_stores += _track_delayed_wgrad(stage, tracker)
        replace(stage, "forward_resumable", partial(_track_forward, stage, tracker))
        for module in stage.modules():
            for kind, method, part in TRACKED_METHODS:
                if isinstance(module, kind):
                    label(module, method, part)
            for kind, part in TRACKED_RESUMABLES:
                if isinstance(module, kind):
                    label(module, "forward_resumable", part, tracker.scoped_resumable)
            if isinstance(module, SelfAttention):
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
        for wgrad_store in wgrad_stores:
            wgrad_store.on_backward_end = None
        for owner, method, before in reversed(undo):
            if before is None:
                object.__delattr__(owner, method)
            else:
                object.__setattr__(owner, method, before)


def tag_states(
    tracker: MemoryTracker, stages: list[Transformer], optimizer: torch.optim.Optimizer, others: Iterable[Tensor] = ()
) -> None:
    """Tag the tensors that exist before a step: weights, buffers, moments and others."""
    for stage in stages:
        tracker.tag("weights", stage.parameters())
        tracker.tag("buffers", stage.buffers())
        if stage.rope is not None:
            tracker.tag("buffers", (stage.rope.cos, stage.rope.sin))
    tracker.tag("optimizer", states_on_device(optimizer))
    tracker.tag("batch", others)


def tag_gradients(tracker: MemoryTracker, stages: list[Transformer]) -> None:
    """Tag the gradients: reduced ones, and unreduced sums over micro-batches."""
    for stage in stages:
        tracker.tag("gradients", (p.grad for p in stage.parameters() if p.grad is not None))
        for module in stage.modules():
            group = fsdp_param_group(module)
            for param in () if group is None else group.fsdp_params:
                tracker.tag("gradients", (p.grad for p in fsdp_parameters(param) if p.grad is not None))
                if param.unsharded_accumulated_grad is not None:
                    tracker.tag("gradients", (param.unsharded_accumulated_grad,))


def _track_forward(
    stage: Transformer, tracker: MemoryTracker, forward_resumable: Callable[..., Resumable[Tensor]]
) -> Callable[..., Any]:
    """Wrap the resumable forward of a stage to track its phase, and to tag surviving tensors when backward starts."""

    def before_backward(grad: Tensor) -> None:
        _tag_survivors(stage, tracker)

    def run(*args: Any, **kwargs: Any) -> Resumable[Tensor]:
        if tracker.phase == "before":
            # torch's stages allocate all receive buffers before the first of them runs.
            tracker.tag_untagged("pipeline buffers")
        # During an overlapped backward, its live temporaries must not be tagged as gradients.
        if not is_in_backward():
            _tag_survivors(stage, tracker)
        task = ResumableTask(forward_resumable(*args, **kwargs))
        while True:
            tracker.phase = "forward"
            task.resume()
            tracker.phase = "backward"
            if task.is_done:
                break
            yield
        output = task.run_to_end()
        if output.requires_grad:
            output.register_hook(before_backward)
        return output

    return run


def _track_delayed_wgrad(stage: Transformer, tracker: MemoryTracker) -> list[WeightGradStore]:
    """Tag what a backward pass saves for its weight gradients at its end, before a schedule computes them."""
    found: list[WeightGradStore] = []
    for module in stage.modules():
        wgrad_store: Any = getattr(module, "wgrad_store", None)
        if isinstance(wgrad_store, WeightGradStore) and wgrad_store not in found:
            wgrad_store.on_backward_end = partial(_tag_survivors, stage, tracker)
            found.append(wgrad_store)
    return found


def _tag_survivors(stage: Transformer, tracker: MemoryTracker) -> None:
    """Tag tensors that survived the passes so far: gradients, or tensors saved for a later pass."""
    tag_gradients(tracker, [stage])
    p = stage.cfg.parallel
    if p.pp > 1:
        # Without a split backward, the surviving tensors are being sent to the previous stage.
        tracker.tag_survivors(DELAYED_WGRAD if SCHEDULES[p.schedule].splits_backward else PIPELINE)
