"""Memory attribution by part: wrap the methods of modules so that the memory tracker tags allocations by part."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from moefold.comm.private_torch import fsdp_param_group, fsdp_parameters, is_in_backward
from moefold.metrics.memory_tracker import GATHERED_WEIGHTS, MemoryTracker
from moefold.model.attention import SelfAttention, TokenMixer
from moefold.model.block import Block
from moefold.model.head import Head
from moefold.model.linear_attention import LinearAttention
from moefold.model.mlp import SwiGLU
from moefold.model.module_wrapper import CallContext, Function, Wrapper, wrap_calls, wrap_method
from moefold.model.moe.experts import Experts
from moefold.model.moe.layer import MoELayer
from moefold.model.moe.router import Router
from moefold.model.norm import FullWidthQKNorm, LayerNorm, RMSNorm
from moefold.model.transformer import Embedding, Transformer
from moefold.optim.state_offload import states_on_device
from moefold.parallel.parallel_model import ParallelModel, StepRunner
from moefold.parallel.pipeline import PipelineRunner
from moefold.parallel.recompute import forward_method
from moefold.parallel.wgrad_store import WeightGradStore

STATES = ("weights", "gathered weights", "gradients", "optimizer", "buffers", "batch")
DELAYED_WGRAD = "postponed gradients"
"""Part name of tensors saved for a delayed weight-gradient pass."""
PIPELINE = "pipeline"
"""Part name of tensors that are sent to, or were received from, another pipeline rank."""
RELOADED = "brought back"
"""Part name of activations that `train.offload` has reloaded."""
ACTIVATIONS = (
    "embedding",
    "norms",
    "attention",
    "core attention",
    "residual stream",
    "dense MLP",
    "router",
    "dispatch buffers",
    "experts",
    "shared experts",
    "logits",
    DELAYED_WGRAD,
    PIPELINE,
    RELOADED,
)
NOT_ACTIVATIONS = (*STATES, "workspace", "other")
PARTS = (*STATES, *ACTIVATIONS, "workspace", "other")
"""All part names, in the order of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryByPart:
    """Tensor bytes by part: for each part that any rank has, a list with one number per rank."""

    peak_bytes: dict[str, list[int]]
    """Bytes at the rank's peak within the forward and backward passes. The sum over the parts is that peak."""
    current_bytes: dict[str, list[int]]
    """Bytes after the backward passes, with all gradients, before the optimizer update."""

    @classmethod
    def from_ranks(cls, ranks_bytes: Sequence[Sequence[float]]) -> Self:
        """Build the breakdown from the bytes of all ranks.

        Args:
            ranks_bytes: for each rank the bytes of `PARTS` at the peak, then the current bytes, [ranks, 2 * parts].
        """
        peak, current = (
            {part: [int(row[start + i]) for row in ranks_bytes] for i, part in enumerate(PARTS)}
            for start in (0, len(PARTS))
        )
        return cls(
            peak_bytes={part: sizes for part, sizes in peak.items() if any(sizes)},
            current_bytes={part: sizes for part, sizes in current.items() if any(sizes)},
        )


TRACKED_METHODS: tuple[tuple[type, str, str], ...] = (
    (RMSNorm, "normalize", "norms"),
    (LayerNorm, "normalize", "norms"),
    (FullWidthQKNorm, "forward", "norms"),
    (TokenMixer, "forward", "attention"),
    (LinearAttention, "mix", "core attention"),
    (SelfAttention, "core_attention", "core attention"),
    (SwiGLU, "forward", "dense MLP"),
    (Router, "forward", "router"),
    (Experts, "forward", "experts"),
    (Embedding, "forward", "embedding"),
    (Head, "losses", "logits"),
    (Head, "logits", "logits"),
)
"""Methods whose allocations belong to a part. Calls inside may belong to other parts."""
TRACKED_LAYERS: tuple[tuple[type, str], ...] = ((Block, "residual stream"), (MoELayer, "router"))
"""Layers whose `forward_method` has allocations that belong to a part."""
DISPATCH_PART = "dispatch buffers"
DISPATCH_METHODS = (
    "dispatch_preprocess",
    "dispatch_postprocess",
    "combine_preprocess",
    "combine_postprocess",
    "dispatch_probs",
    "dispatch_probs_async",
    "dispatch_async",
    "combine_async",
)


@contextmanager
def track_memory(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batch: Iterable[Tensor],
    outer_states: Sequence[Tensor] = (),
    shared_memory: Sequence[Tensor] = (),
    shared_weights: Sequence[Tensor] = (),
) -> Iterator[MemoryTracker]:
    """Track the memory of the forward and backward passes of a step inside this context.

    Args:
        outer_states: states of an outer optimizer that are on the device.
        shared_memory: memory of exchanges between ranks, which is not counted.
        shared_weights: gathered weights in memory that ranks share, counted on each of them.
    """
    stages = model.stages
    tracker = MemoryTracker()
    tracker.leave_out(shared_memory)
    tag_states(tracker, stages, optimizer, batch)
    tracker.tag("optimizer", outer_states)
    tracker.tag(GATHERED_WEIGHTS, model.cast_copies.tensors())
    tracker.tag(GATHERED_WEIGHTS, shared_weights)
    with tracker, _label_parts(model, tracker):
        yield tracker
        # FSDP replaces shards by padded shards at its first step.
        tag_states(tracker, stages, optimizer)
        tag_gradients(tracker, stages)
        tracker.move_tag(DELAYED_WGRAD, PIPELINE)


def bytes_by_part(tracker: MemoryTracker) -> list[int]:
    """Return a rank's row of `MemoryByPart`: the bytes of each part at the peak, then the current bytes."""
    peaks = tracker.peak().by_part, tracker.current()
    assert all(by_name.keys() <= set(PARTS) for by_name in peaks), peaks
    return [by_name.get(part, 0) for by_name in peaks for part in PARTS]


@contextmanager
def _label_parts(model: ParallelModel, tracker: MemoryTracker) -> Iterator[None]:
    """Tag allocations inside this context by part and pass."""
    with ExitStack() as undo:

        def wrap(owner: object, method: str, wrapper: Wrapper) -> None:
            undo.callback(wrap_method(owner, method, wrapper))

        for stage in model.stages:
            on_end = partial(_tag_survivors, stage, tracker, model.runner)
            _track_delayed_wgrad(stage, on_end, undo)
            wrap(stage, forward_method(stage), partial(_track_forward, tracker, on_end))
        for owner, method, part in _tracked_methods(model):
            wrap(owner, method, partial(tracker.scoped, part))
        yield


def _tracked_methods(model: ParallelModel) -> Iterator[tuple[object, str, str]]:
    """Iterate over the methods whose allocations belong to a part: their objects, their names and the parts."""
    dispatchers: dict[int, Any] = {}
    for stage in model.stages:
        methods = (*TRACKED_METHODS, *((kind, forward_method(stage), part) for kind, part in TRACKED_LAYERS))
        for module in stage.modules():
            yield from ((module, method, part) for kind, method, part in methods if isinstance(module, kind))
            if isinstance(module, MoELayer):
                dispatchers[id(module.dispatcher)] = module.dispatcher
                if module.shared is not None:
                    yield module.shared, "forward", "shared experts"
    for dispatcher in dispatchers.values():
        for method in DISPATCH_METHODS:
            yield dispatcher, method, DISPATCH_PART
    if isinstance(model.runner, PipelineRunner):
        yield model.runner.messages, "allocate", PIPELINE
    if model.offload is not None:
        yield model.offload.copy_engine, "allocate_device", RELOADED


def tag_states(
    tracker: MemoryTracker, stages: list[Transformer], optimizer: torch.optim.Optimizer, batch: Iterable[Tensor] = ()
) -> None:
    """Tag the tensors that exist before a step: weights, buffers, moments and others."""
    for stage in stages:
        tracker.tag("weights", stage.parameters())
        tracker.tag("buffers", stage.buffers())
        if stage.rope is not None:
            tracker.tag("buffers", (stage.rope.cos, stage.rope.sin))
    tracker.tag("optimizer", states_on_device(optimizer))
    tracker.tag("batch", batch)


def tag_gradients(tracker: MemoryTracker, stages: list[Transformer]) -> None:
    """Tag the reduced gradients, and the unreduced sums over micro-batches."""
    for stage in stages:
        tracker.tag("gradients", (p.grad for p in stage.parameters() if p.grad is not None))
        for module in stage.modules():
            group = fsdp_param_group(module)
            for param in () if group is None else group.fsdp_params:
                tracker.tag("gradients", (p.grad for p in fsdp_parameters(param) if p.grad is not None))
                if param.unsharded_accumulated_grad is not None:
                    tracker.tag("gradients", (param.unsharded_accumulated_grad,))


def _track_forward(tracker: MemoryTracker, tag_remaining: Callable[[], None], forward: Function) -> Function:
    """Wrap the forward pass of a stage to track its phase, and to tag surviving tensors when backward starts."""

    def begin(*args: Any, **kwargs: Any) -> CallContext:
        # During an overlapped backward, its live temporaries must not be tagged as gradients.
        if not is_in_backward():
            tag_remaining()
        return CallContext(in_forward, on_end)

    @contextmanager
    def in_forward() -> Iterator[None]:
        tracker.phase = "forward"
        yield
        tracker.phase = "backward"

    def on_end(output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: tag_remaining())

    return wrap_calls(forward, begin)


def _track_delayed_wgrad(stage: Transformer, on_end: Callable[[], None], undo: ExitStack) -> None:
    """Tag, at the end of a backward pass, the tensors saved for its weight gradients."""
    for module in stage.modules():
        wgrad_store = getattr(module, "wgrad_store", None)
        if isinstance(wgrad_store, WeightGradStore) and wgrad_store.on_backward_end is None:
            wgrad_store.on_backward_end = on_end
            undo.callback(setattr, wgrad_store, "on_backward_end", None)


def _tag_survivors(stage: Transformer, tracker: MemoryTracker, runner: StepRunner) -> None:
    """Tag tensors that survived the passes so far: gradients, or tensors saved for a later pass."""
    tag_gradients(tracker, [stage])
    if isinstance(runner, PipelineRunner):
        # Without a split backward, the surviving tensors are being sent to the previous stage.
        tracker.tag_remaining(DELAYED_WGRAD if runner.splits_backward else PIPELINE)
