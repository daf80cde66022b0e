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

FORWARD = ("leaving", "out", "experts", "home", "sum")
"""Of a layer with experts: the work ahead of its first exchange, and while that is under way; the experts, and while
their results travel; and the sum of these. Each holds for all of the layer, whatever came before it."""
AGAIN = ("leaving_again", "out_again", "experts_again", "home_again")
"""The same where the layer runs again. The sum is a moment of `gradients`."""
BACKWARD = ("gradients", "home_back", "experts_back", "out_back")
"""Ahead of the exchange of the results' gradients, and while these travel; the experts' gradients, and while those of
the rows travel. A layer without experts has `leaving` and `gradients` alone."""
WITH_SPLITS = ("beside", "late")
"""What a schedule that splits backward passes adds to `experts_back` and to `out_back`."""
MOMENTS = (*FORWARD, *AGAIN, *BACKWARD, *WITH_SPLITS)
"""Of a layer. Work before an exchange is never below what rests at it, but for `experts_back` with split passes."""


@dataclass(frozen=True, slots=True)
class LayerPieces(Generic[T]):
    """What one layer adds."""

    kept: T
    """For its backward pass."""
    at: Mapping[str, T]
    """All of it at each of `MOMENTS`, what it keeps included."""
    postponed: T
    """Until its weights' gradients are computed; nothing without split passes."""
    is_routed: bool
    """Whether it has experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePieces(Generic[T]):
    """What one stage adds."""

    before: T
    """What stands before the layers."""
    layers: Sequence[LayerPieces[T]]
    further: Sequence[LayerPieces[T]]
    """Layers of multi-token prediction."""
    further_kept: T
    """One of them with its head."""
    head: T
    logits: T
    """What the loss has beside the head."""
    postponed_head: T
    is_last: bool
    splits: bool
    """Whether the schedule splits backward passes, so that a whole one, too, computes the gradients of weights last."""
    pauses_again: bool
    """Whether exchanges run again before the gradients."""


class Course(Protocol[S_contra]):
    """Follows a pass."""

    def reach(self, now: S_contra) -> None:
        """So much is there at some moment."""

    def pause(self, rests: S_contra) -> None:
        """So much is there while an exchange is under way, or when all is done; never more than was reached before."""


def run_forward(course: Course[T], stage: StagePieces[T]) -> None:
    """Follow the forward pass of a stage."""
    now = stage.before
    course.reach(now)
    for layer in stage.layers:
        _layer_forward(course, layer, now, FORWARD)
        now = now + layer.kept
    if stage.is_last:
        now = now + stage.head
        course.reach(now + stage.logits)
        for layer in stage.further:
            _layer_forward(course, layer, now, FORWARD)
            now = now + stage.further_kept
            course.reach(now + stage.logits)
    course.reach(now)
    course.pause(now)


def run_backward(course: Course[T], stage: StagePieces[T]) -> None:
    """Follow the backward pass of a stage, what runs again included."""
    before: list[T] = []
    now = stage.before
    layers = list(stage.layers) + list(stage.further)
    for layer in layers:
        before.append(now)
        now = now + layer.kept
    course.reach(whole(stage))
    left = stage.postponed_head
    for layer in reversed(layers):
        _layer_backward(course, layer, before.pop() + left, stage)
        left = left + layer.postponed
    course.reach(stage.before + left)
    course.pause(stage.before + left)


def whole(stage: StagePieces[T]) -> T:
    """All that a stage keeps."""
    now = stage.before
    for layer in stage.layers:
        now = now + layer.kept
    now = now + stage.head
    for _ in stage.further:
        now = now + stage.further_kept
    return now


def _layer_forward(course: Course[T], layer: LayerPieces[T], now: T, names: Sequence[str]) -> None:
    course.reach(now + layer.at[names[0]])
    if not layer.is_routed:
        return
    course.pause(now + layer.at[names[1]])
    course.reach(now + layer.at[names[2]])
    course.pause(now + layer.at[names[3]])
    for name in names[4:]:
        course.reach(now + layer.at[name])


def _layer_backward(course: Course[T], layer: LayerPieces[T], now: T, stage: StagePieces[T]) -> None:
    """A layer whose gradients come, on top of what is there of those before it."""
    if stage.pauses_again and layer.is_routed:
        _layer_forward(course, layer, now, AGAIN)
    course.reach(now + layer.at["gradients"])
    if not layer.is_routed:
        return
    course.pause(now + layer.at["home_back"])
    working, rests = now + layer.at["experts_back"], now + layer.at["out_back"]
    if stage.splits:
        working, rests = working + layer.at["beside"], rests + layer.at["late"]
        course.reach(rests)
    course.reach(working)
    course.pause(rests)


class Stretched(Protocol[S_co]):
    """A pass from one exchange to the next, or to its end."""

    @property
    def most(self) -> S_co:
        """At its fullest moment, or at all that may be."""

    @property
    def rests(self) -> S_co:
        """While the exchange at its end is under way."""


def turns(
    forward: Iterable[Stretched[S]], backward: Sequence[Stretched[S]], nothing: S, sent: S
) -> Iterator[tuple[S, S]]:
    """The moments of a pair: what belongs to the forward pass, and to the backward pass.

    Args:
        forward: of one micro-batch; it begins at the first exchange of the other pass.
        backward: of another one; at each of its exchanges the forward pass goes on to its own next one.
        nothing: what is there of a pass that has not begun.
        sent: what is left of the backward pass when it is over.
    """
    ahead, coming = nothing, iter(forward)
    for stretch in backward[:-1]:
        yield ahead, stretch.most
        if following := next(coming, None):
            yield following.most, stretch.rests
            ahead = following.rests
    yield ahead, backward[-1].most
    for following in coming:
        yield following.most, sent
