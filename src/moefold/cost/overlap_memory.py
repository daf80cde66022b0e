"""The course of a pass from one exchange of experts to the next, and of two passes that take turns there. Torch-free.

Written once for whatever is added up along the way: the bytes of one recipe (`pass_memory.py`), or the counts that the
planner multiplies with the bytes of many (`planner/memory/snapshots.py`).

What a pass has in memory between two exchanges of experts, and two passes that take turns there. Torch-free.

With `parallel.overlap_experts` a forward pass goes on by one exchange wherever the backward pass of another micro-batch
has begun one. What is there at once follows from where both of them stand (`pass_turns.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from moefold.cost.activation_memory import ActivationMemory
from moefold.cost.saved_tensors import BytesByPart
from moefold.topology.collective_order import RECOMPUTED_WITH_COMM
from moefold.topology.stages import Stage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


T = TypeVar("T", Counter[str], "NDArray[np.float64]")
"""What is added up."""
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)

FORWARD_POINTS = ("leaving", "out", "experts", "home", "sum")
"""Of a layer with experts: the work ahead of its first exchange, and while that is under way; the experts, and while
their results travel; and the sum of these. Each holds for all of the layer, whatever came before it."""
RECOMPUTE_POINTS = ("leaving_again", "out_again", "experts_again", "home_again")
"""The same where the layer runs again. The sum is a moment of `gradients`."""
BACKWARD_POINTS = ("gradients", "home_back", "experts_back", "out_back")
"""Ahead of the exchange of the results' gradients, and while these travel; the experts' gradients, and while those of
the rows travel. A layer without experts has `leaving` and `gradients` alone."""
SPLIT_BACKWARD_POINTS = ("beside", "late")
"""What a schedule that splits backward passes adds to `experts_back` and to `out_back`."""
SNAPSHOT_POINTS = (*FORWARD_POINTS, *RECOMPUTE_POINTS, *BACKWARD_POINTS, *SPLIT_BACKWARD_POINTS)
"""Of a layer. Work before an exchange is never below what rests at it, but for `experts_back` with split passes."""


@dataclass(frozen=True, slots=True)
class LayerMemory(Generic[T]):
    """What one layer adds."""

    saved: T
    """For its backward pass."""
    at_point: Mapping[str, T]
    """All of it at each of `SNAPSHOT_POINTS`, what it keeps included."""
    delayed_wgrad: T
    """Until its weights' gradients are computed; nothing without split passes."""
    is_moe: bool
    """Whether it has experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory(Generic[T]):
    """What one stage adds."""

    embedding: T
    """What stands before the layers."""
    layers: Sequence[LayerMemory[T]]
    mtp_layers: Sequence[LayerMemory[T]]
    """Layers of multi-token prediction."""
    mtp_layer_saved: T
    """One of them with its head."""
    head: T
    logits: T
    """What the loss has beside the head."""
    delayed_wgrad_head: T
    is_last: bool
    splits_backward: bool
    """Whether the schedule splits backward passes, so that a whole one, too, computes the gradients of weights last."""
    recomputes_comm: bool
    """Whether exchanges run again before the gradients."""


class PassVisitor(Protocol[S_contra]):
    """Follows a pass."""

    def observe(self, live: S_contra) -> None:
        """So much is there at some moment."""

    def close_interval(self, during_comm: S_contra) -> None:
        """So much is there while an exchange is under way, or when all is done; never more than was reached before."""


def visit_forward(visitor: PassVisitor[T], stage: StageMemory[T]) -> None:
    """Follow the forward pass of a stage."""
    now = stage.embedding
    visitor.observe(now)
    for layer in stage.layers:
        _layer_forward(visitor, layer, now, FORWARD_POINTS)
        now = now + layer.saved
    if stage.is_last:
        now = now + stage.head
        visitor.observe(now + stage.logits)
        for layer in stage.mtp_layers:
            _layer_forward(visitor, layer, now, FORWARD_POINTS)
            now = now + stage.mtp_layer_saved
            visitor.observe(now + stage.logits)
    visitor.observe(now)
    visitor.close_interval(now)


def visit_backward(visitor: PassVisitor[T], stage: StageMemory[T]) -> None:
    """Follow the backward pass of a stage, what runs again included."""
    before: list[T] = []
    now = stage.embedding
    layers = list(stage.layers) + list(stage.mtp_layers)
    for layer in layers:
        before.append(now)
        now = now + layer.saved
    visitor.observe(total_saved(stage))
    left = stage.delayed_wgrad_head
    for layer in reversed(layers):
        _layer_backward(visitor, layer, before.pop() + left, stage)
        left = left + layer.delayed_wgrad
    visitor.observe(stage.embedding + left)
    visitor.close_interval(stage.embedding + left)


def total_saved(stage: StageMemory[T]) -> T:
    """All that a stage keeps."""
    now = stage.embedding
    for layer in stage.layers:
        now = now + layer.saved
    now = now + stage.head
    for _ in stage.mtp_layers:
        now = now + stage.mtp_layer_saved
    return now


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
    """A layer whose gradients come, on top of what is there of those before it."""
    if stage.recomputes_comm and layer.is_moe:
        _layer_forward(visitor, layer, live, RECOMPUTE_POINTS)
    visitor.observe(live + layer.at_point["gradients"])
    if not layer.is_moe:
        return
    visitor.close_interval(live + layer.at_point["home_back"])
    working, rests = live + layer.at_point["experts_back"], live + layer.at_point["out_back"]
    if stage.splits_backward:
        working, rests = working + layer.at_point["beside"], rests + layer.at_point["late"]
        visitor.observe(rests)
    visitor.observe(working)
    visitor.close_interval(rests)


class CommIntervalLike(Protocol[S_co]):
    """A pass from one exchange to the next, or to its end."""

    @property
    def peak(self) -> S_co:
        """At its fullest moment, or at all that may be."""

    @property
    def during_comm(self) -> S_co:
        """While the exchange at its end is under way."""


def interleave(
    forward: Iterable[CommIntervalLike[S]], backward: Sequence[CommIntervalLike[S]], empty: S, sent: S
) -> Iterator[tuple[S, S]]:
    """The moments of a pair: what belongs to the forward pass, and to the backward pass.

    Args:
        forward: of one micro-batch; it begins at the first exchange of the other pass.
        backward: of another one; at each of its exchanges the forward pass goes on to its own next one.
        empty: what is there of a pass that has not begun.
        sent: what is left of the backward pass when it is over.
    """
    ahead, coming = empty, iter(forward)
    for stretch in backward[:-1]:
        yield ahead, stretch.peak
        if following := next(coming, None):
            yield following.peak, stretch.during_comm
            ahead = following.during_comm
    yield ahead, backward[-1].peak
    for following in coming:
        yield following.peak, sent


@dataclass(frozen=True, slots=True)
class SizedParts:
    """Parts with their sum, which is asked for often."""

    parts: BytesByPart
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.parts.total())


EMPTY = SizedParts(BytesByPart())


@dataclass(frozen=True, slots=True)
class CommInterval:
    """A pass from one exchange to the next, or to its end."""

    peak: SizedParts
    """At its fullest moment."""
    during_comm: SizedParts
    """While the exchange at its end is under way."""


PassIntervals = tuple[CommInterval, ...]


class _IntervalBuilder:
    """A pass under construction."""

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
    """The passes of the stages of one config, with `parallel.overlap_experts`.

    Every exchange counts as one over all axes: what goes beside it has as many.

    Args:
        activation_memory: of the layers.
        splits_backward: whether the schedule splits backward passes.
    """

    def __init__(self, activation_memory: ActivationMemory, *, splits_backward: bool) -> None:
        self._activation_memory, self._splits_backward = activation_memory, splits_backward
        self._cached_layer, self._cached_stage = cache(self._layer_memory), cache(self._stage_memory)

    def forward_intervals(self, stage: Stage) -> PassIntervals:
        """The forward pass of a stage."""
        drawn = _IntervalBuilder()
        visit_forward(drawn, self._cached_stage(stage))
        return tuple(drawn.intervals)

    def backward_intervals(self, stage: Stage) -> PassIntervals:
        """The backward pass of a stage, recomputation included."""
        drawn = _IntervalBuilder()
        visit_backward(drawn, self._cached_stage(stage))
        return tuple(drawn.intervals)

    def _layer_memory(self, kind: str) -> LayerMemory[BytesByPart]:
        formula = self._activation_memory
        postponed = formula.delayed_wgrad_layer(kind) if self._splits_backward else BytesByPart()
        return LayerMemory(formula.saved_by_kind[kind], layer_snapshots(formula, kind), postponed, kind == "M")

    def _stage_memory(self, stage: Stage) -> StageMemory[BytesByPart]:
        formula, splits, count = self._activation_memory, self._splits_backward, stage.parts.num_mtp_layers
        further = []
        if count:
            postponed = formula.delayed_wgrad_mtp() if splits else BytesByPart()
            further = [replace(self._cached_layer(formula.mtp_kind), delayed_wgrad=postponed)] * count
        return StageMemory(
            embedding=formula.embedding_part(stage),
            layers=[self._cached_layer(kind) for kind in formula.kinds(stage)],
            mtp_layers=further,
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
    """Whether exchanges of experts run again before the gradients, with these parts that do."""
    return not set(RECOMPUTED_WITH_COMM).isdisjoint(recompute)


def layer_snapshots(activation_memory: ActivationMemory, kind: str) -> dict[str, BytesByPart]:
    """All that a layer of kind "D" or "M" has in memory at each of `pass_turns.MOMENTS`."""
    whole = activation_memory.without_recompute
    running = whole.saved_by_kind[kind] + activation_memory.transient_norm
    if kind == "D":
        return {"leaving": running, "gradients": running}
    found = _forward_snapshots(activation_memory, FORWARD_POINTS)
    there, gradients = activation_memory, running
    if recomputes_comm(activation_memory.recompute):
        there = whole
        again = _forward_snapshots(whole, (*RECOMPUTE_POINTS, "sum"))
        gradients = _larger(again.pop("sum"), running)
        found |= again
    full = (
        there.saved_by_kind[kind]
        - there.experts.expert_outputs()
        - BytesByPart({"residual stream": activation_memory.hidden_bytes})
    )
    return found | {
        "gradients": _larger(gradients, full),
        "home_back": full,
        "experts_back": full + (whole.experts.fc1_outputs() - there.experts.fc1_outputs()),
        "out_back": full - there.experts.saved_by_experts(),
        "beside": activation_memory.delayed_wgrad_concurrent(kind),
        "late": BytesByPart(experts=activation_memory.delayed_wgrad_layer(kind)["experts"]),
    }


def _forward_snapshots(activation_memory: ActivationMemory, points: tuple[str, ...]) -> dict[str, BytesByPart]:
    """A layer with experts that runs for the first time or, with a formula that keeps everything, again."""
    whole, experts, output = (
        activation_memory.without_recompute,
        activation_memory.experts,
        BytesByPart({"residual stream": activation_memory.hidden_bytes}),
    )
    places, under_way = experts.permute_indices(), experts.dispatch_comm_buffers()
    # The shared expert runs while the rows are under way.
    ahead = (
        whole.saved_by_kind["M"]
        - output
        - whole.experts.saved()
        + places
        + under_way
        + activation_memory.transient_norm
    )
    keeps = not recomputes_comm(activation_memory.recompute)
    held = (
        activation_memory.saved_by_kind["M"] - output - experts.saved() + places
        if keeps
        else _live_during_dispatch(activation_memory)
    )
    held["shared experts"] += activation_memory.hidden_bytes if whole.saved_by_kind["M"]["shared experts"] else 0
    all_results = BytesByPart(experts=experts.expert_tokens * experts.token_bytes)
    worked = experts.saved_by_experts() - places if keeps else BytesByPart()
    out, home = held + under_way, held + worked + experts.combine_comm_buffers()
    at_work = held + whole.experts.saved_by_experts() - places + all_results + experts.expert_transient()
    summing = held + worked + experts.expert_outputs() + experts.combine_buffer()
    return dict(zip(points, (_larger(ahead, out), out, _larger(at_work, home), home, summing), strict=True))


def _live_during_dispatch(activation_memory: ActivationMemory) -> BytesByPart:
    """What an MoE layer that will run again has at hand while rows travel, although it keeps none of it.

    The result of the norm, the choices and where the rows are; where all of the layer runs again, the residual stream
    too.
    """
    held = BytesByPart(router=activation_memory.without_recompute.saved_by_kind["M"]["router"])
    if "layer" in activation_memory.recompute:
        return (
            held
            + activation_memory.experts.permute_indices()
            + BytesByPart({"norms": activation_memory.hidden_bytes, "residual stream": activation_memory.hidden_bytes})
        )
    return (
        held + activation_memory.saved_by_kind["M"] - BytesByPart({"residual stream": activation_memory.hidden_bytes})
    )


def _larger(one: BytesByPart, other: BytesByPart) -> BytesByPart:
    return one if one.total() >= other.total() else other


def overlapped_peak(forward: PassIntervals, backward: PassIntervals, sent: SizedParts) -> tuple[SizedParts, SizedParts]:
    """The moment of a pair at which most is there: what belongs to the forward pass, and to the backward pass.

    Args:
        forward_intervals: of one micro-batch; it begins at the first exchange of the other pass.
        backward_intervals: of another one; at each of its exchanges the forward pass goes on to its own next one.
        sent: what is left of the backward pass when it is over.
    """
    return max(interleave(forward, backward, EMPTY, sent), key=lambda both: both[0].size + both[1].size)
