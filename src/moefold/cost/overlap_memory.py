"""Memory of overlapped passes: a forward and a backward pass that interleave at expert collectives. Torch-free.

With `parallel.overlap_experts` a forward pass advances by one expert collective whenever the backward pass of another
micro-batch has started one. The peak follows from the live memory of both between their collectives.

The walk is generic in the quantity that is added up: bytes of one recipe (`OverlappedPassMemory`), or the counts that
the planner multiplies with the bytes of many mappings (`planner/memory/snapshots.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.saved_tensors import BytesByPart
from moefold.topology.collective_order import RECOMPUTED_WITH_COMM
from moefold.topology.pipeline_layout import Stage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


T = TypeVar("T", Counter[str], "NDArray[np.float64]")
"""Quantity that is added up."""
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)

FORWARD_POINTS = ("before_dispatch", "dispatch", "experts", "combine", "sum")
"""Snapshot points of an MoE layer's forward pass: before and during the dispatch, the experts, during the combine, and
the weighted sum after it. A point counts the memory of this layer only."""
RECOMPUTE_POINTS = ("before_dispatch_recompute", "dispatch_recompute", "experts_recompute", "combine_recompute")
"""The same points while the layer is recomputed. The sum is part of `gradients`."""
BACKWARD_POINTS = ("gradients", "combine_backward", "experts_backward", "dispatch_backward")
"""Snapshot points of the backward pass: before and during the all-to-all of the output gradients, the experts'
backward, and during the all-to-all of their input gradients. A dense layer has `before_dispatch` and `gradients`
only."""
SPLIT_BACKWARD_POINTS = ("concurrent_wgrad", "delayed_wgrad")
"""Memory that a split backward pass adds to `experts_backward` and to `dispatch_backward`."""
SNAPSHOT_POINTS = (*FORWARD_POINTS, *RECOMPUTE_POINTS, *BACKWARD_POINTS, *SPLIT_BACKWARD_POINTS)
"""All snapshot points of a layer. The peak before a collective is at least the memory during it, except
`experts_backward` with a split backward pass."""


@dataclass(frozen=True, slots=True)
class LayerMemory(Generic[T]):
    """Memory of one layer."""

    saved: T
    """Saved for backward."""
    at_point: Mapping[str, T]
    """Live memory at each of `SNAPSHOT_POINTS`, including what is saved."""
    delayed_wgrad: T
    """Held until the weight-gradient pass; empty without split backward passes."""
    is_moe: bool
    """Whether the layer has experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory(Generic[T]):
    """Memory of one stage."""

    embedding: T
    """Saved before the layers."""
    layers: Sequence[LayerMemory[T]]
    mtp_layers: Sequence[LayerMemory[T]]
    """MTP (multi-token prediction) layers."""
    mtp_layer_saved: T
    """Saved by one MTP layer with its head."""
    head: T
    logits: T
    """Temporary logits of the loss, in addition to the head."""
    delayed_wgrad_head: T
    is_last: bool
    splits_backward: bool
    """Whether the schedule splits backward passes; then an unsplit backward pass also computes weight gradients
    last."""
    recomputes_comm: bool
    """Whether expert collectives are repeated by recomputation."""


class PassVisitor(Protocol[S_contra]):
    """Visitor of the memory course of a pass."""

    def observe(self, live: S_contra) -> None:
        """Record the live memory at some time between two collectives."""

    def close_interval(self, during_comm: S_contra) -> None:
        """Close an interval with the memory during its collective or at the end, at most the peak before."""


def visit_forward(visitor: PassVisitor[T], stage: StageMemory[T]) -> None:
    """Visit the forward pass of a stage."""
    current = stage.embedding
    visitor.observe(current)
    for layer in stage.layers:
        _layer_forward(visitor, layer, current, FORWARD_POINTS)
        current = current + layer.saved
    if stage.is_last:
        current = current + stage.head
        visitor.observe(current + stage.logits)
        for layer in stage.mtp_layers:
            _layer_forward(visitor, layer, current, FORWARD_POINTS)
            current = current + stage.mtp_layer_saved
            visitor.observe(current + stage.logits)
    visitor.observe(current)
    visitor.close_interval(current)


def visit_backward(visitor: PassVisitor[T], stage: StageMemory[T]) -> None:
    """Visit the backward pass of a stage, recomputation included."""
    saved_before: list[T] = []
    current = stage.embedding
    layers = list(stage.layers) + list(stage.mtp_layers)
    for layer in layers:
        saved_before.append(current)
        current = current + layer.saved
    visitor.observe(total_saved(stage))
    delayed = stage.delayed_wgrad_head
    for layer in reversed(layers):
        _layer_backward(visitor, layer, saved_before.pop() + delayed, stage)
        delayed = delayed + layer.delayed_wgrad
    visitor.observe(stage.embedding + delayed)
    visitor.close_interval(stage.embedding + delayed)


def total_saved(stage: StageMemory[T]) -> T:
    """Return all that a stage saves for backward."""
    current = stage.embedding
    for layer in stage.layers:
        current = current + layer.saved
    current = current + stage.head
    for _ in stage.mtp_layers:
        current = current + stage.mtp_layer_saved
    return current


def _layer_forward(visitor: PassVisitor[T], layer: LayerMemory[T], live: T, points: Sequence[str]) -> None:
    visitor.observe(live + layer.at_point[points[0]])
    if not layer.is_moe:
        return
    visitor.close_interval(live + layer.at_point[points[1]])
    visitor.observe(live + layer.at_point[points[2]])
    visitor.close_interval(live + layer.at_point[points[3]])
    for name in points[4:]:
        visitor.observe(live + layer.at_point[name])


def _layer_backward(visitor: PassVisitor[T], layer: LayerMemory[T], live: T, stage: StageMemory[T]) -> None:
    """Visit the backward pass of a layer, on top of the memory of earlier layers."""
    if stage.recomputes_comm and layer.is_moe:
        _layer_forward(visitor, layer, live, RECOMPUTE_POINTS)
    visitor.observe(live + layer.at_point["gradients"])
    if not layer.is_moe:
        return
    visitor.close_interval(live + layer.at_point["combine_backward"])
    peak = live + layer.at_point["experts_backward"]
    during_comm = live + layer.at_point["dispatch_backward"]
    if stage.splits_backward:
        peak = peak + layer.at_point["concurrent_wgrad"]
        during_comm = during_comm + layer.at_point["delayed_wgrad"]
        visitor.observe(during_comm)
    visitor.observe(peak)
    visitor.close_interval(during_comm)


class CommIntervalLike(Protocol[S_co]):
    """Interval of a pass from one expert collective to the next, or to its end."""

    @property
    def peak(self) -> S_co:
        """Peak memory, or all candidates for it."""

    @property
    def during_comm(self) -> S_co:
        """Memory during the collective at the end of the interval."""


def interleave(
    forward: Iterable[CommIntervalLike[S]], backward: Sequence[CommIntervalLike[S]], empty: S, sent: S
) -> Iterator[tuple[S, S]]:
    """Yield the joint states of a pair: memory of the forward pass and of the backward pass.

    Args:
        forward: intervals of one micro-batch; it starts at the first collective of the backward pass.
        backward: intervals of another one; at each of its collectives the forward pass advances to its own next one.
        empty: memory of a pass that has not started.
        sent: memory of the backward pass once it is done.
    """
    forward_state = empty
    remaining = iter(forward)
    for interval in backward[:-1]:
        yield forward_state, interval.peak
        if next_forward := next(remaining, None):
            yield next_forward.peak, interval.during_comm
            forward_state = next_forward.during_comm
    yield forward_state, backward[-1].peak
    for next_forward in remaining:
        yield next_forward.peak, sent


@dataclass(frozen=True, slots=True)
class SizedParts:
    """Bytes by part with their cached sum."""

    parts: BytesByPart
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.parts.total())


EMPTY = SizedParts(BytesByPart())


@dataclass(frozen=True, slots=True)
class CommInterval:
    """Interval of a pass from one expert collective to the next, or to its end."""

    peak: SizedParts
    """Peak memory."""
    during_comm: SizedParts
    """Memory during the collective at the end of the interval."""


PassIntervals = tuple[CommInterval, ...]


class _IntervalBuilder:
    """Builder of the intervals of a pass."""

    def __init__(self) -> None:
        self.intervals: list[CommInterval] = []
        self._peak = EMPTY

    def observe(self, live: BytesByPart) -> None:
        if live.total() > self._peak.size:
            self._peak = SizedParts(live)

    def close_interval(self, during_comm: BytesByPart) -> None:
        self.intervals.append(CommInterval(self._peak, SizedParts(during_comm)))
        self._peak = EMPTY


class OverlappedPassMemory:
    """Memory of the overlapped passes of a config's stages, with `parallel.overlap_experts`.

    A collective over ep and one over etp count as one: both passes of a pair have the same number.

    Args:
        activation_memory: activation memory of the layers.
        splits_backward: whether the schedule splits backward passes.
    """

    def __init__(self, activation_memory: ActivationMemory, *, splits_backward: bool) -> None:
        self._activation_memory = activation_memory
        self._splits_backward = splits_backward
        self._cached_layer = cache(self._layer_memory)
        self._cached_stage = cache(self._stage_memory)

    def forward_intervals(self, stage: Stage) -> PassIntervals:
        """Return the intervals of a stage's forward pass."""
        builder = _IntervalBuilder()
        visit_forward(builder, self._cached_stage(stage))
        return tuple(builder.intervals)

    def backward_intervals(self, stage: Stage) -> PassIntervals:
        """Return the intervals of a stage's backward pass, recomputation included."""
        builder = _IntervalBuilder()
        visit_backward(builder, self._cached_stage(stage))
        return tuple(builder.intervals)

    def _layer_memory(self, kind: str) -> LayerMemory[BytesByPart]:
        formula = self._activation_memory
        delayed = formula.delayed_wgrad_layer(kind) if self._splits_backward else BytesByPart()
        return LayerMemory(formula.saved_by_kind[kind], layer_snapshots(formula, kind), delayed, kind == "M")

    def _stage_memory(self, stage: Stage) -> StageMemory[BytesByPart]:
        formula = self._activation_memory
        splits = self._splits_backward
        count = stage.parts.num_mtp_layers
        mtp_layers = []
        if count:
            delayed = formula.delayed_wgrad_mtp() if splits else BytesByPart()
            mtp_layers = [replace(self._cached_layer(formula.mtp_kind), delayed_wgrad=delayed)] * count
        return StageMemory(
            embedding=formula.embedding_part(stage),
            layers=[self._cached_layer(kind) for kind in formula.kinds(stage)],
            mtp_layers=mtp_layers,
            mtp_layer_saved=formula.mtp_layer() if count else BytesByPart(),
            head=formula.head() if stage.is_last else BytesByPart(),
            logits=BytesByPart(logits=formula.transient_logits),
            delayed_wgrad_head=BytesByPart(
                logits=(1 + count) * formula.delayed_wgrad_head if splits and stage.is_last else 0
            ),
            is_last=stage.is_last,
            splits_backward=splits,
            recomputes_comm=recomputes_comm(formula.recompute),
        )


def recomputes_comm(recompute: Iterable[str]) -> bool:
    """Return whether these recomputed parts repeat expert collectives before the gradients."""
    return not set(RECOMPUTED_WITH_COMM).isdisjoint(recompute)


def layer_snapshots(activation_memory: ActivationMemory, kind: str) -> dict[str, BytesByPart]:
    """Return the live memory of a layer of kind "D" or "M" at each of `SNAPSHOT_POINTS`."""
    without_recompute = activation_memory.without_recompute
    running = without_recompute.saved_by_kind[kind] + activation_memory.transient_norm
    if kind == "D":
        return {"before_dispatch": running, "gradients": running}
    snapshots = _forward_snapshots(activation_memory, FORWARD_POINTS)
    saved_memory = activation_memory
    gradients = running
    if recomputes_comm(activation_memory.recompute):
        saved_memory = without_recompute
        recompute_snapshots = _forward_snapshots(without_recompute, (*RECOMPUTE_POINTS, "sum"))
        gradients = _larger(recompute_snapshots.pop("sum"), running)
        snapshots |= recompute_snapshots
    all_saved = (
        saved_memory.saved_by_kind[kind]
        - saved_memory.experts.expert_outputs()
        - BytesByPart({"residual stream": activation_memory.hidden_bytes})
    )
    return snapshots | {
        "gradients": _larger(gradients, all_saved),
        "combine_backward": all_saved,
        "experts_backward": all_saved + (without_recompute.experts.fc1_outputs() - saved_memory.experts.fc1_outputs()),
        "dispatch_backward": all_saved - saved_memory.experts.saved_by_experts(),
        "concurrent_wgrad": activation_memory.delayed_wgrad_concurrent(kind),
        "delayed_wgrad": BytesByPart(experts=activation_memory.delayed_wgrad_layer(kind)["experts"]),
    }


def _forward_snapshots(activation_memory: ActivationMemory, points: tuple[str, ...]) -> dict[str, BytesByPart]:
    """Return the live memory of an MoE layer's forward pass, or of its recomputation."""
    without_recompute = activation_memory.without_recompute
    experts = activation_memory.experts
    output = BytesByPart({"residual stream": activation_memory.hidden_bytes})
    indices = experts.permute_indices()
    comm_buffers = experts.dispatch_comm_buffers()
    # The shared expert runs during the dispatch.
    before_dispatch = (
        without_recompute.saved_by_kind["M"]
        - output
        - without_recompute.experts.saved()
        + indices
        + comm_buffers
        + activation_memory.transient_norm
    )
    saves = not recomputes_comm(activation_memory.recompute)
    live = (
        activation_memory.saved_by_kind["M"] - output - experts.saved() + indices
        if saves
        else _live_during_dispatch(activation_memory)
    )
    live["shared experts"] += (
        activation_memory.hidden_bytes if without_recompute.saved_by_kind["M"]["shared experts"] else 0
    )
    all_outputs = BytesByPart(experts=experts.expert_tokens * experts.token_bytes)
    saved_by_experts = experts.saved_by_experts() - indices if saves else BytesByPart()
    during_dispatch = live + comm_buffers
    during_combine = live + saved_by_experts + experts.combine_comm_buffers()
    running_experts = (
        live + without_recompute.experts.saved_by_experts() - indices + all_outputs + experts.expert_transient()
    )
    summing = live + saved_by_experts + experts.expert_outputs() + experts.combine_buffer()
    return dict(
        zip(
            points,
            (
                _larger(before_dispatch, during_dispatch),
                during_dispatch,
                _larger(running_experts, during_combine),
                during_combine,
                summing,
            ),
            strict=True,
        )
    )


def _live_during_dispatch(activation_memory: ActivationMemory) -> BytesByPart:
    """Return the live memory of an MoE layer to be recomputed during its dispatch, none of which is saved.

    The norm's output, the routing and the permutation indices; if the whole layer is recomputed, the residual stream
    too.
    """
    live = BytesByPart(router=activation_memory.without_recompute.saved_by_kind["M"]["router"])
    if "layer" in activation_memory.recompute:
        return (
            live
            + activation_memory.experts.permute_indices()
            + BytesByPart({"norms": activation_memory.hidden_bytes, "residual stream": activation_memory.hidden_bytes})
        )
    return (
        live + activation_memory.saved_by_kind["M"] - BytesByPart({"residual stream": activation_memory.hidden_bytes})
    )


def _larger(one: BytesByPart, other: BytesByPart) -> BytesByPart:
    return one if one.total() >= other.total() else other


def overlapped_peak(forward: PassIntervals, backward: PassIntervals, sent: SizedParts) -> tuple[SizedParts, SizedParts]:
    """Return the peak joint state of a pair: memory of the forward pass and of the backward pass.

    Args:
        forward: intervals of one micro-batch; it starts at the first collective of the backward pass.
        backward: intervals of another one; at each of its collectives the forward pass advances to its own next one.
        sent: memory of the backward pass once it is done.
    """
    return max(interleave(forward, backward, EMPTY, sent), key=lambda state: state[0].size + state[1].size)
