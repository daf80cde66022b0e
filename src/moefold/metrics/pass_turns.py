"""The course of a pass from one exchange of experts to the next, and of two passes that take turns there. Torch-free.

Written once for whatever is added up along the way: the bytes of one recipe (`pass_memory.py`), or the counts that the
planner multiplies with the bytes of many (`plan/pair_counts.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    # Recipes are checked without numpy.
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
